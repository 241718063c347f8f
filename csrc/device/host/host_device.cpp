#include "device/host/host_device.hpp"

#include "device/host/clock.hpp"
#include "device/host/host_stream.hpp"
#include "device/host/wait.hpp"

namespace ep::device {

namespace host {

uint64_t HostDevice::now_ns() const {
  return host::now_ns();
}

WaitResult HostDevice::wait(Doorbell& doorbell,
                            FunctionRef<bool()> ready,
                            uint64_t deadline_ns,
                            const std::function<bool()>& interrupt,
                            const WaitPolicy& policy) {
  return wait_on(doorbell, ready, deadline_ns, interrupt, policy);
}

std::shared_ptr<detail::StreamImpl> HostDevice::create_stream() {
  return std::make_shared<HostStream>(find_kernel_);
}

uint32_t HostDevice::max_blocks() const {
  return BlockTeam::kMaxBlocks;
}

}  // namespace host

std::shared_ptr<Device> create_host_device() {
  return std::make_shared<host::HostDevice>();
}

}  // namespace ep::device
