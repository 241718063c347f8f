#include "buffer/turn.hpp"

#include <utility>

#include "ep/error.hpp"

namespace ep::buffer {

bool Turns::is_up(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  return serving_ == ticket;
}

Turns::Turn Turns::take(const std::function<bool()>& interrupt) {
  if (is_mine()) throw Error("a call on the buffer, in the middle of another call of this thread");
  uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    ticket = next_ticket_++;
    if (serving_ == ticket) return begin();
  }
  const auto ready = [&] { return is_up(ticket); };
  if (device_.wait(doorbell_, ready, device::kNoDeadline, interrupt, policy_) ==
      device::WaitResult::kReady) {
    return begin();
  }
  {
    const std::lock_guard lock(mutex_);
    if (serving_ != ticket) {
      abandoned_.insert(ticket);
      throw Interrupted("interrupted while another thread was in a call on the buffer");
    }
  }
  next();  // the turn came in the same moment
  throw Interrupted("interrupted before the call began");
}

std::optional<Turns::Turn> Turns::try_take() {
  const std::lock_guard lock(mutex_);
  if (serving_ != next_ticket_) return std::nullopt;
  ++next_ticket_;
  return begin();
}

Turns::Turn Turns::begin() {
  holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return Turn(*this);
}

void Turns::next() {
  holder_.store({}, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    ++serving_;
    while (abandoned_.erase(serving_) != 0)
      ++serving_;
  }
  device::ring(doorbell_);
}

}  // namespace ep::buffer
