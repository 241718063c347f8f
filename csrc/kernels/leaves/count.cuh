// Counting routes: in token order, slot order, so that every row has its place by arithmetic.
#pragma once

#include "kernels/operation.cuh"

namespace ep::kernels {

// The expert of (token, slot), read in the caller's dtype; compared before it is narrowed.
EP_HOST_DEVICE int64_t load_id(const Strided& idx, uint64_t token, uint32_t slot) {
  const std::byte* p = idx.data + static_cast<int64_t>(token) * idx.row_stride +
                       static_cast<int64_t>(slot) * idx.column_stride;
  return idx.element_bytes == 8 ? *reinterpret_cast<const int64_t*>(p)
                                : int64_t{*reinterpret_cast<const int32_t*>(p)};
}

EP_HOST_DEVICE void store_id(std::byte* dst, uint64_t i, uint32_t element_bytes, int64_t id) {
  if (element_bytes == 8) {
    reinterpret_cast<int64_t*>(dst)[i] = id;
  } else {
    reinterpret_cast<int32_t*>(dst)[i] = static_cast<int32_t>(id);
  }
}

// splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection that spreads every bit.
EP_HOST_DEVICE uint64_t mix64(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// One token's share of the routing hash: a sum, so workers may add in any order.
EP_HOST_DEVICE uint64_t hash_route(uint64_t place, int64_t expert) {
  return mix64(place * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(expert + 2));
}

struct CountArgs {
  const DispatchParams* params;
  uint32_t* rank_rows;    // [R] of this worker
  uint32_t* expert_rows;  // [E] of this worker
};

struct CountResult {
  uint64_t hash;      // of this thread's slots
  uint64_t bad_slot;  // least bad (token, slot) of this thread; ~0: none
};

// Id of one slot: -1 and bad ids become -1, a bad one is noted.
EP_HOST_DEVICE int32_t checked_id(const DispatchParams& p,
                                  uint32_t token,
                                  uint32_t slot,
                                  CountResult& r) {
  const int64_t id = load_id(p.idx, token, slot);
  if (id >= -1 && id < static_cast<int64_t>(p.entry.state->num_experts))
    return static_cast<int32_t>(id);
  const uint64_t place = (uint64_t{token} << 32) | slot;
  if (place < r.bad_slot) r.bad_slot = place;
  return -1;
}

// Counts one token's routes.  Writes each slot's route with the row relative to the worker's segment: the
// index among this worker's rows to that rank ("rank") or to that expert ("expert").
template <LayoutKind kLayout, class Coop>
EP_HOST_DEVICE void count_token(Coop coop,
                                const CountArgs& a,
                                uint32_t token,
                                CountResult& result) {
  const DispatchParams& p = *a.params;
  const DeviceState& s = *p.entry.state;
  layout::Route* routes = p.routes + uint64_t{token} * p.num_topk;
  if constexpr (Coop::kForm == Form::kOneThread) {
    for (uint32_t k = 0; k < p.num_topk; ++k) {
      const int32_t id = checked_id(p, token, k, result);
      store_id(p.handle_idx, uint64_t{token} * p.num_topk + k, p.idx_element_bytes, id);
      result.hash += hash_route(uint64_t{token} * p.num_topk + k, id);
      layout::Route route{layout::kNoRank, layout::kNoRow};
      if (id >= 0) {
        const uint32_t expert = static_cast<uint32_t>(id), rank = s.expert_rank[expert];
        uint32_t earlier = 0;
        while (earlier < k && (routes[earlier].rank_and_flags & ~layout::kFirstSlot) != rank)
          ++earlier;
        const bool first = earlier == k;
        if (first) route.row = a.rank_rows[rank]++;
        const uint32_t in_expert = a.expert_rows[expert]++;
        if (kLayout == LayoutKind::kExpert)
          route.row = in_expert;
        else if (!first)
          route.row = routes[earlier].row;
        route.rank_and_flags = rank | (first ? layout::kFirstSlot : 0u);
      }
      routes[k] = route;
    }
  } else {
    // Lane k owns slot k: K <= 32.  Equal ranks and equal experts find each other with match.
    const uint32_t lane = coop.thread_rank();
    const bool mine = lane < p.num_topk;
    const int32_t id = mine ? checked_id(p, token, lane, result) : -1;
    if (mine) {
      store_id(p.handle_idx, uint64_t{token} * p.num_topk + lane, p.idx_element_bytes, id);
      result.hash += hash_route(uint64_t{token} * p.num_topk + lane, id);
    }
    const uint32_t rank = id >= 0 ? s.expert_rank[id] : layout::kNoRank;
    const uint32_t same_rank = coop.match(rank),
                   same_expert = coop.match(static_cast<uint32_t>(id));
    const uint32_t below = (1u << lane) - 1u;
    const bool first = id >= 0 && (same_rank & below) == 0;
    const uint32_t rank_row = id >= 0 ? a.rank_rows[rank] : 0;
    const uint32_t expert_row = id >= 0 ? a.expert_rows[id] + coop.count(same_expert & below) : 0;
    coop.sync();
    if (first) a.rank_rows[rank] = rank_row + 1;
    if (id >= 0 && (same_expert & ~below) == (1u << lane)) a.expert_rows[id] = expert_row + 1;
    coop.sync();
    if (mine) {
      const uint32_t row = kLayout == LayoutKind::kExpert ? expert_row : rank_row;
      routes[lane] = {rank | (first ? layout::kFirstSlot : 0u), id >= 0 ? row : layout::kNoRow};
    }
  }
}

// Turns the workers' counts into exclusive prefixes over workers, in place, and leaves the totals in `total`.
template <class Coop>
EP_HOST_DEVICE void exclusive_scan_workers(
    Coop coop, uint32_t* counts, uint32_t num_workers, uint32_t num_columns, uint32_t* total) {
  for (uint32_t c = coop.thread_rank(); c < num_columns; c += coop.size()) {
    uint32_t sum = 0;
    for (uint32_t w = 0; w < num_workers; ++w) {
      uint32_t* cell = counts + uint64_t{w} * num_columns + c;
      const uint32_t n = coop.read(cell);
      coop.write(cell, sum);
      sum += n;
    }
    coop.write(total + c, sum);
  }
  coop.sync();
}

}  // namespace ep::kernels
