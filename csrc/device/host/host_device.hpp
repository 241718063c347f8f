// HostDevice: the machine itself, as csrc/buffer sees it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/device.hpp"

namespace ep::device::host {

// Without state: one object serves any number of buffers and threads.
class HostDevice final : public Device {
 public:
  uint64_t now_ns() const override;
  WaitResult wait(Doorbell& doorbell,
                  FunctionRef<bool()> ready,
                  uint64_t deadline_ns,
                  const std::function<bool()>& interrupt,
                  const WaitPolicy& policy) override;
  std::shared_ptr<detail::StreamImpl> create_stream() override;
  uint32_t max_blocks() const override;
};

}  // namespace ep::device::host
