// HostStream: an in-order queue with a worker thread of its own.
#pragma once

#include <functional>
#include <memory>

#include "device/device.hpp"
#include "device/host/host_kernels.hpp"
#include "device/host/stream_state.hpp"

namespace ep::device::host {

// Any thread may call any member.  The worker thread starts with the first work; a launch of n
// blocks runs block 0 on it and the others on n - 1 helper threads, all alive at once.  Between
// calls these threads wait with a Backoff, so a caller that keeps them busy makes no system call.
//
// The destructor runs what is queued and then ends the threads; on the worker's own thread (queued
// work dropped the last reference) it returns at once and they end by themselves, and in a forked
// child, where they do not exist, it leaves everything as it is.  Work of another
// stream must not drop the last reference to a stream that waits for an event behind that work.
class HostStream final : public detail::StreamImpl {
 public:
  explicit HostStream(FindKernel find) : find_kernel_(find) {}
  ~HostStream() override { state_->close(); }
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  // Throws Unsupported for a kernel that `find` does not know, Error for more than kMaxParamsBytes,
  // for no or more than BlockTeam::kMaxBlocks blocks, and without a thread.
  void launch(const Launch& launch) override;
  void call(std::function<void()> work) override;
  void wait(std::shared_ptr<detail::EventImpl> event) override;
  std::shared_ptr<detail::EventImpl> record() override;

 private:
  FindKernel find_kernel_;
  const std::shared_ptr<StreamState> state_ = std::make_shared<StreamState>();
};

}  // namespace ep::device::host
