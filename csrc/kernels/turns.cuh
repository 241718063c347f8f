// The small kernels: a turn that a rank spends without taking part, and the copy out of an extent.
#pragma once

#include "kernels/leave.cuh"
#include "kernels/leaves/copy.cuh"

namespace ep::kernels {

// Publishes a record that refuses.  One block, of which one worker works.
template <class Coop>
EP_HOST_DEVICE void refuse(Coop coop, const RefuseParams& p) {
  if (coop.worker() != 0) return;
  DeviceState& s = *p.entry.state;
  Cause status = static_cast<Cause>(p.entry.agreed[layout::kStatus]);
  if (p.only_if_aborted) {
    uint32_t abort = 0;
    if (coop.thread_rank() == 0)
      abort = coop.template exchange<Order::kAcqRel, Scope::kSystem>(&s.abort, 0u);
    status = static_cast<Cause>(coop.uniform(abort));
    if (status == Cause::kNone) {     // an operation in flight took it
      if (coop.thread_rank() == 0) {  // ticket.sequence stays 0: no turn was spent
        coop.template store<Order::kRelease, Scope::kSystem>(&p.entry.ticket->done, 1u);
        coop.ring(&p.entry.ticket->doorbell);
      }
      return;
    }
  }
  Operation op;
  if (enter(coop, op, p.entry)) enter_records(coop, op, p.entry, OwnFields{}, status);
  leave(coop, op, static_cast<int32_t*>(nullptr));
}

// Tells every peer that this rank is gone for good, then waits while any of them may still read its window.
// A peer has read it for the last time when it has completed this rank's last operation, or has closed.
template <class Coop>
EP_HOST_DEVICE void close(Coop coop, const CloseParams& p) {
  if (coop.worker() != 0) return;
  DeviceState& s = *p.state;
  layout::WindowHeader* header = header_of(s, s.rank);
  coop.template store<Order::kRelease, Scope::kSystem>(&header->closed, 1u);
  Operation op{};
  op.state = &s;
  op.sequence = s.sequence;
  op.tag = layout::tag_of(op.sequence);
  op.bank = layout::bank_of(op.sequence);
  FaultRecord fault{};
  fault.cause = Cause::kClosed;
  fault.needs_resync = 1;
  write_poison(coop, op, fault);
  const uint64_t last = coop.template load<Order::kRelaxed, Scope::kSystem>(&header->completed);
  const uint64_t deadline = coop.now_ns() + p.patience_ns;
  EP_NO_UNROLL
  for (uint32_t peer = 0; peer < s.num_ranks; ++peer) {
    layout::WindowHeader* theirs = header_of(s, peer);
    const auto passed = [&] {
      return coop.template load<Order::kAcquire, Scope::kSystem>(&theirs->completed) >= last ||
             coop.template load<Order::kAcquire, Scope::kSystem>(&theirs->closed) != 0 ||
             coop.template load<Order::kAcquire, Scope::kSystem>(&s.lost) != 0;
    };
    auto backoff = coop.make_backoff();
    while (!coop.uniform(passed()) && coop.uniform(coop.now_ns()) < deadline)
      coop.back_off(backoff);
  }
  if (coop.thread_rank() == 0) {
    coop.template store<Order::kRelease, Scope::kSystem>(&p.ticket->done, 1u);
    coop.ring(&p.ticket->doorbell);
  }
}

// Copies each item's share of this block.
template <class Coop>
EP_HOST_DEVICE void copy_out(Coop coop, const CopyOutParams& p) {
  constexpr uint64_t kUnit = 4096;  // a block's share begins and ends at whole units
  const uint32_t worker = coop.block() * coop.num_workers() + coop.worker();
  const uint32_t workers = coop.num_blocks() * coop.num_workers();
  EP_NO_UNROLL
  for (uint32_t i = 0; i < p.num_items; ++i) {
    const CopyOutParams::Item& item = p.items[i];
    const uint64_t num_rows = item.num_rows == nullptr ? 1 : coop.read(item.num_rows);
    const uint64_t num_bytes = num_rows == 0 ? 0 : item.num_bytes * num_rows - item.padding;
    const uint64_t units = ceil_div(num_bytes, kUnit);
    const uint64_t begin = part_begin(units, worker, workers) * kUnit;
    const uint64_t end = min_of(part_begin(units, worker + 1, workers) * kUnit, num_bytes);
    if (begin < end) copy_row(coop, item.to + begin, item.from + begin, end - begin);
  }
  stream_fence(coop);
}

}  // namespace ep::kernels
