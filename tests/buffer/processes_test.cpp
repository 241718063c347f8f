// Ranks as processes: windows are shared memory, ranks meet over TCP.  Each test forks its ranks.
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

std::vector<TripSpec> mixed_specs(uint32_t num_ranks) {
  std::vector<TripSpec> specs;
  for (uint32_t i = 0; i < 24; ++i) {
    const Layout layout = kBothLayouts[i % 2];
    TripSpec s{.num_experts = 2 * num_ranks + 1,
               .num_topk = 1 + i % 5,
               .hidden = 128,
               .routing = kAllRoutings[i % 7],
               .seed = i,
               .layout = layout,
               .alignment = layout == Layout::kExpert && i % 3 == 0 ? 8u : 1u,
               .exact = i % 5 != 0,
               .combine_weights = layout == Layout::kExpert && i % 4 == 1,
               .row_weights = i % 3 == 1};
    for (uint32_t r = 0; r < num_ranks; ++r)
      s.num_tokens.push_back((i * 7 + r * 5) % 23);
    if (i % 6 == 4) s.quant = Quant::kFp8Block128Ue8m0;
    if (i % 6 == 5) s.extras = {{DType::kInt16, {3}}};
    specs.push_back(s);
  }
  return specs;
}

TEST(Processes, OneRank) {
  run_specs(mixed_specs(1), {.run = run_processes});
}

TEST(Processes, TwoRanks) {
  for (const AnswerIn answer_in : {AnswerIn::kOrdinary, AnswerIn::kExpertOutput}) {
    run_specs(mixed_specs(2), {.answer_in = answer_in, .run = run_processes});
  }
}

TEST(Processes, FiveRanksWithSeveralWorkers) {
  run_specs(mixed_specs(5),
            {.adapt = [](BufferConfig& config) { config.num_sms = 2; }, .run = run_processes});
}

TEST(Processes, Replays) {
  const Trip trip = make_trip({.num_tokens = {40, 0, 33},
                               .num_experts = 7,
                               .num_topk = 3,
                               .hidden = 256,
                               .layout = Layout::kExpert,
                               .alignment = 4,
                               .combine_weights = true});
  run_processes(3, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for({&trip, 1}));
    const uint32_t rank = buffer.rank();
    const DispatchResult first = buffer.dispatch(dispatch_args(trip, rank));
    for (uint32_t i = 0; i < scaled(50); ++i) {
      DispatchArgs args{.x = to_tensor(trip.tokens[rank].x)};
      args.handle = &first.handle;
      args.async_op = i % 2 == 0;
      const DispatchResult sent = buffer.dispatch(args);
      expect_combined(trip.back[rank], rank,
                      buffer.combine(window_combine_args(buffer, trip, rank, sent.handle)));
      expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
    }
  });
}

// user report Q5: memory goes when the last tensor that views it does
TEST(Processes, OutputsOutliveTheirBuffer) {
  const Trip trip =
      make_trip({.num_tokens = {40, 7}, .num_experts = 4, .num_topk = 2, .hidden = 64});
  run_processes(2, [&](std::shared_ptr<Communicator> group) {
    DispatchResult kept;
    uint32_t rank = 0;
    {
      EPBuffer buffer(group, config_for({&trip, 1}));
      rank = buffer.rank();
      kept = buffer.dispatch(dispatch_args(trip, rank));
    }
    expect_received(trip.sent.ranks[rank], trip.rules, rank, kept);
  });
}

TEST(Processes, AFailingRankIsNamed) {  // of the harness itself: nothing above may pass by accident
  EXPECT_THROW(run_processes(2,
                             [](std::shared_ptr<Communicator> group) {
                               if (group->rank() == 1) throw std::runtime_error("on purpose");
                             }),
               std::runtime_error);
}

}  // namespace
}  // namespace ep::test
