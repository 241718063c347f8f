// Which kernel: an operation and its compile-time configuration.
#pragma once

#include "common/target.hpp"
#include "kernels/config.hpp"

namespace ep::kernels {

enum class KernelOp : uint8_t { kDispatch, kCombine, kRefuse, kClose, kCopyOut };

struct KernelKey {
  KernelOp op = KernelOp::kRefuse;
  DispatchConfig dispatch{};  // read for kDispatch
  CombineConfig combine{};    // read for kCombine
};

}  // namespace ep::kernels
