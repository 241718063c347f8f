// What a figure was taken on.
#pragma once

#include <cstdint>
#include <string>

namespace ep::bench {

struct Conditions {
  std::string cpu;     // the model's name
  std::string isa;     // the widest instruction set that the library's leaves know
  std::string kernel;  // of the operating system
  uint32_t num_cores = 1;
};

Conditions find_conditions();

// Cores that this process may run on.
uint32_t num_usable_cores();

}  // namespace ep::bench
