// HostWorker: the Coop of the host target.  One OS thread is one worker and one block; the contract
// is csrc/kernels/coop.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/doorbell.hpp"
#include "device/doorbell.hpp"
#include "device/host/backoff.hpp"
#include "device/host/clock.hpp"
#include "ep/config.hpp"
#include "kernels/coop.hpp"

namespace ep::device::host {

// `word` is naturally aligned memory that threads and processes may share; the scope of an access
// does not matter here, every access is seen by the whole machine.
class HostWorker {
 public:
  using Backoff = host::Backoff;
  using Order = kernels::Order;
  using Scope = kernels::Scope;

  static constexpr kernels::Form kForm = kernels::Form::kOneThread;

  // The doorbell is what this worker's waits sleep on; null: they never sleep.
  HostWorker(uint32_t block, uint32_t num_blocks, Doorbell* doorbell, const WaitPolicy& policy)
      : block_(block), num_blocks_(num_blocks), doorbell_(doorbell), policy_(policy) {}

  static constexpr uint32_t thread_rank() { return 0; }
  static constexpr uint32_t size() { return 1; }
  static constexpr void sync() {}
  template <typename T>
  static constexpr T uniform(T value) {
    return value;
  }

  static constexpr uint32_t worker() { return 0; }
  static constexpr uint32_t num_workers() { return 1; }
  static constexpr void block_sync() {}
  template <typename T>
  static constexpr T block_broadcast(T value) {
    return value;
  }

  static constexpr bool block_all(bool value) { return value; }

  uint32_t block() const { return block_; }
  uint32_t num_blocks() const { return num_blocks_; }

  template <Order kOrder, Scope kScope, typename T>
  static T load(const T* word) {
    static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
    return atomic(const_cast<T*>(word)).load(memory_order(kOrder));
  }

  template <Order kOrder, Scope kScope, typename T>
  static void store(T* word, std::type_identity_t<T> value) {
    static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
    atomic(word).store(value, memory_order(kOrder));
  }

  template <Order kOrder, Scope kScope, typename T>
  static T fetch_add(T* word, std::type_identity_t<T> value) {
    return atomic(word).fetch_add(value, memory_order(kOrder));
  }

  // Writes even when `value` is not smaller, so that a release holds whichever value stays.
  template <Order kOrder, Scope kScope, typename T>
  static T fetch_min(T* word, std::type_identity_t<T> value) {
    const std::atomic_ref<T> ref = atomic(word);
    T there = ref.load(std::memory_order_relaxed);
    while (!ref.compare_exchange_weak(there, value < there ? value : there, memory_order(kOrder),
                                      std::memory_order_relaxed)) {
    }
    return there;
  }

  template <Order kOrder, Scope kScope, typename T>
  static T exchange(T* word, std::type_identity_t<T> value) {
    return atomic(word).exchange(value, memory_order(kOrder));
  }

  template <Order kOrder, Scope kScope, typename T>
  static T compare_exchange(T* word,
                            std::type_identity_t<T> expected,
                            std::type_identity_t<T> desired) {
    atomic(word).compare_exchange_strong(expected, desired, memory_order(kOrder),
                                         failure_order(kOrder));
    return expected;
  }

  template <typename T>
  static T read(const T* at) {
    return *at;
  }

  template <typename T>
  static void write(T* at, std::type_identity_t<T> value) {
    *at = value;
  }

  static void ring(Doorbell* doorbell) { device::ring(*doorbell); }

  static uint64_t now_ns() { return host::now_ns(); }

  Backoff make_backoff() const { return Backoff(doorbell_, policy_); }
  static void back_off(Backoff& backoff) { backoff.step(); }

 private:
  template <typename T>
  static std::atomic_ref<T> atomic(T* word) {
    static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>);
    static_assert(
        std::atomic_ref<T>::is_always_lock_free);  // a lock would not reach other processes
    return std::atomic_ref<T>{*word};
  }

  static constexpr std::memory_order memory_order(Order order) {
    switch (order) {
      case Order::kRelaxed:
        return std::memory_order_relaxed;
      case Order::kAcquire:
        return std::memory_order_acquire;
      case Order::kRelease:
        return std::memory_order_release;
      case Order::kAcqRel:
        return std::memory_order_acq_rel;
    }
    __builtin_unreachable();
  }

  // A compare_exchange that fails is a load: it keeps the acquire half of its order.
  static constexpr std::memory_order failure_order(Order order) {
    const bool acquires = order == Order::kAcquire || order == Order::kAcqRel;
    return acquires ? std::memory_order_acquire : std::memory_order_relaxed;
  }

  uint32_t block_;
  uint32_t num_blocks_;
  Doorbell* doorbell_;
  WaitPolicy policy_;
};

}  // namespace ep::device::host
