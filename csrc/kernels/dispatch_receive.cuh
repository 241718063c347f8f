// Dispatch, receiving half: dead rows get their values while rows are on their way; each channel's word lets
// the receiver copy that channel's duplicates ("expert"); the sum of the words must be the matrix's number.
#pragma once

#include "kernels/dispatch_send.cuh"

namespace ep::kernels {

// Gap rows: x and the caller's own data 0, our scales 1.
template <class Coop>
EP_HOST_DEVICE void fill_gap_payload(Coop coop,
                                     const DispatchParams& p,
                                     const layout::OutputLayout& out,
                                     std::byte* extent,
                                     uint64_t row) {
  const uint64_t x_pitch = layout::row_pitch(p.shape.x_bytes),
                 scales_pitch = layout::row_pitch(p.shape.scales_bytes);
  fill_words(coop, extent + out.x_offset + row * x_pitch, 0u, x_pitch / 4);
  fill_words(coop, extent + out.scales_offset + row * scales_pitch, p.gap_scale, scales_pitch / 4);
  EP_NO_UNROLL
  for (uint32_t i = 0; i < p.shape.num_extras; ++i) {
    const uint64_t pitch = layout::row_pitch(p.shape.extra_bytes[i]);
    fill_words(coop, extent + out.extra_offset[i] + row * pitch, 0u, pitch / 4);
  }
}

// Gaps and tail: ids -1, weights 0, source -1.
template <class Coop>
EP_HOST_DEVICE void fill_dead_metadata(Coop coop,
                                       const DispatchParams& p,
                                       const layout::OutputLayout& out,
                                       std::byte* extent,
                                       uint64_t row) {
  fill_words(coop, extent + out.idx_offset + row * p.shape.idx_bytes, 0xFFFFFFFFu,
             p.shape.idx_bytes / 4);
  fill_words(coop, extent + out.weights_offset + row * p.shape.weights_bytes, 0u,
             p.shape.weights_bytes / 4);
  fill_words(coop, extent + out.source_offset + row * 8, 0xFFFFFFFFu, 2);
}

template <LayoutKind kLayout, class Coop>
EP_OUTLINED void fill_dead_rows(Coop coop, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  const layout::PlanLayout plan = plan_layout(s);
  const Destination& d = s.scratch.destinations[s.rank];
  std::byte* extent = window_of(s, s.rank) + d.extent_offset;
  const uint32_t worker = worker_index(coop), workers = total_workers(coop);
  if constexpr (kLayout == LayoutKind::kExpert) {
    const uint32_t num_local = s.expert_offsets[s.rank + 1] - s.expert_offsets[s.rank];
    EP_NO_UNROLL
    for (uint32_t e = 0; e < num_local; ++e) {
      const uint32_t begin = coop.read(p.plan + plan.expert_offsets + e) +
                             coop.read(p.plan + plan.tokens_per_expert + e);
      const uint32_t end = coop.read(p.plan + plan.expert_offsets + e + 1);
      for (uint64_t row = uint64_t{begin} + worker; row < end; row += workers) {
        fill_gap_payload(coop, p, d.layout, extent, row);
        fill_dead_metadata(coop, p, d.layout, extent, row);
      }
    }
  }
  const uint64_t used = coop.read(p.plan + layout::PlanLayout::kNumRows);
  for (uint64_t row = used + worker; row < d.row_limit; row += workers) {
    fill_dead_metadata(coop, p, d.layout, extent, row);
  }
}

// Rows of one channel whose bytes came once, into another row of the same token.
template <class Coop>
EP_HOST_DEVICE void copy_duplicates(Coop coop,
                                    const DispatchParams& p,
                                    uint32_t source,
                                    uint32_t channel) {
  const DeviceState& s = *p.entry.state;
  const Destination& d = s.scratch.destinations[s.rank];
  std::byte* extent = window_of(s, s.rank) + d.extent_offset;
  const uint32_t* dup_of = reinterpret_cast<const uint32_t*>(extent + d.layout.dup_of_offset);
  const auto* segments = reinterpret_cast<const layout::Segment*>(
      window_of(s, s.rank) + s.window_layout.segment(source, channel, 0));
  const uint32_t num_local = s.expert_offsets[s.rank + 1] - s.expert_offsets[s.rank];
  const auto copy = [&](uint64_t offset, uint32_t bytes, uint64_t row, uint64_t from) {
    const uint64_t pitch = layout::row_pitch(bytes);
    if (bytes != 0)
      copy_row(coop, extent + offset + row * pitch, extent + offset + from * pitch, bytes);
  };
  for (uint32_t e = 0; e < num_local; ++e) {
    const uint32_t rows = coop.read(&segments[e].rows), first = coop.read(&segments[e].first);
    for (uint32_t i = coop.worker(); i < rows; i += coop.num_workers()) {
      const uint64_t row = uint64_t{first} + i;
      const uint32_t from = coop.read(dup_of + row);
      if (from == layout::kNoRow) continue;
      copy(d.layout.x_offset, p.shape.x_bytes, row, from);
      copy(d.layout.scales_offset, p.shape.scales_bytes, row, from);
      EP_NO_UNROLL
      for (uint32_t x = 0; x < p.shape.num_extras; ++x) {
        copy(d.layout.extra_offset[x], p.shape.extra_bytes[x], row, from);
      }
    }
  }
}

// Waits for the rows of this block's share of the sources.
template <LayoutKind kLayout, class Coop>
EP_HOST_DEVICE bool receive_rows(Coop coop, Operation& op, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  EP_NO_UNROLL
  for (uint32_t step = coop.block(); step < s.num_ranks; step += coop.num_blocks()) {
    const uint32_t source = (s.rank + step) % s.num_ranks;  // this rank's own rows come first
    const uint32_t num_channels = channels_of(coop, s, op.bank, source);
    uint64_t rows = 0;
    EP_NO_UNROLL
    for (uint32_t c = 0; c < num_channels; ++c) {
      const uint64_t* word = words_at(s, s.rank, s.window_layout.channel(source, c));
      if (!wait_for(coop, op, {word, op.tag, op.bank, source, Phase::kRows, false})) return false;
      rows +=
          layout::value_in(coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(word)));
      if constexpr (kLayout == LayoutKind::kExpert) copy_duplicates(coop, p, source, c);
    }
    if (rows == coop.read(p.plan + plan_layout(s).rows_from + source)) continue;
    set_fault(coop, op, Cause::kBadRow, Phase::kRows, [&](FaultRecord& f) {
      f.peer = source;
      f.needed = coop.read(p.plan + plan_layout(s).rows_from + source);
      f.available = rows;
    });
    return false;
  }
  if constexpr (kLayout == LayoutKind::kExpert) stream_fence(coop);
  return true;
}

// "rank" with dropped rows: the matrix does not tell which experts lost a row; the kept ids do.
template <class Coop>
EP_OUTLINED void recount_experts(Coop coop, const DispatchParams& p) {
  const DeviceState& s = *p.entry.state;
  const layout::PlanLayout plan = plan_layout(s);
  const Destination& d = s.scratch.destinations[s.rank];
  std::byte* extent = window_of(s, s.rank) + d.extent_offset;
  const uint32_t first = s.expert_offsets[s.rank], num_local = s.expert_offsets[s.rank + 1] - first;
  const uint64_t ids = uint64_t{coop.read(p.plan + layout::PlanLayout::kNumRows)} * p.num_topk;
  const Strided idx{extent + d.layout.idx_offset, p.idx_element_bytes, 0, 1, p.idx_element_bytes};
  const int64_t id_base = p.global_ids ? int64_t{first} : 0;
  if (coop.thread_rank() == 0) {
    uint32_t* counts = p.plan + plan.tokens_per_expert;
    EP_NO_UNROLL
    for (uint32_t e = 0; e < num_local; ++e)
      coop.write(counts + e, 0u);
    EP_NO_UNROLL
    for (uint64_t i = 0; i < ids; ++i) {
      const int64_t id = load_id(idx, i, 0);
      if (id >= 0) coop.write(counts + (id - id_base), coop.read(counts + (id - id_base)) + 1);
    }
    uint32_t start = 0;
    EP_NO_UNROLL
    for (uint32_t e = 0; e < num_local; ++e) {
      start += coop.read(counts + e);
      coop.write(p.plan + plan.expert_offsets + e + 1, start);
    }
  }
  coop.sync();
  write_small(coop, p);
}

}  // namespace ep::kernels
