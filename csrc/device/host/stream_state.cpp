#include "device/host/stream_state.hpp"

#include <utility>

#include "device/host/thread.hpp"
#include "ep/error.hpp"

namespace ep::device::host {

StreamState::~StreamState() {
  // One by one: the default destructor of a long list would recurse once per item.
  while (spent_ != nullptr)
    spent_ = std::move(spent_->next);
}

void StreamState::enqueue(const std::shared_ptr<StreamState>& self,
                          FunctionRef<void(StreamItem&)> fill) {
  require_own_process();
  {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<StreamItem> item = std::move(spent_);
    if (item != nullptr) {
      spent_ = std::move(item->next);
    } else {
      // Default-initialised: the parameters' bytes are not cleared.
      item = std::make_unique_for_overwrite<StreamItem>();
    }
    if (!worker_.joinable()) {
      worker_ = start_thread("ep-stream", [self] { self->work(); });
      worker_id_ = worker_.get_id();
    }
    fill(*item);
    const uint64_t position = enqueued_.load(std::memory_order_relaxed) + 1;
    item->position = position;
    StreamItem* const added = item.get();
    (last_ == nullptr ? first_ : last_->next) = std::move(item);
    last_ = added;
    enqueued_.store(position, std::memory_order_release);
  }
  ring(work_doorbell_);
}

void StreamState::require_own_process() const {
  if (::getpid() != pid_)
    throw Error("this stream was made before fork(): a child's streams and events are inert");
}

void StreamState::close() noexcept {
  if (::getpid() != pid_) return;  // the mutex may be held by a thread that is not here
  {
    const std::lock_guard lock(mutex_);
    closing_.store(true, std::memory_order_release);
  }
  ring(work_doorbell_);
  if (!worker_.joinable()) return;
  if (on_worker_thread()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

void StreamState::work() noexcept {
  std::unique_ptr<StreamItem> item;
  while ((item = next(std::move(item))) != nullptr) {
    execute(*item);
    // What the item holds is gone before anybody learns that it is done; and outside the mutex,
    // because its last reference to anything, this stream included, may end here.
    item->job = {};
    item->work = nullptr;
    item->event = nullptr;
    completed_.store(item->position, std::memory_order_release);
    ring(done_doorbell_);
  }
  team_.stop();
}

std::unique_ptr<StreamItem> StreamState::next(std::unique_ptr<StreamItem> done) noexcept {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (done != nullptr) {
        done->next = std::move(spent_);
        spent_ = std::move(done);
      }
      if (first_ != nullptr) {
        std::unique_ptr<StreamItem> item = std::move(first_);
        first_ = std::move(item->next);
        if (first_ == nullptr) last_ = nullptr;
        return item;
      }
      if (closing_.load(std::memory_order_relaxed)) return nullptr;
    }
    await_work();
  }
}

void StreamState::await_work() noexcept {
  // The queue was empty, so every item up to `completed` is all there was.
  const uint64_t completed = completed_.load(std::memory_order_relaxed);
  Backoff backoff(&work_doorbell_, idle_policy_);
  while (enqueued_.load(std::memory_order_acquire) == completed &&
         !closing_.load(std::memory_order_acquire)) {
    backoff.step();
  }
}

void StreamState::execute(StreamItem& item) noexcept {
  if (item.job.kernel != nullptr) {
    idle_policy_ = item.job.wait_policy;
    team_.run(item.job);
  } else if (item.event != nullptr) {
    // Without a bound: streams drain, and an event is a point of the past of its stream.
    item.event->wait(kNoDeadline, {});
  } else {
    item.work();
  }
}

}  // namespace ep::device::host
