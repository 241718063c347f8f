// Every kernel that exists: what is instantiated for CPUs and what is compiled for GPUs.
#pragma once

#include <array>
#include <cstddef>

#include "kernels/kernel_key.hpp"

namespace ep::kernels {

// The key without what its operation does not read.  Equal canonical keys name the same kernel.
constexpr KernelKey canonical(KernelKey key) {
  if (key.op != KernelOp::kDispatch) key.dispatch = {};
  if (key.op != KernelOp::kCombine) key.combine = {};
  if (key.dispatch.format == Format::kBytes) key.dispatch.in = Element::kBF16;
  return key;
}

namespace detail {

inline constexpr LayoutKind kLayouts[] = {LayoutKind::kRank, LayoutKind::kExpert};
inline constexpr Element kElements[] = {Element::kBF16, Element::kFP16, Element::kFP32};
inline constexpr Format kFp8Formats[] = {Format::kFp8Block128, Format::kFp8Block128Pow2,
                                         Format::kFp8Block128Ue8m0};
inline constexpr size_t kNumKernels = 2 * (1 + 3 * 3) + 2 * 3 * 3 + 3;

constexpr std::array<KernelKey, kNumKernels> list_kernels() {
  std::array<KernelKey, kNumKernels> all{};
  size_t n = 0;
  for (const LayoutKind layout : kLayouts) {
    all[n++] = {KernelOp::kDispatch, {layout, Format::kBytes, Element::kBF16}, {}};
    for (const Format format : kFp8Formats) {
      for (const Element in : kElements)
        all[n++] = {KernelOp::kDispatch, {layout, format, in}, {}};
    }
  }
  for (const LayoutKind layout : kLayouts) {
    for (const Element in : kElements) {
      for (const Element out : kElements)
        all[n++] = {KernelOp::kCombine, {}, {layout, in, out}};
    }
  }
  for (const KernelOp op : {KernelOp::kRefuse, KernelOp::kClose, KernelOp::kCopyOut})
    all[n++] = {op, {}, {}};
  return all;
}

}  // namespace detail

// Canonical keys.
inline constexpr std::array<KernelKey, detail::kNumKernels> kAllKernels = detail::list_kernels();

}  // namespace ep::kernels
