// Rounds of contenders, and what they say.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bench/ep_bench/case.hpp"
#include "bench/ep_bench/contender.hpp"
#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/statistics.hpp"
#include "bench/ep_bench/verify.hpp"

namespace ep::bench {

// Microseconds, by contender, round, rank.
using Times = std::vector<std::vector<std::vector<double>>>;

struct ThroughputResult {
  Case kase;
  std::vector<Contender> contenders;
  Times times;
  std::vector<uint64_t> num_rows;  // received, by rank
  uint32_t num_sms = 0;
  std::optional<Verified> verified;
};

// One line of the table.
struct Summary {
  Contender contender;
  uint64_t num_bytes;                       // of all ranks together
  Spread us;                                // over rounds, of the slowest rank
  double fastest_rank_us, slowest_rank_us;  // medians of single ranks
  double gb_per_s;
  std::optional<double> of_memcpy;  // median over rounds of time / memcpy's time in that round
};

// Forks; throws RanksFailed.
ThroughputResult measure_throughput(const Options& options, const Case& kase);

std::vector<Summary> summarise(const ThroughputResult& result);

}  // namespace ep::bench
