#include "bench/ep_bench/workload.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>
#include <utility>

namespace ep::bench {
namespace {

// The finaliser of splitmix64 (Vigna, public domain).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

enum class Stream : uint64_t { kRouting, kWeights, kTokens, kAnswers, kPopularity };

// Its own sequence for every (stream, rank, token, part).
class Random {
 public:
  Random(uint64_t seed, Stream stream, uint64_t rank = 0, uint64_t token = 0, uint64_t part = 0)
      : state_(mix(seed + kStep * static_cast<uint64_t>(stream))) {
    for (const uint64_t key : {rank, token, part})
      state_ = mix(state_ + kStep * (key + 1));
  }

  uint64_t next() { return mix(state_ += kStep); }
  // In (0, 1].
  double uniform() { return (static_cast<double>(next() >> 11) + 1.0) * 0x1p-53; }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(((next() >> 32) * n) >> 32); }
  // Of the standard normal distribution; the second value of a pair is not used.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
  uint64_t state_;
};

void choose_uniformly(Random& random, uint32_t num_experts, std::span<int64_t> chosen) {
  for (auto slot = chosen.begin(); slot != chosen.end();) {
    *slot = random.below(num_experts);
    if (std::find(chosen.begin(), slot, *slot) == slot) ++slot;
  }
}

// The largest of log(popularity) + Gumbel noise are a draw without replacement by popularity.
void choose_by_popularity(Random& random,
                          std::span<const double> log_popularity,
                          std::span<int64_t> chosen) {
  std::vector<std::pair<double, int64_t>> keys;
  for (const double log_p : log_popularity) {
    keys.emplace_back(log_p - std::log(-std::log(random.uniform() * (1.0 - 0x1p-50))),
                      static_cast<int64_t>(keys.size()));
  }
  const auto end = keys.begin() + static_cast<ptrdiff_t>(chosen.size());
  std::partial_sort(keys.begin(), end, keys.end(), std::greater<>());
  std::transform(keys.begin(), end, chosen.begin(), [](const auto& key) { return key.second; });
}

// Sign, mantissa and the low exponent bits are random; the rest keeps the numbers ordinary.
void write_numbers(const Case& kase, Random random, std::byte* row) {
  constexpr uint64_t kFree = 0x83FF83FF83FF83FFu, kSet = 0x3C003C003C003C00u;
  constexpr uint64_t kLow = 0x0000FFFF0000FFFFu;  // of two floats: mantissa only
  const bool is_fp32 = kase.dtype == DType::kFloat32;
  const uint64_t free = is_fp32 ? kFree | kLow : kFree, set = is_fp32 ? kSet & ~kLow : kSet;
  const uint64_t row_bytes = kase.combine_row_bytes();
  for (uint64_t at = 0; at < row_bytes; at += sizeof(uint64_t)) {
    const uint64_t bits = (random.next() & free) | set;
    std::memcpy(row + at, &bits, sizeof bits);
  }
}

}  // namespace

std::vector<int64_t> make_routing(const Case& kase, uint32_t rank) {
  std::vector<double> log_popularity;
  if (kase.skew.sigma > 0.0) {
    Random random(kase.seed, Stream::kPopularity);
    for (uint32_t e = 0; e < kase.num_experts; ++e) {
      log_popularity.push_back(kase.skew.sigma * random.normal());
    }
  }
  const uint32_t num_choices = kase.skew.one_rank ? kase.first_expert(1) : kase.num_experts;
  std::vector<int64_t> routing(uint64_t{kase.num_tokens} * kase.num_topk);
  for (uint32_t token = 0; token < kase.num_tokens; ++token) {
    Random random(kase.seed, Stream::kRouting, rank, token);
    const auto chosen = std::span(routing).subspan(uint64_t{token} * kase.num_topk, kase.num_topk);
    if (log_popularity.empty()) {
      choose_uniformly(random, num_choices, chosen);
    } else {
      choose_by_popularity(random, log_popularity, chosen);
    }
  }
  return routing;
}

std::vector<float> make_weights(const Case& kase, uint32_t rank) {
  std::vector<float> weights(uint64_t{kase.num_tokens} * kase.num_topk);
  Random random(kase.seed, Stream::kWeights, rank);
  for (float& weight : weights)
    weight = static_cast<float>(random.uniform());
  return weights;
}

void write_token(const Case& kase, uint32_t rank, uint32_t token, std::byte* row) {
  write_numbers(kase, Random(kase.seed, Stream::kTokens, rank, token), row);
}

void write_answer(const Case& kase, uint32_t rank, uint32_t token, uint32_t part, std::byte* row) {
  write_numbers(kase, Random(kase.seed, Stream::kAnswers, rank, token, part), row);
}

RowMap map_rows(const Case& kase, const std::vector<std::vector<int64_t>>& routing, uint32_t rank) {
  const uint32_t first = kase.first_expert(rank), end = kase.first_expert(rank + 1);
  std::vector<std::vector<Origin>> of_expert(end - first);
  RowMap map;
  map.rows_per_source.assign(kase.num_ranks, 0);
  for (uint32_t source = 0; source < kase.num_ranks; ++source) {
    for (uint32_t token = 0; token < kase.num_tokens; ++token) {
      bool is_here = false;
      for (uint32_t slot = 0; slot < kase.num_topk; ++slot) {
        const int64_t expert = routing[source][uint64_t{token} * kase.num_topk + slot];
        if (expert < first || expert >= end) continue;
        of_expert[static_cast<size_t>(expert - first)].push_back({source, token, slot});
        is_here = true;
      }
      if (!is_here) continue;
      ++map.rows_per_source[source];
      if (kase.layout == Layout::kRank) map.rows.push_back({source, token, rank});
    }
  }
  for (const std::vector<Origin>& rows : of_expert) {
    map.routes_per_expert.push_back(static_cast<uint32_t>(rows.size()));
    if (kase.layout == Layout::kExpert) map.rows.insert(map.rows.end(), rows.begin(), rows.end());
  }
  return map;
}

}  // namespace ep::bench
