// Adding up one token's rows: fp32, in slot order, one rounding.
#pragma once

#include "common/numeric.hpp"
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

// acc = first term, then acc + term, each rounded to fp32; a term is the element or fp32(weight * element);
// then the biases; one rounding.  No terms: the first bias, else 0.
template <Element kIn, Element kOut, class Coop>
EP_HOST_DEVICE void reduce_row(Coop coop,
                               const CombineParams& p,
                               const Terms& terms,
                               uint32_t token) {
  std::byte* out = p.out + static_cast<int64_t>(token) * p.out_stride;
  const bool weighted = p.weights.data != nullptr;
#if EP_CUDA_COMPILE
  for (uint32_t c = coop.thread_rank(); c < p.num_columns; c += coop.size()) {
    float acc = 0.0f;
    bool empty = true;
    const auto add = [&](float term) {
      acc = empty ? term : __fadd_rn(acc, term);
      empty = false;
    };
    for (uint32_t i = 0; i < terms.num_terms; ++i) {
      const float v = element_at<kIn>(terms.rows[i], c);
      add(weighted ? __fmul_rn(terms.weights[i], v) : v);
    }
    for (uint32_t b = 0; b < p.num_bias; ++b)
      add(bias_at(p.bias[b], token, c));
    if constexpr (kOut == Element::kBF16) {
      reinterpret_cast<uint16_t*>(out)[c] = float_to_bf16(acc);
    } else if constexpr (kOut == Element::kFP16) {
      reinterpret_cast<uint16_t*>(out)[c] = float_to_fp16(acc);
    } else {
      reinterpret_cast<float*>(out)[c] = canonical_nan(acc);
    }
  }
#else
  static_cast<void>(coop);
  host::ReduceRow row{};
  row.terms = terms.rows;
  row.weights = weighted ? terms.weights : nullptr;
  row.num_terms = terms.num_terms;
  row.num_bias = p.num_bias;
  for (uint32_t b = 0; b < p.num_bias; ++b) {
    row.bias[b] = p.bias[b].rows.data + static_cast<int64_t>(token) * p.bias[b].rows.row_stride;
    row.bias_element[b] = p.bias[b].element;
  }
  row.out = out;
  row.columns = p.num_columns;
  host::leaves().reduce_row[static_cast<uint32_t>(kIn)][static_cast<uint32_t>(kOut)](row);
#endif
}

}  // namespace ep::kernels
