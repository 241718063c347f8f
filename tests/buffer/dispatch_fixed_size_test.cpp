// exact = false: sizes that do not depend on the routing, tails, and what happens to rows past
// max_rows.
#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/compare.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

// user reports I1, I7, I2: dead rows have ids of -1; the valid prefix equals the exact output;
// counts are on the device.
TEST(FixedSize, EveryRouting) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const Routing routing : kAllRoutings) {
      specs.push_back({.num_tokens = {5, 0, 8},
                       .num_experts = 7,
                       .num_topk = 3,
                       .hidden = 24,
                       .routing = routing,
                       .layout = layout,
                       .exact = false,
                       .row_weights = true});
    }
  }
  run_specs(specs);
}

TEST(FixedSize, AlignedExperts) {
  std::vector<TripSpec> specs;
  for (const uint32_t alignment : {2u, 8u, 16u}) {
    for (const Routing routing : {Routing::kUniform, Routing::kMixed, Routing::kNone}) {
      specs.push_back({.num_tokens = {5, 3},
                       .num_experts = 5,
                       .num_topk = 2,
                       .hidden = 24,
                       .routing = routing,
                       .layout = Layout::kExpert,
                       .alignment = alignment,
                       .exact = false});
    }
  }
  run_specs(specs);
}

TEST(FixedSize, MaxTokensShrinksTheOutput) {  // user report D10
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    specs.push_back(
        {.num_tokens = {20, 3}, .num_experts = 4, .num_topk = 2, .hidden = 16, .layout = layout});
    specs.push_back({.num_tokens = {4, 1},
                     .num_experts = 4,
                     .num_topk = 2,
                     .hidden = 16,
                     .layout = layout,
                     .exact = false,
                     .max_tokens = 4});
  }
  run_specs(specs);
}

TEST(FixedSize, ARankWithoutExpertsGetsNoRows) {
  for (const Layout layout : kBothLayouts) {
    run_spec({.num_tokens = {4, 4, 4},
              .num_experts = 5,
              .num_topk = 2,
              .hidden = 16,
              .expert_offsets = {0, 3, 3, 5},
              .layout = layout,
              .exact = false});
  }
}

// user report D8, at every capacity around the demand: kept rows are the first in layout order, the
// true demand is reported, dropped routes add nothing and weights are not renormalised.
TEST(FixedSize, DropsRowsPastMaxRows) {
  for (const Layout layout : kBothLayouts) {
    for (const uint32_t alignment : {1u, 4u}) {
      if (layout == Layout::kRank && alignment != 1) continue;
      std::vector<TripSpec> specs;
      for (const Routing routing : {Routing::kUniform, Routing::kDuplicates, Routing::kMixed}) {
        for (const uint32_t max_rows : {1u, 3u, 6u, 7u, 10u, 24u}) {
          specs.push_back({.num_tokens = {7, 5},
                           .num_experts = 5,
                           .num_topk = 3,
                           .hidden = 16,
                           .routing = routing,
                           .seed = max_rows,
                           .layout = layout,
                           .alignment = alignment,
                           .drop = true,
                           .max_rows = max_rows,
                           .combine_weights = layout == Layout::kExpert,
                           .row_weights = true});
        }
      }
      run_specs(specs);
    }
  }
}

TEST(FixedSize, DropWithScalesAndGlobalIds) {
  for (const Layout layout : kBothLayouts) {
    run_spec({.num_tokens = {7, 5},
              .num_experts = 5,
              .num_topk = 3,
              .hidden = 128,
              .layout = layout,
              .drop = true,
              .global_ids = true,
              .max_rows = 6,
              .quant = Quant::kFp8Block128Ue8m0});
  }
}

TEST(FixedSize, MaxRowsThatSuffice) {
  for (const Layout layout : kBothLayouts) {
    run_spec({.num_tokens = {7, 5},
              .num_experts = 5,
              .num_topk = 3,
              .hidden = 16,
              .layout = layout,
              .max_rows = 36});
  }
}

// Too many rows: nothing is sent, status is set and CapacityError comes on every rank, with the
// same numbers; the next call is exact.
TEST(FixedSize, TooManyRowsRaiseEverywhere) {
  for (const Layout layout : kBothLayouts) {
    const Trip good = make_trip(
        {.num_tokens = {14, 2}, .num_experts = 2, .num_topk = 1, .hidden = 16, .layout = layout});
    const Trip bad = make_trip({.num_tokens = {14, 2},
                                .num_experts = 2,
                                .num_topk = 1,
                                .hidden = 16,
                                .routing = Routing::kOneRank,
                                .layout = layout,
                                .max_rows = 10});
    ASSERT_TRUE(bad.sent.ranks[0].too_many);
    run_threads(2, [&](std::shared_ptr<Communicator> group) {
      EPBuffer buffer(group, config_for({&good, 1}));
      round_trip(buffer, good);
      const DispatchResult result = buffer.dispatch(dispatch_args(bad, buffer.rank()));
      try {
        result.event.synchronize();
        ADD_FAILURE() << "rank " << buffer.rank() << ": no error";
      } catch (const CapacityError& e) {
        EXPECT_EQ(e.rank, 0u);
        EXPECT_EQ(e.needed, 16u);
        EXPECT_EQ(e.available, 10u);
      }
      EXPECT_NE(*static_cast<const int32_t*>(result.status.data), 0);
      buffer.check();  // the fault has been raised, once
      round_trip(buffer, good);
    });
  }
}

TEST(FixedSize, ADeferredFaultComesAtTheNextCall) {
  const Trip good =
      make_trip({.num_tokens = {4, 4}, .num_experts = 2, .num_topk = 1, .hidden = 16});
  const Trip bad = make_trip({.num_tokens = {4, 4},
                              .num_experts = 2,
                              .num_topk = 1,
                              .hidden = 16,
                              .routing = Routing::kOneRank,
                              .max_rows = 3});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for({&good, 1}));
    const DispatchResult unused = buffer.dispatch(dispatch_args(bad, buffer.rank()));
    EXPECT_THROW(buffer.dispatch(dispatch_args(good, buffer.rank())),
                 CapacityError);  // spends no turn
    round_trip(buffer, good);
  });
}

TEST(FixedSize, BadIdsCountAsNone) {  // user report I5: nobody waits for ever, nobody gets the row
  Trip trip = make_trip(
      {.num_tokens = {6, 4}, .num_experts = 5, .num_topk = 2, .hidden = 16, .exact = false});
  std::vector<Tokens> given = trip.tokens;
  const int64_t bad[] = {-2, 5, 6, int64_t{1} << 32, INT64_MIN};
  for (uint64_t t = 0; t < 5; ++t) {
    given[0].idx.set_id(t, t % 2, bad[t]);
    trip.tokens[0].idx.set_id(t, t % 2, -1);
  }
  trip.sent = dispatch(trip.tokens, trip.rules);
  make_answers(trip);
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for({&trip, 1}));
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    args.topk_idx = to_tensor(given[rank].idx);
    const DispatchResult sent = buffer.dispatch(args);
    if (rank == 0) {
      EXPECT_THROW(sent.event.synchronize(), InvalidArgument);
      EXPECT_NE(*static_cast<const int32_t*>(sent.status.data), 0);
      *static_cast<int32_t*>(sent.status.data) = 0;  // the rest is as if nothing were wrong
    }
    expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
    expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
  });
}

TEST(FixedSize, MaxRowsIsTheContracts) {
  const Trip trip = make_trip({.num_tokens = {3, 3, 3},
                               .num_experts = 4,
                               .num_topk = 2,
                               .hidden = 16,
                               .expert_offsets = {0, 3, 3, 4}});
  run_threads(3, [&](std::shared_ptr<Communicator> group) {
    const EPBuffer buffer(group, config_for({&trip, 1}));
    for (const Layout layout : kBothLayouts) {
      for (const uint32_t max_tokens : {1u, 2u, 3u}) {
        for (const uint32_t alignment : {1u, 4u, 128u}) {
          Rules rules = trip.rules;
          rules.layout = layout;
          rules.max_tokens = max_tokens;
          rules.alignment = alignment;
          EXPECT_EQ(buffer.max_rows(layout, max_tokens, alignment),
                    rules.fixed_rows(buffer.rank()));
        }
      }
    }
  });
}

}  // namespace
}  // namespace ep::test
