// Integer helpers shared by layouts, kernels and the host.
#pragma once

#include "common/target.hpp"

namespace ep {

template <typename T>
EP_HOST_DEVICE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
EP_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

EP_HOST_DEVICE constexpr uint64_t ceil_div(uint64_t n, uint64_t d) {
  return (n + d - 1) / d;
}

// REQUIRES: `alignment` > 0.
EP_HOST_DEVICE constexpr uint64_t align_up(uint64_t n, uint64_t alignment) {
  return ceil_div(n, alignment) * alignment;
}

// Where part `i` of `parts` contiguous parts of `n` items begins; part `parts` begins at n.
// Sizes differ by at most one.
EP_HOST_DEVICE constexpr uint64_t part_begin(uint64_t n, uint32_t i, uint32_t parts) {
  return n * i / parts;
}

// How much of [begin, begin + count) lies below `limit`.
EP_HOST_DEVICE constexpr uint32_t kept_below(uint32_t limit, uint64_t begin, uint32_t count) {
  if (begin >= limit) return 0;
  return static_cast<uint32_t>(min_of<uint64_t>(count, limit - begin));
}

}  // namespace ep
