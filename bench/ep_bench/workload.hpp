// What the ranks send, as functions of seed, rank and token: any rank can work out everybody's
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/ep_bench/case.hpp"

namespace ep::bench {

// [T,K] of one rank: experts of each token, without repetition.
std::vector<int64_t> make_routing(const Case& kase, uint32_t rank);

// [T,K] of one rank, in (0, 1].
std::vector<float> make_weights(const Case& kase, uint32_t rank);

// Ordinary numbers, about 2^-7 to 2 in magnitude (fp16: 1 to 2), of the case's dtype.
void write_token(const Case& kase, uint32_t rank, uint32_t token, std::byte* row);
// What the experts answer to a token.  `part`: layout "rank": the answering rank; "expert": the
// slot.
void write_answer(const Case& kase, uint32_t rank, uint32_t token, uint32_t part, std::byte* row);

// Where a row comes from.
struct Origin {
  uint32_t rank, token, part;
};

// The rows that one rank receives, in order.
struct RowMap {
  std::vector<Origin> rows;
  std::vector<uint32_t> routes_per_expert;  // of the rank's own experts
  std::vector<uint32_t> rows_per_source;    // layout "rank"
};

// `routing[r]` is make_routing(kase, r).
RowMap map_rows(const Case& kase, const std::vector<std::vector<int64_t>>& routing, uint32_t rank);

}  // namespace ep::bench
