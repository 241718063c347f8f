// Faults that all ranks see in the same call: ids, token counts, calls that differ, too many rows.
// After each the next call is exact.
#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3;

TripSpec wide_spec(Layout layout = Layout::kRank) {
  return {.num_tokens = {9, 9, 9},
          .num_experts = 6,
          .num_topk = 3,
          .hidden = 128,
          .layout = layout,
          .buffer_tokens = 16};
}

Tensor ids_with(const Table& ids, uint64_t token, uint64_t slot, int64_t id) {
  Table copy = ids;
  copy.set_id(token, slot, id);
  return to_tensor(copy);
}

// user reports I5, H9, api.md: ids are checked before narrowing and named by token and slot.
TEST(Errors, ABadIdIsNamed) {
  for (const DType dtype : {DType::kInt64, DType::kInt32}) {
    TripSpec spec = wide_spec();
    spec.idx_dtype = dtype;
    const Trip trip = make_trip(spec);
    std::vector<int64_t> bad = {-2, 6, 7, std::numeric_limits<int32_t>::min(),
                                std::numeric_limits<int32_t>::max()};
    if (dtype == DType::kInt64) {
      const int64_t wide[] = {std::numeric_limits<int64_t>::min(), (int64_t{1} << 32) + 1,
                              (int64_t{1} << 32) - 1, std::numeric_limits<int64_t>::max()};
      bad.insert(bad.end(), std::begin(wide), std::end(wide));
    }
    with_buffers(trip, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      for (uint32_t i = 0; i < bad.size(); ++i) {
        const uint32_t token = i * 5 % 9, slot = i % 3;
        DispatchArgs args = dispatch_args(trip, rank);
        if (rank == i % kRanks)
          args.topk_idx = ids_with(trip.tokens[rank].idx, token, slot, bad[i]);
        args.async_op = i % 2 == 1;
        expect_refusal<InvalidArgument>(buffer, i % kRanks,
                                        {"topk_idx[" + std::to_string(token) + ", " +
                                             std::to_string(slot) + "] = " + std::to_string(bad[i]),
                                         "num_experts=6"},
                                        [&] { buffer.dispatch(args); });
        round_trip(buffer, trip);
      }
    });
  }
}

TEST(Errors, TheFirstOfSeveralBadIdsIsNamed) {
  const Trip trip = make_trip(wide_spec());
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        DispatchArgs args = dispatch_args(trip, buffer.rank());
        if (buffer.rank() == 1) {
          Table ids = trip.tokens[1].idx;
          for (uint64_t t = 2; t < 9; ++t)
            ids.set_id(t, 1, -9 - static_cast<int64_t>(t));
          args.topk_idx = to_tensor(ids);
        }
        expect_refusal<InvalidArgument>(buffer, 1, {"topk_idx[2, 1] = -11"},
                                        [&] { buffer.dispatch(args); });
        round_trip(buffer, trip);
      },
      [](BufferConfig& config, uint32_t) { config.num_sms = 4; });
}

// exact = false: the host does not wait, so the fault comes once, at any of three places, and
// spends no turn.
TEST(Errors, ABadIdOfAFixedSizeDispatchIsDeferred) {
  TripSpec spec = wide_spec();
  spec.exact = false;
  const Trip trip = make_trip(spec);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (uint32_t place = 0; place < 4; ++place) {
      DispatchArgs args = dispatch_args(trip, rank);
      if (rank == 1) args.topk_idx = ids_with(trip.tokens[rank].idx, 4, 2, -3);
      args.async_op = place % 2 == 0;
      const DispatchResult sent = buffer.dispatch(args);
      if (args.async_op) buffer.comm_stream().synchronize();
      EXPECT_EQ(value_of(sent.status) != 0, rank == 1);
      const auto look = [&] {
        if (place == 0) sent.event.synchronize();
        if (place == 1) buffer.check();
        if (place == 2) buffer.dispatch(dispatch_args(trip, rank));
        if (place == 3) buffer.combine(combine_args(trip, rank, sent.handle));
      };
      if (rank == 1) expect_text(caught<InvalidArgument>(look), {"topk_idx[4, 2] = -3"});
      if (rank == 1 || place >= 2) look();  // nothing is left to be raised
      EXPECT_NO_THROW(sent.event.synchronize());
      EXPECT_NO_THROW(buffer.check());
      round_trip(buffer, trip);
    }
  });
}

// user report D1: both numbers, on the rank alone; the others learn that it refused.
TEST(Errors, TooManyTokens) {
  const Trip trip = make_trip(wide_spec());
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (const uint32_t bound : {16u, 9u}) {
      for (uint32_t culprit = 0; culprit < kRanks; ++culprit) {
        DispatchArgs args = dispatch_args(trip, rank);
        if (bound == 9) args.max_tokens = 9;
        if (rank == culprit) {
          args.x = zeros(DType::kBFloat16, bound + 1, 128);
          args.topk_idx = zeros(DType::kInt64, bound + 1, 3);
          args.topk_weights = zeros(DType::kFloat32, bound + 1, 3);
        }
        const auto call = [&] { buffer.dispatch(args); };
        if (rank == culprit) {
          const CapacityError error = caught<CapacityError>(call);
          EXPECT_EQ(error.rank, rank);
          EXPECT_EQ(error.needed, bound + 1);
          EXPECT_EQ(error.available, bound);
          expect_text(error, {std::to_string(bound + 1), std::to_string(bound), "max_tokens"});
        } else {
          const PeerError error = caught<PeerError>(call);
          EXPECT_EQ(error.peers, std::vector<uint32_t>{culprit});
          expect_text(error, {std::to_string(bound + 1) + " tokens", std::to_string(bound)});
        }
        round_trip(buffer, trip);
      }
    }
  });
}

// What an agreed field is on most ranks, and on one.
struct Difference {
  std::string field;
  std::function<void(DispatchArgs&)> usual, changed;
};

void expect_desync(EPBuffer& buffer,
                   uint32_t culprit,
                   const std::string& field,
                   const std::function<void()>& call) {
  SCOPED_TRACE(field);
  const Desync error = caught<Desync>(call);
  EXPECT_EQ(error.field, field);
  EXPECT_NE(error.mine, error.theirs);
  EXPECT_EQ(error.peer == culprit, buffer.rank() != culprit);
  expect_text(error, {field, std::to_string(error.mine), std::to_string(error.theirs),
                      "rank " + std::to_string(error.peer)});
}

std::vector<Difference> dispatch_differences() {
  using A = DispatchArgs;
  const auto nothing = [](A&) {};
  const auto scaled = [](DType dtype, uint64_t columns) {
    return [=](A& a) { a.scales = zeros(dtype, 9, columns); };
  };
  const auto extras = [](std::vector<Tensor> tensors) { return [=](A& a) { a.extras = tensors; }; };
  const auto rows = [](uint32_t n) { return [=](A& a) { a.max_rows = n; }; };
  const auto expert = [](A& a) { a.layout = Layout::kExpert; };
  const Tensor i32 = zeros(DType::kInt32, 9, 2), f32 = zeros(DType::kFloat32, 9, 2),
               longer = zeros(DType::kInt32, 9, 3);
  return {
      {"layout", nothing, expert},
      {"quant", nothing, [](A& a) { a.quant = Quant::kFp8Block128; }},
      {"quant", [](A& a) { a.quant = Quant::kFp8Block128; },
       [](A& a) { a.quant = Quant::kFp8Block128Pow2; }},
      {"exact", nothing, [](A& a) { a.exact = false; }},
      {"overflow", rows(48),
       [](A& a) {
         a.max_rows = 48;
         a.overflow = Overflow::kDrop;
       }},
      {"max_tokens", nothing, [](A& a) { a.max_tokens = 12; }},
      {"max_rows", rows(48), rows(47)},
      {"expert_alignment", expert,
       [](A& a) {
         a.layout = Layout::kExpert;
         a.expert_alignment = 8;
       }},
      {"K", nothing,
       [](A& a) {
         a.topk_idx = zeros(DType::kInt64, 9, 2);
         a.topk_weights = zeros(DType::kFloat32, 9, 2);
       }},
      {"dtype of x", nothing, [](A& a) { a.x.dtype = DType::kFloat16; }},
      {"row bytes of x", nothing, [](A& a) { a.x = zeros(DType::kBFloat16, 9, 64); }},
      {"dtype of scales", nothing, scaled(DType::kFloat32, 2)},
      {"dtype of scales", scaled(DType::kFloat32, 2), scaled(DType::kInt32, 2)},
      {"row bytes of scales", scaled(DType::kFloat32, 2), scaled(DType::kFloat32, 3)},
      {"dtype of topk_idx", nothing, [](A& a) { a.topk_idx = zeros(DType::kInt32, 9, 3); }},
      {"topk_weights", nothing, [](A& a) { a.topk_weights = {}; }},
      {"number of extras", nothing, extras({i32})},
      {"dtype of an extra", extras({i32, i32}), extras({i32, f32})},
      {"row bytes of an extra", extras({i32, i32}), extras({i32, longer})},
  };
}

// user reports B9, D3, R3: every agreed field of a dispatch, on every rank, before data moves.
TEST(Errors, DispatchesThatDiffer) {
  const Trip trip = make_trip(wide_spec());
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        uint32_t culprit = 0;
        for (const Difference& d : dispatch_differences()) {
          DispatchArgs args = dispatch_args(trip, buffer.rank());
          (buffer.rank() == culprit ? d.changed : d.usual)(args);
          expect_desync(buffer, culprit, d.field, [&] { buffer.dispatch(args); });
          round_trip(buffer, trip);
          culprit = (culprit + 1) % kRanks;
        }
      },
      [](BufferConfig& config, uint32_t) { config.token_bytes = 1024; });
}

TEST(Errors, FreeFieldsMayDiffer) {
  Trip trip = make_trip(wide_spec(Layout::kExpert));
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    args.async_op = rank == 0;
    args.num_sms = 1 + rank;
    if (rank == 1) args.ids = Ids::kGlobal;
    if (rank == 2) args.stream = Stream::host();
    const DispatchResult sent = buffer.dispatch(args);
    CombineArgs back = combine_args(trip, rank, sent.handle);
    back.async_op = rank == 2;
    back.num_sms = 3 - rank;
    expect_combined(trip.back[rank], rank, buffer.combine(back));
    round_trip(buffer, trip);
  });
}

// A rank that replays among ranks that route, and handles of two dispatches: also in a combine.
TEST(Errors, HandlesThatDiffer) {
  const std::vector<Trip> trips = make_trips({wide_spec(), wide_spec()});
  TripSpec other_spec = wide_spec();
  other_spec.seed = 77;
  const Trip &trip = trips[0], other = make_trip(other_spec);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const Handle first = buffer.dispatch(dispatch_args(trip, rank)).handle;
    const Handle second = buffer.dispatch(dispatch_args(other, rank)).handle;
    for (uint32_t culprit = 0; culprit < kRanks; ++culprit) {
      DispatchArgs replay{.x = to_tensor(trip.tokens[rank].x)};
      replay.handle = rank == culprit ? &second : &first;
      expect_desync(buffer, culprit, "routing of the handle", [&] { buffer.dispatch(replay); });
      round_trip(buffer, trip);
      const Trip& mine = rank == culprit ? other : trip;
      const CombineArgs back = combine_args(mine, rank, rank == culprit ? second : first);
      expect_desync(buffer, culprit, "routing of the handle", [&] { buffer.combine(back); });
      DispatchArgs args = dispatch_args(trip, rank);
      if (rank == culprit) args = replay;
      expect_desync(buffer, culprit, "handle (replay)", [&] { buffer.dispatch(args); });
      round_trip(buffer, other);
    }
  });
}

TEST(Errors, CombinesThatDiffer) {
  const Trip trip = make_trip(wide_spec());
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        const Handle handle = buffer.dispatch(dispatch_args(trip, rank)).handle;
        const uint64_t rows = trip.sent.ranks[rank].rows.size();
        const std::pair<std::string, std::function<void(CombineArgs&)>> changes[] = {
            {"dtype of x", [&](CombineArgs& a) { a.x.dtype = DType::kFloat16; }},
            {"row bytes of x", [&](CombineArgs& a) { a.x = zeros(DType::kBFloat16, rows, 64); }},
            {"row_weights",
             [&](CombineArgs& a) { a.row_weights = zeros(DType::kFloat32, rows, 3); }},
        };
        uint32_t culprit = 0;
        for (const auto& [field, change] : changes) {
          CombineArgs args = combine_args(trip, rank, handle);
          if (rank == culprit) change(args);
          expect_desync(buffer, culprit, field, [&, &a = args] { buffer.combine(a); });
          expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, handle)));
          culprit = (culprit + 1) % kRanks;
        }
      },
      [](BufferConfig& config, uint32_t) { config.output_bytes = 1024; });
}

TEST(Errors, ADispatchAndACombine) {  // user report B4
  for (const Layout layout : kBothLayouts) {
    const Trip trip = make_trip(wide_spec(layout));
    with_buffers(trip, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
      for (uint32_t culprit = 0; culprit < kRanks; ++culprit) {
        expect_desync(buffer, culprit, "kind of operation", [&] {
          if (rank == culprit)
            buffer.combine(combine_args(trip, rank, sent.handle));
          else
            buffer.dispatch(dispatch_args(trip, rank));
        });
        expect_combined(trip.back[rank], rank,
                        buffer.combine(window_combine_args(buffer, trip, rank, sent.handle)));
        round_trip(buffer, trip);
      }
    });
  }
}

TEST(Errors, ADesyncOfAnAsyncFixedSizeDispatch) {
  TripSpec spec = wide_spec();
  spec.exact = false;
  const Trip trip = make_trip(spec);
  with_buffers(trip, [&](EPBuffer& buffer) {
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.async_op = true;
    if (buffer.rank() == 2) args.max_tokens = 10;
    const DispatchResult sent = buffer.dispatch(args);
    expect_desync(buffer, 2, "max_tokens", [&] { sent.event.synchronize(); });
    EXPECT_NE(value_of(sent.status), 0);
    EXPECT_NO_THROW(sent.event.synchronize());  // once
    EXPECT_NO_THROW(buffer.check());
    round_trip(buffer, trip);
  });
}

// user report D8: nothing is sent, the demand is told, the same error everywhere and at any place.
TEST(Errors, TooManyRows) {
  TripSpec spec = wide_spec();
  spec.routing = Routing::kOneRank;
  const Trip good = make_trip(wide_spec());
  spec.max_rows = 20;
  const Trip bad = make_trip(spec);
  with_buffers(good, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    for (uint32_t place = 0; place < 3; ++place) {
      DispatchArgs args = dispatch_args(bad, rank);
      args.async_op = place != 1;
      const DispatchResult sent = buffer.dispatch(args);
      buffer.comm_stream().synchronize();
      const CapacityError error = caught<CapacityError>([&] {
        if (place == 0) sent.event.synchronize();
        if (place == 1) buffer.check();
        if (place == 2) buffer.dispatch(dispatch_args(good, rank));
      });
      EXPECT_EQ(error.rank, 0u);
      EXPECT_EQ(error.needed, 27u);
      EXPECT_EQ(error.available, 20u);
      expect_text(error, {"27", "20", "rank 0", "max_rows"});
      EXPECT_NE(value_of(sent.status), 0);
      EXPECT_EQ(value_of(sent.rows_needed_device), rank == 0 ? 27 : 0);  // the true demand
      EXPECT_NO_THROW(sent.event.synchronize());
      round_trip(buffer, good);
    }
  });
}

// The handle of a dispatch that failed names no rows: an error on every rank, and a way back.
TEST(Errors, TheHandleOfAFailedDispatch) {
  TripSpec spec = wide_spec();
  const Trip good = make_trip(spec);
  spec.routing = Routing::kOneRank;
  spec.max_rows = 20;
  const Trip bad = make_trip(spec);
  with_buffers(good, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(bad, rank));
    caught<CapacityError>([&] { buffer.check(); });
    CombineArgs args{.x = zeros(DType::kBFloat16, 20, 128)};
    args.handle = &sent.handle;
    caught<Error>([&] { buffer.combine(args); });
    buffer.resync();
    DispatchArgs replay{.x = to_tensor(bad.tokens[rank].x)};
    replay.handle = &sent.handle;
    try {
      buffer.dispatch(replay).event.synchronize();
    } catch (const Error&) {
    }
    buffer.resync();
    round_trip(buffer, good);
  });
}

}  // namespace
}  // namespace ep::test
