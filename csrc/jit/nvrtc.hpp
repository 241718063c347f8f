// NVRTC, the compiler for CUDA C++ that is a library: opened at run time, so that nothing of ours links it.
//
// It serialises the threads of a process; who has many kernels to compile uses processes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jit/header_bundle.hpp"

namespace ep::jit {

struct NvrtcVersion {
  int major = 0, minor = 0;
  friend bool operator==(const NvrtcVersion&, const NvrtcVersion&) = default;
};
std::string to_string(NvrtcVersion version);

class Nvrtc {
 public:
  static constexpr int kOldestMajor = 13;

  // Opens the library at `path`; an empty path: the one that the dynamic loader finds or that lies where
  // pip puts it.  It stays loaded to the end of the process.
  // Throws Unsupported if there is none, or an older one, and says what brings it.
  static std::shared_ptr<const Nvrtc> open(const std::string& path = {});

  ~Nvrtc();
  Nvrtc(const Nvrtc&) = delete;
  Nvrtc& operator=(const Nvrtc&) = delete;

  NvrtcVersion version() const { return version_; }
  const std::string& path() const { return path_; }  // as the dynamic loader resolved it

  // Does it know the architecture's number?  `arch` is sm_<number>, or that with an `a` or `f`.
  bool knows(std::string_view arch) const;

  struct Job {
    std::string name;  // of the source, in messages
    std::string source;
    std::vector<std::string> options;
    const HeaderBundle* headers = nullptr;
  };
  struct Output {
    bool good = false;
    std::string error;  // NVRTC's name of it, where not good
    std::string log;
    std::string ptx;
    std::vector<std::byte> cubin;
    double seconds = 0;  // of the compilation alone
  };
  Output compile(const Job& job) const;

 private:
  struct Api;
  explicit Nvrtc(const std::string& path);

  std::unique_ptr<const Api> api_;
  NvrtcVersion version_;
  std::string path_;
};

// Where open() looks when it is given no path, in this order.  `beside`: the folder of this library's file.
std::vector<std::string> nvrtc_places(const std::string& beside);

}  // namespace ep::jit
