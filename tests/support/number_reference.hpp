// What numeric.hpp and the leaves must compute, from the formats' definitions alone: every code is
// decoded with ldexp, and rounding is a search for the nearest code.  Shares no line with csrc/.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ep::test {

// A sign bit, then exponent and mantissa.  The exponents are IEEE 754's, except that e4m3fn uses
// all codes but the last for numbers.
class NumberFormat {
 public:
  NumberFormat(int exponent_bits, int mantissa_bits, bool has_inf, uint32_t nan)
      : sign_(1u << (exponent_bits + mantissa_bits)), nan_(nan) {
    const uint32_t inf = ((1u << exponent_bits) - 1) << mantissa_bits;
    // One code past the numbers stands for the first value that would need a greater exponent:
    // what is nearer to that overflows.
    last_ = has_inf ? inf : sign_ - 1;
    has_inf_ = has_inf;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t implicit_one = 1u << mantissa_bits;
    for (uint32_t code = 0; code <= last_; ++code) {
      const int exponent = static_cast<int>(code >> mantissa_bits);
      const uint32_t fraction = code & (implicit_one - 1);
      const double steps = exponent == 0 ? fraction : implicit_one + fraction;
      values_.push_back(std::ldexp(steps, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }

  static const NumberFormat& bf16() {
    static const NumberFormat kFormat(8, 7, true, 0x7FC0);
    return kFormat;
  }
  static const NumberFormat& fp16() {
    static const NumberFormat kFormat(5, 10, true, 0x7E00);
    return kFormat;
  }
  static const NumberFormat& e4m3fn() {
    static const NumberFormat kFormat(4, 3, false, 0x7F);
    return kFormat;
  }

  uint32_t num_codes() const { return 2 * sign_; }

  double decode(uint32_t code) const {
    const uint32_t magnitude = code & (sign_ - 1);
    double value = values_[std::min(magnitude, last_)];
    if (has_inf_ && magnitude == last_) value = INFINITY;
    if (has_inf_ ? magnitude > last_ : magnitude == last_) value = NAN;
    return code & sign_ ? -value : value;
  }

  // Nearest, ties to the even code.
  uint32_t encode(double v) const {
    if (std::isnan(v)) return nan_;
    const double magnitude = std::min(std::abs(v), values_.back());
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    uint32_t code = static_cast<uint32_t>(above - values_.begin());
    if (*above != magnitude) {
      const double to_above = *above - magnitude, to_below = magnitude - *(above - 1);
      if (to_below < to_above || (to_below == to_above && code % 2 != 0)) --code;
    }
    return (std::signbit(v) ? sign_ : 0) | code;
  }

  // fp32 values where rounding may go wrong: every number, every midpoint, and their neighbours.
  std::vector<float> edges() const {
    std::vector<float> edges;
    for (uint32_t code = 0; code < last_; ++code) {
      const float at = static_cast<float>(values_[code]);
      const double sum = values_[code] + values_[code + 1];
      for (const float v : {at, static_cast<float>(sum / 2)}) {
        for (const float w : {std::nextafter(v, 0.0f), v, std::nextafter(v, INFINITY)}) {
          edges.insert(edges.end(), {w, -w});
        }
      }
    }
    return edges;
  }

 private:
  uint32_t sign_, nan_, last_ = 0;
  bool has_inf_ = false;
  std::vector<double> values_;  // of the codes 0..last_
};

inline float fp32_from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// fp32 as it leaves a kernel: every NaN is the one quiet NaN.
inline uint32_t fp32_bits(float v) {
  return std::isnan(v) ? 0x7FC00000u : std::bit_cast<uint32_t>(v);
}

}  // namespace ep::test
