// Where every row goes: from the count matrix, the same arithmetic on every rank.
//
//   "rank":   row = rows of lower sources to that rank + rows of lower workers + index in the worker
//   "expert": row = aligned start of the expert + its rows from lower sources + from lower workers + index
#pragma once

#include "kernels/leave.cuh"
#include "kernels/leaves/count.cuh"
#include "layout/rows.hpp"

namespace ep::kernels {

EP_HOST_DEVICE layout::PlanLayout plan_layout(const DeviceState& s) {
  return layout::PlanLayout::make(s.num_ranks, s.max_local_experts);
}

// What the records say: rows of `source` to `rank`, routes of `source` to `expert`.
template <class Coop>
EP_HOST_DEVICE uint32_t rank_count(Coop coop, const Operation& op, uint32_t source, uint32_t rank) {
  return record_value(coop, record_from(*op.state, op.bank, source), layout::kFixedWords + rank);
}
template <class Coop>
EP_HOST_DEVICE uint32_t
expert_count(Coop coop, const Operation& op, uint32_t source, uint32_t expert) {
  return record_value(coop, record_from(*op.state, op.bank, source),
                      layout::kFixedWords + op.state->num_ranks + expert);
}

// Rows of the output tensors of `rank`.
EP_HOST_DEVICE uint64_t output_rows(const DispatchParams& p,
                                    uint32_t rank,
                                    uint64_t rows_needed,
                                    bool is_expert) {
  const DeviceState& s = *p.entry.state;
  if (p.exact) return rows_needed;
  if (p.max_rows != 0) return p.max_rows;
  const uint32_t local = s.expert_offsets[rank + 1] - s.expert_offsets[rank];
  return layout::worst_case_rows(
      {is_expert, s.num_ranks, p.max_tokens, p.num_topk, local, p.expert_alignment});
}

// Fills rows_of in the plan and row_base in the scratch.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED void place_segments(Coop coop, const Operation& op, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  const layout::PlanLayout plan = plan_layout(s);
  const Scratch& scratch = s.scratch;
  for (uint32_t e = coop.thread_rank(); e < s.num_experts; e += coop.size()) {
    uint32_t before = 0, total = 0;
    for (uint32_t source = 0; source < s.num_ranks; ++source) {
      const uint32_t n = expert_count(coop, op, source, e);
      if (source < s.rank) before += n;
      total += n;
    }
    coop.write(scratch.row_base + s.num_ranks + e, before);
    coop.write(scratch.expert_total + e, total);
  }
  coop.sync();
  for (uint32_t rank = coop.thread_rank(); rank < s.num_ranks; rank += coop.size()) {
    uint64_t rows = 0;
    if constexpr (kLayout == LayoutKind::kRank) {
      for (uint32_t source = 0; source < s.num_ranks; ++source) {
        if (source == s.rank) coop.write(scratch.row_base + rank, static_cast<uint32_t>(rows));
        rows += rank_count(coop, op, source, rank);
      }
    } else {
      for (uint32_t e = s.expert_offsets[rank]; e < s.expert_offsets[rank + 1]; ++e) {
        uint32_t* base = scratch.row_base + s.num_ranks + e;
        coop.write(base, coop.read(base) + static_cast<uint32_t>(rows));
        rows = align_up(rows + coop.read(scratch.expert_total + e), p.expert_alignment);
      }
    }
    coop.write(p.plan + plan.rows_of + rank, static_cast<uint32_t>(rows));
  }
  coop.sync();
}

// Fills the destinations; false: some rank has no room, and every rank says so alike.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED bool place_extents(Coop coop, const Operation& op, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  const uint32_t* rows_of = p.plan + plan_layout(s).rows_of;
  EP_NO_UNROLL
  for (uint32_t rank = 0; rank < s.num_ranks; ++rank) {
    const uint64_t needed = coop.read(rows_of + rank);
    const uint64_t rows = output_rows(p, rank, needed, kLayout == LayoutKind::kExpert);
    const layout::OutputLayout out = layout::OutputLayout::make(p.shape, rows);
    const uint64_t* record = record_from(s, op.bank, rank);
    const uint64_t capacity =
        uint64_t{record_value(coop, record, layout::kCapacity)} * layout::kArenaAlignBytes;
    const bool too_many = needed > rows && !p.drop;
    if (too_many || out.num_bytes > capacity) {
      set_fault(coop, op, too_many ? Cause::kTooManyRows : Cause::kExtentTooSmall, Phase::kRecords,
                [&](FaultRecord& f) {
                  f.peer = rank;
                  f.needed = too_many ? needed : out.num_bytes;
                  f.available = too_many ? rows : capacity;
                });
      return false;
    }
    if (coop.thread_rank() != 0) continue;
    Destination& d = s.scratch.destinations[rank];
    d.extent_offset =
        uint64_t{record_value(coop, record, layout::kBase)} * layout::kArenaAlignBytes;
    d.layout = out;
    d.row_limit = rows;
  }
  coop.sync();
  return true;
}

// The receiving half of the plan.  `limit`: rows of this rank's output.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED void plan_receive(Coop coop,
                              const Operation& op,
                              const DispatchParams& p,
                              uint64_t limit) {
  const DeviceState& s = *p.entry.state;
  const layout::PlanLayout plan = plan_layout(s);
  const uint32_t first = s.expert_offsets[s.rank], num_local = s.expert_offsets[s.rank + 1] - first;
  const uint32_t clip = static_cast<uint32_t>(limit);
  constexpr bool kByExpert = kLayout == LayoutKind::kExpert;
  for (uint32_t source = coop.thread_rank(); source < s.num_ranks; source += coop.size()) {
    uint64_t begin = 0, start = 0;
    uint32_t kept = 0;
    if constexpr (kByExpert) {
      for (uint32_t e = 0; e < num_local; ++e) {
        begin = start;
        for (uint32_t lower = 0; lower < source; ++lower)
          begin += expert_count(coop, op, lower, first + e);
        kept += kept_below(clip, begin, expert_count(coop, op, source, first + e));
        start = align_up(start + coop.read(s.scratch.expert_total + first + e), p.expert_alignment);
      }
    } else {
      for (uint32_t lower = 0; lower < source; ++lower)
        begin += rank_count(coop, op, lower, s.rank);
      kept = kept_below(clip, begin, rank_count(coop, op, source, s.rank));
      coop.write(p.plan + plan.rank_offsets + source,
                 static_cast<uint32_t>(min_of<uint64_t>(begin, clip)));
    }
    coop.write(p.plan + plan.rows_from + source, kept);
  }
  if (coop.thread_rank() == 0) {
    uint64_t start = 0, hash = 0;
    EP_NO_UNROLL
    for (uint32_t e = 0; e < num_local; ++e) {
      const uint32_t total = coop.read(s.scratch.expert_total + first + e);
      coop.write(p.plan + plan.tokens_per_expert + e,
                 kByExpert ? kept_below(clip, start, total) : total);
      coop.write(p.plan + plan.expert_offsets + e,
                 static_cast<uint32_t>(kByExpert ? min_of<uint64_t>(start, clip) : start));
      start = align_up(start + total, p.expert_alignment);
    }
    coop.write(p.plan + plan.expert_offsets + num_local,
               static_cast<uint32_t>(kByExpert ? min_of<uint64_t>(start, clip) : start));
    EP_NO_UNROLL
    for (uint32_t source = 0; source < s.num_ranks; ++source) {
      const uint64_t* record = record_from(s, op.bank, source);
      const uint64_t low = record_value(coop, record, layout::kHashLow);
      hash =
          mix64(hash + 1) ^ (uint64_t{record_value(coop, record, layout::kHashHigh)} << 32 | low);
    }
    const uint32_t needed = coop.read(p.plan + plan.rows_of + s.rank);
    coop.write(p.plan + plan.rank_offsets + s.num_ranks, min_of(needed, clip));
    coop.write(p.plan + layout::PlanLayout::kNumRows, min_of(needed, clip));
    coop.write(p.plan + layout::PlanLayout::kRowsNeeded, needed);
    coop.write(p.plan + layout::PlanLayout::kHashLow, static_cast<uint32_t>(hash));
    coop.write(p.plan + layout::PlanLayout::kHashHigh, static_cast<uint32_t>(hash >> 32));
  }
  coop.sync();
}

// This rank's small arrays.  REQUIRES: the destinations are filled.
EP_HOST_DEVICE uint32_t* small_of(const DeviceState& s) {
  const Destination& d = s.scratch.destinations[s.rank];
  return reinterpret_cast<uint32_t*>(window_of(s, s.rank) + d.extent_offset +
                                     d.layout.small_offset);
}

// What the caller sees of the plan.
template <class Coop>
EP_OUTLINED void write_small(Coop coop, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  const layout::PlanLayout plan = plan_layout(s);
  const auto small = layout::SmallLayout::make(s.num_ranks, s.max_local_experts);
  uint32_t* out = small_of(s);
  const auto copy = [&](uint32_t to, uint32_t from, uint32_t n) {
    EP_NO_UNROLL
    for (uint32_t i = coop.thread_rank(); i < n; i += coop.size()) {
      coop.write(out + to + i, coop.read(p.plan + from + i));
    }
  };
  copy(layout::SmallLayout::kNumRows, layout::PlanLayout::kNumRows, 1);
  copy(layout::SmallLayout::kRowsNeeded, layout::PlanLayout::kRowsNeeded, 1);
  copy(small.rank_offsets, plan.rank_offsets, s.num_ranks + 1);
  copy(small.tokens_per_expert, plan.tokens_per_expert, s.max_local_experts);
  copy(small.expert_offsets, plan.expert_offsets, s.max_local_experts + 1);
}

}  // namespace ep::kernels
