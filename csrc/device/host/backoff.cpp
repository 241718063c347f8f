#include "device/host/backoff.hpp"

#include <algorithm>
#include <atomic>

#include <sched.h>

#include "device/host/clock.hpp"
#include "device/host/futex.hpp"

namespace ep::device::host {

namespace {
// A yield that finds nobody takes 0.3-0.7 us, one that lets another thread work takes several.  A
// clock that jumps between two reads of a spin means that the thread was preempted (or that its
// caller's looks are so slow that yielding between them costs nothing).
constexpr uint64_t kSwitchedNs = 5 * kNanosPerMicro;
constexpr uint64_t kPreemptedNs = 20 * kNanosPerMicro;
}  // namespace

void Backoff::slow_step(uint64_t wake_by_ns) noexcept {
  switch (phase_) {
    case Phase::kSpin:
      return spin();
    case Phase::kYield:
      return yield();
    case Phase::kSleep:
      return sleep(wake_by_ns);
  }
}

void Backoff::spin() noexcept {
  const uint64_t before = seen_ns_;
  seen_ns_ = now_ns();
  bool crowded = false;
  if (phase_start_ns_ == 0) {
    phase_start_ns_ = seen_ns_;
    sched_yield();
    seen_ns_ = now_ns();
    crowded = seen_ns_ - phase_start_ns_ > kSwitchedNs;
  } else {
    crowded = seen_ns_ - before > kPreemptedNs;
  }
  if (crowded || seen_ns_ - phase_start_ns_ >= policy_.spin_us * kNanosPerMicro) {
    enter(policy_.yield_us != 0 ? Phase::kYield : Phase::kSleep);
  }
}

void Backoff::yield() noexcept {
  sched_yield();
  seen_ns_ = now_ns();
  if (phase_start_ns_ == 0) phase_start_ns_ = seen_ns_;
  if (seen_ns_ - phase_start_ns_ >= policy_.yield_us * kNanosPerMicro) enter(Phase::kSleep);
}

void Backoff::sleep(uint64_t wake_by_ns) noexcept {
  if (doorbell_ == nullptr) {
    sched_yield();
    seen_ns_ = now_ns();
    return;
  }
  const std::atomic_ref<uint32_t> generation{doorbell_->generation};
  if (!registered_) {
    std::atomic_ref<uint32_t>{doorbell_->sleepers}.fetch_add(1, std::memory_order_seq_cst);
    registered_ = true;
  } else {
    const uint64_t now = now_ns();
    if (now < wake_by_ns) {
      futex_wait(&doorbell_->generation, generation_, std::min(kMaxSleepNs, wake_by_ns - now));
    }
  }
  generation_ = generation.load(std::memory_order_seq_cst);
  seen_ns_ = now_ns();
}

void Backoff::enter(Phase phase) noexcept {
  phase_ = phase;
  phase_start_ns_ = 0;
}

void Backoff::leave() noexcept {
  std::atomic_ref<uint32_t>{doorbell_->sleepers}.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace ep::device::host
