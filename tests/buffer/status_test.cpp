// The twins that never throw: the same calls, the same errors, as a Status.
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/trip.hpp"

namespace ep::test {
namespace {

static_assert(noexcept(std::declval<EPBuffer&>().try_dispatch({},
                                                              std::declval<DispatchResult&>())));
static_assert(noexcept(std::declval<EPBuffer&>().try_combine({}, std::declval<CombineResult&>())));

Trip small_trip(uint32_t num_ranks = 2) {
  TripSpec spec;
  spec.num_tokens = {4, 6};
  spec.num_tokens.resize(num_ranks);
  spec.num_experts = 4;
  spec.num_topk = 2;
  spec.hidden = 32;
  return make_trip(spec);
}

TEST(Status, OfACallThatWorksIsGood) {
  const Trip trip = small_trip();
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const uint32_t rank = group->rank();
    std::optional<EPBuffer> buffer;
    ASSERT_TRUE(EPBuffer::try_create(group, config_for(std::span(&trip, 1)), buffer).ok());
    DispatchResult got;
    CombineResult back;
    for (int i = 0; i < 3; ++i) {  // into what exists
      const Status status = buffer->try_dispatch(dispatch_args(trip, rank), got);
      EXPECT_TRUE(status.ok());
      EXPECT_EQ(status.kind(), ErrorKind::kNone);
      EXPECT_STREQ(status.message(), "ok");
      EXPECT_EQ(status.error(), nullptr);
      status.raise();
      expect_received(trip.sent.ranks[rank], trip.rules, rank, got);
      ASSERT_TRUE(buffer->try_combine(combine_args(trip, rank, got.handle), back).ok());
      expect_combined(trip.back[rank], rank, back);
    }
    Tensor answer;
    EXPECT_TRUE(buffer->try_expert_output(got.handle, 0, DType::kBFloat16, answer).ok());
    EXPECT_EQ(answer.shape[0], got.x.shape[0]);
    EXPECT_TRUE(buffer->try_check().ok());
  });
}

TEST(Status, OfACallThatFailsHoldsTheErrorAndLeavesTheResult) {
  const Trip trip = small_trip();
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const uint32_t rank = group->rank();
    EPBuffer buffer(group, config_for(std::span(&trip, 1)));
    const DispatchArgs good = dispatch_args(trip, rank);
    DispatchResult got = buffer.dispatch(good);
    const void* const before = got.x.data;
    DispatchArgs wrong = good;
    if (rank == 1) wrong.max_tokens = 1;
    std::optional<Status> kept;
    {
      const Status status = buffer.try_dispatch(wrong, got);
      kept = status;
    }
    EXPECT_FALSE(kept->ok());
    EXPECT_EQ(got.x.data, before);
    ASSERT_NE(kept->error(), nullptr);
    EXPECT_STREQ(kept->message(), kept->error()->what());
    if (rank == 1) {
      ASSERT_EQ(kept->kind(), ErrorKind::kCapacity);
      const auto& error = static_cast<const CapacityError&>(*kept->error());
      EXPECT_EQ(error.rank, 1u);
      EXPECT_EQ(error.needed, 6u);
      EXPECT_EQ(error.available, 1u);
      EXPECT_THROW(kept->raise(), CapacityError);
    } else {
      ASSERT_EQ(kept->kind(), ErrorKind::kPeer);
      EXPECT_EQ(static_cast<const PeerError&>(*kept->error()).peers, std::vector<uint32_t>{1});
      EXPECT_THROW(kept->raise(), PeerError);
    }
    CombineResult back;
    EXPECT_EQ(buffer.try_combine({}, back).kind(), ErrorKind::kInvalidArgument);
    round_trip(buffer, trip);
    buffer.close();
    EXPECT_EQ(buffer.try_dispatch(good, got).kind(), ErrorKind::kError);
    uint64_t completed = 0;
    EXPECT_EQ(buffer.try_resync(completed).kind(), ErrorKind::kError);
  });
}

TEST(Status, OfABufferThatCannotBe) {
  std::optional<EPBuffer> buffer;
  const Status status = EPBuffer::try_create(Communicator::single(), BufferConfig{}, buffer);
  EXPECT_EQ(status.kind(), ErrorKind::kInvalidArgument);
  EXPECT_FALSE(buffer.has_value());
}

// What is no ep::Error (here the caller's allocator's own exception) is an error without a class of ours.
TEST(Status, OfAForeignException) {
  const Trip trip = small_trip(1);
  BufferConfig config = config_for(std::span(&trip, 1));
  config.allocator = [](uint64_t) -> std::shared_ptr<void> { throw std::runtime_error("mine"); };
  EPBuffer buffer(Communicator::single(), config);
  DispatchResult got;
  const Status status = buffer.try_dispatch(dispatch_args(trip, 0), got);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.kind(), ErrorKind::kError);
  EXPECT_EQ(status.error(), nullptr);
  EXPECT_STREQ(status.message(), "mine");
  EXPECT_THROW(status.raise(), std::runtime_error);
}

// The same when rows are on their way already: as for std::bad_alloc, the others hear of it in their next call.
TEST(Status, OfAForeignExceptionBehindTheCounts) {
  const Trip trip = small_trip();
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const uint32_t rank = group->rank();
    BufferConfig config = config_for(std::span(&trip, 1));
    config.outputs = Outputs::kCaller;
    config.timeout_s = 5.0;
    int calls_left = rank == 1 ? 1 : -1;  // the handle
    config.allocator = [&](uint64_t bytes) -> std::shared_ptr<void> {
      if (calls_left-- == 0) throw std::runtime_error("mine");
      constexpr std::align_val_t kAlign{256};
      return {::operator new(bytes, kAlign), [](void* p) { ::operator delete(p, kAlign); }};
    };
    EPBuffer buffer(group, config);
    DispatchResult got;
    const Status first = buffer.try_dispatch(dispatch_args(trip, rank), got);
    if (rank == 1) {
      EXPECT_STREQ(first.message(), "mine");
      EXPECT_FALSE(got.x.defined());
      EXPECT_EQ(buffer.memory().used, 0u);
    } else {
      EXPECT_TRUE(first.ok()) << first.message();
      EXPECT_EQ(buffer.try_dispatch(dispatch_args(trip, rank), got).kind(), ErrorKind::kPeer);
    }
    round_trip(buffer, trip);
  });
}

TEST(Warm, ChecksNamesAndSendsNothing) {
  const Trip trip = small_trip(1);
  EPBuffer buffer(Communicator::single(), config_for(std::span(&trip, 1)));
  buffer.warm(DispatchArgs{});
  buffer.warm(CombineArgs{});
  DispatchArgs latency;
  latency.mode = Mode::kLatency;
  EXPECT_THROW(buffer.warm(latency), Unsupported);
  CombineArgs coded;
  coded.quant = Quant::kFp8Block128;
  EXPECT_THROW(buffer.warm(coded), Unsupported);
  EXPECT_EQ(buffer.stats().dispatches, 0u);
}

TEST(Version, OfTheLibraryIsThatOfTheHeaders) {
  const std::string headers = std::to_string(EP_VERSION_MAJOR) + "." +
                              std::to_string(EP_VERSION_MINOR) + "." +
                              std::to_string(EP_VERSION_PATCH);
  EXPECT_EQ(version(), headers);
}

}  // namespace
}  // namespace ep::test
