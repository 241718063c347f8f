// How long a call keeps the thread that makes it.
#pragma once

#include <array>
#include <cstdint>

#include "bench/ep_bench/case.hpp"
#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/statistics.hpp"

namespace ep::bench {

enum class Span : uint8_t {
  kDispatchReturn,  // replayed, async_op: from call to return
  kDispatchDone,    // the same call, until its event is synchronised
  kDispatchSync,    // replayed, synchronous
  kCombineReturn,
  kCombineDone,
  kCombineSync,
  kPairSync,  // dispatch with new routing, then combine
};

inline constexpr Choice<Span> kSpans[] = {{"dispatch_return", Span::kDispatchReturn},
                                          {"dispatch_done", Span::kDispatchDone},
                                          {"dispatch_sync", Span::kDispatchSync},
                                          {"combine_return", Span::kCombineReturn},
                                          {"combine_done", Span::kCombineDone},
                                          {"combine_sync", Span::kCombineSync},
                                          {"pair_sync", Span::kPairSync}};
inline constexpr uint32_t kNumSpans = 7;
inline constexpr uint32_t kLatencyCalls = 2000;  // of each kind that count

struct LatencyResult {
  Case kase;
  uint32_t num_sms = 0;
  std::array<std::vector<double>, kNumSpans> us;  // by Span, in the order of the calls

  Spread spread(Span span) const { return spread_of(us[static_cast<size_t>(span)]); }
};

// REQUIRES: one rank.  Forks; throws RanksFailed.
LatencyResult measure_latency(const Case& kase);

}  // namespace ep::bench
