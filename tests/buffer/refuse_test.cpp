// EPBuffer::refuse: a rank whose caller's arguments cannot even be read spends its turn.
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3;

// In every rank: `culprit` refuses the call that the others make; they hear of it in that call.
template <class Call>
void refuse_or(EPBuffer& buffer, uint32_t culprit, Operation operation, Call&& call) {
  if (buffer.rank() == culprit) return buffer.refuse(operation);
  const PeerError error = caught<PeerError>(call);
  EXPECT_EQ(error.peers, std::vector<uint32_t>{culprit});
  EXPECT_EQ(error.reason, "it refused its arguments");
  expect_text(error, {"rank " + std::to_string(culprit)});
}

uint64_t next_call(EPBuffer& buffer) {
  buffer.comm_stream().synchronize();
  return BufferAccess::impl(buffer).core().state.sequence;
}

TEST(Refuse, ADispatch) {
  for (const Layout layout : kBothLayouts) {
    const Trip trip = plain_trip(kRanks, layout);
    with_buffers(trip, [&](EPBuffer& buffer) {
      for (uint32_t round = 0; round < 2 * kRanks; ++round) {
        refuse_or(buffer, round % kRanks, Operation::kDispatch,
                  [&] { buffer.dispatch(dispatch_args(trip, buffer.rank())); });
        if (round % 2 == 0) round_trip(buffer, trip);
      }
      EXPECT_NO_THROW(buffer.check());
      round_trip(buffer, trip);
      EXPECT_EQ(buffer.stats().faults, 2 * kRanks);
      EXPECT_EQ(buffer.memory().used, 0u);
    });
  }
}

TEST(Refuse, ACombine) {
  for (const Layout layout : kBothLayouts) {
    const Trip trip = plain_trip(kRanks, layout);
    with_buffers(trip, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      for (uint32_t culprit = 0; culprit < kRanks; ++culprit) {
        const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
        const auto combine = [&] { return buffer.combine(combine_args(trip, rank, sent.handle)); };
        refuse_or(buffer, culprit, Operation::kCombine, combine);
        EXPECT_NO_THROW(buffer.check());
        expect_combined(trip.back[rank], rank, combine());
      }
    });
  }
}

// Behind a call in flight it waits for nobody, and ends the call after that one.
TEST(Refuse, BehindAnAsyncCall) {
  const Trip trip = plain_trip(2);
  Gate has_refused;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    args.exact = false;
    args.async_op = true;
    if (rank == 1) has_refused.wait();
    const DispatchResult sent = buffer.dispatch(args);
    refuse_or(buffer, 0, Operation::kDispatch, [&] { buffer.dispatch(dispatch_args(trip, rank)); });
    if (rank == 0) {
      EXPECT_FALSE(sent.event.query());
      has_refused.open();
    }
    sent.event.synchronize();
    EXPECT_EQ(value_of(sent.num_rows_device), static_cast<int32_t>(trip.sent.ranks[rank].num_rows));
    round_trip(buffer, trip);
  });
}

TEST(Refuse, OfAClosedBufferIsNothing) {
  const Trip trip = plain_trip(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    buffer.close();
    const uint64_t before = next_call(buffer);
    buffer.refuse(Operation::kDispatch);
    EXPECT_EQ(next_call(buffer), before);
  });
}

TEST(Refuse, BeforeAResyncIsNothing) {
  const Trip trip = plain_trip(2);
  Gate gave_up;
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const auto call = [&] { buffer.dispatch(dispatch_args(trip, rank)); };
    if (rank == 0) {
      buffer.set_timeout_s(kShortS);
      caught<Timeout>(call);
      gave_up.open();
      buffer.set_timeout_s(kBoundS);
    } else {
      gave_up.wait();
      caught<PeerError>(call);
    }
    const uint64_t before = next_call(buffer), faults = buffer.stats().faults;
    buffer.refuse(Operation::kDispatch);
    EXPECT_EQ(next_call(buffer), before);
    EXPECT_EQ(buffer.stats().faults, faults);
    EXPECT_EQ(buffer.resync(), 0u);
    round_trip(buffer, trip);
  });
}

}  // namespace
}  // namespace ep::test
