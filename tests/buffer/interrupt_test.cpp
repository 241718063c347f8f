// Ctrl-C where a buffer waits in its Communicator: construction and resync().
#include <atomic>
#include <barrier>
#include <functional>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3, kUser = 1, kLate = 2;
constexpr double kPromisedS = 0.1;

// Whose interrupt is asked: the configuration's, or without one the group's.
enum class Asked : uint8_t { kBuffer, kGroup };
constexpr Asked kBoth[] = {Asked::kBuffer, Asked::kGroup};

void expect_interrupted(const std::function<void()>& call) {
  const Stopwatch watch;
  caught<Interrupted>(call);
  EXPECT_LT(watch.seconds(), kPromisedS + kSlackS);
}

void expect_ended_by_user(const std::function<void()>& call) {
  const PeerError error = caught<PeerError>(call);
  EXPECT_EQ(error.peers, std::vector<uint32_t>{kUser});
  expect_text(error, {"rank 1", "interrupted"});
}

TEST(InterruptedSetUp, OfAConstruction) {
  for (const Asked asked : kBoth) {
    const Watchdog watchdog;
    const Trip trip = plain_trip(kRanks);
    Gate left;
    run_threads(kRanks, [&](std::shared_ptr<Communicator> group) {
      const bool is_user = group->rank() == kUser;
      BufferConfig config = config_for({&trip, 1});
      std::atomic<bool> impatient{is_user};
      const auto interrupt = [&] { return impatient.load(); };
      if (asked == Asked::kBuffer) config.interrupt = interrupt;
      if (asked == Asked::kGroup) group->interrupt = interrupt;
      const auto construct = [&] { EPBuffer(group, config); };
      if (is_user) {
        expect_interrupted(construct);
        left.open();
      } else {
        if (group->rank() == kLate) left.wait();
        expect_ended_by_user(construct);
      }
      impatient = false;
      EXPECT_EQ(static_cast<bool>(group->interrupt), asked == Asked::kGroup);  // lent, not given
      EPBuffer buffer(group, config);
      round_trip(buffer, trip);
      buffer.close();
      group->interrupt = nullptr;
    });
  }
}

TEST(InterruptedSetUp, OfAResync) {
  for (const Asked asked : kBoth) {
    const Watchdog watchdog;
    const Trip trip = plain_trip(kRanks);
    Gate left;
    std::barrier<> all_failed(kRanks);
    run_threads(kRanks, [&](std::shared_ptr<Communicator> group) {
      const uint32_t rank = group->rank();
      BufferConfig config = config_for({&trip, 1});
      std::atomic<bool> impatient{false};
      const auto interrupt = [&] { return impatient.load(); };
      if (asked == Asked::kBuffer) config.interrupt = interrupt;
      if (asked == Asked::kGroup) group->interrupt = interrupt;
      EPBuffer buffer(group, config);
      round_trip(buffer, trip);
      const auto dispatch = [&] { buffer.dispatch(dispatch_args(trip, rank)); };
      if (rank != kLate) {
        buffer.set_timeout_s(kShortS);
        caught<Timeout>(dispatch);
        buffer.set_timeout_s(kBoundS);
      }
      all_failed.arrive_and_wait();
      const auto resync = [&] { buffer.resync(); };
      if (rank == kUser) {
        impatient = true;
        expect_interrupted(resync);
        impatient = false;
        left.open();
      } else {
        if (rank == kLate) left.wait();
        expect_ended_by_user(resync);
      }
      if (rank != kLate) expect_text(caught<Error>(dispatch), {"resync()"});
      EXPECT_EQ(buffer.resync(), 2u);
      round_trip(buffer, trip);
      buffer.close();
      group->interrupt = nullptr;
    });
  }
}

}  // namespace
}  // namespace ep::test
