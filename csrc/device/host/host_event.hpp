// HostEvent: a position in a host stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "device/device.hpp"
#include "device/host/stream_state.hpp"

namespace ep::device::host {

// Any thread may call any member.  It may outlive its stream.
class HostEvent final : public detail::EventImpl {
 public:
  HostEvent(std::shared_ptr<StreamState> state, uint64_t position)
      : state_(std::move(state)), position_(position) {}

  bool query() const override { return state_->completed() >= position_; }

  // Throws Error on the stream's own thread for a point that work still in progress must reach:
  // that wait would never end.
  WaitResult wait(uint64_t deadline_ns, const std::function<bool()>& ask) override;

  // Throws Error in a forked child, which the point is never reached in.
  void require_own_process() const { state_->require_own_process(); }

  bool is_of(const StreamState& state) const { return state_.get() == &state; }

 private:
  const std::shared_ptr<StreamState> state_;
  const uint64_t position_;
};

}  // namespace ep::device::host
