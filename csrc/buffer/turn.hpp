// Calls of one buffer take turns, in the order in which threads asked.  A turn may be held across a wait (a
// dispatch that waits for its counts), so it is not a lock: waiting for it goes through the device's wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "device/device.hpp"

namespace ep::buffer {

class Turns {
 public:
  Turns(device::Device& device, const WaitPolicy& policy) : device_(device), policy_(policy) {}

  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(&turns) {}
    ~Turn() { release(); }
    Turn(Turn&& other) noexcept : turns_(other.turns_) { other.turns_ = nullptr; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    Turn& operator=(Turn&&) = delete;
    void release() {
      if (turns_ != nullptr) turns_->next();
      turns_ = nullptr;
    }

   private:
    Turns* turns_;
  };

  // Throws Interrupted when `interrupt` says so before the turn comes, and Error where this thread has it
  // already: a signal handler calls in the middle of a call of its own thread.
  Turn take(const std::function<bool()>& interrupt);
  // Empty while somebody else has the turn.
  std::optional<Turn> try_take();
  // Does this thread have the turn?
  bool is_mine() const {
    return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

 private:
  Turn begin();
  void next();
  bool is_up(uint64_t ticket);

  device::Device& device_;
  const WaitPolicy policy_;
  Doorbell doorbell_{};
  std::mutex mutex_;  // of the three below; held for moments
  uint64_t next_ticket_ = 0, serving_ = 0;
  std::set<uint64_t> abandoned_;  // tickets whose holders left before their turn
  std::atomic<std::thread::id> holder_{};
};

}  // namespace ep::buffer
