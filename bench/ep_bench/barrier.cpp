#include "bench/ep_bench/barrier.hpp"

#include <climits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/conditions.hpp"

namespace ep::bench {
namespace {

// Short: a rank that the system has put on the same core as this one must get it.
constexpr int64_t kSpinNs = 2'000;
constexpr int64_t kYieldNs = 1'000'000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Not the private futex: the word may be shared with other processes.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof(word) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

}  // namespace

Barrier::Barrier(uint32_t num_ranks)
    : num_ranks_(num_ranks), has_core_each_(num_ranks <= num_usable_cores()) {}

void Barrier::wait() {
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (stopped_.load(std::memory_order_acquire)) throw Stopped();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != num_ranks_) {
    wait_for_change(generation);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  opened_ns_.store(now_ns(), std::memory_order_relaxed);
  // Sequentially consistent against sleepers_: either a sleeper is seen here, or it sees the
  // change.
  generation_.store(generation + 1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(generation_, FUTEX_WAKE, INT_MAX);
}

int64_t Barrier::align() {
  wait();
  wait();
  return opened_ns_.load(std::memory_order_relaxed);
}

void Barrier::stop() {
  stopped_.store(true, std::memory_order_seq_cst);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  futex(generation_, FUTEX_WAKE, INT_MAX);
}

void Barrier::wait_for_change(uint32_t generation) {
  const auto has_changed = [&] {
    return generation_.load(std::memory_order_acquire) != generation;
  };
  const int64_t start = now_ns();
  while (!has_changed()) {
    const int64_t waited = now_ns() - start;
    if (has_core_each_ && waited < kSpinNs) {
      pause();
    } else if (waited < kYieldNs) {
      sched_yield();
    } else {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (generation_.load(std::memory_order_seq_cst) == generation) {
        futex(generation_, FUTEX_WAIT, generation);
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  if (stopped_.load(std::memory_order_acquire)) throw Stopped();
}

}  // namespace ep::bench
