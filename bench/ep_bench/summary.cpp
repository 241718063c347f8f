// What the rounds of a case say, contender by contender.
#include <algorithm>

#include "bench/ep_bench/throughput.hpp"

namespace ep::bench {
namespace {

constexpr double kBytesPerUsPerGbPerS = 1e3;

std::vector<double> slowest_ranks(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> slowest;
  for (const std::vector<double>& ranks : rounds) {
    slowest.push_back(*std::max_element(ranks.begin(), ranks.end()));
  }
  return slowest;
}

// Per round, the time memcpy took for the same bytes; empty where it did not run.
std::vector<double> memcpy_times(const ThroughputResult& result, Contender contender) {
  const auto times_of = [&](Contender wanted) -> std::vector<double> {
    const auto it = std::find(result.contenders.begin(), result.contenders.end(), wanted);
    if (it == result.contenders.end()) return {};
    return slowest_ranks(result.times[static_cast<size_t>(it - result.contenders.begin())]);
  };
  const std::vector<double> in = times_of(Contender::kMemcpy);
  const std::vector<double> out = result.kase.is_quantised() ? times_of(Contender::kMemcpyOut) : in;
  if (!moves_combine_rows(contender)) return in;
  if (!moves_dispatch_rows(contender)) return out;
  std::vector<double> both = in;
  for (size_t i = 0; i < both.size(); ++i)
    both[i] += out[i];
  return both;
}

std::optional<double> median_ratio(const std::vector<double>& times,
                                   const std::vector<double>& bounds) {
  if (bounds.empty()) return std::nullopt;
  std::vector<double> ratios;
  for (size_t i = 0; i < times.size(); ++i)
    ratios.push_back(times[i] / bounds[i]);
  return median(ratios);
}

}  // namespace

std::vector<Summary> summarise(const ThroughputResult& result) {
  std::vector<Summary> summaries;
  for (size_t c = 0; c < result.contenders.size(); ++c) {
    const Contender contender = result.contenders[c];
    Summary summary{.contender = contender,
                    .num_bytes = 0,
                    .us = {},
                    .fastest_rank_us = 0.0,
                    .slowest_rank_us = 0.0,
                    .gb_per_s = 0.0,
                    .of_memcpy = {}};
    std::vector<double> of_rank;
    for (uint32_t rank = 0; rank < result.kase.num_ranks; ++rank) {
      summary.num_bytes += bytes_of(contender, result.kase, result.num_rows[rank]);
      std::vector<double> own;
      for (const std::vector<double>& round : result.times[c])
        own.push_back(round[rank]);
      of_rank.push_back(median(own));
    }
    const auto [fastest, slowest] = std::minmax_element(of_rank.begin(), of_rank.end());
    summary.fastest_rank_us = *fastest;
    summary.slowest_rank_us = *slowest;
    const std::vector<double> times = slowest_ranks(result.times[c]);
    summary.us = spread_of(times);
    summary.gb_per_s =
        static_cast<double>(summary.num_bytes) / (summary.us.median * kBytesPerUsPerGbPerS);
    // Where nothing is copied memcpy bounds nothing.
    if (summary.num_bytes > 0) {
      summary.of_memcpy = median_ratio(times, memcpy_times(result, contender));
    }
    summaries.push_back(summary);
  }
  return summaries;
}

}  // namespace ep::bench
