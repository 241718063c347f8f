// Seeded routings: the ones real routers make, and the ones that break libraries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "support/oracle.hpp"

namespace ep::test {

enum class Routing : uint8_t {
  kUniform,     // distinct experts, all alike
  kSkewed,      // distinct experts, log-normal popularity: user report T3
  kOneRank,     // everything to the rank that owns most experts: user reports D4, G1
  kNone,        // all -1: nobody receives anything, user reports C4, C7
  kMixed,       // a third of the slots and a quarter of the tokens are -1: user reports I3, I4
  kDuplicates,  // few experts, drawn with replacement: user report T1
  kOneExpert,   // one slot per token names the same expert: user report G7
};
inline constexpr Routing kAllRoutings[] = {
    Routing::kUniform, Routing::kSkewed,     Routing::kOneRank,  Routing::kNone,
    Routing::kMixed,   Routing::kDuplicates, Routing::kOneExpert};

using Random = std::mt19937_64;

inline uint32_t below(Random& random, uint64_t bound) {
  return static_cast<uint32_t>(random() % bound);
}
inline bool chance(Random& random, uint32_t one_in) {
  return random() % one_in == 0;
}

// A stream of random numbers of its own for each (seed, rank, purpose).
inline Random stream_of(uint64_t seed, uint64_t rank, uint64_t purpose) {
  std::seed_seq mixed{seed & 0xFFFFFFFFu, seed >> 32, rank, purpose};
  return Random(mixed);
}

struct RoutingShape {
  Routing routing = Routing::kUniform;
  uint64_t seed = 0;
  uint32_t num_topk = 0;
  std::vector<uint32_t> expert_offsets{};
  DType dtype = DType::kInt64;
};

// Popularity of the experts, the same on all ranks.
inline std::vector<double> popularity(const RoutingShape& shape) {
  Random random = stream_of(shape.seed, 0, 101);
  std::normal_distribution<double> normal(0.0, 2.0);
  std::vector<double> weights(shape.expert_offsets.back(), 1.0);
  if (shape.routing == Routing::kSkewed) {
    for (double& w : weights)
      w = std::exp(normal(random));
  }
  return weights;
}

// K of the experts in [first, end), distinct while there are enough.
inline std::vector<int64_t> draw_distinct(
    Random& random, std::vector<double> weights, uint32_t first, uint32_t end, uint32_t num_topk) {
  std::vector<int64_t> ids;
  for (uint32_t k = 0; k < num_topk; ++k) {
    if (k >= end - first) {
      ids.push_back(first + below(random, end - first));
      continue;
    }
    std::discrete_distribution<uint32_t> pick(weights.begin() + first, weights.begin() + end);
    const uint32_t expert = first + pick(random);
    weights[expert] = 0.0;
    ids.push_back(expert);
  }
  return ids;
}

inline Table make_ids(const RoutingShape& shape, uint32_t rank, uint64_t num_tokens) {
  const std::vector<uint32_t>& offsets = shape.expert_offsets;
  const uint32_t num_experts = offsets.back(), num_topk = shape.num_topk;
  Random random = stream_of(shape.seed, rank, 1), common = stream_of(shape.seed, 0, 2);
  const uint32_t favourite = below(common, num_experts), few = std::min(num_experts, 3u);
  uint32_t largest = 0;
  for (uint32_t r = 0; r + 1 < offsets.size(); ++r) {
    if (offsets[r + 1] - offsets[r] > offsets[largest + 1] - offsets[largest]) largest = r;
  }
  const bool to_one = shape.routing == Routing::kOneRank;
  const std::vector<double> weights = popularity(shape);
  Table ids(shape.dtype, num_tokens, num_topk, 0xFF);
  for (uint64_t t = 0; t < num_tokens; ++t) {
    if (shape.routing == Routing::kNone || (shape.routing == Routing::kMixed && chance(random, 4)))
      continue;
    const std::vector<int64_t> drawn =
        draw_distinct(random, weights, to_one ? offsets[largest] : 0,
                      to_one ? offsets[largest + 1] : num_experts, num_topk);
    const uint32_t only = below(random, num_topk);
    for (uint32_t k = 0; k < num_topk; ++k) {
      int64_t id = drawn[k];
      if (shape.routing == Routing::kDuplicates)
        id = (favourite + below(random, few)) % num_experts;
      if (shape.routing == Routing::kOneExpert) id = k == only ? int64_t{favourite} : -1;
      if (shape.routing == Routing::kMixed && chance(random, 3)) id = -1;
      ids.set_id(t, k, id);
    }
  }
  return ids;
}

}  // namespace ep::test
