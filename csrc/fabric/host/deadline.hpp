// The bound of a wait on the host, and who may leave it earlier.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <utility>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::fabric {

// For one thread: also its const members remember when the interrupt was last asked.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Interrupt = std::function<bool()>;

  // `timeout_s` from now; 0 looks once.  Throws InvalidArgument when it is negative or NaN.
  explicit Deadline(double timeout_s, Interrupt interrupt = {})
      : interrupt_(std::move(interrupt)), ask_at_(Clock::now() + kAskPeriod) {
    set(timeout_s);
  }

  // Another bound of the same wait.
  Deadline with(double timeout_s) const {
    Deadline other = *this;
    other.set(timeout_s);
    return other;
  }

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }

  double remaining_s() const {
    const std::chrono::duration<double> left = at_ - Clock::now();
    return std::max(left.count(), 0.0);
  }

  // The wait sleeps no longer than until then, and then calls ask().
  Clock::time_point next_look() const { return interrupt_ ? std::min(at_, ask_at_) : at_; }

  // Asks the interrupt about every 50 ms; throws Interrupted when it says so.
  void ask() const {
    if (!interrupt_ || Clock::now() < ask_at_) return;
    ask_at_ = Clock::now() + kAskPeriod;
    if (interrupt_()) throw Interrupted("interrupted while waiting for other ranks");
  }

  // For poll(), until next_look(): rounded up, so that a wait does not spin through its last
  // millisecond.
  int poll_ms() const {
    const std::chrono::duration<double, std::milli> left = next_look() - Clock::now();
    return static_cast<int>(std::clamp(std::ceil(left.count()), 0.0, 1e9));
  }

 private:
  static constexpr std::chrono::milliseconds kAskPeriod{50};

  void set(double timeout_s) {
    if (!(timeout_s >= 0.0)) {
      throw InvalidArgument(
          str("timeout_s=", timeout_s, " must be a number of seconds, 0 or more"));
    }
    // Three years; more would overflow the clock.
    const std::chrono::duration<double> bounded(std::min(timeout_s, 1e8));
    at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded);
  }

  Interrupt interrupt_;
  Clock::time_point at_{};
  mutable Clock::time_point ask_at_;
};

}  // namespace ep::fabric
