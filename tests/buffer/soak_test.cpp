// Many rounds without barriers between ranks: every rank dawdles at its own moments, picks its own
// number of workers and its own mix of synchronous and asynchronous calls.  Rows must not change by
// a bit.
#include <deque>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

// Busy for up to some tens of microseconds, or gives the core away, or neither.
void dawdle(Random& random) {
  switch (below(random, 4)) {
    case 0: {
      volatile uint32_t work = 0;
      for (uint32_t n = below(random, 20000); n > 0; --n)
        work = work + n;
      break;
    }
    case 1:
      for (uint32_t n = below(random, 30); n > 0; --n)
        std::this_thread::yield();
      break;
    default:
      break;
  }
}

// T cycles, also by rank: user report B4.
std::vector<Trip> cycling_trips(uint32_t num_ranks, bool fixed_sizes) {
  constexpr uint32_t kCycle[] = {1, 2, 4, 0, 8, 16, 31, 64, 3};
  std::vector<TripSpec> specs;
  for (uint32_t i = 0; i < std::size(kCycle); ++i) {
    const Layout layout = kBothLayouts[i % 2];
    TripSpec s{.num_experts = num_ranks * 3,
               .num_topk = 4,
               .hidden = 128,
               .routing = kAllRoutings[i % std::size(kAllRoutings)],
               .seed = i,
               .layout = layout,
               .alignment = layout == Layout::kExpert ? 4u : 1u,
               .combine_weights = layout == Layout::kExpert,
               .row_weights = i % 3 == 0};
    for (uint32_t r = 0; r < num_ranks; ++r)
      s.num_tokens.push_back(kCycle[(i + r) % std::size(kCycle)]);
    if (i % 4 == 2) s.quant = Quant::kFp8Block128;
    s.exact = !fixed_sizes || i % 2 == 0;
    specs.push_back(s);
  }
  return make_trips(specs);
}

// Calls whose results have not been looked at.
struct Pending {
  const Trip* trip;
  DispatchResult sent;
  CombineResult back;
};

void look_at(const Pending& p, uint32_t rank) {
  SCOPED_TRACE(p.trip->spec.name());
  expect_combined(p.trip->back[rank], rank, p.back);
  expect_received(p.trip->sent.ranks[rank], p.trip->rules, rank, p.sent);
}

void soak(EPBuffer& buffer, const std::vector<Trip>& trips, uint32_t num_rounds) {
  const uint32_t rank = buffer.rank();
  Random common = stream_of(99, 0, 0), mine = stream_of(99, rank, 1);
  std::deque<Pending> pending;
  for (uint32_t round = 0; round < num_rounds && !::testing::Test::HasFailure(); ++round) {
    const Trip& trip = trips[below(common, trips.size())];
    DispatchArgs dispatch = dispatch_args(trip, rank);
    dispatch.async_op = chance(mine, 2);
    dispatch.num_sms = 1 + below(mine, 4);
    dawdle(mine);
    Pending p{&trip, buffer.dispatch(dispatch), {}};
    dispatch = {};  // freed while it may be in flight: user report G4
    dawdle(mine);
    CombineArgs combine = chance(mine, 2) ? window_combine_args(buffer, trip, rank, p.sent.handle)
                                          : combine_args(trip, rank, p.sent.handle);
    combine.async_op = chance(mine, 2);
    combine.num_sms = 1 + below(mine, 4);
    p.back = buffer.combine(combine);
    combine = {};
    pending.push_back(std::move(p));
    if (chance(mine, 3)) dawdle(mine);
    while (pending.size() > 2 || (!pending.empty() && chance(mine, 2))) {
      look_at(pending.front(), rank);
      pending.pop_front();
    }
  }
  for (const Pending& p : pending)
    look_at(p, rank);
}

void run_soak(uint32_t num_ranks, uint32_t num_rounds, bool fixed_sizes) {
  const std::vector<Trip> trips = cycling_trips(num_ranks, fixed_sizes);
  BufferConfig config = config_for(trips);
  run_threads(num_ranks, [&](std::shared_ptr<Communicator> group) {
    BufferConfig own = config;
    own.num_sms = 1 + group->rank() % 4;
    own.outputs = group->rank() % 2 == 0 ? Outputs::kAuto : Outputs::kCaller;
    EPBuffer buffer(group, own);
    soak(buffer, trips, num_rounds);
  });
}

TEST(Soak, TwoRanks) {
  run_soak(2, scaled(2000), false);
}  // user report G3
TEST(Soak, FourRanks) {
  run_soak(4, scaled(1000), true);
}
TEST(Soak, SevenRanks) {
  run_soak(7, scaled(200), true);
}

// user report T2: the same bytes each time, whatever the timing.
TEST(Soak, OneRoutingManyTimes) {
  const Trip trip = make_trip({.num_tokens = {64, 64, 1},
                               .num_experts = 9,
                               .num_topk = 4,
                               .hidden = 64,
                               .routing = Routing::kSkewed,
                               .layout = Layout::kExpert});
  run_threads(3, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for({&trip, 1}));
    soak(buffer, {trip}, scaled(300));
  });
}

// Dispatches without a combine, dropped handles and dropped events are legal and leak nothing: user
// report N5.
TEST(Soak, DroppedResultsLeakNothing) {
  const std::vector<Trip> trips = cycling_trips(2, true);
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for(trips));
    const uint32_t rank = buffer.rank();
    Random mine = stream_of(7, rank, 0);
    uint64_t peak = 0;
    for (uint32_t round = 0; round < (3 + scaled(20)) * trips.size(); ++round) {
      DispatchArgs args = dispatch_args(trips[round % trips.size()], rank);
      args.async_op = chance(mine, 2);
      const DispatchResult dropped = buffer.dispatch(args);
      if (chance(mine, 4)) buffer.expert_output(dropped.handle);
      if (round == 2 * trips.size()) peak = buffer.memory().peak;
    }
    round_trip(buffer, trips[0]);
    EXPECT_LE(buffer.memory().peak, 2 * peak);
  });
}

}  // namespace
}  // namespace ep::test
