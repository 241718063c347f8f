// Every kernel configuration that exists for CPUs, instantiated.
#include "device/host/host_kernels.hpp"

#include "device/host/worker.hpp"
#include "kernels/combine.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/turns.cuh"

namespace ep::device::host {
namespace {

using kernels::CombineConfig;
using kernels::DispatchConfig;
using kernels::Element;
using kernels::Format;
using kernels::LayoutKind;

template <DispatchConfig kConfig>
void run_dispatch(HostWorker& worker, const void* params) {
  kernels::dispatch<kConfig>(worker, *static_cast<const kernels::DispatchParams*>(params));
}

template <CombineConfig kConfig>
void run_combine(HostWorker& worker, const void* params) {
  kernels::combine<kConfig>(worker, *static_cast<const kernels::CombineParams*>(params));
}

template <LayoutKind kLayout, Element kIn>
HostKernel dispatch_kernel(Format format) {
  switch (format) {
    case Format::kBytes:
      return &run_dispatch<DispatchConfig{kLayout, Format::kBytes, Element::kBF16}>;
    case Format::kFp8Block128:
      return &run_dispatch<DispatchConfig{kLayout, Format::kFp8Block128, kIn}>;
    case Format::kFp8Block128Pow2:
      return &run_dispatch<DispatchConfig{kLayout, Format::kFp8Block128Pow2, kIn}>;
    case Format::kFp8Block128Ue8m0:
      return &run_dispatch<DispatchConfig{kLayout, Format::kFp8Block128Ue8m0, kIn}>;
  }
  return nullptr;
}

template <LayoutKind kLayout>
HostKernel dispatch_kernel(const DispatchConfig& config) {
  switch (config.in) {
    case Element::kBF16:
      return dispatch_kernel<kLayout, Element::kBF16>(config.format);
    case Element::kFP16:
      return dispatch_kernel<kLayout, Element::kFP16>(config.format);
    case Element::kFP32:
      return dispatch_kernel<kLayout, Element::kFP32>(config.format);
  }
  return nullptr;
}

template <LayoutKind kLayout, Element kIn>
HostKernel combine_kernel(Element out) {
  switch (out) {
    case Element::kBF16:
      return &run_combine<CombineConfig{kLayout, kIn, Element::kBF16}>;
    case Element::kFP16:
      return &run_combine<CombineConfig{kLayout, kIn, Element::kFP16}>;
    case Element::kFP32:
      return &run_combine<CombineConfig{kLayout, kIn, Element::kFP32}>;
  }
  return nullptr;
}

template <LayoutKind kLayout>
HostKernel combine_kernel(const CombineConfig& config) {
  switch (config.in) {
    case Element::kBF16:
      return combine_kernel<kLayout, Element::kBF16>(config.out);
    case Element::kFP16:
      return combine_kernel<kLayout, Element::kFP16>(config.out);
    case Element::kFP32:
      return combine_kernel<kLayout, Element::kFP32>(config.out);
  }
  return nullptr;
}

void run_refuse(HostWorker& worker, const void* params) {
  kernels::refuse(worker, *static_cast<const kernels::RefuseParams*>(params));
}

void run_close(HostWorker& worker, const void* params) {
  kernels::close(worker, *static_cast<const kernels::CloseParams*>(params));
}

void run_copy_out(HostWorker& worker, const void* params) {
  kernels::copy_out(worker, *static_cast<const kernels::CopyOutParams*>(params));
}

}  // namespace

HostKernel find_kernel(const kernels::KernelKey& key) {
  switch (key.op) {
    case kernels::KernelOp::kDispatch:
      return key.dispatch.layout == LayoutKind::kRank
                 ? dispatch_kernel<LayoutKind::kRank>(key.dispatch)
                 : dispatch_kernel<LayoutKind::kExpert>(key.dispatch);
    case kernels::KernelOp::kCombine:
      return key.combine.layout == LayoutKind::kRank
                 ? combine_kernel<LayoutKind::kRank>(key.combine)
                 : combine_kernel<LayoutKind::kExpert>(key.combine);
    case kernels::KernelOp::kRefuse:
      return &run_refuse;
    case kernels::KernelOp::kClose:
      return &run_close;
    case kernels::KernelOp::kCopyOut:
      return &run_copy_out;
  }
  return nullptr;
}

}  // namespace ep::device::host
