// Which kernel: an operation and its compile-time configuration.
#pragma once

#include "common/target.hpp"
#include "kernels/config.hpp"

namespace ep::kernels {

enum class KernelOp : uint8_t { kDispatch, kCombine, kRefuse, kClose, kCopyOut };

constexpr bool operator==(const DispatchConfig& a, const DispatchConfig& b) {
  return a.layout == b.layout && a.format == b.format && a.in == b.in;
}
constexpr bool operator==(const CombineConfig& a, const CombineConfig& b) {
  return a.layout == b.layout && a.in == b.in && a.out == b.out;
}

struct KernelKey {
  KernelOp op = KernelOp::kRefuse;
  DispatchConfig dispatch{};  // read for kDispatch
  CombineConfig combine{};    // read for kCombine
  friend constexpr bool operator==(const KernelKey&, const KernelKey&) = default;
};

}  // namespace ep::kernels
