// The leaves, written once with the compiler's vector types and compiled once per instruction set:
// simd_baseline.cpp, simd_avx2.cpp and simd_avx512.cpp define EP_SIMD_BYTES, the width of a vector,
// and include this.
//
// Code for AVX must never reach a CPU without it.  An inline function or a template instantiation
// with external linkage that is emitted here would be merged by the linker with the baseline copy
// of the same name, and either may win.  Therefore everything here is in an anonymous namespace,
// and nothing here calls a function from another header: not numeric.hpp, not <algorithm>.
// `nm -C` on the objects shows no weak symbol.  Intrinsics are safe: they are always inlined.
//
// Every operation is one IEEE operation: compile with -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host/leaves.hpp"
#include "kernels/host/simd_quantize.hpp"
#include "kernels/host/simd_reduce.hpp"
#include "kernels/host/simd_vectors.hpp"

namespace ep::kernels::host {
namespace {

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Rows of 1040 bytes scattered over 58 MB: streamed 7.1 GB/s, memcpy 4.1; over 1 MB: 18 and 23.
// Rows of 272 bytes: 4.4 and 3.2; over 1 MB: 7 and 20.  (EPYC, AVX2; leaves_bench.)  So small rows,
// which the lines at both ends weigh on and which are often read again soon, stay in the caches.
constexpr uint64_t kStreamMinBytes = 1024;
constexpr uint64_t kLineBytes = 64;

void copy_row(std::byte* dst, const std::byte* src, uint64_t num_bytes) {
  if (num_bytes < kStreamMinBytes) {
    __builtin_memcpy(dst, src, num_bytes);
    return;
  }
  const uint64_t head = -reinterpret_cast<uintptr_t>(dst) % kLineBytes;
  // Plain stores to the two lines that are not whole were 10 to 30 % slower.
  uint64_t at = 0;
  for (; at < head; at += 16)
    stream_16(dst + at, src + at);
  for (; at + kLineBytes <= num_bytes; at += kLineBytes) {
    for (uint64_t i = 0; i < kLineBytes; i += EP_SIMD_BYTES) {
      stream(dst + at + i, load<U8>(src + at + i));
    }
  }
  for (; at + 16 <= num_bytes; at += 16)
    stream_16(dst + at, src + at);
  __builtin_memcpy(dst + at, src + at, num_bytes - at);
}

constexpr Leaves make_leaves(const char* isa) {
  using enum Element;
  using enum Format;
  return {
      isa,
      copy_row,
      stream_fence,
      {{quantize_row<kBF16, kFp8Block128>, quantize_row<kBF16, kFp8Block128Pow2>,
        quantize_row<kBF16, kFp8Block128Ue8m0>},
       {quantize_row<kFP16, kFp8Block128>, quantize_row<kFP16, kFp8Block128Pow2>,
        quantize_row<kFP16, kFp8Block128Ue8m0>},
       {quantize_row<kFP32, kFp8Block128>, quantize_row<kFP32, kFp8Block128Pow2>,
        quantize_row<kFP32, kFp8Block128Ue8m0>}},
      {{reduce_row<kBF16, kBF16>, reduce_row<kBF16, kFP16>, reduce_row<kBF16, kFP32>},
       {reduce_row<kFP16, kBF16>, reduce_row<kFP16, kFP16>, reduce_row<kFP16, kFP32>},
       {reduce_row<kFP32, kBF16>, reduce_row<kFP32, kFP16>, reduce_row<kFP32, kFP32>}},
  };
}

}  // namespace
}  // namespace ep::kernels::host

#undef EP_SIMD_INLINE
