// reduce_row: a chunk of columns of all terms, then the next chunk.  Part of simd_body.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host/leaves.hpp"
#include "kernels/host/simd_vectors.hpp"

namespace ep::kernels::host {
namespace {

// A chunk's sums stay in registers while all terms pass.  Four cover the latency of an addition; 8
// and 12 were slower from memory (8 bf16 terms, AVX2: 15, 14 and 10 GB/s).
constexpr uint32_t kChunkVectors = 4;
constexpr uint32_t kLeastVectors = 2;  // two fp32 vectors make one of 16-bit elements

template <bool kStream, typename V>
EP_SIMD_INLINE void put(std::byte* p, V v) {
  if constexpr (kStream) {
    stream(p, v);
  } else {
    store(p, v);
  }
}

template <Element kOut, bool kStream, uint32_t kVectors>
EP_SIMD_INLINE void store_columns(std::byte* row, uint32_t begin, const F32 (&sums)[kVectors]) {
  std::byte* p = row + uint64_t{begin} * kElementBytes<kOut>;
  for (uint32_t v = 0; v < kVectors; v += 2, p += 2 * kLanes * kElementBytes<kOut>) {
    const F32 a = canonical_nan(sums[v]);
    const F32 b = canonical_nan(sums[v + 1]);
    if constexpr (kOut == Element::kBF16) {
      put<kStream>(p, narrow_to_16(f32_to_bf16_bits(a), f32_to_bf16_bits(b)));
    } else if constexpr (kOut == Element::kFP16) {
      const HalfU16 halves[2] = {f32_to_fp16(a), f32_to_fp16(b)};
      put<kStream>(p, __builtin_bit_cast(I16, halves));
    } else {
      put<kStream>(p, a);
      put<kStream>(p + EP_SIMD_BYTES, b);
    }
  }
}

// sums += (or, for the first addend, =) a row's columns, times its weight.
template <Element kIn, bool kWeighted, uint32_t kVectors>
EP_SIMD_INLINE void add_columns(
    F32 (&sums)[kVectors], bool is_first, const std::byte* row, uint32_t begin, float weight) {
  F32 addends[kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    addends[v] = load_columns<kIn>(row, begin + v * kLanes);
    if constexpr (kWeighted) addends[v] *= weight;
  }
  // Zero plus the first addend would turn -0 into 0.
  for (uint32_t v = 0; v < kVectors; ++v)
    sums[v] = is_first ? addends[v] : sums[v] + addends[v];
}

template <Element kIn, Element kOut, bool kWeighted, bool kStream, uint32_t kVectors>
EP_SIMD_INLINE void reduce_columns(const ReduceRow& row, uint32_t begin) {
  F32 sums[kVectors] = {};
  if (row.num_terms > 0) {
    add_columns<kIn, kWeighted>(sums, true, row.terms[0], begin, kWeighted ? row.weights[0] : 1);
    for (uint32_t t = 1; t < row.num_terms; ++t) {
      add_columns<kIn, kWeighted>(sums, false, row.terms[t], begin, kWeighted ? row.weights[t] : 1);
    }
  }
  for (uint32_t b = 0; b < row.num_bias; ++b) {
    const bool is_first = row.num_terms + b == 0;
    switch (row.bias_element[b]) {
      case Element::kBF16:
        add_columns<Element::kBF16, false>(sums, is_first, row.bias[b], begin, 1);
        break;
      case Element::kFP16:
        add_columns<Element::kFP16, false>(sums, is_first, row.bias[b], begin, 1);
        break;
      case Element::kFP32:
        add_columns<Element::kFP32, false>(sums, is_first, row.bias[b], begin, 1);
        break;
    }
  }
  store_columns<kOut, kStream>(row.out, begin, sums);
}

// The last columns, too few for two vectors: summed where whole vectors may be read and written.
template <Element kIn, Element kOut, bool kWeighted>
void reduce_tail(const ReduceRow& row, uint32_t begin) {
  constexpr uint32_t kMaxBytes = kLeastVectors * EP_SIMD_BYTES;
  alignas(EP_SIMD_BYTES) std::byte pieces[kMaxTerms + kMaxBias + 1][kMaxBytes] = {};
  const std::byte* terms[kMaxTerms];
  ReduceRow tail = row;
  tail.terms = terms;
  const uint32_t n = row.columns - begin;
  const auto copy_piece = [begin, n](std::byte* piece, const std::byte* from, uint32_t size) {
    __builtin_memcpy(piece, from + uint64_t{begin} * size, uint64_t{n} * size);
    return piece;
  };
  for (uint32_t t = 0; t < row.num_terms; ++t) {
    terms[t] = copy_piece(pieces[t], row.terms[t], kElementBytes<kIn>);
  }
  for (uint32_t b = 0; b < row.num_bias; ++b) {
    const uint32_t size = row.bias_element[b] == Element::kFP32 ? 4 : 2;
    tail.bias[b] = copy_piece(pieces[kMaxTerms + b], row.bias[b], size);
  }
  tail.out = pieces[kMaxTerms + kMaxBias];
  reduce_columns<kIn, kOut, kWeighted, false, kLeastVectors>(tail, 0);
  __builtin_memcpy(row.out + uint64_t{begin} * kElementBytes<kOut>, tail.out,
                   uint64_t{n} * kElementBytes<kOut>);
}

template <Element kIn, Element kOut, bool kWeighted, bool kStream>
void reduce_whole_row(const ReduceRow& row) {
  uint32_t at = 0;
  for (; at + kChunkVectors * kLanes <= row.columns; at += kChunkVectors * kLanes) {
    reduce_columns<kIn, kOut, kWeighted, kStream, kChunkVectors>(row, at);
  }
  for (; at + kLeastVectors * kLanes <= row.columns; at += kLeastVectors * kLanes) {
    reduce_columns<kIn, kOut, kWeighted, kStream, kLeastVectors>(row, at);
  }
  if (at < row.columns) reduce_tail<kIn, kOut, kWeighted>(row, at);
}

template <Element kIn, Element kOut>
void reduce_row(const ReduceRow& row) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(row.out) % EP_SIMD_BYTES == 0;
  if (row.weights != nullptr) {
    is_aligned ? reduce_whole_row<kIn, kOut, true, true>(row)
               : reduce_whole_row<kIn, kOut, true, false>(row);
  } else {
    is_aligned ? reduce_whole_row<kIn, kOut, false, true>(row)
               : reduce_whole_row<kIn, kOut, false, false>(row);
  }
}

}  // namespace
}  // namespace ep::kernels::host
