// Moving bytes: whole-worker leaves.
#pragma once

#include "common/numeric.hpp"
#include "kernels/coop.hpp"
#include "kernels/params.hpp"
#if !EP_CUDA_COMPILE
#include <cstring>

#include "kernels/host/leaves.hpp"
#endif

namespace ep::kernels {

struct alignas(16) Bytes16 {
  uint64_t low, high;
};

// The form of a worker with lanes: 16 bytes at a time where `src` allows it.
// REQUIRES: `dst` is a multiple of 16; less than 4 GB, or than 64 GB where `src` is one too.
template <class Coop>
EP_OUTLINED void copy_row_by_lanes(Coop coop,
                                   std::byte* dst,
                                   const std::byte* src,
                                   uint64_t num_bytes) {
  constexpr uint32_t kLoads = 2;  // in flight, before the first store
  uint32_t bytes_left = static_cast<uint32_t>(num_bytes);
  if (reinterpret_cast<uintptr_t>(src) % 16 == 0) {
    const uint32_t stride = coop.size();
    auto* to = reinterpret_cast<Bytes16*>(dst) + coop.thread_rank();
    const auto* from = reinterpret_cast<const Bytes16*>(src) + coop.thread_rank();
    const uint32_t num_vectors = static_cast<uint32_t>(num_bytes / 16);
    uint32_t i = coop.thread_rank();
    EP_NO_UNROLL
    for (; i + (kLoads - 1) * stride < num_vectors; i += kLoads * stride) {
      Bytes16 v[kLoads];
      for (uint32_t k = 0; k < kLoads; ++k)
        v[k] = coop.read(from + k * stride);
      for (uint32_t k = 0; k < kLoads; ++k)
        coop.write(to + k * stride, v[k]);
      from += kLoads * stride;
      to += kLoads * stride;
    }
    EP_NO_UNROLL
    for (; i < num_vectors; i += stride, from += stride, to += stride)
      coop.write(to, coop.read(from));
    dst += num_bytes / 16 * 16;
    src += num_bytes / 16 * 16;
    bytes_left %= 16;
  }
  EP_NO_UNROLL
  for (uint32_t i = coop.thread_rank(); i < bytes_left; i += coop.size())
    coop.write(dst + i, coop.read(src + i));
}

// Copies one row into memory that another worker or rank will read.  `dst` is 16-byte aligned.
// Ordering: stream_fence() by the same worker, then a release by one of its threads.
template <class Coop>
EP_HOST_DEVICE void copy_row(Coop coop, std::byte* dst, const std::byte* src, uint64_t num_bytes) {
#if EP_CUDA_COMPILE
  copy_row_by_lanes(coop, dst, src, num_bytes);
#else
  static_cast<void>(coop);
  host::leaves().copy_row(dst, src, num_bytes);
#endif
}

// Orders the worker's copies before a later release by one of its threads.
template <class Coop>
EP_HOST_DEVICE void stream_fence(Coop coop) {
#if !EP_CUDA_COMPILE
  host::leaves().stream_fence();
#endif
  coop.sync();
}

// Writes a 32-bit pattern over `num_words` words.
template <class Coop>
EP_OUTLINED void fill_words(Coop coop, std::byte* dst, uint32_t pattern, uint64_t num_words) {
  for (uint64_t i = coop.thread_rank(); i < num_words; i += coop.size()) {
    coop.write(reinterpret_cast<uint32_t*>(dst) + i, pattern);
  }
}

// Copies row `row` of a matrix with any strides into contiguous bytes.
template <class Coop>
EP_HOST_DEVICE void gather_row(Coop coop, std::byte* dst, const Strided& src, uint64_t row) {
  const std::byte* from = src.data + static_cast<int64_t>(row) * src.row_stride;
#if !EP_CUDA_COMPILE
  if (src.column_stride == static_cast<int64_t>(src.element_bytes)) {
    std::memcpy(dst, from, uint64_t{src.num_columns} * src.element_bytes);
    return;
  }
#endif
  for (uint32_t c = coop.thread_rank(); c < src.num_columns; c += coop.size()) {
    const std::byte* element = from + static_cast<int64_t>(c) * src.column_stride;
    for (uint32_t b = 0; b < src.element_bytes; ++b)
      dst[uint64_t{c} * src.element_bytes + b] = element[b];
  }
}

// Element `column` of row `row`, as fp32.
EP_HOST_DEVICE float load_float(const Strided& m, Element element, uint64_t row, uint32_t column) {
  const std::byte* p = m.data + static_cast<int64_t>(row) * m.row_stride +
                       static_cast<int64_t>(column) * m.column_stride;
  switch (element) {
    case Element::kBF16:
      return bf16_to_float(*reinterpret_cast<const uint16_t*>(p));
    case Element::kFP16:
      return fp16_to_float(*reinterpret_cast<const uint16_t*>(p));
    case Element::kFP32:
      break;
  }
  return *reinterpret_cast<const float*>(p);
}

}  // namespace ep::kernels
