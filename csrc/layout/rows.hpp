// How many rows an output has when its size may not depend on the routing.
#pragma once

#include "common/math.hpp"
#include "layout/limits.hpp"

namespace ep::layout {

struct RowBound {
  bool is_expert;
  uint32_t num_ranks, max_tokens, num_topk, num_local_experts, expert_alignment;
};

// The most rows any routing can need on a rank, gaps included.
//   "rank":   every source sends every token once:  R * B
//   "expert": M = R * B * K routes; at most n = min(L, M) experts have a part group; each of them may waste
//             a - 1 rows, the rest of the routes fill whole groups:  a * (n + (M - n) / a)
EP_HOST_DEVICE constexpr uint64_t worst_case_rows(const RowBound& b) {
  const uint64_t tokens = uint64_t{b.num_ranks} * b.max_tokens;
  if (!b.is_expert) return tokens;
  if (b.num_local_experts == 0) return 0;
  const uint64_t routes = tokens * b.num_topk, align = b.expert_alignment;
  const uint64_t groups = min_of<uint64_t>(b.num_local_experts, routes);
  return align * (groups + (routes - groups) / align);
}

static_assert(worst_case_rows({false, 4, 16, 8, 2, 1}) == 64);
static_assert(worst_case_rows({true, 4, 16, 8, 2, 1}) == 512);
static_assert(worst_case_rows({true, 1, 2, 1, 4, 8}) == 16);

}  // namespace ep::layout
