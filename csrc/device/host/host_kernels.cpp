// Every kernel that exists, instantiated for CPUs.
#include "device/host/host_kernels.hpp"

#include <array>
#include <cstddef>
#include <utility>

#include "device/host/worker.hpp"
#include "kernels/all_kernels.hpp"
#include "kernels/combine.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/turns.cuh"

namespace ep::device::host {
namespace {

using kernels::kAllKernels;
using kernels::KernelKey;
using kernels::KernelOp;

template <KernelKey kKey>
void run(HostWorker& worker, const void* params) {
  if constexpr (kKey.op == KernelOp::kDispatch) {
    kernels::dispatch<kKey.dispatch>(worker, *static_cast<const kernels::DispatchParams*>(params));
  } else if constexpr (kKey.op == KernelOp::kCombine) {
    kernels::combine<kKey.combine>(worker, *static_cast<const kernels::CombineParams*>(params));
  } else if constexpr (kKey.op == KernelOp::kRefuse) {
    kernels::refuse(worker, *static_cast<const kernels::RefuseParams*>(params));
  } else if constexpr (kKey.op == KernelOp::kClose) {
    kernels::close(worker, *static_cast<const kernels::CloseParams*>(params));
  } else {
    static_assert(kKey.op == KernelOp::kCopyOut);
    kernels::copy_out(worker, *static_cast<const kernels::CopyOutParams*>(params));
  }
}

template <size_t... kIndex>
constexpr std::array<HostKernel, kAllKernels.size()> instantiate(std::index_sequence<kIndex...>) {
  return {&run<kAllKernels[kIndex]>...};
}

constexpr auto kInstances = instantiate(std::make_index_sequence<kAllKernels.size()>());

}  // namespace

HostKernel find_kernel(const kernels::KernelKey& key) {
  const KernelKey wanted = kernels::canonical(key);
  for (size_t i = 0; i < kAllKernels.size(); ++i) {
    if (kAllKernels[i] == wanted) return kInstances[i];
  }
  return nullptr;
}

}  // namespace ep::device::host
