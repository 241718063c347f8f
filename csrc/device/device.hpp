// What csrc/buffer needs of a machine: a clock, waits, streams, launches.  Implemented by device/host; a
// simulator and CUDA implement the same interface.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "common/doorbell.hpp"
#include "common/function_ref.hpp"
#include "device/doorbell.hpp"
#include "ep/config.hpp"
#include "ep/stream.hpp"
#include "kernels/kernel_key.hpp"

namespace ep::device {

inline constexpr uint64_t kNoDeadline = ~uint64_t{0};

enum class WaitResult : uint8_t { kReady, kDeadline, kInterrupted };

// A fault that an operation left behind, raised at most once by whoever looks first.
class Deferred {
 public:
  virtual ~Deferred() = default;
  // Throws the fault if there is one and nobody has raised it yet.
  virtual void raise() = 0;
};

}  // namespace ep::device

namespace ep::inline EP_ABI_NAMESPACE::detail {

// A point in a stream's work.
class EventImpl {
 public:
  virtual ~EventImpl() = default;
  virtual bool query() const = 0;
  // Blocks the calling host thread.
  virtual device::WaitResult wait(uint64_t deadline_ns, const std::function<bool()>& interrupt) = 0;

  std::shared_ptr<device::Deferred> deferred{};  // what synchronize() raises
  // What synchronize() asks, or null; set by the buffer.
  std::shared_ptr<const std::function<bool()>> interrupt{};
};

// An in-order queue of launches and host functions.
class StreamImpl {
 public:
  virtual ~StreamImpl() = default;

  struct Launch {
    kernels::KernelKey kernel{};
    std::span<const std::byte> params{};  // copied before launch() returns
    uint32_t num_blocks = 1;              // all alive at once
    Doorbell* doorbell = nullptr;         // what the blocks' waits sleep on; outlives the launch
    WaitPolicy wait_policy{};
  };
  virtual void launch(const Launch& launch) = 0;
  virtual void call(std::function<void()> work) = 0;
  virtual void wait(std::shared_ptr<EventImpl> event) = 0;
  virtual std::shared_ptr<EventImpl> record() = 0;
};

}  // namespace ep::inline EP_ABI_NAMESPACE::detail

namespace ep::device {

class Device {
 public:
  virtual ~Device() = default;

  // Monotonic; the same clock that kernels read.
  virtual uint64_t now_ns() const = 0;

  // Blocks the calling host thread until ready() is true.  `doorbell` is rung after each change that
  // ready() may depend on.  Looks at ready() before the deadline and at `interrupt` about every 50 ms.
  virtual WaitResult wait(Doorbell& doorbell,
                          FunctionRef<bool()> ready,
                          uint64_t deadline_ns,
                          const std::function<bool()>& interrupt,
                          const WaitPolicy& policy) = 0;

  virtual std::shared_ptr<detail::StreamImpl> create_stream() = 0;

  // Most blocks that a launch may have.
  virtual uint32_t max_blocks() const = 0;
};

// The host target.  One object serves any number of buffers; it holds no thread of its own.
std::shared_ptr<Device> create_host_device();

}  // namespace ep::device
