// The end of an operation.
#pragma once

#include "kernels/entry.cuh"

namespace ep::kernels {

// The fault that `fault` is a copy of, once more.
template <class Coop>
EP_OUTLINED void renew_fault(Coop coop, const Operation& op, const FaultRecord& fault) {
  set_fault(coop, op, fault.cause, fault.phase, [&](FaultRecord& f) { f = fault; });
}

// Publishes a refusal for an operation whose record is not out yet.
template <class Coop>
EP_HOST_DEVICE void spend_turn(Coop coop, Operation& op) {
  DeviceState& s = *op.state;
  const uint64_t* mine = record_from(s, op.bank, s.rank) + layout::kStatus;
  const uint64_t word = coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(mine));
  if (layout::tag_in(word) == op.tag) return;
  const FaultRecord fault =
      s.fault;  // what the caller shall hear, unless the wait below fails in its turn
  coop.sync();
  if (coop.thread_rank() == 0) s.fault_claimed = s.fault_set = 0;
  coop.sync();
  op.leaving = true;
  if (!drain_previous(coop, op)) return;
  EntryParams refusal{};
  refusal.state = &s;
  if (fault.from_peer != 0) refusal.needed = fault.peer + 1;  // who began it
  publish_record(coop, op, refusal, OwnFields{}, fault.cause);
  renew_fault(coop, op, fault);
}

// The end of the operation, by the last block.  REQUIRES: arrive(kEnd) was true.
//
// Every turn has a record, also one that ended before this rank's was out (a late rank that finds the poison of
// an aborted dispatch): its peers' next operation waits for it.
template <class Coop>
EP_HOST_DEVICE void leave(Coop coop, Operation& op, int32_t* status) {
  DeviceState& s = *op.state;
  const bool failed = faulted(coop, op);
  const bool skipped = failed && s.fault.cause == Cause::kBroken;
  if (failed && !skipped && s.fault.needs_resync == 0) spend_turn(coop, op);
  if (failed && s.fault.poisons != 0 && s.fault.from_peer == 0) write_poison(coop, op, s.fault);
  if (coop.thread_rank() != 0) return;
  layout::WindowHeader* header = header_of(s, s.rank);
  if (status != nullptr) {
    coop.write(status,
               failed ? static_cast<int32_t>(s.fault.cause)
                      : (s.bad_slot != ~uint64_t{0} ? static_cast<int32_t>(Cause::kBadIds) : 0));
  }
  if (failed) op.ticket->fault = s.fault;
  if (s.bad_slot != ~uint64_t{0}) {
    op.ticket->bad_ids.cause = Cause::kBadIds;
    op.ticket->bad_ids.bad_slot = s.bad_slot;
    op.ticket->bad_ids.bad_id = s.bad_id;
  }
  if (failed && s.fault.needs_resync != 0) s.broken = s.fault.cause;
  if (failed && !skipped) s.drain = op.sequence + 1;
  if (!failed)
    coop.template store<Order::kRelease, Scope::kSystem>(&header->completed, op.sequence);
  coop.template store<Order::kRelease, Scope::kSystem>(&header->phase,
                                                       static_cast<uint32_t>(Phase::kIdle));
  op.ticket->sequence = op.sequence;
  if (!skipped) s.sequence = op.sequence + 1;
  s.deadline_ns = 0;
  s.arrived[kCounted] = s.arrived[kEnd] = 0;
  s.fault_claimed = s.fault_set = 0;
  s.bad_slot = ~uint64_t{0};
  s.routing_hash = 0;
  coop.template store<Order::kRelease, Scope::kSystem>(&op.ticket->done, 1u);
  coop.ring(&op.ticket->doorbell);
}

}  // namespace ep::kernels
