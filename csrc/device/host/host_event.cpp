#include "device/host/host_event.hpp"

#include "device/host/wait.hpp"
#include "ep/error.hpp"

namespace ep::device::host {

WaitResult HostEvent::wait(uint64_t deadline_ns, const std::function<bool()>& ask) {
  if (query()) return WaitResult::kReady;
  state_->require_own_process();
  if (state_->on_worker_thread()) {
    throw Error("work of a stream waits for a later point of the same stream");
  }
  return wait_on(state_->done_doorbell(), [this] { return query(); }, deadline_ns, ask, {});
}

}  // namespace ep::device::host
