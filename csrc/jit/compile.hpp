// Source -> key -> cubin, each step a function of its arguments alone.  Knows nothing of what the kernels do.
//
//   Unit --key_of--> what a cache would store it under
//        --compile-> Kernel
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ep/error.hpp"
#include "jit/header_bundle.hpp"
#include "jit/nvrtc.hpp"
#include "jit/ptxas_log.hpp"

namespace ep::jit {

// One translation unit with one kernel.
struct Unit {
  std::string name;                       // of the kernel, in messages
  std::string source;                     // its #includes name headers of the bundle, nothing else
  std::string arch;                       // "sm_90a"
  std::vector<std::string> options;       // beside those that options_of adds
  const HeaderBundle* headers = nullptr;  // outlives the unit
};

struct Kernel {
  std::vector<std::byte> cubin;
  std::string ptx, log;
  ResourceUse use;
  double seconds = 0;
};

// NVRTC refuses the source.  The text has its log and the source.
class CompileError : public Error {
 public:
  CompileError(const std::string& what, std::string log) : Error(what), log_(std::move(log)) {}
  const std::string& log() const noexcept { return log_; }

 private:
  std::string log_;
};

// All options that the unit is compiled with.
std::vector<std::string> options_of(const Unit& unit);

// 32 hexadecimal digits: of the source, the options, the headers and the compiler's version.
std::string key_of(const Unit& unit, NvrtcVersion compiler);

// Throws CompileError; Unsupported where the compiler does not know the architecture.
Kernel compile(const Nvrtc& nvrtc, const Unit& unit);

}  // namespace ep::jit
