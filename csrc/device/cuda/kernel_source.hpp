// What is compiled for a GPU: one translation unit per kernel, from headers that the library carries.
#pragma once

#include <cstdint>
#include <string>

#include "jit/compile.hpp"
#include "kernels/kernel_key.hpp"

namespace ep::device::cuda {

// A launch may have blocks of so many threads; it leaves each of them 64 registers.
inline constexpr uint32_t kMaxBlockThreads = 1024;

// "dispatch-expert-fp8_block128-bf16": unique among the kernels that exist.
std::string kernel_name(const kernels::KernelKey& key);

// The symbol of the kernel in its cubin: "ep_dispatch".
std::string kernel_entry(const kernels::KernelKey& key);

// `arch`: "sm_90a".  The unit's headers are kernel_headers().
jit::Unit kernel_unit(const kernels::KernelKey& key, const std::string& arch);

// csrc/{common,layout,kernels,device/cuda}, as far as kernels include it.
const jit::HeaderBundle& kernel_headers();

}  // namespace ep::device::cuda
