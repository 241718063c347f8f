// Processes that end without closing: abandon(), and forked children that drop what they inherited.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "fabric/rank_processes.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

using fabric::Child;
using fabric::Port;
using fabric::Signal;

constexpr double kExitS = 15.0;  // a wait for somebody who does not come would outlive it

// A test here forks, so its bound is a timer and not a thread.
struct Bound {
  Bound() { ::alarm(static_cast<unsigned>(kBoundS)); }
  ~Bound() { ::alarm(0); }
};

DispatchArgs fixed_async(const Trip& trip, uint32_t rank) {
  DispatchArgs args = dispatch_args(trip, rank);
  args.exact = false;
  args.async_op = true;
  return args;
}

// Rank 0 leaves with a call in flight whose peer has not come; rank 1 then makes that call.
void run_abandon(const std::function<void(EPBuffer, DispatchResult)>& leave) {
  const Bound bound;
  const Trip trip = plain_trip(2);
  const Port port;
  const Signal gone;
  const auto start = [&](uint32_t rank, const std::function<void(EPBuffer&)>& body) {
    return Child([&, rank] {
      BufferConfig config = config_for({&trip, 1});
      config.timeout_s = 10 * kBoundS;
      EPBuffer buffer(Communicator::tcp(port.address(), rank, 2, 30.0), config);
      round_trip(buffer, trip);
      body(buffer);
    });
  };
  Child leaver = start(0, [&](EPBuffer& buffer) {
    DispatchResult sent = buffer.dispatch(fixed_async(trip, 0));
    await_entered(buffer, 0, 3);
    leave(std::move(buffer), std::move(sent));
  });
  Child late = start(1, [&](EPBuffer& buffer) {
    gone.wait();
    const PeerLost error =
        caught<PeerLost>([&] { buffer.dispatch(fixed_async(trip, 1)).event.synchronize(); });
    EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
    const Stopwatch watch;
    buffer.close();
    EXPECT_LT(watch.seconds(), 2.0 + kSlackS);
  });
  EXPECT_EQ(leaver.join(kExitS), 0);
  gone.signal();
  EXPECT_EQ(late.join(kExitS), 0);
}

TEST(Abandon, ThenExitAtOnce) {
  run_abandon([](EPBuffer buffer, DispatchResult) {
    buffer.abandon();
    std::exit(0);  // with the destructors of statics
  });
}

TEST(Abandon, ThenDropEverythingAndExit) {
  run_abandon([](EPBuffer buffer, DispatchResult sent) {
    const Trip trip = plain_trip(2);
    buffer.abandon();
    buffer.abandon();
    expect_text(caught<Error>([&] { buffer.dispatch(dispatch_args(trip, 0)); }), {"closed"});
    buffer.check();
    buffer.abort("nobody hears it");
    buffer.refuse(Operation::kDispatch);
    buffer.close();
    EXPECT_FALSE(sent.event.query());
    { const EPBuffer dropped = std::move(buffer); }
    sent = {};
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

// A call on the user's own stream is in flight; the stream's last owner is the buffer.
TEST(Abandon, JoinsNoStreamOfTheUser) {
  const Bound bound;
  const Trip trip = plain_trip(1);
  Child leaver([&] {
    static Gate never;
    std::optional<EPBuffer> buffer(std::in_place, Communicator::single(), config_for({&trip, 1}));
    {
      Stream held = Stream::host();
      held.call([] { never.wait(); });
      DispatchArgs args = fixed_async(trip, 0);
      args.stream = held;
      buffer->dispatch(args);
    }
    buffer->abandon();
    buffer.reset();
  });
  EXPECT_EQ(leaver.join(kExitS), 0);
}

// user report L6: the peer has nothing left to ask of the process that is gone.  That process has taken
// nothing down.
TEST(Abandon, BehindAFinishedCallIsClean) {
  const Bound bound;
  const Trip trip = plain_trip(2);
  const Port port;
  const Signal gone;
  std::vector<Child> ranks;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      EPBuffer buffer(Communicator::tcp(port.address(), rank, 2, 30.0), config_for({&trip, 1}));
      round_trip(buffer, trip);
      if (rank == 0) {
        const fabric::Census before = fabric::take_census();
        buffer.abandon();
        { const EPBuffer dropped = std::move(buffer); }
        const fabric::Census after = fabric::take_census();
        EXPECT_EQ(after.num_mappings, before.num_mappings);
        EXPECT_EQ(after.num_threads, before.num_threads);
        std::exit(::testing::Test::HasFailure() ? 1 : 0);
      }
      gone.wait();
      const Stopwatch watch;
      buffer.close();
      EXPECT_LT(watch.seconds(), 2.0 + kSlackS);
    });
  }
  EXPECT_EQ(ranks[0].join(kExitS), 0);
  gone.signal();
  EXPECT_EQ(ranks[1].join(kExitS), 0);
}

// What a parent holds when it forks: a stream with work in flight, an event behind it, outputs that
// view the window, and the buffer itself.
struct Inherited {
  Stream stream = Stream::host();
  Event event{};
  std::optional<EPBuffer> buffer{};
  DispatchResult sent{};
  Stream unused = Stream::host();
};

TEST(Fork, AChildMayDropWhatItInherited) {
  const Bound bound;
  const Trip trip = plain_trip(1);
  static Gate gate;
  Inherited mine;
  mine.buffer.emplace(Communicator::single(), config_for({&trip, 1}));
  mine.sent = mine.buffer->dispatch(dispatch_args(trip, 0));
  mine.sent.record_stream(mine.stream);
  mine.stream.call([] { gate.wait(); });
  mine.event = mine.stream.record();
  const std::function<void(Inherited&)> drops[] = {
      [](Inherited& child) { child.stream = {}; }, [](Inherited& child) { child.event = {}; },
      [](Inherited& child) { child.sent = {}; },   [](Inherited& child) { child.buffer.reset(); },
      [](Inherited& child) { child.unused = {}; }, [](Inherited& child) { child = Inherited{}; },
  };
  for (const auto& drop : drops) {
    Child child([&] { drop(mine); });
    EXPECT_EQ(child.join(kExitS), 0);
  }
  Child all([&] {
    for (const auto& drop : drops)
      drop(mine);
  });
  EXPECT_EQ(all.join(kExitS), 0);
  EXPECT_FALSE(mine.event.query());  // the parent's are as they were
  gate.open();
  mine.event.synchronize();
  expect_received(trip.sent.ranks[0], trip.rules, 0, mine.sent);
  round_trip(*mine.buffer, trip);
}

// The locks of a stream and of an arena may be held when the process forks: a child waits for none.
TEST(Fork, AChildOfABusyParentDropsWithoutWaiting) {
  const Bound bound;
  const Trip trip = plain_trip(1);
  std::optional<EPBuffer> buffer(std::in_place, Communicator::single(), config_for({&trip, 1}));
  std::optional<DispatchResult> sent = buffer->dispatch(dispatch_args(trip, 0));
  Stream stream = Stream::host();
  std::atomic<bool> enough{false};
  const auto keep_busy = [&](const std::function<void()>& work) {
    return std::jthread([&, work] {
      while (!enough)
        work();
    });
  };
  const std::jthread calls = keep_busy([&] {
    for (int i = 0; i < 1000; ++i)
      stream.call([] {});
    stream.synchronize();
  });
  const std::jthread dispatches = keep_busy([&] { buffer->dispatch(dispatch_args(trip, 0)); });
  for (uint32_t i = 0; i < scaled(100); ++i) {
    Child child([&] {
      stream = {};
      sent.reset();
      buffer.reset();
    });
    EXPECT_EQ(child.join(kExitS), 0);
  }
  enough = true;
}

TEST(Fork, AChildMayMakeABufferOfItsOwn) {
  const Bound bound;
  const Trip trip = plain_trip(1);
  std::optional<EPBuffer> buffer(std::in_place, Communicator::single(), config_for({&trip, 1}));
  round_trip(*buffer, trip);
  Child child([&] {
    buffer.reset();
    EPBuffer own(Communicator::single(), config_for({&trip, 1}));
    round_trip(own, trip);
  });
  EXPECT_EQ(child.join(kExitS), 0);
  round_trip(*buffer, trip);
}

}  // namespace
}  // namespace ep::test
