// Dispatch, sending half: each worker takes tokens, loads a row once, and stores it into its final place at
// every destination; then one word per (source, channel) says how many rows have come.
//
// Channel words.  State: channel[source][block], {rows | tag}, in the receiver's window; segments beside it.
// Writers: the source's block, with release, after its rows, metadata and segments.  Readers: the receiver,
// with acquire.  One bank: the source holds the receiver's record of this operation, so the receiver has
// left the operation before, with its reads.
#pragma once

#include "kernels/leaves/copy.cuh"
#include "kernels/leaves/encode.cuh"
#include "kernels/placement.cuh"

namespace ep::kernels {

// One token, ready to be stored anywhere.
struct Payload {
  const std::byte* x;
  const std::byte* scales;
};

template <class Coop>
EP_HOST_DEVICE uint32_t worker_index(Coop coop) {
  return coop.block() * coop.num_workers() + coop.worker();
}
template <class Coop>
EP_HOST_DEVICE uint32_t total_workers(Coop coop) {
  return coop.num_blocks() * coop.num_workers();
}

// Where the share of worker `worker` begins.
EP_HOST_DEVICE uint32_t first_token(uint32_t num_tokens, uint32_t worker, uint32_t workers) {
  return static_cast<uint32_t>(part_begin(num_tokens, worker, workers));
}

// The checked id of (token, slot), as the handle keeps it.
EP_HOST_DEVICE int64_t stored_id(const DispatchParams& p, uint64_t slot) {
  return p.idx_element_bytes == 8 ? reinterpret_cast<const int64_t*>(p.handle_idx)[slot]
                                  : int64_t{reinterpret_cast<const int32_t*>(p.handle_idx)[slot]};
}

template <DispatchConfig kConfig, class Coop>
EP_HOST_DEVICE Payload load_token(Coop coop, const DispatchParams& p, uint32_t token) {
  const Scratch& scratch = p.entry.state->scratch;
  std::byte* staged = scratch.worker_bytes + worker_index(coop) * scratch.worker_pitch;
  const std::byte* row = p.x.data + static_cast<int64_t>(token) * p.x.row_stride;
  if constexpr (kConfig.format != Format::kBytes) {
    std::byte* scales = staged + layout::row_pitch(p.shape.x_bytes);
    encode_row<kConfig.in, kConfig.format>(coop, staged, scales, row, p.num_columns);
    return {staged, scales};
  } else {
    if (p.scales.data == nullptr) return {row, nullptr};
    gather_row(coop, staged, p.scales, token);
    coop.sync();
    return {row, staged};
  }
}

// The final row of each of the token's slots; kNoRow where it is dropped.
template <LayoutKind kLayout, class Coop>
EP_HOST_DEVICE void place_token(Coop coop, const DispatchParams& p, uint32_t token) {
  const DeviceState& s = *p.entry.state;
  const uint32_t* prefix =
      s.scratch.counts + uint64_t{worker_index(coop)} * (s.num_ranks + s.num_experts);
  EP_NO_UNROLL
  for (uint32_t k = coop.thread_rank(); k < p.num_topk; k += coop.size()) {
    const uint64_t slot = uint64_t{token} * p.num_topk + k;
    layout::Route route = p.routes[slot];
    if (route.row == layout::kNoRow) continue;
    const uint32_t rank = route.rank_and_flags & ~layout::kFirstSlot;
    uint32_t column = rank;
    if constexpr (kLayout == LayoutKind::kExpert) {
      column = s.num_ranks + static_cast<uint32_t>(stored_id(p, slot));
    }
    route.row += coop.read(s.scratch.row_base + column) + coop.read(prefix + column);
    if (route.row >= s.scratch.destinations[rank].row_limit) route.row = layout::kNoRow;
    p.routes[slot] = route;
  }
  coop.sync();
}

// x, scales and extras of a token into row `row` of `rank`.
template <class Coop>
EP_HOST_DEVICE void store_payload(Coop coop,
                                  const DispatchParams& p,
                                  uint32_t rank,
                                  uint32_t row,
                                  uint32_t token,
                                  Payload payload) {
  const DeviceState& s = *p.entry.state;
  const Destination& d = s.scratch.destinations[rank];
  const layout::OutputLayout& out = d.layout;
  std::byte* extent = window_of(s, rank) + d.extent_offset;
  copy_row(coop, extent + out.x_offset + row * layout::row_pitch(p.shape.x_bytes), payload.x,
           p.shape.x_bytes);
  if (p.shape.scales_bytes != 0) {
    copy_row(coop, extent + out.scales_offset + row * layout::row_pitch(p.shape.scales_bytes),
             payload.scales, p.shape.scales_bytes);
  }
  EP_NO_UNROLL
  for (uint32_t i = 0; i < p.shape.num_extras; ++i) {
    copy_row(coop, extent + out.extra_offset[i] + row * layout::row_pitch(p.shape.extra_bytes[i]),
             p.extras[i].data + static_cast<int64_t>(token) * p.extras[i].row_stride,
             p.shape.extra_bytes[i]);
  }
}

// The ids, weights and source of one row.  "expert": of slot `slot`; "rank": of all slots of `rank`.
template <LayoutKind kLayout, class Coop>
EP_HOST_DEVICE void store_metadata(Coop coop,
                                   const DispatchParams& p,
                                   uint32_t rank,
                                   uint32_t row,
                                   uint32_t token,
                                   uint32_t slot) {
  const DeviceState& s = *p.entry.state;
  const Destination& d = s.scratch.destinations[rank];
  std::byte* extent = window_of(s, rank) + d.extent_offset;
  const int64_t id_base = p.global_ids ? 0 : int64_t{s.expert_offsets[rank]};
  float* weights = reinterpret_cast<float*>(extent + d.layout.weights_offset);
  constexpr bool kByExpert = kLayout == LayoutKind::kExpert;
  const uint32_t width = kByExpert ? 1 : p.num_topk;
  EP_NO_UNROLL
  for (uint32_t i = coop.thread_rank(); i < width; i += coop.size()) {
    const uint64_t from = uint64_t{token} * p.num_topk + (kByExpert ? slot : i);
    const bool here = (p.routes[from].rank_and_flags & ~layout::kFirstSlot) == rank;
    store_id(extent + d.layout.idx_offset, uint64_t{row} * width + i, p.idx_element_bytes,
             here ? stored_id(p, from) - id_base : -1);
    if (p.has_weights)
      coop.write(weights + uint64_t{row} * width + i, here ? p.handle_weights[from] : 0.0f);
  }
  if (coop.thread_rank() == 0) {
    uint32_t* source =
        reinterpret_cast<uint32_t*>(extent + d.layout.source_offset) + uint64_t{row} * 2;
    coop.write(source, s.rank);
    coop.write(source + 1, token);
  }
}

// "expert": where the receiver finds a row's bytes, and the channel's range of rows of that expert.
template <class Coop>
EP_HOST_DEVICE void note_expert_row(
    Coop coop, const DispatchParams& p, std::byte* extent, uint64_t slot, uint32_t primary) {
  const DeviceState& s = *p.entry.state;
  const layout::Route route = p.routes[slot];
  const uint32_t rank = route.rank_and_flags & ~layout::kFirstSlot;
  uint32_t* dup_of =
      reinterpret_cast<uint32_t*>(extent + s.scratch.destinations[rank].layout.dup_of_offset);
  coop.write(dup_of + route.row, primary == route.row ? layout::kNoRow : primary);
  layout::Segment* segment = s.scratch.segments + uint64_t{coop.block()} * s.num_experts +
                             static_cast<uint64_t>(stored_id(p, slot));
  coop.template fetch_min<Order::kRelaxed, Scope::kBlock>(&segment->first, route.row);
  coop.template fetch_add<Order::kRelaxed, Scope::kBlock>(&segment->rows, 1u);
}

// False: the handle names a row that the receiver does not have.
template <DispatchConfig kConfig, class Coop>
EP_HOST_DEVICE bool send_token(Coop coop,
                               const Operation& op,
                               const DispatchParams& p,
                               uint32_t token) {
  const DeviceState& s = *p.entry.state;
  constexpr bool kByExpert = kConfig.layout == LayoutKind::kExpert;
  const layout::Route* routes = p.routes + uint64_t{token} * p.num_topk;
  if (!p.replay) place_token<kConfig.layout>(coop, p, token);
  Payload payload{};
  EP_NO_UNROLL
  for (uint32_t k = 0; k < p.num_topk; ++k) {
    const layout::Route route = routes[k];
    const uint32_t rank = route.rank_and_flags & ~layout::kFirstSlot;
    if (route.row == layout::kNoRow ||
        (!kByExpert && (route.rank_and_flags & layout::kFirstSlot) == 0))
      continue;
    if (rank >= s.num_ranks || route.row >= s.scratch.destinations[rank].row_limit) {
      set_fault(coop, op, Cause::kBadRow, Phase::kRows, [&](FaultRecord& f) { f.peer = rank; });
      return false;
    }
    const Destination& d = s.scratch.destinations[rank];
    std::byte* extent = window_of(s, rank) + d.extent_offset;
    uint32_t primary = route.row;
    if constexpr (kByExpert) {
      EP_NO_UNROLL
      for (uint32_t j = 0; j < k && primary == route.row; ++j) {
        const bool same = (routes[j].rank_and_flags & ~layout::kFirstSlot) == rank;
        if (same && routes[j].row != layout::kNoRow) primary = routes[j].row;
      }
      if (coop.thread_rank() == 0)
        note_expert_row(coop, p, extent, uint64_t{token} * p.num_topk + k, primary);
    }
    if (primary == route.row) {
      if (payload.x == nullptr) payload = load_token<kConfig>(coop, p, token);
      store_payload(coop, p, rank, route.row, token, payload);
    }
    store_metadata<kConfig.layout>(coop, p, rank, route.row, token, k);
    if (coop.thread_rank() == 0) {
      coop.template fetch_add<Order::kRelaxed, Scope::kBlock>(
          s.scratch.rows_sent + uint64_t{coop.block()} * s.num_ranks + rank, 1u);
    }
  }
  return true;
}

// Clears what the block adds up while it sends.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED void clear_block_sums(Coop coop, const Operation& op) {
  const DeviceState& s = *op.state;
  if (coop.worker() == 0) {
    uint32_t* rows_sent = s.scratch.rows_sent + uint64_t{coop.block()} * s.num_ranks;
    EP_NO_UNROLL
    for (uint32_t r = coop.thread_rank(); r < s.num_ranks; r += coop.size())
      coop.write(rows_sent + r, 0u);
    if constexpr (kLayout == LayoutKind::kExpert) {
      layout::Segment* segments = s.scratch.segments + uint64_t{coop.block()} * s.num_experts;
      for (uint32_t e = coop.thread_rank(); e < s.num_experts; e += coop.size()) {
        coop.write(&segments[e].first, layout::kNoRow);
        coop.write(&segments[e].rows, 0u);
      }
    }
  }
  coop.block_sync();
}

// One word per destination: this channel's rows are there.
template <LayoutKind kLayout, class Coop>
EP_OUTLINED void announce_rows(Coop coop, const Operation& op) {
  const DeviceState& s = *op.state;
  const Scratch& scratch = s.scratch;
  for (uint32_t step = 0; step < s.num_ranks; ++step) {
    const uint32_t rank = (s.rank + step) % s.num_ranks;
    if constexpr (kLayout == LayoutKind::kExpert) {
      const uint32_t first = s.expert_offsets[rank], end = s.expert_offsets[rank + 1];
      auto* out = reinterpret_cast<layout::Segment*>(
          window_of(s, rank) + s.window_layout.segment(s.rank, coop.block(), 0));
      const layout::Segment* sums = scratch.segments + uint64_t{coop.block()} * s.num_experts;
      for (uint32_t e = first + coop.thread_rank(); e < end; e += coop.size()) {
        coop.write(&out[e - first].first, coop.read(&sums[e].first));
        coop.write(&out[e - first].rows, coop.read(&sums[e].rows));
      }
      coop.sync();
    }
    if (coop.thread_rank() != 0) continue;
    const uint32_t rows =
        coop.read(scratch.rows_sent + uint64_t{coop.block()} * s.num_ranks + rank);
    uint64_t* word = words_at(s, rank, s.window_layout.channel(s.rank, coop.block()));
    coop.template store<Order::kRelease, Scope::kSystem>(word, layout::tagged(rows, op.tag));
    coop.ring(&header_of(s, rank)->doorbell);
  }
}

template <DispatchConfig kConfig, class Coop>
EP_OUTLINED bool send_rows(Coop coop, const Operation& op, const DispatchParams& p) {
  clear_block_sums<kConfig.layout>(coop, op);
  const uint32_t worker = worker_index(coop), workers = total_workers(coop);
  const uint32_t end = first_token(p.num_tokens, worker + 1, workers);
  bool good = true;
  for (uint32_t token = first_token(p.num_tokens, worker, workers); good && token < end; ++token) {
    good = send_token<kConfig>(coop, op, p, token);
  }
  stream_fence(coop);
  coop.block_sync();
  if (coop.worker() == 0 && !faulted(coop, op)) announce_rows<kConfig.layout>(coop, op);
  return good;
}

}  // namespace ep::kernels
