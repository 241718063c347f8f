// quantize_row: two passes over four groups of 128 columns while they are in L1, the greatest
// magnitudes and then the encoding.  Part of simd_body.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/host/leaves.hpp"
#include "kernels/host/simd_vectors.hpp"

namespace ep::kernels::host {
namespace {

constexpr uint32_t kGroupColumns = 128;
constexpr uint32_t kWordGroups = 4;  // groups whose exponents share an int32

// Every lane holds lane i + kBy.
template <uint32_t kBy, typename V, size_t... kI>
EP_SIMD_INLINE V rotate(V v, std::index_sequence<kI...>) {
  return __builtin_shufflevector(v, v, ((kI + kBy) % sizeof...(kI))...);
}

template <uint32_t kBy, typename V>
EP_SIMD_INLINE int32_t max_lane(V v) {
  if constexpr (kBy == 0) {
    return v[0];
  } else {
    const V other = rotate<kBy>(v, std::make_index_sequence<sizeof(V) / sizeof(v[0])>{});
    return max_lane<kBy / 2>(v > other ? v : other);
  }
}

// The formats of x, seen as integers: magnitudes order as the numbers do, and NaNs are above kInf.
template <Element kIn>
struct Bits {
  using V = I16;
  static constexpr int16_t kMagnitude = 0x7FFF;
  static constexpr int16_t kInf = kIn == Element::kBF16 ? 0x7F80 : 0x7C00;
};
template <>
struct Bits<Element::kFP32> {
  using V = I32;
  static constexpr int32_t kMagnitude = 0x7FFFFFFF;
  static constexpr int32_t kInf = 0x7F800000;
};

// The greatest magnitude of a group, among its numbers if kSkipNan.
template <Element kIn, bool kSkipNan>
EP_SIMD_INLINE int32_t group_max_bits(const std::byte* in) {
  using V = typename Bits<kIn>::V;
  V most{};
  for (uint32_t at = 0; at < kGroupColumns * kElementBytes<kIn>; at += EP_SIMD_BYTES) {
    V v = load<V>(in + at) & Bits<kIn>::kMagnitude;
    if constexpr (kSkipNan) v = v > Bits<kIn>::kInf ? V{} : v;
    most = v > most ? v : most;
  }
  return max_lane<EP_SIMD_BYTES / kElementBytes<kIn> / 2>(most);
}

template <Element kIn>
EP_SIMD_INLINE float magnitude_to_float(int32_t bits) {
  if constexpr (kIn == Element::kFP16) return fp16_to_f32(HalfU16{} + uint16_t(bits))[0];
  return float_of(kIn == Element::kBF16 ? uint32_t(bits) << 16 : uint32_t(bits));
}

struct Amax {
  float value;   // max |x| over non-NaN x, inf counting as FLT_MAX
  bool is_rare;  // the group has an inf or a NaN
};

template <Element kIn>
EP_SIMD_INLINE Amax group_amax(const std::byte* in) {
  int32_t bits = group_max_bits<kIn, false>(in);
  if (bits < Bits<kIn>::kInf) [[likely]]
    return {magnitude_to_float<kIn>(bits), false};
  bits = group_max_bits<kIn, true>(in);
  return {bits == Bits<kIn>::kInf ? 0x1.fffffep127f : magnitude_to_float<kIn>(bits), true};
}

// e4m3fn(clamp(v, -448, 448)), in the low byte of each lane.  In a group without inf and NaN, which
// !kIsRare promises, |v| is at most some roundings above 448 and needs no clamp.
//
// Adding 2^20 times the power of two below v (2^-6 where v is subnormal) rounds v in the adder and
// leaves its steps, 8 to 16 (0 to 8), in the last bits; the exponent is put above them.
template <bool kIsRare>
EP_SIMD_INLINE I32 f32_to_e4m3fn(F32 v) {
  const I32 bits = I32(v);
  I32 magnitude = bits & 0x7FFFFFFF;
  I32 is_nan{};  // -1 where so
  if constexpr (kIsRare) {
    is_nan = magnitude > 0x7F800000;
    magnitude = magnitude > 0x43E00000 ? I32{} + 0x43E00000 : magnitude;
  }
  const I32 least = I32{} + 0x3C800000;
  const I32 exponent = magnitude & 0x7F800000;
  const I32 power = exponent > least ? exponent : least;
  const I32 steps = I32(F32(magnitude) + F32(power + (20 << 23))) - power;
  // 20 << 23 was added above, and 120 is between the exponent biases; steps count from 8.
  constexpr int32_t kExcess = (20 << 23) + (120 << 3) + 8;
  const I32 excess = bits < 0 ? I32{} + (kExcess - 0x80) : I32{} + kExcess;
  const I32 byte = steps + I32(U32(power) >> 20) - excess;
  if constexpr (kIsRare) return is_nan ? I32{} + 0x7F : byte;
  return byte;
}

template <Element kIn, bool kIsRare>
EP_SIMD_INLINE void encode_group(const std::byte* in, float inverse, std::byte* out) {
  for (uint32_t c = 0; c < kGroupColumns; c += 4 * kLanes) {
    I32 bytes[4];
    for (uint32_t i = 0; i < 4; ++i) {
      bytes[i] = f32_to_e4m3fn<kIsRare>(load_columns<kIn>(in, c + i * kLanes) * inverse);
    }
    store(out + c, narrow_to_8(bytes));
  }
}

// The scales of up to four groups come first: a division's latency is then hidden by the others.
template <Element kIn, Format kFormat>
void quantize_row(const QuantizeRow& row) {
  constexpr uint32_t kGroupBytes = kGroupColumns * kElementBytes<kIn>;
  const uint32_t num_groups = row.columns / kGroupColumns;
  for (uint32_t begin = 0; begin < num_groups; begin += kWordGroups) {
    const uint32_t n = num_groups - begin < kWordGroups ? num_groups - begin : kWordGroups;
    const std::byte* in = row.in + uint64_t{begin} * kGroupBytes;
    float inverse[kWordGroups];
    bool is_rare[kWordGroups];
    uint32_t exponents = 0x7F7F7F7Fu;
    for (uint32_t i = 0; i < n; ++i) {
      const Amax amax = group_amax<kIn>(in + i * kGroupBytes);
      float scale = (amax.value < 1e-4f ? 1e-4f : amax.value) / 448.0f;
      if constexpr (kFormat != Format::kFp8Block128) {
        const uint32_t exponent = (bits_of(scale) + 0x7FFFFFu) >> 23;  // rounds up
        scale = float_of(exponent << 23);
        exponents = (exponents & ~(0xFFu << 8 * i)) | exponent << 8 * i;
      }
      inverse[i] = 1.0f / scale;
      is_rare[i] = amax.is_rare;
      if constexpr (kFormat != Format::kFp8Block128Ue8m0) {
        store(row.scales + uint64_t{begin + i} * sizeof(float), scale);
      }
    }
    if constexpr (kFormat == Format::kFp8Block128Ue8m0) store(row.scales + begin, exponents);
    for (uint32_t i = 0; i < n; ++i) {
      const std::byte* from = in + i * kGroupBytes;
      std::byte* to = row.out + uint64_t{begin + i} * kGroupColumns;
      if (is_rare[i]) [[unlikely]] {
        encode_group<kIn, true>(from, inverse[i], to);
      } else {
        encode_group<kIn, false>(from, inverse[i], to);
      }
    }
  }
}

}  // namespace
}  // namespace ep::kernels::host
