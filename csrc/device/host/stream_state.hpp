// What a host stream, its worker thread and its events share.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <unistd.h>

#include "common/doorbell.hpp"
#include "common/function_ref.hpp"
#include "common/pool.hpp"
#include "device/device.hpp"
#include "device/host/block_team.hpp"

namespace ep::device::host {

inline constexpr size_t kMaxParamsBytes = 1024;

// One piece of queued work.  Exactly one of job.kernel, work and event is set.
struct StreamItem {
  alignas(64) std::array<std::byte, kMaxParamsBytes> params;  // what job.params points to
  BlockJob job{};
  std::function<void()> work{};
  std::shared_ptr<detail::EventImpl> event{};
  uint64_t position = 0;
  std::unique_ptr<StreamItem> next{};
};

// State:    the queue with a list of spent items, so that steady work allocates nothing; positions,
//           which count items from 1.  `mutex_` guards the queue and is held for moments, never
//           across a wait.
// Writers:  enqueue() and close(), any thread, move `enqueued_` and `closing_` under the mutex and
//           then ring work_doorbell_; the worker alone moves `completed_` and then rings
//           done_doorbell_.
// Readers:  the worker waits for `enqueued_` (acquire) without the mutex, waiters for `completed_`
//           (acquire): they then see all that the items up to there wrote.
// Lifetime: shared by the stream, its worker thread and its events; the last one frees it.  In a forked
//           child the worker does not exist, but its share does: there a stream that has had work is
//           never freed, and close() does nothing.
class StreamState {
 public:
  StreamState() = default;
  ~StreamState();
  StreamState(const StreamState&) = delete;
  StreamState& operator=(const StreamState&) = delete;

  // Queues what `fill` writes into an item, starting the worker if this is the first.  `fill` runs
  // under the mutex.  `self` is this object's owner, which the worker keeps.
  void enqueue(const std::shared_ptr<StreamState>& self, FunctionRef<void(StreamItem&)> fill);

  // Ends the worker once the queue is empty, and waits for that, except on the worker's own thread; in a
  // forked child there is none to end.
  // REQUIRES: the last call; nothing is queued afterwards.
  void close() noexcept;

  BlockTeam& team() { return team_; }
  const PoolAllocator<std::byte>& allocator() const { return allocator_; }  // of its events
  Doorbell& done_doorbell() { return done_doorbell_; }

  // Throws Error in a forked child: nothing that is queued there would ever be done.
  void require_own_process() const;

  uint64_t enqueued() const { return enqueued_.load(std::memory_order_acquire); }
  uint64_t completed() const { return completed_.load(std::memory_order_acquire); }

  // Only for who has seen enqueued() > 0: the worker started before that.
  bool on_worker_thread() const { return std::this_thread::get_id() == worker_id_; }

 private:
  void work() noexcept;
  // Takes back the item that is done, if any, and gives the next one; null: the stream is closed.
  std::unique_ptr<StreamItem> next(std::unique_ptr<StreamItem> done) noexcept;
  void await_work() noexcept;
  void execute(StreamItem& item) noexcept;

  const PoolAllocator<std::byte> allocator_{std::make_shared<Pool>()};
  std::mutex mutex_{};
  std::unique_ptr<StreamItem> first_{};
  StreamItem* last_ = nullptr;
  std::unique_ptr<StreamItem> spent_{};
  std::thread worker_{};
  const pid_t pid_ = ::getpid();
  std::thread::id worker_id_{};  // written once, before enqueued_ leaves 0

  std::atomic<bool> closing_{false};
  WaitPolicy idle_policy_{};  // the worker's: that of its last launch
  BlockTeam team_{};

  alignas(64) std::atomic<uint64_t> enqueued_{0};
  Doorbell work_doorbell_{};
  alignas(64) std::atomic<uint64_t> completed_{0};
  Doorbell done_doorbell_{};
};

}  // namespace ep::device::host
