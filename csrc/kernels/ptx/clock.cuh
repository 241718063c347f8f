// Time.
#pragma once

#include "common/target.hpp"

namespace ep::kernels::ptx {

// Nanoseconds, one clock for all SMs of the GPU; it advances in steps of up to a microsecond or so.
EP_DEVICE uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) : : "memory");
  return ns;
}

}  // namespace ep::kernels::ptx
