// Streams, events and threads: what is ordered, what waits for whom, and what never waits.
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

DispatchArgs async_args(const Trip& trip, uint32_t rank, bool exact) {
  DispatchArgs args = dispatch_args(trip, rank);
  args.exact = exact;
  args.async_op = true;
  return args;
}

// A stream whose work so far is done once `gate` is open.
Stream held_by(Gate& gate) {
  Stream stream = Stream::host();
  stream.call([&gate] { gate.wait(); });
  return stream;
}

std::vector<uint8_t> bytes_of(const Tensor& t) {
  const auto* data = static_cast<const uint8_t*>(t.data);
  const auto pitch = static_cast<size_t>(t.strides[0] * num_bytes(t.dtype));
  return {data, data + static_cast<size_t>(t.shape[0]) * pitch};
}

// protocol rule 7: another stream is slow to read x; the tensors are dropped; the arena holds
// nothing else.  The next dispatch may not put its rows there before that reader is done.
TEST(Streams, ARecordedReaderIsWaitedFor) {
  for (const bool exact : {true, false}) {
    const std::vector<Trip> trips = {plain_trip(2, Layout::kRank, 1),
                                     plain_trip(2, Layout::kRank, 2)};
    Gate gate;
    with_buffers(
        trips[0],
        [&](EPBuffer& buffer) {
          const uint32_t rank = buffer.rank();
          Stream reader = Stream::host();
          std::vector<uint8_t> seen, wanted;
          {
            DispatchArgs args = dispatch_args(trips[0], rank);
            args.exact = exact;
            const DispatchResult sent = buffer.dispatch(args);
            sent.record_stream(reader);
            wanted = bytes_of(sent.x);
            if (rank == 0)
              reader.call([&, x = sent.x.data] {
                gate.wait();
                const auto* data = static_cast<const uint8_t*>(x);
                seen.assign(data, data + wanted.size());
              });
          }
          DispatchArgs args = async_args(trips[1], rank, false);
          const DispatchResult next = buffer.dispatch(args);
          if (rank == 0) {
            EXPECT_THROW(next.event.synchronize(kShortS), Timeout);
            EXPECT_FALSE(next.event.query());
            gate.open();
          }
          next.event.synchronize();
          reader.synchronize();
          EXPECT_EQ(seen, rank == 0 ? wanted : std::vector<uint8_t>{});
          EXPECT_EQ(value_of(next.num_rows_device),
                    static_cast<int32_t>(trips[1].sent.ranks[rank].num_rows));
        },
        [](BufferConfig& config, uint32_t) {
          config.arena_bytes = 4096;  // one output of 18 rows of 64 bytes and their metadata
          config.outputs = Outputs::kWindow;
        });
  }
}

// With room elsewhere nobody waits for the slow reader.
TEST(Streams, ASlowReaderHoldsUpNobodyWhereThereIsRoom) {
  const Trip trip = plain_trip(2);
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        Gate gate;
        Stream reader = held_by(gate);
        buffer.dispatch(dispatch_args(trip, buffer.rank())).record_stream(reader);
        round_trip(buffer, trip);
        round_trip(buffer, trip);
        gate.open();
        reader.synchronize();
      },
      [](BufferConfig& config, uint32_t) { config.outputs = Outputs::kWindow; });
}

// user report P (CPU shadow): exact = false never blocks the host, also while a peer is not there
// at all.
TEST(Streams, FixedSizeCallsNeverBlock) {
  const Trip trip = plain_trip(2, Layout::kExpert);
  Gate issued;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    if (rank == 1) issued.wait();
    std::vector<DispatchResult> sent;
    std::vector<CombineResult> back;
    for (uint32_t i = 0; i < 3; ++i) {
      sent.push_back(buffer.dispatch(async_args(trip, rank, false)));
      CombineArgs args{.x = sent[i].x};
      args.handle = &sent[i].handle;
      args.async_op = true;
      back.push_back(buffer.combine(args));
    }
    if (rank == 0) {
      EXPECT_FALSE(sent[0].event.query());
      EXPECT_FALSE(back[2].event.query());
      issued.open();
    }
    back[2].event.synchronize();
    for (uint32_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(sent[i].event.query());
      EXPECT_EQ(value_of(sent[i].status) + value_of(back[i].status), 0);
      EXPECT_EQ(bytes_of(back[i].x), bytes_of(back[0].x));
    }
  });
}

// check() tells what is there already; it does not wait for a call of another thread.
TEST(Streams, CheckNeverWaits) {
  const Trip trip = plain_trip(2);
  Gate checked;
  with_buffers(trip, [&](EPBuffer& buffer) {
    std::jthread checker;
    if (buffer.rank() == 0) {
      checker = std::jthread([&] {
        await_entered(buffer, 0, 1);
        buffer.check();
        checked.open();
      });
    } else {
      checked.wait();
    }
    round_trip(buffer, trip);
  });
}

// user report O4: two combines in flight, each read behind its own event.
TEST(Streams, EventsOfSeveralCallsInFlight) {
  const std::vector<Trip> trips = {plain_trip(2, Layout::kRank, 3),
                                   plain_trip(2, Layout::kRank, 4)};
  with_buffers(trips[0], [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (uint32_t round = 0; round < 20; ++round) {
      std::deque<DispatchResult> sent;
      std::deque<CombineResult> back;
      for (const Trip& trip : trips)
        sent.push_back(buffer.dispatch(async_args(trip, rank, true)));
      for (uint32_t i = 0; i < 2; ++i) {
        CombineArgs args = combine_args(trips[i], rank, sent[i].handle);
        args.async_op = true;
        back.push_back(buffer.combine(args));
      }
      for (const uint32_t i : {1u, 0u}) {
        expect_combined(trips[i].back[rank], rank, back[i]);
        expect_received(trips[i].sent.ranks[rank], trips[i].rules, rank, sent[i]);
        back[i].event.synchronize();  // twice is as good as once
        EXPECT_TRUE(back[i].event.query());
      }
    }
  });
}

// Calls of one buffer run in issue order whatever streams they are on, and a result of one stream
// may be used on another behind its event.
TEST(Streams, CallsOnSeveralStreamsStayInOrder) {
  const Trip trip = plain_trip(3, Layout::kExpert);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    Stream streams[] = {Stream::host(), Stream::host(), Stream()};
    for (uint32_t i = 0; i < 30; ++i) {
      DispatchArgs args = async_args(trip, rank, i % 4 == 0);
      args.stream = streams[i % 3];
      const DispatchResult sent = buffer.dispatch(args);
      CombineArgs back = combine_args(trip, rank, sent.handle);
      if (i % 4 != 0) {
        Table padded(DType::kBFloat16, static_cast<uint64_t>(sent.x.shape[0]), 32);
        std::memcpy(padded.bytes.data(), trip.answers[rank].x.bytes.data(),
                    trip.answers[rank].x.bytes.size());
        back.x = to_tensor(padded);
      }
      back.stream = streams[(i + rank) % 3];
      back.async_op = i % 2 == 0;
      expect_combined(trip.back[rank], rank, buffer.combine(back));
    }
  });
}

// The call begins only when the events it was given are reached: its inputs are made on another
// stream.
TEST(Streams, WaitForOrdersTheInputs) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    Gate gate;
    Stream producer = held_by(gate), other = Stream::host();
    DispatchArgs args = async_args(trip, rank, false);
    const Tensor x = to_tensor(Table(DType::kBFloat16, 9, 32)), idx = args.topk_idx;
    args.x = x;
    args.topk_idx = to_tensor(Table(DType::kInt64, 9, 2, 0xFF));
    producer.call([&, to = args.topk_idx] {
      fill(x, trip.tokens[rank].x);
      fill(to, trip.tokens[rank].idx);
    });
    args.wait_for = {other.record(), producer.record(), Event()};
    const DispatchResult sent = buffer.dispatch(args);
    EXPECT_FALSE(sent.event.query());
    gate.open();
    sent.event.synchronize();
    EXPECT_EQ(value_of(sent.num_rows_device), static_cast<int32_t>(trip.sent.ranks[rank].num_rows));
    Tensor used = sent.x;
    used.shape[0] = static_cast<int64_t>(trip.sent.ranks[rank].num_rows);
    EXPECT_EQ(difference({rank, "x"}, used, trip.sent.ranks[rank].x), "");
  });
}

// An event orders with wait() and raises with synchronize(), once.
TEST(Streams, WaitingForAnEventRaisesNothing) {
  const Trip trip = plain_trip(2);
  Gate ended;
  Event().wait();
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    if (rank == 1) ended.wait();
    const DispatchResult sent = buffer.dispatch(async_args(trip, rank, false));
    if (rank == 0) {
      await_entered(buffer, 0, 1);
      EXPECT_FALSE(sent.event.query());
      buffer.abort("enough");
      ended.open();
    }
    for (uint32_t i = 0; i < 2; ++i)
      EXPECT_NO_THROW(sent.event.wait());
    EXPECT_TRUE(sent.event.query());
    EXPECT_NE(value_of(sent.status), 0);
    expect_text(caught<PeerError>([&] { sent.event.synchronize(); }), {"enough"});
    EXPECT_NO_THROW(sent.event.synchronize());
    const DispatchResult good = buffer.dispatch(async_args(trip, rank, true));
    good.event.wait();
    EXPECT_EQ(value_of(good.status), 0);
    expect_received(trip.sent.ranks[rank], trip.rules, rank, good);
  });
}

TEST(Streams, AnInterruptLeavesTheWaitForAnEvent) {
  const Trip trip = plain_trip(2);
  std::atomic<bool> asked{false};
  Gate left;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        if (buffer.rank() == 1) left.wait();
        const DispatchResult sent = buffer.dispatch(async_args(trip, buffer.rank(), false));
        if (buffer.rank() == 0) {
          asked = true;
          EXPECT_THROW(sent.event.wait(), Interrupted);
          left.open();
        }
        sent.event.synchronize();  // the call itself goes on
        EXPECT_EQ(value_of(sent.status), 0);
      },
      [&](BufferConfig& config, uint32_t rank) {
        if (rank == 0) config.interrupt = [&] { return asked.exchange(false); };
      });
}

// Inputs may be overwritten behind inputs_done; the handle and what was sent keep the old ones.
TEST(Streams, InputsMayBeOverwrittenBehindInputsDone) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (const bool exact : {true, false}) {
      const DispatchArgs args = async_args(trip, rank, exact);
      const DispatchResult sent = buffer.dispatch(args);
      sent.inputs_done.synchronize();
      std::memset(args.x.data, 0xFF, 9 * 64);
      std::memset(args.topk_idx.data, 0x77, 9 * 2 * 8);
      std::memset(args.topk_weights.data, 0xFF, 9 * 2 * 4);
      CombineArgs back = combine_args(trip, rank, sent.handle);
      if (!exact) continue;
      expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
      expect_combined(trip.back[rank], rank, buffer.combine(back));
    }
  });
}

// Any thread may call.  Equal calls from several threads pair up in whatever order they come.
TEST(Streams, SeveralThreadsCallOneBuffer) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    constexpr uint32_t kThreads = 4;
    std::vector<DispatchResult> sent(kThreads * 10);
    const auto in_threads = [&](const std::function<void(uint32_t)>& call) {
      std::vector<std::jthread> threads;
      for (uint32_t t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          for (uint32_t i = 0; i < 10; ++i)
            EXPECT_NO_THROW(call(t * 10 + i));
        });
      }
    };
    in_threads([&](uint32_t i) {
      DispatchArgs args = dispatch_args(trip, rank);
      args.async_op = i % 2 == 0;
      sent[i] = buffer.dispatch(args);
    });
    for (const DispatchResult& one : sent)
      expect_received(trip.sent.ranks[rank], trip.rules, rank, one);
    in_threads([&](uint32_t i) {
      expect_combined(trip.back[rank], rank,
                      buffer.combine(combine_args(trip, rank, sent[i].handle)));
    });
    EXPECT_EQ(buffer.stats().dispatches, 40u);
    EXPECT_EQ(buffer.stats().combines, 40u);
  });
}

// What other threads may ask while a call waits for its peers.
TEST(Streams, QueriesAnswerWhileACallWaits) {
  const Trip trip = plain_trip(2);
  Gate asked;
  with_buffers(trip, [&](EPBuffer& buffer) {
    std::jthread asker;
    if (buffer.rank() == 0) {
      asker = std::jthread([&] {
        await_entered(buffer, 0, 1);
        EXPECT_EQ(buffer.num_ranks(), 2u);
        EXPECT_EQ(buffer.stats().dispatches, 0u);
        EXPECT_GT(buffer.memory().used, 0u);
        EXPECT_EQ(buffer.max_rows(Layout::kRank), 18u);
        buffer.set_timeout_s(29.0);
        buffer.routing_layout(dispatch_args(trip, 0).topk_idx);
        asked.open();
      });
    } else {
      asked.wait();
    }
    round_trip(buffer, trip);
  });
}

}  // namespace
}  // namespace ep::test
