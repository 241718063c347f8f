// The bound of a wait on the host.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::fabric {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `timeout_s` from now; 0 looks once.  Throws InvalidArgument when it is negative or NaN.
  explicit Deadline(double timeout_s) {
    if (!(timeout_s >= 0.0)) {
      throw InvalidArgument(
          str("timeout_s=", timeout_s, " must be a number of seconds, 0 or more"));
    }
    // Three years; more would overflow the clock.
    const std::chrono::duration<double> bounded(std::min(timeout_s, 1e8));
    at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded);
  }

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }

  double remaining_s() const {
    const std::chrono::duration<double> left = at_ - Clock::now();
    return std::max(left.count(), 0.0);
  }

  // For poll(): rounded up, so that a wait does not spin through its last millisecond.
  int poll_ms() const { return static_cast<int>(std::min(std::ceil(remaining_s() * 1e3), 1e9)); }

 private:
  Clock::time_point at_;
};

}  // namespace ep::fabric
