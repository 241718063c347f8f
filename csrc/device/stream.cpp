// ep::Stream and ep::Event, over whatever implements them.
#include "ep/stream.hpp"

#include <string>
#include <utility>

#include "device/device.hpp"
#include "device/host/clock.hpp"
#include "device/host/host_stream.hpp"
#include "ep/error.hpp"

namespace ep {

namespace {

constexpr double kNanosPerSecond = 1e9;
constexpr double kEndlessSeconds = 1e9;  // 32 years: no bound, and no overflow of nanoseconds

uint64_t deadline_after(double timeout_s) {
  // Not `timeout_s < 0`: a bound that is not a number is none either.
  if (!(timeout_s >= 0) || timeout_s >= kEndlessSeconds) return device::kNoDeadline;
  return device::host::now_ns() + static_cast<uint64_t>(timeout_s * kNanosPerSecond);
}

detail::StreamImpl& require(const std::shared_ptr<detail::StreamImpl>& impl, const char* what) {
  if (impl == nullptr) {
    throw InvalidArgument(std::string(what) + " on an empty stream; Stream::host() makes one");
  }
  return *impl;
}

device::WaitResult wait_until(detail::EventImpl& event, uint64_t deadline_ns) {
  if (event.interrupt != nullptr) return event.wait(deadline_ns, *event.interrupt);
  return event.wait(deadline_ns, {});
}

}  // namespace

bool Event::query() const {
  return impl_ == nullptr || impl_->query();
}

void Event::wait() const {
  if (impl_ != nullptr &&
      wait_until(*impl_, device::kNoDeadline) == device::WaitResult::kInterrupted) {
    throw Interrupted("the wait for an event was interrupted");
  }
}

void Event::synchronize(double timeout_s) const {
  if (impl_ == nullptr) return;
  switch (wait_until(*impl_, deadline_after(timeout_s))) {
    case device::WaitResult::kReady:
      break;
    case device::WaitResult::kDeadline:
      throw Timeout("an event was not reached within " + std::to_string(timeout_s) + " s", {},
                    "event");
    case device::WaitResult::kInterrupted:
      throw Interrupted("the wait for an event was interrupted");
  }
  if (impl_->deferred != nullptr) impl_->deferred->raise();
}

Stream Stream::host() {
  return Stream(std::make_shared<device::host::HostStream>(&device::host::find_kernel));
}

void Stream::call(std::function<void()> work) {
  detail::StreamImpl& impl = require(impl_, "Stream::call");
  if (!work) throw InvalidArgument("Stream::call: the function is empty");
  impl.call(std::move(work));
}

void Stream::wait(const Event& event) {
  detail::StreamImpl& impl = require(impl_, "Stream::wait");
  if (event.impl() != nullptr) impl.wait(event.impl());
}

Event Stream::record() {
  return Event(require(impl_, "Stream::record").record());
}

void Stream::synchronize() {
  require(impl_, "Stream::synchronize").record()->wait(device::kNoDeadline, {});
}

}  // namespace ep
