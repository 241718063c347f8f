// What changes the code of a kernel.  Everything else is a run-time value.
#pragma once

#include "common/target.hpp"

namespace ep::kernels {

enum class LayoutKind : uint8_t { kRank, kExpert };

// The element types that kernels compute with.
enum class Element : uint8_t { kBF16, kFP16, kFP32 };

EP_HOST_DEVICE constexpr uint32_t num_bytes(Element e) {
  return e == Element::kFP32 ? 4u : 2u;
}

// How dispatch encodes x.
enum class Format : uint8_t {
  kBytes,             // rows travel as they are
  kFp8Block128,       // e4m3fn, one fp32 scale per 128 columns
  kFp8Block128Pow2,   // the scale is the smallest power of two >= it
  kFp8Block128Ue8m0,  // that power's exponent byte, four per int32
};

inline constexpr uint32_t kGroupColumns = 128;  // columns that share a scale

// Bytes of one row's scales.
EP_HOST_DEVICE constexpr uint32_t scale_bytes(Format format, uint32_t num_columns) {
  const uint32_t groups = num_columns / kGroupColumns;
  switch (format) {
    case Format::kBytes:
      return 0;
    case Format::kFp8Block128:
    case Format::kFp8Block128Pow2:
      return groups * 4;
    case Format::kFp8Block128Ue8m0:
      return (groups + 3) / 4 * 4;
  }
  return 0;
}

struct DispatchConfig {
  LayoutKind layout = LayoutKind::kRank;
  Format format = Format::kBytes;
  Element in = Element::kBF16;  // x's element; kBF16 with kBytes
};

struct CombineConfig {
  LayoutKind layout = LayoutKind::kRank;
  Element in = Element::kBF16;
  Element out = Element::kBF16;
};

}  // namespace ep::kernels
