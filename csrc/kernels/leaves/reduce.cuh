// Adding up one token's rows: fp32, in slot order, one rounding.
#pragma once

#include "common/numeric.hpp"
#include "kernels/leaves/copy.cuh"
#include "kernels/leaves/encode.cuh"
#include "kernels/params.hpp"

namespace ep::kernels {

EP_HOST_DEVICE float bias_at(const Bias& bias, uint32_t token, uint64_t column) {
  const std::byte* row = bias.rows.data + static_cast<int64_t>(token) * bias.rows.row_stride;
  switch (bias.element) {
    case Element::kBF16:
      return element_at<Element::kBF16>(row, column);
    case Element::kFP16:
      return element_at<Element::kFP16>(row, column);
    case Element::kFP32:
      break;
  }
  return element_at<Element::kFP32>(row, column);
}

// 16 bytes of a row as fp32, and back with one rounding.
template <Element kElement>
inline constexpr uint32_t kVectorColumns = 16 / num_bytes(kElement);

template <Element kElement>
EP_HOST_DEVICE float vector_element(const Bytes16& v, uint32_t i) {
  constexpr uint32_t kBits = 8 * num_bytes(kElement), kPerHalf = 64 / kBits;
  const uint64_t half = i < kPerHalf ? v.low : v.high;
  const uint32_t bits = static_cast<uint32_t>(half >> (i % kPerHalf * kBits));
  if constexpr (kElement == Element::kBF16) {
    return bf16_to_float(static_cast<uint16_t>(bits));
  } else if constexpr (kElement == Element::kFP16) {
    return fp16_to_float(static_cast<uint16_t>(bits));
  } else {
    return float_of(bits);
  }
}

// The bits of one output element.
template <Element kElement>
EP_HOST_DEVICE uint32_t output_bits(float v) {
  if constexpr (kElement == Element::kBF16) {
    return float_to_bf16(v);
  } else if constexpr (kElement == Element::kFP16) {
    return float_to_fp16(v);
  } else {
    return bits_of(canonical_nan(v));
  }
}

// 64 bits of output from the columns of `v`.
template <Element kElement>
EP_HOST_DEVICE uint64_t output_word(const float* v) {
  constexpr uint32_t kBits = 8 * num_bytes(kElement);
  uint64_t word = 0;
  for (uint32_t i = 0; i < 64 / kBits; ++i)
    word |= uint64_t{output_bits<kElement>(v[i])} << (i * kBits);
  return word;
}

// Columns [first, first + kColumns) of one output row.  With kVectorColumns of them, the rows are read 16 bytes
// at a time; else kColumns is 1.
template <Element kIn, Element kOut, uint32_t kColumns, class Coop>
EP_HOST_DEVICE void reduce_columns(
    Coop coop, const CombineParams& p, const Terms& terms, uint32_t token, uint32_t first) {
  const bool weighted = p.weights.data != nullptr;
  float acc[kColumns] = {};
  EP_NO_UNROLL
  for (uint32_t i = 0; i < terms.num_terms; ++i) {
    const std::byte* at = terms.rows[i] + uint64_t{first} * num_bytes(kIn);
    Bytes16 v{};
    if constexpr (kColumns > 1) v = coop.read(reinterpret_cast<const Bytes16*>(at));
    for (uint32_t c = 0; c < kColumns; ++c) {
      float term = kColumns > 1 ? vector_element<kIn>(v, c) : element_at<kIn>(at, 0);
      if (weighted) term = multiply_rounded(terms.weights[i], term);
      acc[c] = i == 0 ? term : add_rounded(acc[c], term);
    }
  }
  bool empty = terms.num_terms == 0;
  EP_NO_UNROLL
  for (uint32_t b = 0; b < p.num_bias; ++b, empty = false) {
    for (uint32_t c = 0; c < kColumns; ++c) {
      const float term = bias_at(p.bias[b], token, first + c);
      acc[c] = empty ? term : add_rounded(acc[c], term);
    }
  }
  std::byte* out =
      p.out + static_cast<int64_t>(token) * p.out_stride + uint64_t{first} * num_bytes(kOut);
  if constexpr (kColumns == 1) {
    if constexpr (kOut == Element::kFP32) {
      *reinterpret_cast<uint32_t*>(out) = output_bits<kOut>(acc[0]);
    } else {
      *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(output_bits<kOut>(acc[0]));
    }
  } else {
    constexpr uint32_t kPerWord = 8 / num_bytes(kOut);
    for (uint32_t w = 0; w < kColumns / kPerWord; w += 2) {
      const uint64_t low = output_word<kOut>(acc + w * kPerWord);
      if constexpr (kColumns / kPerWord == 1) {
        *reinterpret_cast<uint64_t*>(out) = low;
      } else {
        coop.write(reinterpret_cast<Bytes16*>(out) + w / 2,
                   Bytes16{low, output_word<kOut>(acc + (w + 1) * kPerWord)});
      }
    }
  }
}

// Do all rows, the output's too, begin at multiples of 16 bytes?
EP_HOST_DEVICE bool rows_are_aligned(const Terms& terms, const std::byte* out) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(out);
  EP_NO_UNROLL
  for (uint32_t i = 0; i < terms.num_terms; ++i)
    bits |= reinterpret_cast<uintptr_t>(terms.rows[i]);
  return bits % 16 == 0;
}

// The form of a worker with lanes: each takes vectors of columns.
template <Element kIn, Element kOut, class Coop>
EP_HOST_DEVICE void reduce_row_by_lanes(Coop coop,
                                        const CombineParams& p,
                                        const Terms& terms,
                                        uint32_t token) {
  const std::byte* out = p.out + static_cast<int64_t>(token) * p.out_stride;
  constexpr uint32_t kColumns = kVectorColumns<kIn>;
  const uint32_t vector_end =
      rows_are_aligned(terms, out) ? p.num_columns / kColumns * kColumns : 0;
  EP_NO_UNROLL
  for (uint32_t c = coop.thread_rank() * kColumns; c < vector_end; c += coop.size() * kColumns)
    reduce_columns<kIn, kOut, kColumns>(coop, p, terms, token, c);
  EP_NO_UNROLL
  for (uint32_t c = vector_end + coop.thread_rank(); c < p.num_columns; c += coop.size())
    reduce_columns<kIn, kOut, 1>(coop, p, terms, token, c);
}

// acc = first term, then acc + term, each rounded to fp32; a term is the element or fp32(weight * element);
// then the biases; one rounding.  No terms: the first bias, else 0.
template <Element kIn, Element kOut, class Coop>
EP_HOST_DEVICE void reduce_row(Coop coop,
                               const CombineParams& p,
                               const Terms& terms,
                               uint32_t token) {
#if EP_CUDA_COMPILE
  reduce_row_by_lanes<kIn, kOut>(coop, p, terms, token);
#else
  static_cast<void>(coop);
  const bool weighted = p.weights.data != nullptr;
  host::ReduceRow row{};
  row.terms = terms.rows;
  row.weights = weighted ? terms.weights : nullptr;
  row.num_terms = terms.num_terms;
  row.num_bias = p.num_bias;
  for (uint32_t b = 0; b < p.num_bias; ++b) {
    row.bias[b] = p.bias[b].rows.data + static_cast<int64_t>(token) * p.bias[b].rows.row_stride;
    row.bias_element[b] = p.bias[b].element;
  }
  row.out = p.out + static_cast<int64_t>(token) * p.out_stride;
  row.columns = p.num_columns;
  host::leaves().reduce_row[static_cast<uint32_t>(kIn)][static_cast<uint32_t>(kOut)](row);
#endif
}

}  // namespace ep::kernels
