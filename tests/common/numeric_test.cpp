#include "common/numeric.hpp"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "support/number_reference.hpp"

namespace ep {
namespace {

using test::fp32_from_bits;
using test::NumberFormat;

// Calls check(v) with values from all of fp32, NaNs, infinities and subnormals of both signs among
// them: about 17 million, a step that is prime to every field's width apart.
template <typename Check>
void for_many_floats(Check check) {
  constexpr uint64_t kStep = 251;
  for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += kStep) {
    check(fp32_from_bits(static_cast<uint32_t>(bits)));
    if (testing::Test::HasFailure()) return;
  }
}

const float kSpecial[] = {0.0f,
                          -0.0f,
                          INFINITY,
                          -INFINITY,
                          std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min(),
                          -std::numeric_limits<float>::denorm_min(),
                          fp32_from_bits(0x7FC00000u),
                          fp32_from_bits(0xFFC12345u),
                          fp32_from_bits(0x7F800001u),
                          fp32_from_bits(0xFFFFFFFFu)};

TEST(Numeric, EveryBf16IsDecoded) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float want = static_cast<float>(NumberFormat::bf16().decode(code));
    const float got = bf16_to_float(static_cast<uint16_t>(code));
    ASSERT_EQ(test::fp32_bits(got), test::fp32_bits(want)) << "code " << code;
  }
}

TEST(Numeric, EveryFp16IsDecoded) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float want = static_cast<float>(NumberFormat::fp16().decode(code));
    const float got = fp16_to_float(static_cast<uint16_t>(code));
    ASSERT_EQ(test::fp32_bits(got), test::fp32_bits(want)) << "code " << code;
  }
}

TEST(Numeric, RoundsToTheNearestBf16) {
  const NumberFormat& format = NumberFormat::bf16();
  const auto check = [&](float v) {
    ASSERT_EQ(float_to_bf16(v), format.encode(v)) << "bits " << bits_of(v);
  };
  for (const float v : format.edges())
    check(v);
  for (const float v : kSpecial)
    check(v);
  for_many_floats(check);
}

TEST(Numeric, RoundsToTheNearestFp16) {
  const NumberFormat& format = NumberFormat::fp16();
  const auto check = [&](float v) {
    ASSERT_EQ(float_to_fp16(v), format.encode(v)) << "bits " << bits_of(v);
  };
  for (const float v : format.edges())
    check(v);
  for (const float v : kSpecial)
    check(v);
  for_many_floats(check);
}

TEST(Numeric, RoundsToTheNearestE4m3fn) {
  const NumberFormat& format = NumberFormat::e4m3fn();
  const auto check = [&](float v) {
    if (std::abs(v) > 448.0f) return;
    ASSERT_EQ(float_to_e4m3fn(v), format.encode(v)) << "bits " << bits_of(v);
  };
  for (const float v : format.edges())
    check(v);
  for (const float v : kSpecial)
    check(v);
  for_many_floats(check);
}

TEST(Numeric, E4m3fnHasTheSpecifiedEnds) {
  EXPECT_EQ(float_to_e4m3fn(448.0f), 0x7E);
  EXPECT_EQ(float_to_e4m3fn(-448.0f), 0xFE);
  EXPECT_EQ(float_to_e4m3fn(0x1p-9f), 0x01);
  EXPECT_EQ(float_to_e4m3fn(0x1p-10f), 0x00);  // a tie: to even
  EXPECT_EQ(float_to_e4m3fn(0x1p-6f), 0x08);
  EXPECT_EQ(float_to_e4m3fn(-0.0f), 0x80);
  EXPECT_EQ(float_to_e4m3fn(fp32_from_bits(0xFFC00000u)), 0x7F);
}

TEST(Numeric, OneNanLeaves) {
  for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u}) {
    const float nan = fp32_from_bits(bits);
    EXPECT_EQ(bits_of(canonical_nan(nan)), 0x7FC00000u);
    EXPECT_EQ(float_to_bf16(nan), 0x7FC0);
    EXPECT_EQ(float_to_fp16(nan), 0x7E00);
    EXPECT_EQ(float_to_e4m3fn(nan), 0x7F);
  }
  EXPECT_EQ(bits_of(canonical_nan(-0.0f)), 0x80000000u);
  EXPECT_EQ(bits_of(canonical_nan(-INFINITY)), 0xFF800000u);
}

TEST(Numeric, EveryE8m0IsDecoded) {
  for (int code = 0; code < 255; ++code) {
    const float got = e8m0_to_float(static_cast<uint8_t>(code));
    ASSERT_EQ(bits_of(got), bits_of(std::ldexp(1.0f, code - 127))) << "code " << code;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

TEST(Numeric, E8m0IsTheLeastPowerNotBelow) {
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    EXPECT_EQ(e8m0_at_least(power), exponent + 127);
    if (exponent == 127) continue;
    EXPECT_EQ(e8m0_at_least(std::nextafter(power, INFINITY)), exponent + 128);
    EXPECT_EQ(e8m0_at_least(std::nextafter(2 * power, 0.0f)), exponent + 128);
  }
}

}  // namespace
}  // namespace ep
