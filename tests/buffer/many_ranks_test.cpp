// More ranks than any fixed-width scan holds.
#include <vector>

#include <gtest/gtest.h>

#include "support/trip.hpp"

namespace ep::test {
namespace {

// user report A11: above 128 ranks only the first 128 counts were summed, and receivers waited for ever
TEST(ManyRanks, CountsAreSummedOverAllOfThem) {
  constexpr uint32_t kNumRanks = 129;
  std::vector<uint32_t> num_tokens(kNumRanks);
  for (uint32_t r = 0; r < kNumRanks; ++r)
    num_tokens[r] = r % 3;
  run_spec({.num_tokens = num_tokens, .num_experts = 2 * kNumRanks, .num_topk = 4, .hidden = 8});
}

}  // namespace
}  // namespace ep::test
