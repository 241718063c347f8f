// Conversions between fp32 and the formats that travel, to the bit, on every target.
//
//   bf16   1 sign, 8 exponent, 7 mantissa bits: the upper half of an fp32
//   fp16   IEEE 754 binary16
//   e4m3fn OCP 8-bit floating point specification 1.0: bias 7, no infinities, NaN = 0x7F, max 448
//   e8m0   OCP Microscaling formats specification 1.0: an exponent byte, value 2^(b - 127)
//
// All roundings are to nearest, ties to even.
//
// A NaN becomes the format's one quiet NaN, positive and without payload: bf16 0x7FC0, fp16 0x7E00,
// e4m3fn 0x7F, fp32 0x7FC00000.  Its sign and payload cannot be kept to the bit: which NaN a + b is
// depends on the order of operands that the compiler chose, and inf - inf is a negative NaN on x86
// and a positive one on ARM and NVIDIA.  So what arithmetic made passes through one of the
// float_to_... below, or through canonical_nan where it stays fp32.
#pragma once

#include "common/target.hpp"

namespace ep {

EP_HOST_DEVICE uint32_t bits_of(float v) {
#if EP_DEVICE_PASS
  return __float_as_uint(v);
#else
  return __builtin_bit_cast(uint32_t, v);
#endif
}

EP_HOST_DEVICE float float_of(uint32_t bits) {
#if EP_DEVICE_PASS
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// One rounding each: never fused, whatever the compiler is told.
EP_HOST_DEVICE float add_rounded(float a, float b) {
#if EP_DEVICE_PASS
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

EP_HOST_DEVICE float multiply_rounded(float a, float b) {
#if EP_DEVICE_PASS
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

EP_HOST_DEVICE float canonical_nan(float v) {
  return v == v ? v : float_of(0x7FC00000u);
}

EP_HOST_DEVICE float bf16_to_float(uint16_t v) {
  return float_of(uint32_t{v} << 16);
}

EP_HOST_DEVICE uint16_t float_to_bf16(float v) {
  const uint32_t bits = bits_of(v);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Subnormals are rebuilt with one exact subtraction, so the loop around it needs no branch.
EP_HOST_DEVICE float fp16_to_float(uint16_t v) {
  const uint32_t sign = (uint32_t{v} & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t{v} & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t special = 0x7F800000u | (magnitude << 13);
  const uint32_t subnormal =
      bits_of(float_of((magnitude << 13) + 0x38800000u) - float_of(0x38800000u));
  const uint32_t bits = magnitude >= 0x7C00u ? special : (magnitude < 0x0400u ? subnormal : normal);
  return float_of(sign | bits);
}

EP_HOST_DEVICE uint16_t float_to_fp16(float v) {
  const uint32_t bits = bits_of(v);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the fp32 adder round at the right bit.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  if (magnitude >= 0x477FF000u) half = 0x7C00u;  // 65520 and above round to infinity
  return static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : (sign | half));
}

// REQUIRES: |v| <= 448 or v is NaN.
EP_HOST_DEVICE uint8_t float_to_e4m3fn(float v) {
  const uint32_t bits = bits_of(v);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-6 the result is subnormal with steps of 2^-9; 2^14 has exactly that last fp32 bit.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  const uint32_t normal = (magnitude - 0x3C000000u + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t byte = magnitude < 0x3C800000u ? subnormal : normal;
  const uint32_t value = magnitude > 0x7F800000u ? 0x7Fu : (((bits >> 24) & 0x80u) | byte);
  return static_cast<uint8_t>(value);
}

// The smallest power of two >= v, as an exponent byte.
// REQUIRES: v is positive, normal and <= 2^127.
EP_HOST_DEVICE uint8_t e8m0_at_least(float v) {
  const uint32_t bits = bits_of(v);
  return static_cast<uint8_t>((bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u));
}

EP_HOST_DEVICE float e8m0_to_float(uint8_t exponent) {
  // 2^-127 is subnormal in fp32, and 255 is the format's NaN.  No scale of ours gets to either (the
  // least is 2^-22), callers' bytes may.
  const uint32_t bits = exponent == 255 ? 0x7FC00000u : uint32_t{exponent} << 23;
  return float_of(exponent == 0 ? 0x00400000u : bits);
}

}  // namespace ep
