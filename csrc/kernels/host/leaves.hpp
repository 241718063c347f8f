// The leaves that plain loops do too slowly on a CPU: one table of functions per instruction set, chosen
// once.  Pure functions of their arguments; every table gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/config.hpp"

namespace ep::kernels::host {

// One row of a quantising dispatch.  `columns` is a multiple of 128.
struct QuantizeRow {
  const std::byte* in;  // [columns] of the table entry's Element
  std::byte* out;       // [columns] e4m3fn; 16-byte aligned
  std::byte*
      scales;  // Format::kFp8Block128, Pow2: [columns/128] fp32;  Ue8m0: [ceil(columns/512)] int32
  uint32_t columns;
};

inline constexpr uint32_t kMaxTerms = 32;
inline constexpr uint32_t kMaxBias = 2;

// out[c] = round(terms[0][c] (*w0) + terms[1][c] (*w1) + ... + bias...), see reduce_row.
struct ReduceRow {
  const std::byte* const* terms;  // [num_terms] rows of Element `in`
  const float* weights;           // [num_terms], or null: unweighted
  uint32_t num_terms;             // <= kMaxTerms; 0: the sum starts with the first bias, else is 0
  uint32_t num_bias;              // <= kMaxBias
  const std::byte* bias[kMaxBias];
  Element bias_element[kMaxBias];
  std::byte* out;  // [columns] of Element `out`
  uint32_t columns;
};

struct Leaves {
  const char* isa;

  // Copies with streaming stores where that pays: needs stream_fence() before a release.
  // `dst` is 16-byte aligned, `src` need not be; no overlap.
  void (*copy_row)(std::byte* dst, const std::byte* src, uint64_t num_bytes);

  // Orders earlier streaming stores before later stores (x86: sfence; a release store does not).
  void (*stream_fence)();

  // The fp8 formula, per group of 128 columns, in fp32 with a = min(max |x| over non-NaN x, FLT_MAX):
  //   s = max(a, 1e-4f) / 448.0f;  q = e4m3fn(clamp(x * (1.0f / s), -448, 448)), nearest-even.
  // NaN -> 0x7F and does not touch the scale; inf -> 448; -0 and subnormals are kept.  Pow2 and Ue8m0 take
  // the smallest power of two >= s.  Ue8m0: int32 word j holds groups 4j..4j+3, group 4j in bits 0-7, bytes
  // past the last group are 127.
  void (*quantize_row[3][3])(const QuantizeRow&);  // [Element][Format - kFp8Block128]

  // acc = first term; acc = acc + term in order, each rounded to fp32, a term being the row's element or
  // fp32(w * element) (multiply, then add: no fma); then the biases in order; one rounding to `out`.
  void (*reduce_row[3][3])(const ReduceRow&);  // [Element in][Element out]
};

// The best table this CPU can run.
const Leaves& leaves();

// Every table this CPU can run, plainest first: for tests and benches.
uint32_t num_leaf_tables();
const Leaves& leaf_table(uint32_t i);

}  // namespace ep::kernels::host
