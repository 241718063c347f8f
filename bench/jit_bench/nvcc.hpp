// nvcc as a program that is run, for comparison.
#pragma once

#include <string>
#include <vector>

#include "jit/compile.hpp"

namespace ep::bench {

// The program at `wanted`; an empty `wanted`: of PATH or /usr/local/cuda/bin, or nothing where there is none.
// Throws Error if `wanted` is no program.
std::string find_nvcc(const std::string& wanted);

// Of one compilation: by the clock, and of all processors together, which others' load disturbs less.
struct Seconds {
  double wall = 0, cpu = 0;
};

// Compiles units to cubins in a folder of its own, which goes with the object.
class Nvcc {
 public:
  // Writes the headers out: nvcc reads files.
  Nvcc(std::string program, const jit::HeaderBundle& headers);
  ~Nvcc();
  Nvcc(const Nvcc&) = delete;
  Nvcc& operator=(const Nvcc&) = delete;

  const std::string& program() const { return program_; }

  // From the start of the process to its end, with the processes that it starts.
  // Throws Error with nvcc's text if it fails.
  Seconds compile(const jit::Unit& unit) const;

 private:
  std::string program_, folder_;
};

}  // namespace ep::bench
