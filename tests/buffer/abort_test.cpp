// Calls that somebody leaves on purpose: abort(reason) and the interrupt callback, before a call
// and within one.
#include <atomic>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3;

void dispatch(EPBuffer& buffer, const Trip& trip) {
  buffer.dispatch(dispatch_args(trip, buffer.rank()));
}

void expect_aborted(const std::function<void()>& call, uint32_t by, const std::string& reason) {
  const PeerError error = caught<PeerError>(call);
  EXPECT_EQ(error.peers, std::vector<uint32_t>{by});
  EXPECT_NE(error.reason.find(reason), std::string::npos) << error.reason;
  expect_text(error, {reason, "rank " + std::to_string(by)});
}

// Every rank, the aborting one included, raises once: at its next call.
TEST(Abort, WhileAllAreIdle) {
  const Trip trip = plain_trip(kRanks);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (uint32_t by = 0; by < kRanks; ++by) {
      const std::string reason = "no more data on " + std::to_string(by);
      if (buffer.rank() == by) buffer.abort(reason);
      expect_aborted([&] { dispatch(buffer, trip); }, by, reason);
      EXPECT_NO_THROW(buffer.check());
      round_trip(buffer, trip);
    }
  });
}

TEST(Abort, AnIdleAbortEndsACombine) {
  const Trip trip = plain_trip(kRanks);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
    const auto combine = [&] { return buffer.combine(combine_args(trip, rank, sent.handle)); };
    if (rank == 1) buffer.abort("stop");
    expect_aborted([&] { combine(); }, 1, "stop");
    expect_combined(trip.back[rank], rank, combine());
    round_trip(buffer, trip);
  });
}

TEST(Abort, TheAbortingRankMayLearnFromCheck) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    if (buffer.rank() == 0) {
      buffer.abort("stop");
      expect_aborted([&] { buffer.check(); }, 0, "stop");
    } else {
      expect_aborted([&] { dispatch(buffer, trip); }, 0, "stop");
    }
    round_trip(buffer, trip);
  });
}

TEST(Abort, TwoAbortsAreTwoTurns) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    if (buffer.rank() == 0) {
      buffer.abort("first");
      buffer.abort("second");
    }
    caught<PeerError>([&] { dispatch(buffer, trip); });
    expect_aborted([&] { dispatch(buffer, trip); }, 0, "second");
    round_trip(buffer, trip);
  });
}

TEST(Abort, SeveralRanksAtOnce) {
  const Trip trip = plain_trip(kRanks);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (uint32_t i = 0; i < 20; ++i) {
      if (buffer.rank() != i % kRanks) buffer.abort("all of us");
      caught<PeerError>([&] { dispatch(buffer, trip); });
      round_trip(buffer, trip);
    }
  });
}

TEST(Abort, ReasonsOfAnyLength) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (const size_t length : {0u, 1u, 228u, 229u, 5000u}) {
      if (buffer.rank() == 0) buffer.abort(std::string(length, 'r'));
      expect_aborted([&] { dispatch(buffer, trip); }, 0,
                     std::string(std::min<size_t>(length, layout::kMaxReasonBytes), 'r'));
      round_trip(buffer, trip);
    }
  });
}

// api.md: a rank that waits in dispatch for a late peer; another thread of it aborts.  Whoever is
// in the call and whoever comes later raise in that call, and the next is exact.
TEST(Abort, OfADispatchInFlight) {
  for (uint32_t round = 0; round < 10;
       ++round) {  // the late rank's record may come before the poison
    const Trip trip = plain_trip(kRanks, kBothLayouts[round % 2]);
    Gate ended;
    with_buffers(trip, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      round_trip(buffer, trip);
      std::jthread aborter;
      if (rank == 0) {
        aborter = std::jthread([&] {
          await_entered(buffer, 0, 3);
          await_entered(buffer, 1, 3);
          buffer.abort("user pressed stop");
        });
      }
      if (rank == 2) ended.wait();
      expect_aborted([&] { dispatch(buffer, trip); }, 0, "user pressed stop");
      if (rank == 0) {
        aborter.join();
        ended.open();
      }
      round_trip(buffer, trip);
      EXPECT_NO_THROW(buffer.check());
    });
  }
}

// Of a combine some ranks may have completed: resync() first.
TEST(Abort, OfACombineInFlight) {
  const Trip trip = plain_trip(kRanks);
  Gate ended;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
    std::jthread aborter;
    if (rank == 0) {
      aborter = std::jthread([&] {
        await_entered(buffer, 0, 2);
        await_entered(buffer, 1, 2);
        buffer.abort("enough");
      });
    }
    if (rank == 2) ended.wait();
    expect_aborted([&] { buffer.combine(combine_args(trip, rank, sent.handle)); }, 0, "enough");
    if (rank == 0) {
      aborter.join();
      ended.open();
    }
    EXPECT_EQ(buffer.resync(), 1u);
    expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
    round_trip(buffer, trip);
  });
}

TEST(Abort, OfAnAsyncFixedSizeDispatch) {
  const Trip trip = plain_trip(2);
  Gate ended;
  with_buffers(trip, [&](EPBuffer& buffer) {
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.exact = false;
    args.async_op = true;
    if (buffer.rank() == 1) ended.wait();
    const DispatchResult sent = buffer.dispatch(args);
    if (buffer.rank() == 0) {
      await_entered(buffer, 0, 1);
      buffer.abort("later");
      ended.open();
    }
    expect_aborted([&] { sent.event.synchronize(); }, 0, "later");
    EXPECT_NE(value_of(sent.status), 0);
    round_trip(buffer, trip);
  });
}

// The peer hangs and several calls are queued: the first of them takes the abort, which waits for
// no other.
TEST(Abort, DoesNotWaitForCallsBehindTheOneItEnds) {
  const Trip trip = plain_trip(2);
  Gate ended;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const bool aborts = buffer.rank() == 0;
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.exact = false;
    args.async_op = true;
    std::vector<DispatchResult> sent;
    if (!aborts) ended.wait();
    const auto expect_first_aborted = [&] {
      expect_aborted([&] { sent[0].event.synchronize(); }, 0, "hangs");
    };
    for (uint32_t i = 0; i < 3; ++i) {
      sent.push_back(buffer.dispatch(args));
      if (!aborts && i == 0) expect_first_aborted();  // or the second call would raise it
    }
    if (aborts) {
      await_entered(buffer, 0, 1);
      buffer.abort("hangs");
      EXPECT_FALSE(sent[2].event.query());
      ended.open();
      expect_first_aborted();
    }
    for (const uint32_t i : {1u, 2u}) {
      sent[i].event.synchronize();
      EXPECT_EQ(value_of(sent[i].status), 0);
    }
    round_trip(buffer, trip, AnswerIn::kExpertOutput);
    if (aborts) buffer.abort("again");
    expect_aborted([&] { dispatch(buffer, trip); }, 0, "again");
    round_trip(buffer, trip, AnswerIn::kExpertOutput);
  });
}

TEST(Abort, OfAClosedBufferIsNothing) {
  const Trip trip = plain_trip(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    buffer.close();
    EXPECT_NO_THROW(buffer.abort("late"));
    EXPECT_NO_THROW(buffer.check());
  });
}

// Rank 0's interrupt callback says yes once `asked` is set, and takes the flag back.
Adapt interruptible(std::atomic<bool>& asked) {
  return [&](BufferConfig& config, uint32_t rank) {
    if (rank == 0) config.interrupt = [&] { return asked.exchange(false); };
  };
}

// Ctrl-C while a peer is late: Interrupted within the promised 100 ms here, PeerError there, next
// call exact.
TEST(Interrupt, LeavesADispatch) {
  for (const bool exact : {true, false}) {
    const Trip trip = plain_trip(kRanks);
    std::atomic<bool> asked{false};
    Gate ended;
    with_buffers(
        trip,
        [&](EPBuffer& buffer) {
          const uint32_t rank = buffer.rank();
          DispatchArgs args = dispatch_args(trip, rank);
          args.exact = exact;
          const auto call = [&] { buffer.dispatch(args); };
          if (rank == 2) ended.wait();
          if (rank == 0) {
            const std::jthread user([&] {
              await_entered(buffer, 0, 1);
              await_entered(buffer, 1, 1);
              asked = true;
            });
            caught<Interrupted>(call);
            ended.open();
          } else {
            const PeerError error = caught<PeerError>(call);
            EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
            expect_text(error, {"interrupted"});
          }
          round_trip(buffer, trip);
          EXPECT_NO_THROW(buffer.check());
        },
        interruptible(asked));
  }
}

TEST(Interrupt, LeavesACombine) {
  const Trip trip = plain_trip(2);
  std::atomic<bool> asked{false};
  Gate ended;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
        const auto call = [&] { buffer.combine(combine_args(trip, rank, sent.handle)); };
        if (rank == 0) {
          const std::jthread user([&] {
            await_entered(buffer, 0, 2);
            asked = true;
          });
          caught<Interrupted>(call);
          ended.open();
        } else {
          ended.wait();
          EXPECT_EQ(caught<PeerError>(call).peers, std::vector<uint32_t>{0});
        }
        EXPECT_EQ(buffer.resync(), 1u);
        round_trip(buffer, trip);
      },
      interruptible(asked));
}

// Ctrl-C in a call that stands behind asynchronous ones: it ends them too, since they come first.
// The second could not even begin, so this one needs resync().
TEST(Interrupt, ReachesTheCallBehindAsyncOnes) {
  const Trip trip = plain_trip(2);
  std::atomic<bool> asked{false};
  Gate left;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        DispatchArgs args = dispatch_args(trip, buffer.rank());
        args.exact = false;
        args.async_op = true;
        if (buffer.rank() == 0) {
          const DispatchResult first = buffer.dispatch(args), second = buffer.dispatch(args);
          asked = true;
          const Stopwatch watch;
          caught<Interrupted>([&] { dispatch(buffer, trip); });
          EXPECT_LT(watch.seconds(), kSlackS);
          caught<Interrupted>([&] { first.event.synchronize(); });
          caught<Interrupted>([&] { second.event.synchronize(); });
          left.open();
        } else {
          left.wait();
          for (uint32_t i = 0; i < 2; ++i) {
            const PeerError error =
                caught<PeerError>([&] { buffer.dispatch(args).event.synchronize(); });
            EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
          }
        }
        caught<Error>([&] { dispatch(buffer, trip); });
        EXPECT_EQ(buffer.resync(), 0u);
        round_trip(buffer, trip);
      },
      interruptible(asked));
}

// A wait for an event is this rank's own: leaving it ends nothing.
TEST(Interrupt, LeavesTheWaitForAnEvent) {
  const Trip trip = plain_trip(2);
  std::atomic<bool> asked{false};
  Gate left;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        DispatchArgs args = dispatch_args(trip, rank);
        args.exact = false;
        args.async_op = true;
        if (rank == 1) left.wait();
        const DispatchResult sent = buffer.dispatch(args);
        if (rank == 0) {
          asked = true;
          caught<Interrupted>([&] { sent.event.synchronize(); });
          left.open();
        }
        sent.event.synchronize();
        EXPECT_EQ(value_of(sent.status), 0);
        round_trip(buffer, trip);
      },
      interruptible(asked));
}

// A call that waits behind another thread's: it leaves without having spent a turn.
TEST(Interrupt, LeavesTheWaitForATurn) {
  const Trip trip = plain_trip(2);
  std::atomic<bool> armed{false};
  std::atomic<std::thread::id> impatient{};
  Gate left;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        if (rank == 1) left.wait();
        std::jthread second;
        if (rank == 0) {
          second = std::jthread([&] {
            await_entered(buffer, 0, 1);
            impatient = std::this_thread::get_id();
            armed = true;
            caught<Interrupted>([&] { dispatch(buffer, trip); });
            left.open();
          });
        }
        expect_received(trip.sent.ranks[rank], trip.rules, rank,
                        buffer.dispatch(dispatch_args(trip, rank)));
        if (second.joinable()) second.join();
        round_trip(buffer, trip);
      },
      [&](BufferConfig& config, uint32_t rank) {
        if (rank != 0) return;
        config.interrupt = [&] { return armed && impatient.load() == std::this_thread::get_id(); };
      });
}

}  // namespace
}  // namespace ep::test
