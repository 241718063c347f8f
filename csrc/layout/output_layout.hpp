// What a receiver's extent holds: the output of one dispatch with room for N rows.  Every rank evaluates it
// for every receiver, from agreed fields and N alone.
//
//   base                                   metadata                                              num_bytes
//   +---------+-----------+---------------+---------+---------+--------+--------+---------------+
//   | x       | scales    | extras 0..    | idx     | weights | source | dup_of | small         |
//   | [N]     | [N]       | [N] each      | [N]     | [N]     | [N] x2 | [N]    | [small_words] |
//   +---------+-----------+---------------+---------+---------+--------+--------+---------------+
//   payload block, freed on its own        metadata block, freed on its own
#pragma once

#include "common/math.hpp"
#include "layout/limits.hpp"

namespace ep::layout {

struct OutputShape {
  uint32_t num_ranks, max_local_experts;
  uint32_t x_bytes, scales_bytes;  // per row, without padding; 0: none
  uint32_t num_extras;
  uint32_t extra_bytes[kMaxExtras];
  uint32_t idx_bytes;      // per row: K * size or size
  uint32_t weights_bytes;  // per row; 0: none
  uint32_t is_expert;      // 1: dup_of exists
};

EP_HOST_DEVICE constexpr uint64_t row_pitch(uint64_t row_bytes) {
  return align_up(row_bytes, kRowAlignBytes);
}

// The small array at the end of the metadata block, 32-bit words.
struct SmallLayout {
  uint32_t rank_offsets, tokens_per_expert, expert_offsets, num_words;
  static constexpr uint32_t kNumRows = 0, kRowsNeeded = 1, kOutputStatus = 2;

  static EP_HOST_DEVICE constexpr SmallLayout make(uint32_t num_ranks, uint32_t max_local_experts) {
    SmallLayout l{};
    l.rank_offsets = 4;
    l.tokens_per_expert = l.rank_offsets + num_ranks + 1;
    l.expert_offsets = l.tokens_per_expert + max_local_experts;
    l.num_words = l.expert_offsets + max_local_experts + 1;
    return l;
  }
};

struct OutputLayout {
  uint64_t x_offset, scales_offset, extra_offset[kMaxExtras];
  uint64_t metadata_offset, idx_offset, weights_offset, source_offset, dup_of_offset, small_offset;
  uint64_t num_bytes;

  static EP_HOST_DEVICE constexpr OutputLayout make(const OutputShape& s, uint64_t num_rows) {
    OutputLayout l{};
    uint64_t cursor = 0;
    const auto take = [&cursor](uint64_t bytes) {
      const uint64_t at = cursor;
      cursor = align_up(cursor + bytes, kArenaAlignBytes);
      return at;
    };
    l.x_offset = take(num_rows * row_pitch(s.x_bytes));
    l.scales_offset = take(num_rows * row_pitch(s.scales_bytes));
    EP_NO_UNROLL
    for (uint32_t i = 0; i < kMaxExtras; ++i) {
      l.extra_offset[i] = take(i < s.num_extras ? num_rows * row_pitch(s.extra_bytes[i]) : 0);
    }
    l.metadata_offset = cursor;
    l.idx_offset = take(num_rows * s.idx_bytes);
    l.weights_offset = take(num_rows * s.weights_bytes);
    l.source_offset = take(num_rows * 8);
    l.dup_of_offset = take(s.is_expert != 0 ? num_rows * 4 : 0);
    l.small_offset =
        take(uint64_t{SmallLayout::make(s.num_ranks, s.max_local_experts).num_words} * 4);
    l.num_bytes = cursor;
    return l;
  }
};

}  // namespace ep::layout
