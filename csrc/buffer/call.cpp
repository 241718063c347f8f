#include "buffer/call.hpp"

namespace ep::buffer {
namespace {

// A peer may have told it before this rank's own watcher did: resync() shall name the same ranks.
void note_lost(kernels::DeviceState& state, const kernels::FaultRecord& fault) {
  for (uint32_t i = 0; i < layout::mask_words(state.num_ranks); ++i) {
    std::atomic_ref(state.lost_mask[i]).fetch_or(fault.mask[i], std::memory_order_relaxed);
  }
  std::atomic_ref(state.lost).store(1u, std::memory_order_release);
}

uint32_t acquire(const uint32_t& word) {
  return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

bool Call::done() const {
  return acquire(ticket.done) != 0;
}

bool Call::counts_known() const {
  return acquire(ticket.counts_ready) != 0 || done();
}

// The stream's function holds a plain pointer: one with a shared_ptr in it would be allocated each time.
void Call::queue_finish(detail::StreamImpl& stream, std::shared_ptr<Call> self) {
  self_ = std::move(self);
  stream.call([this] {
    const std::shared_ptr<Call> alive = std::move(self_);
    finish();
  });
}

void Call::finish() {
  if (ticket.fault.cause == layout::Cause::kNone) {
    if (kind_ == layout::OpKind::kDispatch) core_->num_dispatches.fetch_add(1);
    if (kind_ == layout::OpKind::kCombine) core_->num_combines.fetch_add(1);
  }
  if (ticket.fault.cause != layout::Cause::kNone && ticket.fault.cause != layout::Cause::kBroken) {
    core_->num_faults.fetch_add(1);
    if (ticket.fault.needs_resync != 0) core_->needs_resync.store(true);
    if (ticket.fault.cause == layout::Cause::kLost) note_lost(core_->state, ticket.fault);
    // Peers may still write into what this call left half done, until they have entered the next one.  A call
    // that ended at entry has sent nothing.
    if (ticket.fault.poisons != 0) {
      for (const auto& block : blocks)
        block->set_usable_from(ticket.sequence + 2);
    }
  }
  keep_.clear();
  blocks.clear();
  // Nobody will ask what happened: an event that is kept shall not keep the windows of its buffer.
  if (ticket.fault.cause == layout::Cause::kNone && ticket.bad_ids.cause == layout::Cause::kNone)
    core_.reset();
}

bool Call::has_unraised() const {
  if (!done() || raised_.load()) return false;
  if (own_refusal_ != layout::Cause::kNone && ticket.fault.needs_resync == 0) return false;
  return ticket.fault.cause != layout::Cause::kNone || ticket.bad_ids.cause != layout::Cause::kNone;
}

void Call::raise() {
  if (!has_unraised() || raised_.exchange(true)) return;
  if (ticket.fault.cause == layout::Cause::kNone)
    throw_fault(*core_, kind_, ticket.sequence, ticket.bad_ids);
  if (ticket.fault.needs_resync != 0) core_->needs_resync.store(true);
  throw_fault(*core_, kind_, ticket.sequence, ticket.fault);
}

void Call::raise_now() {
  const layout::Cause cause = ticket.fault.cause;
  if (cause == layout::Cause::kNone || (cause == layout::Cause::kTooManyRows && defers_capacity))
    return;
  raise();
}

}  // namespace ep::buffer
