// Dispatch: every token's row to the ranks that own its experts.
//
//   every worker | count its tokens .......... wait .................... send rows -> word | receive |
//   last block   |   prefix -> record -> wait for records -> place everything ^            |         | end
//   peer         |           (records)                                                (words)
//
// Two grid phases, no barrier between ranks; but every sender waits for every rank's record, which is what
// makes final rows, exact sizes and "no room" known to all before a row moves.  A replay does the same
// without counting: were it to start towards one rank before it holds all records, a refusal by another
// would end the operation while its late stores could still land in rows of the next one.
#pragma once

#include "kernels/dispatch_receive.cuh"

namespace ep::kernels {

// Counts this worker's tokens and snapshots routing and weights into the handle.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED void count_tokens(Coop coop, const DispatchParams& p) {
  DeviceState& s = *p.entry.state;
  const uint32_t worker = worker_index(coop), workers = total_workers(coop);
  const uint32_t begin = first_token(p.num_tokens, worker, workers);
  const uint32_t end = first_token(p.num_tokens, worker + 1, workers);
  if (p.weights.data != nullptr) {
    EP_NO_UNROLL
    for (uint32_t token = begin; token < end; ++token) {
      EP_NO_UNROLL
      for (uint32_t k = coop.thread_rank(); k < p.num_topk; k += coop.size()) {
        p.handle_weights[uint64_t{token} * p.num_topk + k] =
            load_float(p.weights, p.weights_element, token, k);
      }
    }
  }
  coop.sync();
  if (p.replay) return;
  const uint32_t columns = s.num_ranks + s.num_experts;
  uint32_t* counts = s.scratch.counts + uint64_t{worker} * columns;
  for (uint32_t c = coop.thread_rank(); c < columns; c += coop.size())
    coop.write(counts + c, 0u);
  coop.sync();
  CountResult result{0, ~uint64_t{0}};
  const CountArgs args{&p, counts, counts + s.num_ranks};
  EP_NO_UNROLL
  for (uint32_t token = begin; token < end; ++token)
    count_token<kLayout>(coop, args, token, result);
  if (result.hash != 0) {
    coop.template fetch_add<Order::kRelaxed, Scope::kDevice>(&s.routing_hash, result.hash);
  }
  if (result.bad_slot != ~uint64_t{0}) {
    coop.template fetch_min<Order::kRelaxed, Scope::kDevice>(&s.bad_slot, result.bad_slot);
  }
}

// This rank's small array of a fixed-size output: its place does not depend on the routing.
EP_OUTLINED uint32_t* fixed_small(const DispatchParams& p, bool is_expert) {
  const DeviceState& s = *p.entry.state;
  const auto out = layout::OutputLayout::make(p.shape, output_rows(p, s.rank, 0, is_expert));
  return reinterpret_cast<uint32_t*>(window_of(s, s.rank) + p.extent_offset + out.small_offset);
}

// Where this rank's status word is: an exact output has one only once its size is known.
EP_HOST_DEVICE int32_t* output_status(const DispatchParams& p, bool failed, bool is_expert) {
  const DeviceState& s = *p.entry.state;
  if (p.exact && failed) return nullptr;
  uint32_t* small = p.exact ? small_of(s) : fixed_small(p, is_expert);
  return reinterpret_cast<int32_t*>(small + layout::SmallLayout::kOutputStatus);
}

// One worker of the last block to have counted: agrees with all ranks and places everything.
template <LayoutKind kLayout, class Coop>
EP_HOST_DEVICE bool lead_dispatch(Coop coop, Operation& op, const DispatchParams& p) {
  DeviceState& s = *p.entry.state;
  Cause status = Cause::kNone;
  OwnFields own{};
  own.base = static_cast<uint32_t>(p.extent_offset / layout::kArenaAlignBytes);
  own.capacity = static_cast<uint32_t>(p.extent_bytes / layout::kArenaAlignBytes);
  own.num_tokens = p.num_tokens;
  if (!p.replay) {
    const uint32_t columns = s.num_ranks + s.num_experts;
    exclusive_scan_workers(coop, s.scratch.counts, total_workers(coop), columns,
                           s.scratch.row_base);
    own.counts = s.scratch.row_base;  // the totals; overwritten once the records are out
    if (s.bad_slot != ~uint64_t{0}) {
      if (coop.thread_rank() == 0) {
        s.bad_id = load_id(p.idx, static_cast<uint32_t>(s.bad_slot >> 32),
                           static_cast<uint32_t>(s.bad_slot));
      }
      if (p.exact) status = Cause::kArguments;
    }
  }
  coop.sync();
  if (!enter_records(coop, op, p.entry, own, status) || !await_records(coop, op, p.entry))
    return false;
  if (!p.replay) place_segments<kLayout>(coop, op, p);
  if (!p.exact && coop.thread_rank() == 0) {  // true also where it is too much
    uint32_t* small = fixed_small(p, kLayout == LayoutKind::kExpert);
    coop.write(small + layout::SmallLayout::kNumRows, 0u);
    coop.write(small + layout::SmallLayout::kRowsNeeded,
               coop.read(p.plan + plan_layout(s).rows_of + s.rank));
  }
  coop.sync();
  if (!place_extents<kLayout>(coop, op, p)) return false;
  if (!p.replay) plan_receive<kLayout>(coop, op, p, s.scratch.destinations[s.rank].row_limit);
  write_small(coop, p);
  coop.sync();
  if (coop.thread_rank() == 0) {
    op.ticket->num_rows = coop.read(p.plan + layout::PlanLayout::kNumRows);
    op.ticket->rows_needed = coop.read(p.plan + layout::PlanLayout::kRowsNeeded);
    coop.template store<Order::kRelease, Scope::kSystem>(&op.ticket->counts_ready, 1u);
    coop.ring(&op.ticket->doorbell);
  }
  announce_placed(coop, op);
  return true;
}

template <DispatchConfig kConfig, class Coop>
EP_HOST_DEVICE void dispatch(Coop coop, const DispatchParams& p) {
  constexpr bool kByExpert = kConfig.layout == LayoutKind::kExpert;
  Operation op;
  if (coop.block_all(enter(coop, op, p.entry))) {
    count_tokens<kConfig.layout>(coop, p);
    bool good = true;
    if (arrive(coop, op, kCounted) && coop.worker() == 0)
      good = lead_dispatch<kConfig.layout>(coop, op, p);
    if (coop.block_all(good && await_placed(coop, op)) && send_rows<kConfig>(coop, op, p)) {
      fill_dead_rows<kConfig.layout>(coop, p);
      receive_rows<kConfig.layout>(coop, op, p);
    }
  }
  if (!arrive(coop, op, kEnd) || coop.worker() != 0) return;
  const bool failed = faulted(coop, op);
  if (!kByExpert && !failed && p.drop && !p.replay) {
    if (coop.read(p.plan + layout::PlanLayout::kRowsNeeded) >
        coop.read(p.plan + layout::PlanLayout::kNumRows)) {
      recount_experts(coop, p);
    }
  }
  leave(coop, op, output_status(p, failed, kByExpert));
}

}  // namespace ep::kernels
