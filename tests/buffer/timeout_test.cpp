// Waits that expire: who is told what, and the way back.
#include <barrier>
#include <chrono>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3, kLate = 2;
constexpr double kLongS = 30.0;

using Call = std::function<void(EPBuffer&, const Trip&, const Handle&)>;

void dispatch_exact(EPBuffer& buffer, const Trip& trip, const Handle&) {
  buffer.dispatch(dispatch_args(trip, buffer.rank()));
}
void dispatch_fixed(EPBuffer& buffer, const Trip& trip, const Handle&) {
  DispatchArgs args = dispatch_args(trip, buffer.rank());
  args.exact = false;
  buffer.dispatch(args);
}
void replay(EPBuffer& buffer, const Trip& trip, const Handle& handle) {
  DispatchArgs args{.x = to_tensor(trip.tokens[buffer.rank()].x)};
  args.handle = &handle;
  buffer.dispatch(args);
}
void combine(EPBuffer& buffer, const Trip& trip, const Handle& handle) {
  buffer.combine(combine_args(trip, buffer.rank(), handle));
}
void combine_window(EPBuffer& buffer, const Trip& trip, const Handle& handle) {
  buffer.combine(window_combine_args(buffer, trip, buffer.rank(), handle));
}

void expect_rounds(EPBuffer& buffer, const Trip& trip, uint32_t num_rounds = 3) {
  for (uint32_t i = 0; i < num_rounds; ++i)
    round_trip(buffer, trip, i % 2 == 0 ? AnswerIn::kOrdinary : AnswerIn::kExpertOutput);
}

// user reports B1, B2: the error comes in time and names the rank; the late rank learns it; until
// resync() no call is made; afterwards all is exact, older handles included.
void run_late_rank(Layout layout, const Call& call) {
  const Trip trip = plain_trip(kRanks, layout);
  std::latch gave_up(kRanks - 1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));  // call 1
    round_trip(buffer, trip);                                                // 2, 3
    buffer.set_timeout_s(kShortS);
    const auto fail = [&] { call(buffer, trip, sent.handle); };  // 4
    if (rank == kLate) {
      gave_up.wait();
      const PeerError error = caught<PeerError>(fail);
      expect_text(error, {"gave up on call 4"});
      EXPECT_NE(error.peers, std::vector<uint32_t>{kLate});
    } else {
      const Stopwatch watch;
      const Timeout error = caught<Timeout>(fail);
      EXPECT_LT(watch.seconds(), kShortS + 1.0 + kSlackS);
      EXPECT_GE(watch.seconds(), kShortS * 0.5);  // the other's poison may come first
      EXPECT_EQ(error.peers, std::vector<uint32_t>{kLate});
      EXPECT_FALSE(error.phase.empty());
      expect_text(error, {"rank 2 has not entered call 4", "completed call 3"});
      gave_up.count_down();
    }
    const Error before = caught<Error>(fail);
    EXPECT_EQ(before.kind(), ErrorKind::kError);
    expect_text(before, {"resync()"});
    buffer.set_timeout_s(kLongS);
    EXPECT_EQ(buffer.resync(), 3u);
    expect_rounds(buffer, trip);
    expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
  });
}

TEST(Timeouts, InAnExactDispatch) {
  run_late_rank(Layout::kRank, dispatch_exact);
}
TEST(Timeouts, InAnExactDispatchByExpert) {
  run_late_rank(Layout::kExpert, dispatch_exact);
}
TEST(Timeouts, InAFixedSizeDispatch) {
  run_late_rank(Layout::kExpert, dispatch_fixed);
}
TEST(Timeouts, InAReplay) {
  run_late_rank(Layout::kRank, replay);
}
TEST(Timeouts, InACombine) {
  run_late_rank(Layout::kRank, combine);
}
TEST(Timeouts, InACombineOfWindowMemory) {
  run_late_rank(Layout::kExpert, combine_window);
}

// The first rank whose time is up ends it for all, whatever the others' bounds.
TEST(Timeouts, OneBoundEndsTheCallForAll) {
  const Trip trip = plain_trip(kRanks);
  std::latch gave_up(kRanks - 1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    buffer.set_timeout_s(rank == 0 ? kShortS : kLongS);
    const Stopwatch watch;
    const auto call = [&] { buffer.dispatch(dispatch_args(trip, rank)); };
    if (rank == kLate) {
      gave_up.wait();
      expect_text(caught<PeerError>(call), {"rank 0 gave up on call 1"});
    } else {
      EXPECT_EQ(caught<Timeout>(call).peers, std::vector<uint32_t>{kLate});
      EXPECT_LT(watch.seconds(), kShortS + 1.0 + kSlackS);
      gave_up.count_down();
    }
    EXPECT_EQ(buffer.resync(), 0u);
    expect_rounds(buffer, trip);
  });
}

TEST(Timeouts, SeveralMissingRanksAreNamed) {
  const Trip trip = plain_trip(4);
  std::latch gave_up(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const auto call = [&] { buffer.dispatch(dispatch_args(trip, buffer.rank())); };
    buffer.set_timeout_s(kShortS);
    if (buffer.rank() == 1) {
      const Timeout error = caught<Timeout>(call);
      EXPECT_EQ(error.peers, (std::vector<uint32_t>{0, 2, 3}));
      expect_text(error, {"rank 0 has not", "rank 2 has not", "rank 3 has not"});
      gave_up.count_down();
    } else {
      gave_up.wait();
      EXPECT_EQ(caught<PeerError>(call).peers, std::vector<uint32_t>{1});
    }
    buffer.set_timeout_s(kLongS);
    buffer.resync();
    expect_rounds(buffer, trip);
  });
}

// user report B2: the bound is a run-time value, in both directions.
TEST(Timeouts, ABoundThatGrowsIsUsed) {
  const Trip trip = plain_trip(2);
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        EXPECT_EQ(buffer.timeout_s(), kShortS);
        buffer.set_timeout_s(kLongS);
        if (buffer.rank() == 1) {  // later than the first bound allows
          await_entered(buffer, 0, 1);
          std::this_thread::sleep_for(std::chrono::duration<double>(2 * kShortS));
        }
        expect_rounds(buffer, trip);
      },
      [](BufferConfig& config, uint32_t) { config.timeout_s = kShortS; });
}

// An asynchronous call of fixed size: its event brings the error, once.
TEST(Timeouts, OfAnAsyncCall) {
  const Trip trip = plain_trip(2);
  std::latch gave_up(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    buffer.set_timeout_s(kShortS);
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.exact = false;
    args.async_op = true;
    if (buffer.rank() == 0) {
      const DispatchResult sent = buffer.dispatch(args);
      EXPECT_EQ(caught<Timeout>([&] { sent.event.synchronize(); }).peers, std::vector<uint32_t>{1});
      EXPECT_NO_THROW(sent.event.synchronize());
      EXPECT_NE(value_of(sent.status), 0);
      EXPECT_EQ(caught<Error>([&] { buffer.dispatch(args); }).kind(), ErrorKind::kError);
      gave_up.count_down();
    } else {
      gave_up.wait();
      const DispatchResult sent = buffer.dispatch(args);
      caught<PeerError>([&] { sent.event.synchronize(); });
    }
    buffer.set_timeout_s(kLongS);
    buffer.resync();
    expect_rounds(buffer, trip);
  });
}

// What nobody looked at before resync() is settled by it: a late look does not ask for another one.
TEST(Timeouts, ResyncSettlesWhatNobodyLookedAt) {
  const Trip trip = plain_trip(2);
  std::barrier<> both(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.exact = false;
    args.async_op = true;
    buffer.set_timeout_s(kShortS);
    std::vector<DispatchResult> unseen;
    if (buffer.rank() == 0) {
      for (uint32_t i = 0; i < 3; ++i)  // the second and third are not made
        unseen.push_back(buffer.dispatch(args));
      buffer.comm_stream().synchronize();
    }
    both.arrive_and_wait();
    buffer.set_timeout_s(kLongS);
    EXPECT_EQ(buffer.resync(), 0u);
    for (const DispatchResult& sent : unseen) {
      try {
        sent.event.synchronize();
      } catch (const Error&) {
      }
    }
    unseen.clear();
    expect_rounds(buffer, trip);
    EXPECT_EQ(buffer.memory().used, 0u);
  });
}

TEST(Timeouts, ResyncNamesWhoDoesNotCome) {  // and may be made again
  const Trip trip = plain_trip(kRanks);
  std::latch gave_up(kRanks - 1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    round_trip(buffer, trip);
    buffer.set_timeout_s(kShortS);
    if (buffer.rank() == kLate) {
      gave_up.wait();
      EXPECT_THROW(buffer.resync(), PeerError);
    } else {
      EXPECT_EQ(caught<Timeout>([&] { buffer.resync(); }).peers, std::vector<uint32_t>{kLate});
      gave_up.count_down();
    }
    buffer.set_timeout_s(kLongS);
    EXPECT_EQ(buffer.resync(), 2u);
    expect_rounds(buffer, trip);
  });
}

TEST(Timeouts, ResyncOfAHealthyBuffer) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (uint64_t i = 0; i < 3; ++i) {
      const DispatchResult sent = buffer.dispatch(dispatch_args(trip, buffer.rank()));
      EXPECT_EQ(buffer.resync(), 2 * i + 1);
      const uint32_t rank = buffer.rank();
      expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
    }
  });
}

// Fault after fault: every recovery leaves as much memory and as exact a buffer as the first.
TEST(Timeouts, ManyInARow) {
  const Trip trip = plain_trip(2, Layout::kExpert);
  std::barrier<> both(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (uint32_t i = 0; i < 6; ++i) {
      buffer.set_timeout_s(0.1);
      const auto call = [&] { dispatch_exact(buffer, trip, {}); };
      const bool late = buffer.rank() == i % 2;
      if (!late) caught<Timeout>(call);
      both.arrive_and_wait();
      if (late && i % 3 != 0) caught<PeerError>(call);  // or it never makes the call
      buffer.set_timeout_s(kLongS);
      buffer.resync();
      expect_rounds(buffer, trip, 2);
      EXPECT_EQ(buffer.memory().used, 0u);
    }
  });
}

}  // namespace
}  // namespace ep::test
