// A handle's plan: what the receiving half of a replay and combine need to know, as 32-bit words.
//
//   0         kHeadWords      +R               +R                 +Lmax               +Lmax+1          num_words
//   +---------+---------------+----------------+------------------+-------------------+-----------------+
//   | head    | rows_from     | rows_of        | tokens_per_expert| expert_offsets    | rank_offsets    |
//   |         | kept, by      | needed, by     | kept routes, by  | aligned, clipped  | clipped         |
//   |         | source        | receiver       | local expert     |                   | [R+1]           |
//   +---------+---------------+----------------+------------------+-------------------+-----------------+
#pragma once

#include "common/target.hpp"

namespace ep::layout {

struct PlanLayout {
  static constexpr uint32_t kNumRows = 0;                 // used rows here: min(needed, N)
  static constexpr uint32_t kRowsNeeded = 1;              // true demand here, gaps included
  static constexpr uint32_t kHashLow = 2, kHashHigh = 3;  // of all ranks' routing
  static constexpr uint32_t kHeadWords = 4;

  uint32_t rows_from, rows_of, tokens_per_expert, expert_offsets, rank_offsets, num_words;

  static EP_HOST_DEVICE constexpr PlanLayout make(uint32_t num_ranks, uint32_t max_local_experts) {
    PlanLayout l{};
    l.rows_from = kHeadWords;
    l.rows_of = l.rows_from + num_ranks;
    l.tokens_per_expert = l.rows_of + num_ranks;
    l.expert_offsets = l.tokens_per_expert + max_local_experts;
    l.rank_offsets = l.expert_offsets + max_local_experts + 1;
    l.num_words = l.rank_offsets + num_ranks + 1;
    return l;
  }
};

// A route: where one (token, slot) went.  Two words: {destination rank, row there}.
//   destination  kNoRank: no expert.  kFirstSlot is set in the token's first slot of that rank.
//   row          kNoRow: not routed, or dropped
inline constexpr uint32_t kNoRank = 0x7FFFFFFFu;
inline constexpr uint32_t kFirstSlot = 0x80000000u;
struct Route {
  uint32_t rank_and_flags, row;
};

}  // namespace ep::layout
