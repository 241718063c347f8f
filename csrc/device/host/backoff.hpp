// The steps of one wait on a doorbell: spin, then yield, then sleep.  The only implementation: host
// waits and kernels use it alike.
//
//   Backoff backoff(&doorbell, policy);
//   while (!ready()) backoff.step();
//
// No wake-up is lost: before its first sleep a step registers in `sleepers`, reads `generation` and
// returns, so the caller looks once more; only the next step sleeps, and only while `generation` is
// what it was before that look.  See common/doorbell.hpp for the pairing.
//
// More threads than cores (8 ranks on 2): the peer that this thread waits for may need this very
// core, so spinning would hold up what it waits for.  A wait finds out for itself, without shared
// state: after about a microsecond of spinning it yields once, and if somebody else ran meanwhile
// (the call took long), or if it was preempted while it spun, it skips the rest of the spin.
#pragma once

#include <cstdint>

#include "common/doorbell.hpp"
#include "ep/config.hpp"

namespace ep::device::host {

inline void cpu_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield` is a no-op on most cores; `isb` waits for some 10 ns.
  __asm__ volatile("isb" ::: "memory");
#endif
}

// REQUIRES: used by one thread; the doorbell outlives it.
class Backoff {
 public:
  static constexpr uint64_t kNever = ~uint64_t{0};

  // Longest single sleep: bounds the damage of a peer that died between its store and its ring.
  static constexpr uint64_t kMaxSleepNs = 50'000'000;

  // Without a doorbell nothing can wake a sleeper: such a wait yields for as long as it lasts.
  Backoff(Doorbell* doorbell, const WaitPolicy& policy) noexcept
      : doorbell_(doorbell), policy_(policy), phase_(first_phase(policy)) {}
  ~Backoff() {
    if (registered_) leave();
  }
  Backoff(const Backoff&) = delete;
  Backoff& operator=(const Backoff&) = delete;

  // One step; the caller looks at its words between two.  A sleep ends at `wake_by_ns` at the latest.
  void step(uint64_t wake_by_ns = kNever) noexcept {
    if (phase_ == Phase::kSpin && ++num_spins_ % kSpinsPerClockRead != 0) {
      cpu_pause();
    } else {
      slow_step(wake_by_ns);
    }
  }

  // The clock when a step last read it: at most some microseconds old after a step.  0: not yet.
  uint64_t seen_ns() const noexcept { return seen_ns_; }

 private:
  enum class Phase : uint8_t { kSpin, kYield, kSleep };

  // A pause takes 10-50 ns and a clock read 25-30: so the clock costs a few percent of a spin.
  static constexpr uint32_t kSpinsPerClockRead = 32;

  static Phase first_phase(const WaitPolicy& policy) noexcept {
    if (policy.spin_us != 0) return Phase::kSpin;
    return policy.yield_us != 0 ? Phase::kYield : Phase::kSleep;
  }

  void slow_step(uint64_t wake_by_ns) noexcept;
  void spin() noexcept;
  void yield() noexcept;
  void sleep(uint64_t wake_by_ns) noexcept;
  void enter(Phase phase) noexcept;
  void leave() noexcept;

  Doorbell* doorbell_;
  WaitPolicy policy_;
  Phase phase_;
  bool registered_ = false;
  uint32_t num_spins_ = 0;
  uint32_t generation_ = 0;      // what the next sleep expects
  uint64_t phase_start_ns_ = 0;  // 0: the phase has not read the clock yet
  uint64_t seen_ns_ = 0;
};

}  // namespace ep::device::host
