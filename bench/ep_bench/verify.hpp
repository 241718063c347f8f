// Compares results, bit by bit, with a plain computation that shares nothing with the library.
#pragma once

#include <cstdint>

#include "bench/ep_bench/contender.hpp"
#include "bench/ep_bench/exchange.hpp"
#include "bench/ep_bench/rank_data.hpp"

namespace ep::bench {

struct Verified {
  uint64_t rows = 0;    // of dispatches
  uint64_t values = 0;  // elements of rows and of sums
};

// Each throws std::runtime_error with the first difference and its coordinates.
// `what` names the contender in messages.
Verified verify_dispatch(const RankData& data, const DispatchResult& result, const char* what);
Verified verify_combine(const RankData& data, const CombineResult& result, const char* what);

// What `contender` left in `exchange`.
Verified verify(const RankData& data, const Exchange& exchange, Contender contender);

}  // namespace ep::bench
