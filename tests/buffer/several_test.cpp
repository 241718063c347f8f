// Several groups, buffers, ranks and threads in one process: nothing of one reaches another.
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3;

// Shapes that share no size, so that a number of one buffer is wrong in the other.
Trip narrow_trip(uint64_t seed) {
  return make_trip({.num_tokens = {7, 0, 12},
                    .num_experts = 5,
                    .num_topk = 2,
                    .hidden = 24,
                    .seed = seed,
                    .layout = Layout::kExpert,
                    .alignment = 4,
                    .combine_weights = true});
}

Trip wide_trip(uint64_t seed) {
  return make_trip({.num_tokens = {3, 31, 16},
                    .num_experts = 9,
                    .num_topk = 4,
                    .hidden = 256,
                    .seed = seed,
                    .x_dtype = DType::kFloat32,
                    .quant = Quant::kFp8Block128,
                    .row_weights = true});
}

// Runs all at once; the first failure is thrown when all have ended.
void at_once(const std::vector<std::function<void()>>& jobs) {
  std::vector<std::future<void>> running;
  for (const auto& job : jobs)
    running.push_back(std::async(std::launch::async, job));
  for (const auto& job : running)
    job.wait();
  for (auto& job : running)
    job.get();
}

void rounds(EPBuffer& buffer, const Trip& trip, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i)
    round_trip(buffer, trip, i % 2 == 0 ? AnswerIn::kOrdinary : AnswerIn::kExpertOutput);
}

// One rank with two buffers: a thread for each, then both from one thread in turn.
void use_two_buffers(std::shared_ptr<Communicator> group, uint64_t seed) {
  const Trip narrow = narrow_trip(seed), wide = wide_trip(seed);
  EPBuffer first(group, config_for({&narrow, 1}));
  EPBuffer second(group, config_for({&wide, 1}));
  at_once({[&] { rounds(first, narrow, scaled(40)); }, [&] { rounds(second, wide, scaled(40)); }});
  for (uint32_t i = 0; i < scaled(20); ++i) {
    const DispatchResult a = first.dispatch(dispatch_args(narrow, group->rank()));
    const DispatchResult b = second.dispatch(dispatch_args(wide, group->rank()));
    const CombineResult home_b = second.combine(combine_args(wide, group->rank(), b.handle));
    const CombineResult home_a = first.combine(combine_args(narrow, group->rank(), a.handle));
    expect_received(narrow.sent.ranks[group->rank()], narrow.rules, group->rank(), a);
    expect_received(wide.sent.ranks[group->rank()], wide.rules, group->rank(), b);
    expect_combined(narrow.back[group->rank()], group->rank(), home_a);
    expect_combined(wide.back[group->rank()], group->rank(), home_b);
  }
  EXPECT_EQ(first.stats().faults + second.stats().faults, 0u);
}

TEST(Several, TwoGroupsOfThreeRanksWithTwoBuffersEach) {
  const Watchdog watchdog;
  std::vector<std::function<void()>> groups;
  for (const uint64_t seed : {1u, 2u}) {
    groups.push_back([seed] {
      run_threads(kRanks, [seed](const auto& group) { use_two_buffers(group, seed); });
    });
  }
  at_once(groups);
}

// Ranks that meet at an address may be threads of one process too, beside another such group.
TEST(Several, GroupsThatMeetAtAddresses) {
  const Watchdog watchdog;
  std::vector<std::function<void()>> ranks;
  for (const uint64_t seed : {3u, 4u}) {
    const std::string address = "127.0.0.1:" + std::to_string(free_port());
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      ranks.push_back(
          [=] { use_two_buffers(Communicator::tcp(address, rank, kRanks, kBoundS), seed); });
  }
  at_once(ranks);
}

// "Any thread may call": here three at once, all the same call, so that any order is the same order.
TEST(Several, ThreadsThatShareABuffer) {
  const Trip trip = wide_trip(5);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const auto calls = [&] {
      for (uint32_t i = 0; i < scaled(30); ++i) {
        const DispatchResult sent = buffer.dispatch(dispatch_args(trip, buffer.rank()));
        expect_received(trip.sent.ranks[buffer.rank()], trip.rules, buffer.rank(), sent);
      }
    };
    at_once({calls, calls, calls});
    EXPECT_EQ(buffer.stats().dispatches, 3u * scaled(30));
    EXPECT_EQ(buffer.memory().used, 0u);
    round_trip(buffer, trip);
  });
}

// A fault of one buffer is nobody else's: neither of the rank's other buffer nor of another group.
TEST(Several, AFaultStaysInItsBuffer) {
  const Trip narrow = narrow_trip(6), wide = wide_trip(6);
  const Watchdog watchdog;
  run_threads(kRanks, [&](std::shared_ptr<Communicator> group) {
    EPBuffer good(group, config_for({&wide, 1}));
    EPBuffer bad(group, config_for({&narrow, 1}));
    for (uint32_t i = 0; i < scaled(10); ++i) {
      const DispatchResult sent = good.dispatch(dispatch_args(wide, group->rank()));
      DispatchArgs args = dispatch_args(narrow, group->rank());
      if (group->rank() == 2) args.expert_alignment = 0;
      expect_refusal<InvalidArgument>(bad, 2, {"expert_alignment"}, [&] { bad.dispatch(args); });
      expect_combined(wide.back[group->rank()], group->rank(),
                      good.combine(combine_args(wide, group->rank(), sent.handle)));
    }
    EXPECT_EQ(good.stats().faults, 0u);
    round_trip(bad, narrow);
  });
}

}  // namespace
}  // namespace ep::test
