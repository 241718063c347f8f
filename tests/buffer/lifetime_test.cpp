// What may be dropped when: buffers, outputs, handles, events, inputs; and what is left afterwards.
#include <functional>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "fabric/rank_processes.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

DispatchArgs fixed_async(const Trip& trip, uint32_t rank) {
  DispatchArgs args = dispatch_args(trip, rank);
  args.exact = false;
  args.async_op = true;
  return args;
}

TEST(Lifetime, OutputsOutliveTheBuffer) {  // user report Q5
  const Trip trip = plain_trip(3, Layout::kExpert);
  const Watchdog watchdog;
  run_threads(3, [&](std::shared_ptr<Communicator> group) {
    const uint32_t rank = group->rank();
    DispatchResult sent;
    CombineResult back;
    {
      EPBuffer buffer(group, config_for({&trip, 1}));
      sent = buffer.dispatch(dispatch_args(trip, rank));
      back = buffer.combine(combine_args(trip, rank, sent.handle));
    }
    group.reset();
    expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
    expect_combined(trip.back[rank], rank, back);
    sent.record_stream(Stream::host());
    const Tensor x = sent.x;  // the last owner may be any of the tensors
    sent = {};
    EXPECT_EQ(x.num_dims, 2u);
  });
}

// An asynchronous call is in flight when its buffer goes: the buffer waits for it.
TEST(Lifetime, ABufferGoesWithACallInFlight) {
  const Trip trip = plain_trip(2);
  const Watchdog watchdog;
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    DispatchResult sent;
    {
      EPBuffer buffer(group, config_for({&trip, 1}));
      sent = buffer.dispatch(fixed_async(trip, group->rank()));
    }
    sent.event.synchronize();
    EXPECT_EQ(value_of(sent.status), 0);
    EXPECT_EQ(value_of(sent.num_rows_device),
              static_cast<int32_t>(trip.sent.ranks[group->rank()].num_rows));
  });
}

// Memory is unmapped with the last tensor that views it: events and handles do not.
TEST(Lifetime, EventsAndHandlesKeepNoWindow) {
  const Trip trip = plain_trip(2);
  const Watchdog watchdog;
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const size_t before = fabric::take_census().num_mappings;
    Event event;
    CombineResult back;
    Handle handle;
    {
      EPBuffer buffer(group, config_for({&trip, 1}));
      const DispatchResult sent = buffer.dispatch(dispatch_args(trip, group->rank()));
      handle = sent.handle;
      event = sent.event;
      back = buffer.combine(combine_args(trip, group->rank(), sent.handle));
      group->all_gather({}, 30.0);
      EXPECT_GT(fabric::take_census().num_mappings, before);
      group->all_gather({}, 30.0);
    }
    group->all_gather({}, 30.0);
    EXPECT_EQ(fabric::take_census().num_mappings, before);
    group->all_gather({}, 30.0);
    expect_combined(trip.back[group->rank()], group->rank(), back);
    EXPECT_TRUE(event.query());
  });
}

TEST(Lifetime, AHandleOutlivesItsBuffer) {  // and is nobody else's: user report K6
  const Trip trip = plain_trip(2);
  const Watchdog watchdog;
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const BufferConfig config = config_for({&trip, 1});
    Handle handle;
    {
      EPBuffer buffer(group, config);
      handle = buffer.dispatch(dispatch_args(trip, group->rank())).handle;
    }
    EPBuffer buffer(group, config);
    DispatchArgs replay{.x = to_tensor(trip.tokens[group->rank()].x)};
    replay.handle = &handle;
    expect_text(caught<InvalidArgument>([&] { buffer.dispatch(replay); }), {"another buffer"});
    round_trip(buffer, trip);
  });
}

TEST(Lifetime, CallsOnAClosedBuffer) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
    buffer.close();
    buffer.close();
    const std::function<void()> calls[] = {
        [&] { buffer.dispatch(dispatch_args(trip, rank)); },
        [&] { buffer.combine(combine_args(trip, rank, sent.handle)); },
        [&] { buffer.expert_output(sent.handle); },
        [&] { buffer.resync(); },
    };
    for (const auto& call : calls)
      expect_text(caught<Error>(call), {"closed"});
    expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
    EPBuffer moved = std::move(buffer);
    moved.close();
  });
}

// user report Q3: rank 0 is gone right after its combine; rank 1 still reads what rank 0 answered.
TEST(Lifetime, ClosingDisturbsNoLateReader) {
  const Trip trip = plain_trip(2);
  const Watchdog watchdog;
  for (const AnswerIn answer_in : {AnswerIn::kOrdinary, AnswerIn::kExpertOutput}) {
    std::latch in_combine(1);
    run_threads(2, [&](std::shared_ptr<Communicator> group) {
      EPBuffer buffer(group, config_for({&trip, 1}));
      const uint32_t rank = buffer.rank();
      const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
      CombineArgs args = answer_in == AnswerIn::kOrdinary
                             ? combine_args(trip, rank, sent.handle)
                             : window_combine_args(buffer, trip, rank, sent.handle);
      Stream slow = Stream::host();
      if (rank == 1) {  // its reads begin when rank 0 is in its combine, and then take their time
        slow.call([&] { in_combine.wait(); });
        args.stream = slow;
      }
      args.async_op = true;
      const CombineResult back = buffer.combine(args);
      if (rank == 0) in_combine.count_down();
      if (rank == 1) expect_combined(trip.back[rank], rank, back);
      buffer.close();
      expect_combined(trip.back[rank], rank, back);
    });
  }
}

TEST(Lifetime, ThePeersOfAClosedBuffer) {
  const Trip trip = plain_trip(3);
  std::latch closed(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    round_trip(buffer, trip);
    if (buffer.rank() == 1) {
      buffer.close();
      return closed.count_down();
    }
    if (buffer.rank() == 2) closed.wait();
    const PeerError error =
        caught<PeerError>([&] { buffer.dispatch(dispatch_args(trip, buffer.rank())); });
    EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
    expect_text(error, {"closed"});
  });
}

// user report O (CPU shadow), K7, K8: dispatches without a combine, dropped handles and events leak
// nothing.
TEST(Lifetime, NothingIsLeftOfDroppedResults) {
  const Trip trip = plain_trip(2, Layout::kExpert);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (uint32_t i = 0; i < scaled(200); ++i) {
      DispatchArgs args = i % 2 == 0 ? fixed_async(trip, rank) : dispatch_args(trip, rank);
      args.async_op = true;
      DispatchResult sent = buffer.dispatch(args);
      if (i % 3 != 0) continue;
      CombineArgs back = combine_args(trip, rank, sent.handle);
      if (i % 2 == 0) back.x = sent.x;
      back.async_op = true;
      buffer.combine(back);
    }
    buffer.comm_stream().synchronize();
    EXPECT_EQ(buffer.memory().used, 0u);
    EXPECT_EQ(buffer.stats().faults, 0u);
    round_trip(buffer, trip);
  });
}

// "Freeing inputs right after an async call is safe": the call keeps their owners, and no longer
// than it needs.
TEST(Lifetime, InputsLiveUntilTheCallIsDone) {
  const Trip trip = plain_trip(2);
  Gate gate;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    std::vector<std::weak_ptr<void>> owners;
    const auto watch = [&](const Tensor& t) { owners.push_back(t.owner); };
    if (rank == 1) gate.wait();
    DispatchResult sent;
    {
      DispatchArgs args = fixed_async(trip, rank);
      args.extras = {to_tensor(Table(DType::kInt8, 9, 16))};
      for (const Tensor* t : {&args.x, &args.topk_idx, &args.topk_weights, &args.extras[0]})
        watch(*t);
      sent = buffer.dispatch(args);
    }
    CombineResult back;
    {
      CombineArgs args = combine_args(trip, rank, sent.handle);
      args.x = to_tensor(Table(DType::kBFloat16, static_cast<uint64_t>(sent.x.shape[0]), 32));
      args.bias = {to_tensor(Table(DType::kBFloat16, 9, 32))};
      args.async_op = true;
      watch(args.x);
      watch(args.bias[0]);
      back = buffer.combine(args);
    }
    if (rank == 0) {
      for (const auto& owner : owners)
        EXPECT_FALSE(owner.expired());
      gate.open();
    }
    back.event.synchronize();
    for (const auto& owner : owners)
      EXPECT_TRUE(owner.expired());
  });
}

// protocol rule 8: what combine consumed is handed out again only behind a later operation.
TEST(Lifetime, ExpertOutputIsReusedAfterALaterOperation) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
    const void* consumed = nullptr;
    {
      const CombineArgs args = window_combine_args(buffer, trip, rank, sent.handle);
      consumed = args.x.data;
      expect_combined(trip.back[rank], rank, buffer.combine(args));
    }
    {
      const Tensor next = buffer.expert_output(sent.handle, 32);
      EXPECT_NE(next.data, consumed);
    }
    buffer.combine(combine_args(trip, rank, sent.handle));
    EXPECT_EQ(buffer.expert_output(sent.handle, 32).data, consumed);
    std::set<const void*> addresses;  // and a steady loop needs no more than two of them
    for (uint32_t i = 0; i < 20; ++i) {
      const CombineArgs args = window_combine_args(buffer, trip, rank, sent.handle);
      addresses.insert(args.x.data);
      expect_combined(trip.back[rank], rank, buffer.combine(args));
    }
    EXPECT_LE(addresses.size(), 3u);
  });
}

TEST(Lifetime, TwoBuffersTakeTurns) {  // user report F7
  const Trip a = plain_trip(3), b = plain_trip(3, Layout::kExpert, 9);
  const Watchdog watchdog;
  run_threads(3, [&](std::shared_ptr<Communicator> group) {
    EPBuffer first(group, config_for({&a, 1})), second(group, config_for({&b, 1}));
    const uint32_t rank = group->rank();
    for (uint32_t i = 0; i < 20; ++i) {
      const DispatchResult of_a = first.dispatch(dispatch_args(a, rank));
      const DispatchResult of_b = second.dispatch(dispatch_args(b, rank));
      expect_combined(b.back[rank], rank, second.combine(combine_args(b, rank, of_b.handle)));
      expect_combined(a.back[rank], rank, first.combine(combine_args(a, rank, of_a.handle)));
      expect_received(a.sent.ranks[rank], a.rules, rank, of_a);
    }
    second.close();  // in either order
    round_trip(first, a);
  });
}

TEST(Lifetime, TwoJobsAtOnce) {  // user report F6: same defaults, other data
  const Trip trips[] = {plain_trip(2, Layout::kRank, 5), plain_trip(2, Layout::kRank, 6)};
  std::vector<std::jthread> jobs;
  for (const Trip& trip : trips) {
    jobs.emplace_back([&trip] {
      EXPECT_NO_THROW(with_buffers(trip, [&](EPBuffer& buffer) {
        for (uint32_t round = 0; round < 20; ++round)
          round_trip(buffer, trip);
      }));
    });
  }
}

// user report N4: no descriptor, thread or mapping is left behind, faults or not.
TEST(Lifetime, ManyBuffersLeaveNothing) {
  const Trip trip = plain_trip(2);
  const Watchdog watchdog(2 * kBoundS);
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const uint32_t num_buffers = scaled(200) + 2;
    fabric::Census before{};
    for (uint32_t i = 0; i < num_buffers; ++i) {
      DispatchResult kept;
      {
        EPBuffer buffer(group, config_for({&trip, 1}));
        if (i % 4 == 1 && buffer.rank() == 0) buffer.abort("fault");
        if (i % 4 == 1) caught<PeerError>([&] { round_trip(buffer, trip); });
        if (i % 4 != 3) round_trip(buffer, trip);
        if (i % 4 == 2) kept = buffer.dispatch(dispatch_args(trip, buffer.rank()));
      }
      kept = {};
      group->all_gather({}, 30.0);  // both ranks' buffers are gone, both threads are there
      if (group->rank() == 0 && (i == 1 || i + 1 == num_buffers)) {
        const fabric::Census now = fabric::take_census();
        if (i == 1) before = now;
        EXPECT_EQ(now.num_fds, before.num_fds);
        EXPECT_EQ(now.num_threads, before.num_threads);
        EXPECT_EQ(now.num_mappings, before.num_mappings);  // files in /dev/shm may be anybody's
      }
      group->all_gather({}, 30.0);
    }
  });
}

// protocol rule 19: tags wrap; near it, all is as anywhere, faults and recoveries included.
TEST(Lifetime, SequenceNumbersPastTheWrap) {
  const Trip trip = plain_trip(3, Layout::kExpert);
  for (const uint64_t start : {uint64_t{0xFFFFFFF0}, uint64_t{0xFFFFFFFFFFF0}}) {
    const Watchdog watchdog;
    std::latch gave_up(1);
    run_threads(3, [&](std::shared_ptr<Communicator> group) {
      EPBuffer buffer = BufferAccess::create(group, config_for({&trip, 1}), start);
      const uint32_t rank = group->rank();
      const auto call = [&] { buffer.dispatch(dispatch_args(trip, rank)); };
      for (uint64_t i = 0; i < 20; ++i) {
        if (i == 6 && rank == 1) buffer.abort("near the wrap");
        if (i == 6) caught<PeerError>(call);  // call start + 12
        if (i == 7) {                         // start + 15: the last tag, or one behind it
          if (rank == 2) {
            gave_up.wait();
            caught<PeerError>(call);
          } else {
            buffer.set_timeout_s(kShortS);
            caught<Timeout>(call);
            if (rank == 0) gave_up.count_down();
          }
          buffer.set_timeout_s(30.0);
          EXPECT_EQ(buffer.resync(), start + 14);
        }
        round_trip(buffer, trip, i % 2 == 0 ? AnswerIn::kOrdinary : AnswerIn::kExpertOutput);
      }
    });
  }
}

}  // namespace
}  // namespace ep::test
