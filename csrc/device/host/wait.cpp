#include "device/host/wait.hpp"

#include <algorithm>

#include "device/host/backoff.hpp"
#include "device/host/clock.hpp"

namespace ep::device::host {

namespace {
constexpr uint64_t kInterruptPeriodNs = 50 * kNanosPerMilli;
}  // namespace

WaitResult wait_on(Doorbell& doorbell,
                   FunctionRef<bool()> ready,
                   uint64_t deadline_ns,
                   const std::function<bool()>& interrupt,
                   const WaitPolicy& policy) {
  Backoff backoff(&doorbell, policy);
  uint64_t ask_ns = Backoff::kNever;
  while (!ready()) {
    const uint64_t now = backoff.seen_ns();
    if (now >= deadline_ns) return WaitResult::kDeadline;
    if (interrupt && now != 0) {
      if (ask_ns == Backoff::kNever) ask_ns = now + kInterruptPeriodNs;
      if (now >= ask_ns) {
        if (interrupt()) return WaitResult::kInterrupted;
        ask_ns = now + kInterruptPeriodNs;
      }
    }
    backoff.step(std::min(deadline_ns, ask_ns));
  }
  return WaitResult::kReady;
}

}  // namespace ep::device::host
