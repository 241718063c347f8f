// The kernels that the library carries for CPUs.
#pragma once

#include "device/host/worker.hpp"
#include "kernels/kernel_key.hpp"

namespace ep::device::host {

// One block of a launch.  `params` is the launch's copy, shared by its blocks: read only.
using HostKernel = void (*)(HostWorker& worker, const void* params);

// How a stream finds its kernels; null: there is no such kernel.
using FindKernel = HostKernel (*)(const kernels::KernelKey& key);

HostKernel find_kernel(const kernels::KernelKey& key);

}  // namespace ep::device::host
