// One call on a buffer, from its launch until the last event, tensor or handle of it is gone.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "buffer/core.hpp"

namespace ep::buffer {

// Ownership: the stream's work behind the kernel holds the call, so the ticket outlives the kernel; events
// and the buffer's list of unfinished calls share it.
class Call final : public device::Deferred {
 public:
  Call(std::shared_ptr<Core> core, layout::OpKind kind)
      : blocks(core->allocator()),
        core_(std::move(core)),
        kind_(kind),
        keep_(blocks.get_allocator()) {}

  kernels::Ticket ticket{};
  PoolVector<std::shared_ptr<Block>> blocks;
  bool defers_capacity = false;  // exact = false: too many rows is not raised by the call itself

  // The owner of an input or output that the kernel uses.
  void keep(const Tensor& tensor) { keep(tensor.owner); }
  void keep(const std::shared_ptr<void>& owner) {
    if (owner != nullptr) keep_.push_back(owner);
  }

  // Queues what follows the kernel: the call drops what it used.
  void queue_finish(detail::StreamImpl& stream, std::shared_ptr<Call> self);

  bool done() const;
  bool counts_known() const;                                  // or done
  layout::Cause cause() const { return ticket.fault.cause; }  // REQUIRES: done()
  bool has_unraised() const;

  // Throws the call's fault.  raise(): once; raise_now(): what the call itself must raise.
  void raise() override;
  void raise_now();
  // Nobody will ask for the fault any more.
  void mark_raised() { raised_.store(true); }
  // A turn that this rank spends on its own refusal: its user has heard of this call.  Another rank's refusal or
  // abort in the same turn is no news, or the next call would raise without spending a turn; what needs
  // resync() is.
  void set_own_refusal(layout::Cause cause) { own_refusal_ = cause; }

 private:
  void finish();

  std::shared_ptr<Core> core_;  // null once the call has ended well
  const layout::OpKind kind_;
  PoolVector<std::shared_ptr<void>> keep_;
  std::shared_ptr<Call> self_;  // while the stream holds it
  std::atomic<bool> raised_{false};
  layout::Cause own_refusal_ = layout::Cause::kNone;  // under the buffer's turn
};

// Throws the exception for a fault of call `sequence`.
[[noreturn]] void throw_fault(const Core& core,
                              layout::OpKind kind,
                              uint64_t sequence,
                              const kernels::FaultRecord& fault);

const char* phase_name(kernels::Phase phase);
const char* field_name(uint32_t record_word);

}  // namespace ep::buffer
