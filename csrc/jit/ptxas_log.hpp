// What ptxas says of a kernel when it is verbose.
#pragma once

#include <cstdint>
#include <string_view>

namespace ep::jit {

// Of one kernel and the functions that it calls.
struct ResourceUse {
  uint32_t registers = 0;          // per thread, the deepest chain of calls included
  uint32_t spill_store_bytes = 0;  // summed over functions
  uint32_t spill_load_bytes = 0;   // summed over functions
  uint32_t stack_bytes = 0;        // per thread, the deepest chain of calls included
  uint32_t shared_bytes = 0;       // per block, static
  friend bool operator==(const ResourceUse&, const ResourceUse&) = default;
};

// REQUIRES: the log of a compilation with --ptxas-options=-v and one kernel.
// Throws Error if the log does not tell the registers or the spills.
ResourceUse parse_ptxas_log(std::string_view log);

}  // namespace ep::jit
