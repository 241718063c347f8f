#include "bench/ep_bench/numbers.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace ep::bench {
namespace {

constexpr uint32_t kGroup = 128;
constexpr float kLargestE4m3 = 448.0f;

// Nearest integer, ties to even, for |x| < 2^22: below 2^23 an addition has no room for fractions.
float round_to_integer(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  return (x + kShift) - kShift;
}

float decode_fp16(uint16_t bits) {
  const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::bit_cast<float>(((exponent + 112) << 23) | (mantissa << 13));
  return (bits & 0x8000u) ? -magnitude : magnitude;
}

// The significand has `num_bits` explicit bits, the smallest normal number is 2^least_exponent;
// codes of a format like that count up through its values, so a carry into the exponent needs no
// case.
uint32_t encode_small_float(float magnitude, int num_bits, int least_exponent) {
  const int own = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 127;
  const int exponent = std::max(own, least_exponent);
  const float per_step =
      std::bit_cast<float>(static_cast<uint32_t>(num_bits - exponent + 127) << 23);
  const auto steps = static_cast<int>(round_to_integer(magnitude * per_step));
  return static_cast<uint32_t>(((exponent - least_exponent) << num_bits) + steps);
}

uint16_t encode_fp16(float x) {
  const uint32_t sign = (std::bit_cast<uint32_t>(x) >> 16) & 0x8000u;
  const float magnitude = std::fabs(x);
  const uint32_t code = magnitude >= 65520.0f ? 0x7C00u : encode_small_float(magnitude, 10, -14);
  return static_cast<uint16_t>(sign | code);
}

uint16_t encode_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t below = bits & 0xFFFFu, is_odd = (bits >> 16) & 1u;
  const bool rounds_up = below + is_odd > 0x8000u;
  return static_cast<uint16_t>((bits >> 16) + (rounds_up ? 1u : 0u));
}

uint8_t encode_e4m3(float x) {
  const uint32_t sign = (std::bit_cast<uint32_t>(x) >> 24) & 0x80u;
  return static_cast<uint8_t>(sign | encode_small_float(std::fabs(x), 3, -6));
}

float next_power_of_two(float s) {
  int exponent = 0;
  const float fraction = std::frexp(s, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

template <typename T, typename Decode>
void decode_all(const std::byte* row, uint32_t num_columns, float* out, Decode&& decode) {
  for (uint32_t i = 0; i < num_columns; ++i) {
    T bits;
    std::memcpy(&bits, row + i * sizeof(T), sizeof(T));
    out[i] = decode(bits);
  }
}

template <typename T, typename Encode>
void encode_all(const float* values, uint32_t num_columns, std::byte* row, Encode&& encode) {
  for (uint32_t i = 0; i < num_columns; ++i) {
    const T bits = encode(values[i]);
    std::memcpy(row + i * sizeof(T), &bits, sizeof(T));
  }
}

}  // namespace

void decode_row(DType dtype, const std::byte* row, uint32_t num_columns, float* out) {
  if (dtype == DType::kBFloat16) {
    decode_all<uint16_t>(row, num_columns, out,
                         [](uint16_t b) { return std::bit_cast<float>(uint32_t{b} << 16); });
  } else if (dtype == DType::kFloat16) {
    decode_all<uint16_t>(row, num_columns, out, decode_fp16);
  } else {
    std::memcpy(out, row, num_columns * sizeof(float));
  }
}

void encode_row(DType dtype, const float* values, uint32_t num_columns, std::byte* row) {
  if (dtype == DType::kBFloat16) {
    encode_all<uint16_t>(values, num_columns, row, encode_bf16);
  } else if (dtype == DType::kFloat16) {
    encode_all<uint16_t>(values, num_columns, row, encode_fp16);
  } else {
    std::memcpy(row, values, num_columns * sizeof(float));
  }
}

void quantise_row(
    Quant format, const float* values, uint32_t num_columns, uint8_t* q, std::byte* scales) {
  const uint32_t num_groups = num_columns / kGroup;
  if (format == Quant::kFp8Block128Ue8m0) std::memset(scales, 127, (num_groups + 3) / 4 * 4);
  for (uint32_t group = 0; group < num_groups; ++group) {
    const float* const x = values + group * kGroup;
    float largest = 0.0f;
    for (uint32_t i = 0; i < kGroup; ++i)
      largest = std::max(largest, std::fabs(x[i]));
    float scale = std::max(largest, 1e-4f) / kLargestE4m3;
    if (format != Quant::kFp8Block128) scale = next_power_of_two(scale);
    if (format == Quant::kFp8Block128Ue8m0) {
      scales[group] = static_cast<std::byte>(std::ilogb(scale) + 127);
    } else {
      std::memcpy(scales + group * sizeof(float), &scale, sizeof scale);
    }
    const float inverse = 1.0f / scale;
    for (uint32_t i = 0; i < kGroup; ++i) {
      q[group * kGroup + i] = encode_e4m3(std::clamp(x[i] * inverse, -kLargestE4m3, kLargestE4m3));
    }
  }
}

}  // namespace ep::bench
