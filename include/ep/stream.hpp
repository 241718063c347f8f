// Streams and events.  On CPUs a stream is an in-order queue with a worker thread of its own.
#pragma once

#include <functional>
#include <memory>

#include "ep/version.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

namespace detail {
class StreamImpl;
class EventImpl;
}  // namespace detail

// A point in a stream's work.  Copies share the point.  An empty event is complete.
// An event that a dispatch or combine returned also carries that call's deferred fault: wait() orders,
// synchronize() raises it (once).
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<detail::EventImpl> impl) : impl_(std::move(impl)) {}

  // Has the point been reached?  Does not block, does not raise.
  bool query() const;
  // Blocks until the point is reached; raises no deferred fault.  Throws Interrupted only.
  void wait() const;
  // Blocks until the point is reached; raises what the call behind it deferred.  A negative bound is
  // none.  Throws Timeout (without effect on the buffer) when `timeout_s` passes first.
  void synchronize(double timeout_s = -1.0) const;

  const std::shared_ptr<detail::EventImpl>& impl() const { return impl_; }

 private:
  std::shared_ptr<detail::EventImpl> impl_;
};

// Copies share the queue.  Work of a stream runs in the order given, on one thread.
class Stream {
 public:
  Stream() = default;
  explicit Stream(std::shared_ptr<detail::StreamImpl> impl) : impl_(std::move(impl)) {}

  // A new host stream.
  static Stream host();

  // Queues `work` behind what the stream already holds.  `work` must not throw.
  void call(std::function<void()> work);
  // The stream goes on only when `event` is reached.
  void wait(const Event& event);
  // The point after everything queued so far.
  Event record();
  // Blocks until everything queued so far is done.
  void synchronize();

  bool defined() const { return impl_ != nullptr; }
  const std::shared_ptr<detail::StreamImpl>& impl() const { return impl_; }
  friend bool operator==(const Stream&, const Stream&) = default;

 private:
  std::shared_ptr<detail::StreamImpl> impl_;
};

}  // namespace ep::inline EP_ABI_NAMESPACE
