// Quantising one row: the fp8 formula of docs (api: fp8_block128 and its scale forms).
#pragma once

#include "common/math.hpp"
#include "common/numeric.hpp"
#include "kernels/config.hpp"
#include "kernels/coop.hpp"
#if !EP_CUDA_COMPILE
#include "kernels/host/leaves.hpp"
#endif

namespace ep::kernels {

inline constexpr float kFp8Max = 448.0f;
inline constexpr float kLeastAmax = 1e-4f;
inline constexpr float kFloatMax = 3.402823466e+38f;

template <Element kElement>
EP_HOST_DEVICE float element_at(const std::byte* row, uint64_t column) {
  if constexpr (kElement == Element::kBF16) {
    return bf16_to_float(reinterpret_cast<const uint16_t*>(row)[column]);
  } else if constexpr (kElement == Element::kFP16) {
    return fp16_to_float(reinterpret_cast<const uint16_t*>(row)[column]);
  } else {
    return reinterpret_cast<const float*>(row)[column];
  }
}

// The stored exponent byte, or 0 where the scale is kept as it is.
template <Format kFormat>
EP_HOST_DEVICE float scale_of(float amax) {
  const float scale = max_of(amax, kLeastAmax) / kFp8Max;
  return kFormat == Format::kFp8Block128 ? scale : e8m0_to_float(e8m0_at_least(scale));
}

// `out` gets num_columns bytes, `scales` scale_bytes().  num_columns is a multiple of 128.
template <Element kElement, Format kFormat, class Coop>
EP_HOST_DEVICE void encode_row(
    Coop coop, std::byte* out, std::byte* scales, const std::byte* row, uint32_t num_columns) {
#if EP_CUDA_COMPILE
  constexpr uint32_t kPerLane = 4;
  const uint32_t groups = num_columns / kGroupColumns;
  for (uint32_t g = 0; g < groups; ++g) {
    const uint32_t first = g * kGroupColumns + coop.thread_rank() * kPerLane;
    float v[kPerLane];
    float amax = 0.0f;
    for (uint32_t i = 0; i < kPerLane; ++i) {
      v[i] = element_at<kElement>(row, first + i);
      const float magnitude = float_of(bits_of(v[i]) & 0x7FFFFFFFu);
      amax = magnitude > amax ? magnitude : amax;  // false for NaN
    }
    amax = min_of(coop.max_all(amax), kFloatMax);
    const float scale = scale_of<kFormat>(amax), inverse = 1.0f / scale;
    uint32_t packed = 0;
    for (uint32_t i = 0; i < kPerLane; ++i) {
      float q = v[i] * inverse;
      q = q > kFp8Max ? kFp8Max : (q < -kFp8Max ? -kFp8Max : q);
      packed |= uint32_t{float_to_e4m3fn(q)} << (8 * i);
    }
    reinterpret_cast<uint32_t*>(out)[first / kPerLane] = packed;
    if (coop.thread_rank() != 0) continue;
    if constexpr (kFormat == Format::kFp8Block128Ue8m0) {
      scales[g] = static_cast<std::byte>(bits_of(scale) >> 23);
    } else {
      reinterpret_cast<float*>(scales)[g] = scale;
    }
  }
  if (kFormat == Format::kFp8Block128Ue8m0 && coop.thread_rank() == 0) {
    for (uint32_t g = groups; g % 4 != 0; ++g)
      scales[g] = static_cast<std::byte>(127);
  }
  coop.sync();
#else
  static_cast<void>(coop);
  constexpr auto kScaleForm =
      static_cast<uint32_t>(kFormat) - static_cast<uint32_t>(Format::kFp8Block128);
  host::leaves().quantize_row[static_cast<uint32_t>(kElement)][kScaleForm](
      {row, out, scales, num_columns});
#endif
}

}  // namespace ep::kernels
