#include "device/host/host_event.hpp"

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "device/host/clock.hpp"
#include "device/host/host_stream.hpp"
#include "ep/error.hpp"
#include "ep/stream.hpp"

namespace ep {
namespace {

using device::WaitResult;

// Work that stands still until it is let go.
class Gate {
 public:
  void hold(Stream& stream) {
    stream.call([opened = opened_] { opened.wait(); });
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_{};
  std::shared_future<void> opened_ = promise_.get_future().share();
};

TEST(Event, AnEmptyOneIsComplete) {
  const Event event;
  EXPECT_TRUE(event.query());
  event.synchronize(0.0);
}

TEST(Event, OfAnIdleStreamIsComplete) {
  Stream stream = Stream::host();
  EXPECT_TRUE(stream.record().query());
  stream.call([] {});
  stream.synchronize();
  EXPECT_TRUE(stream.record().query());
}

TEST(Event, IsReachedWhenAllThatWasQueuedBeforeIsDone) {
  Stream stream = Stream::host();
  Gate first;
  Gate second;
  first.hold(stream);
  const Event between = stream.record();
  second.hold(stream);
  const Event after = stream.record();
  const Event copy = between;
  EXPECT_FALSE(between.query());
  first.open();
  copy.synchronize();
  EXPECT_TRUE(between.query());
  EXPECT_FALSE(after.query());
  second.open();
  after.synchronize(600.0);
}

TEST(Event, SynchronizeThrowsTimeoutAtItsBoundAndMayBeCalledAgain) {
  Stream stream = Stream::host();
  Gate gate;
  gate.hold(stream);
  const Event event = stream.record();
  for (const double timeout_s : {0.0, 0.01, 0.07}) {
    const uint64_t start = device::host::now_ns();
    try {
      event.synchronize(timeout_s);
      FAIL() << "no Timeout";
    } catch (const Timeout& e) {
      EXPECT_TRUE(e.peers.empty());
      EXPECT_EQ(e.phase, "event");
      EXPECT_GE(static_cast<double>(device::host::now_ns() - start), timeout_s * 1e9);
    }
  }
  gate.open();
  event.synchronize(-1.0);
  EXPECT_TRUE(event.query());
}

TEST(Event, SynchronizeThrowsInterruptedWhenTheHookSaysSo) {
  Stream stream = Stream::host();
  Gate gate;
  gate.hold(stream);
  const Event event = stream.record();
  int num_asked = 0;
  event.impl()->interrupt =
      std::make_shared<const std::function<bool()>>([&] { return ++num_asked == 2; });
  EXPECT_THROW(event.synchronize(), Interrupted);
  EXPECT_EQ(num_asked, 2);
  gate.open();
  event.synchronize();
}

struct OneFault final : device::Deferred {
  std::atomic<bool> raised{false};
  void raise() override {
    if (!raised.exchange(true)) throw PeerError("rank 3 refused", {3}, "refused");
  }
};

TEST(Event, SynchronizeRaisesTheDeferredFaultOnceAfterThePoint) {
  Stream stream = Stream::host();
  Gate gate;
  gate.hold(stream);
  const Event event = stream.record();
  event.impl()->deferred = std::make_shared<OneFault>();
  EXPECT_THROW(event.synchronize(0.0), Timeout);  // not reached yet: nothing is known
  gate.open();
  EXPECT_THROW(event.synchronize(), PeerError);
  event.synchronize();
}

TEST(Event, OrdersTwoStreams) {
  Stream producer = Stream::host();
  Stream consumer = Stream::host();
  uint64_t value = 0;  // plain: the events alone order its accesses, as a race detector confirms
  uint64_t num_wrong = 0;
  constexpr uint64_t kRounds = 500;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    producer.call([&value, round] { value = round; });
    consumer.wait(producer.record());
    consumer.call([&value, &num_wrong, round] { num_wrong += value != round; });
    producer.wait(consumer.record());
  }
  producer.synchronize();
  EXPECT_EQ(num_wrong, 0u);
}

TEST(Event, OfTheSameStreamOrOfNothingDoesNotStopIt) {
  Stream stream = Stream::host();
  Gate gate;
  gate.hold(stream);
  const Event event = stream.record();
  stream.wait(event);
  stream.wait(Event{});
  gate.open();
  stream.synchronize();
}

TEST(Event, OutlivesItsStream) {
  Event event;
  Stream other = Stream::host();
  {
    Stream stream = Stream::host();
    stream.call([] {});
    event = stream.record();
    other.wait(event);
  }
  EXPECT_TRUE(event.query());
  event.synchronize();
  other.synchronize();
}

TEST(Event, ManyThreadsMayWaitForOne) {
  Stream stream = Stream::host();
  Gate gate;
  gate.hold(stream);
  const Event event = stream.record();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&] { event.synchronize(); });
  gate.open();
  for (std::thread& thread : threads)
    thread.join();
  EXPECT_TRUE(event.query());
}

TEST(Event, WaitInsideItsOwnStreamIsAnErrorAndNotADeadlock) {
  std::promise<bool> threw;
  Stream stream = Stream::host();
  stream.call([&] {
    try {
      stream.synchronize();  // this very work is what it would wait for
      threw.set_value(false);
    } catch (const Error&) {
      threw.set_value(true);
    }
  });
  EXPECT_TRUE(threw.get_future().get());
}

TEST(Stream, AnEmptyOneSaysHowToGetOne) {
  Stream stream;
  EXPECT_FALSE(stream.defined());
  EXPECT_THROW(stream.call([] {}), InvalidArgument);
  EXPECT_THROW(stream.wait(Event{}), InvalidArgument);
  EXPECT_THROW(stream.record(), InvalidArgument);
  EXPECT_THROW(stream.synchronize(), InvalidArgument);
  EXPECT_THROW(Stream::host().call({}), InvalidArgument);
}

TEST(Stream, CopiesShareTheQueue) {
  Stream stream = Stream::host();
  Stream copy = stream;
  EXPECT_EQ(copy, stream);
  int seen = 0;
  Gate gate;
  gate.hold(stream);
  copy.call([&] { seen = 1; });
  gate.open();
  stream.synchronize();
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace ep
