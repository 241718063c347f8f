// Number formats, written from their definitions and not from the library: --verify compares the
// two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ep/ep.hpp"

namespace ep::bench {

// bf16, fp16 or fp32 to float, exactly, and back with one rounding (nearest, ties to even).
// No NaN occurs in what the benchmark sends.
void decode_row(DType dtype, const std::byte* row, uint32_t num_columns, float* out);
void encode_row(DType dtype, const float* values, uint32_t num_columns, std::byte* row);

// The fp8 formula of the interface, per group of 128 columns:
//   a = max |x|; s = max(a, 1e-4) / 448, for "pow2" and "ue8m0" rounded up to a power of two;
//   q = e4m3fn(clamp(x * (1 / s), -448, 448)), nearest, ties to even.
// `scales`: a float per group; ue8m0: the exponent bytes, padded with 127 to whole int32 words.
void quantise_row(
    Quant format, const float* values, uint32_t num_columns, uint8_t* q, std::byte* scales);

}  // namespace ep::bench
