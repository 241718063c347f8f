// HostDevice: the machine itself, as csrc/buffer sees it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/device.hpp"
#include "device/host/host_kernels.hpp"

namespace ep::device::host {

// Constant after construction: one object serves any number of buffers and threads.
class HostDevice final : public Device {
 public:
  // Its streams find their kernels with `find`: tests bring kernels of their own.
  explicit HostDevice(FindKernel find = &find_kernel) : find_kernel_(find) {}

  uint64_t now_ns() const override;
  WaitResult wait(Doorbell& doorbell,
                  FunctionRef<bool()> ready,
                  uint64_t deadline_ns,
                  const std::function<bool()>& interrupt,
                  const WaitPolicy& policy) override;
  std::shared_ptr<detail::StreamImpl> create_stream() override;
  uint32_t max_blocks() const override;

 private:
  const FindKernel find_kernel_;
};

}  // namespace ep::device::host
