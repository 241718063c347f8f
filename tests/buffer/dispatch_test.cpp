// Dispatch with exact sizes: rows, order, metadata and counts against the oracle, to the bit.
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/compare.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

TEST(Dispatch, EveryRoutingInBothLayouts) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const Routing routing : kAllRoutings) {
      specs.push_back({.num_tokens = {9, 4, 13},
                       .num_experts = 7,
                       .num_topk = 4,
                       .hidden = 64,
                       .routing = routing,
                       .layout = layout});
    }
  }
  run_specs(specs);
}

TEST(Dispatch, OneRankIsNoSpecialCase) {  // user report H7
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    specs.push_back(
        {.num_tokens = {11}, .num_experts = 5, .num_topk = 3, .hidden = 40, .layout = layout});
    specs.push_back(
        {.num_tokens = {0}, .num_experts = 5, .num_topk = 3, .hidden = 40, .layout = layout});
  }
  run_specs(specs);
}

// user reports C1, C3, C7: the idle rank rotates, then all idle
TEST(Dispatch, RanksWithoutTokens) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const std::vector<uint32_t>& t :
         {std::vector<uint32_t>{0, 2, 3}, {2, 0, 3}, {2, 3, 0}, {0, 0, 0}, {1, 0, 0}}) {
      specs.push_back(
          {.num_tokens = t, .num_experts = 6, .num_topk = 2, .hidden = 16, .layout = layout});
    }
  }
  run_specs(specs);
}

TEST(Dispatch, EmptyTensorsMayHaveNoMemory) {  // user report C1: topk_idx of shape [0,K], pointer 0
  const Trip trip = make_trip(
      {.num_tokens = {0, 2}, .num_experts = 4, .num_topk = 2, .hidden = 16, .row_weights = true});
  const BufferConfig config = config_for({&trip, 1});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    if (rank == 0) args.x.data = args.topk_idx.data = args.topk_weights.data = nullptr;
    const DispatchResult sent = buffer.dispatch(args);
    expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
    expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
  });
}

// user reports C4, C5: ranks 1 and 2 own experts and get nothing
TEST(Dispatch, NobodySendsToARank) {
  std::vector<TripSpec> specs;
  for (uint32_t round = 0; round < scaled(20); ++round) {
    specs.push_back({.num_tokens = {5, 5, 5},
                     .num_experts = 6,
                     .num_topk = 2,
                     .hidden = 16,
                     .expert_offsets = {0, 4, 5, 6},
                     .routing = Routing::kOneRank,
                     .seed = round,
                     .layout = kBothLayouts[round % 2]});
  }
  run_specs(specs);
}

TEST(Dispatch, AlignedExperts) {  // user report H4: true counts, aligned offsets, defined gaps (I6)
  std::vector<TripSpec> specs;
  for (const uint32_t alignment : {1u, 2u, 4u, 8u, 128u}) {
    specs.push_back({.num_tokens = {6, 9},
                     .num_experts = 8,
                     .num_topk = 3,
                     .hidden = 16,
                     .routing = alignment == 4 ? Routing::kMixed : Routing::kSkewed,
                     .layout = Layout::kExpert,
                     .alignment = alignment});
  }
  specs.push_back({.num_tokens = {6, 9},
                   .num_experts = 8,
                   .num_topk = 3,
                   .hidden = 16,
                   .routing = Routing::kNone,
                   .layout = Layout::kExpert,
                   .alignment = 8});
  run_specs(specs);
}

// user reports R3, H8: ids come back in the dtype they were given in
TEST(Dispatch, IdDtypesAndForms) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      for (const bool global : {false, true}) {
        specs.push_back({.num_tokens = {7, 3, 8},
                         .num_experts = 10,
                         .num_topk = 3,
                         .hidden = 24,
                         .routing = Routing::kMixed,
                         .idx_dtype = dtype,
                         .layout = layout,
                         .global_ids = global});
      }
    }
  }
  run_specs(specs);
}

TEST(Dispatch, WeightDtypes) {  // user report R4: bf16 weights are converted, never read as fp32
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const std::optional<DType> dtype :
         {std::optional<DType>(DType::kFloat32), std::optional<DType>(DType::kBFloat16),
          std::optional<DType>(DType::kFloat16), std::optional<DType>()}) {
      specs.push_back({.num_tokens = {7, 3},
                       .num_experts = 6,
                       .num_topk = 3,
                       .hidden = 24,
                       .routing = Routing::kMixed,
                       .weights_dtype = dtype,
                       .layout = layout});
    }
  }
  run_specs(specs);
}

TEST(Dispatch, StridedInputs) {  // user report R1
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      specs.push_back({.num_tokens = {7, 3},
                       .num_experts = 6,
                       .num_topk = 3,
                       .hidden = 24,
                       .x_dtype = dtype,
                       .layout = layout,
                       .answer_dtype = dtype,
                       .strided = true});
    }
  }
  run_specs(specs);
}

// user report R1: expand() over rows; size-1 dims with any stride
TEST(Dispatch, BroadcastRowsAndOddStridesOfOne) {
  Trip trip = make_trip({.num_tokens = {4, 1}, .num_experts = 4, .num_topk = 1, .hidden = 16});
  for (uint64_t t = 1; t < 4; ++t)
    std::copy_n(trip.tokens[0].x.row(0), 32, trip.tokens[0].x.row(t));
  trip.sent = dispatch(trip.tokens, trip.rules);
  const BufferConfig config = config_for({&trip, 1});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    args.x.strides[0] = rank == 0 ? 0 : 12345;
    args.topk_idx.strides[1] = 777;
    expect_received(trip.sent.ranks[rank], trip.rules, rank, buffer.dispatch(args));
  });
}

TEST(Dispatch, SmallestAndOddTokenCounts) {  // user reports D4, A13, D9
  std::vector<TripSpec> specs;
  for (const uint32_t t : {1u, 2u, 31u, 32u, 33u}) {
    specs.push_back({.num_tokens = {t, t},
                     .num_experts = 4,
                     .num_topk = 2,
                     .hidden = 8,
                     .routing = Routing::kOneRank});
  }
  specs.push_back({.num_tokens = {4095, 4095}, .num_experts = 4, .num_topk = 2, .hidden = 8});
  specs.push_back({.num_tokens = {4095, 4094},
                   .num_experts = 4,
                   .num_topk = 2,
                   .hidden = 8,
                   .layout = Layout::kExpert});
  run_specs(specs);
  run_spec({.num_tokens = {5, 19, 1}, .num_experts = 6, .num_topk = 2, .hidden = 8});
}

TEST(Dispatch, ManyTokens) {  // user report M2: more than 65,536 tokens
  run_spec({.num_tokens = {scaled(65537), 3}, .num_experts = 4, .num_topk = 2, .hidden = 8});
}

TEST(Dispatch, OutputsInTheCallersMemory) {
  for (const Outputs outputs : {Outputs::kCaller, Outputs::kWindow}) {
    for (const Layout layout : kBothLayouts) {
      run_specs({{.num_tokens = {6, 9},
                  .num_experts = 8,
                  .num_topk = 3,
                  .hidden = 16,
                  .routing = Routing::kMixed,
                  .layout = layout,
                  .alignment = layout == Layout::kExpert ? 4u : 1u}},
                {.adapt = [&](BufferConfig& config) { config.outputs = outputs; }});
    }
  }
}

// What one rank says for one call goes before its buffer's policy, which stays what it was.
TEST(Dispatch, OutputsOfOneCall) {
  for (const Outputs policy : {Outputs::kCaller, Outputs::kWindow}) {
    for (const bool exact : {true, false}) {
      const Trip trip =
          make_trip({.num_tokens = {6, 9}, .num_experts = 8, .num_topk = 3, .hidden = 16});
      const bool says_window = policy == Outputs::kCaller;
      run_threads(2, [&](std::shared_ptr<Communicator> group) {
        BufferConfig config = config_for({&trip, 1});
        config.outputs = policy;
        EPBuffer buffer(group, config);
        const uint32_t rank = buffer.rank();
        DispatchArgs args = dispatch_args(trip, rank);
        args.exact = exact;
        for (const uint64_t before : {0u, 2u}) {
          if (rank == 0) args.outputs = says_window ? Outputs::kWindow : Outputs::kCaller;
          const DispatchResult said = buffer.dispatch(args);
          said.event.synchronize();
          EXPECT_EQ(buffer.memory().used != 0, (rank == 0) == says_window);
          args.outputs.reset();
          const DispatchResult plain = buffer.dispatch(args);
          const uint64_t more = before / 2 + 1, all = before + 2;
          const Stats stats = buffer.stats();
          EXPECT_EQ(stats.window_outputs, rank == 0 ? more : (says_window ? 0 : all));
          EXPECT_EQ(stats.caller_outputs, rank == 0 ? more : (says_window ? all : 0));
        }
      });
    }
  }
}

TEST(Dispatch, CallersOutputsSurviveLaterCalls) {
  const std::vector<Trip> trips = make_trips(
      {{.num_tokens = {6, 9}, .num_experts = 8, .num_topk = 3, .hidden = 16},
       {.num_tokens = {9, 6}, .num_experts = 8, .num_topk = 3, .hidden = 16, .seed = 2}});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    BufferConfig config = config_for(trips);
    config.outputs = Outputs::kWindow;
    EPBuffer buffer(group, config);
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trips[0], rank);
    args.outputs = Outputs::kCaller;
    const DispatchResult kept = buffer.dispatch(args);
    EXPECT_EQ(buffer.memory().used, 0u);
    for (uint32_t i = 0; i < 4; ++i) {  // in the memory where the rows of `kept` came to
      const DispatchResult later = buffer.dispatch(dispatch_args(trips[1], rank));
      group->all_gather({}, 30.0);
      std::memset(later.x.data, 0x5A, static_cast<size_t>(later.x.shape[0]) * 32);
      group->all_gather({}, 30.0);
    }
    expect_received(trips[0].sent.ranks[rank], trips[0].rules, rank, kept);
    expect_combined(trips[0].back[rank], rank,
                    buffer.combine(combine_args(trips[0], rank, kept.handle)));
  });
}

TEST(Dispatch, MoreWorkersThanTokens) {  // user reports A6, G9: extreme numbers of workers
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    specs.push_back(
        {.num_tokens = {3, 1}, .num_experts = 8, .num_topk = 8, .hidden = 16, .layout = layout});
    specs.push_back(
        {.num_tokens = {17, 40}, .num_experts = 8, .num_topk = 8, .hidden = 16, .layout = layout});
  }
  for (const uint32_t num_sms : {1u, 2u, 3u, 7u, 64u}) {
    run_specs(specs, {.adapt = [&](BufferConfig& config) { config.num_sms = num_sms; }});
  }
}

TEST(Dispatch, ABoundOnTokensChangesNothingElse) {  // user report D10
  run_specs({{.num_tokens = {3, 1}, .num_experts = 8, .num_topk = 2, .hidden = 16, .max_tokens = 4},
             {.num_tokens = {9, 8}, .num_experts = 8, .num_topk = 2, .hidden = 16}});
}

TEST(Dispatch, RoutingLayoutCountsOnce) {
  const Trip trip = make_trip({.num_tokens = {30, 12},
                               .num_experts = 9,
                               .num_topk = 4,
                               .hidden = 8,
                               .routing = Routing::kDuplicates,
                               .idx_dtype = DType::kInt32});
  const BufferConfig config = config_for({&trip, 1});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const EPBuffer buffer(group, config);
    const uint32_t rank = buffer.rank();
    const RoutingLayout got = buffer.routing_layout(dispatch_args(trip, rank).topk_idx);
    const Tokens& t = trip.tokens[rank];
    std::vector<uint32_t> per_rank(2), per_expert(9);
    Table is_in(DType::kBool, t.num_tokens, 2);
    for (uint64_t i = 0; i < t.num_tokens; ++i) {
      for (uint32_t k = 0; k < 4; ++k) {
        const int64_t expert = t.idx.id(i, k);
        if (expert < 0) continue;
        ++per_expert[static_cast<uint64_t>(expert)];
        is_in.row(i)[expert < trip.rules.expert_offsets[1] ? 0 : 1] = 1;
      }
      for (uint32_t r = 0; r < 2; ++r)
        per_rank[r] += is_in.row(i)[r];
    }
    EXPECT_EQ(difference({rank, "tokens_per_rank"}, got.tokens_per_rank, per_rank), "");
    EXPECT_EQ(difference({rank, "tokens_per_expert"}, got.tokens_per_expert, per_expert), "");
    EXPECT_EQ(difference({rank, "is_token_in_rank"}, got.is_token_in_rank, is_in), "");
  });
}

TEST(Dispatch, TwoBuffersAlternate) {  // user report F7
  const Trip a = make_trip({.num_tokens = {6, 9}, .num_experts = 8, .num_topk = 3, .hidden = 16});
  const Trip b =
      make_trip({.num_tokens = {2, 7}, .num_experts = 4, .num_topk = 1, .hidden = 64, .seed = 2});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer first(group, config_for({&a, 1})), second(group, config_for({&b, 1}));
    for (uint32_t round = 0; round < 3; ++round) {
      round_trip(first, a);
      round_trip(second, b);
    }
  });
}

}  // namespace
}  // namespace ep::test
