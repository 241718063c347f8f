// Handles: replays in any order and of other rows, snapshots, saved and restored handles.
#include <algorithm>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

// The documented minimum, x and handle, plus what the payload needs: user report K2.
DispatchArgs replay_args(const Trip& trip, uint32_t rank, const Handle& handle) {
  const DispatchArgs full = dispatch_args(trip, rank);
  DispatchArgs args{.x = full.x};
  args.scales = full.scales;
  args.quant = full.quant;
  args.extras = full.extras;
  args.handle = &handle;
  return args;
}

void expect_replay(EPBuffer& buffer, const Trip& trip, const Handle& handle) {
  const uint32_t rank = buffer.rank();
  const DispatchResult sent = buffer.dispatch(replay_args(trip, rank, handle));
  expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
  expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, sent.handle)));
}

// Runs `body` with a buffer that can run all of the trips, in every rank.
void with_buffers(const std::vector<Trip>& trips, const std::function<void(EPBuffer&)>& body) {
  const BufferConfig config = config_for(trips);
  run_threads(trips[0].num_ranks(), [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    body(buffer);
  });
}

// The same tensors in other memory, as after saving and loading.
Handle restored(const Handle& handle) {
  unsigned char bytes[sizeof(Handle::Header)];
  std::memcpy(bytes, &handle.header(), sizeof bytes);
  Handle::Header header;
  std::memcpy(&header, bytes, sizeof bytes);
  std::vector<Tensor> tensors(handle.tensors().begin(), handle.tensors().end());
  for (Tensor& t : tensors) {
    if (!t.defined()) continue;
    const uint64_t size = static_cast<uint64_t>(t.num_elements()) * num_bytes(t.dtype);
    const auto memory = std::make_shared<std::vector<uint64_t>>(size / 8 + 1);
    if (size != 0) std::memcpy(memory->data(), t.data, size);
    t.data = memory->data();
    t.owner = memory;
  }
  return Handle::from_tensors(header, tensors);
}

TripSpec base_spec(Layout layout) {
  return {.num_tokens = {7, 0, 9},
          .num_experts = 8,
          .num_topk = 3,
          .hidden = 128,
          .routing = Routing::kMixed,
          .layout = layout,
          .alignment = layout == Layout::kExpert ? 4u : 1u,
          .combine_weights = layout == Layout::kExpert,
          .row_weights = true};
}

TEST(Replay, AnyNumberInAnyOrder) {  // user reports K8, K5
  for (const Layout layout : kBothLayouts) {
    std::vector<Trip> trips;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      TripSpec spec = base_spec(layout);
      spec.seed = seed;
      trips.push_back(make_trip(spec));
    }
    with_buffers(trips, [&](EPBuffer& buffer) {
      std::vector<Handle> handles;
      for (const Trip& trip : trips)
        handles.push_back(buffer.dispatch(dispatch_args(trip, buffer.rank())).handle);
      for (const uint32_t i : {2u, 0u, 1u, 1u, 2u, 0u})
        expect_replay(buffer, trips[i], handles[i]);
    });
  }
}

TEST(Replay, OtherRowsOfOtherDtypesAndSizes) {
  for (const Layout layout : kBothLayouts) {
    std::vector<Trip> trips{make_trip(base_spec(layout))};
    for (uint32_t i = 1; i <= 6; ++i) {
      TripSpec spec = base_spec(layout);
      spec.payload_seed = i;
      spec.hidden = i % 2 == 0 ? 256 : 64;
      spec.x_dtype = i < 3 ? DType::kFloat32 : DType::kFloat16;
      if (i == 4) spec.quant = Quant::kFp8Block128Ue8m0;
      if (i == 5) spec.scale_columns = 3;
      if (i == 6) spec.extras = {{DType::kInt32, {2}}};
      trips.push_back(make_trip(spec));
    }
    with_buffers(trips, [&](EPBuffer& buffer) {
      const Handle handle = buffer.dispatch(dispatch_args(trips[0], buffer.rank())).handle;
      for (const Trip& trip : trips)
        expect_replay(buffer, trip, handle);
    });
  }
}

TEST(Replay, OfAReplaysHandle) {
  for (const Layout layout : kBothLayouts) {
    const std::vector<Trip> trips{make_trip(base_spec(layout))};
    with_buffers(trips, [&](EPBuffer& buffer) {
      Handle handle = buffer.dispatch(dispatch_args(trips[0], buffer.rank())).handle;
      for (uint32_t i = 0; i < 3; ++i) {
        handle = buffer.dispatch(replay_args(trips[0], buffer.rank(), handle)).handle;
        expect_replay(buffer, trips[0], handle);
      }
    });
  }
}

TEST(Replay, WithNewWeights) {  // then again with the recorded ones: the first handle is a snapshot
  for (const Layout layout : kBothLayouts) {
    std::vector<Trip> trips{make_trip(base_spec(layout)), make_trip(base_spec(layout))};
    for (Tokens& t : trips[1].tokens) {
      for (uint64_t i = 0; i < t.num_tokens; ++i) {
        for (uint32_t k = 0; k < 3; ++k)
          t.weights.set_value(i, k, static_cast<float>(i) + 0.125f * static_cast<float>(k));
      }
    }
    trips[1].sent = dispatch(trips[1].tokens, trips[1].rules);
    make_answers(trips[1]);
    with_buffers(trips, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      const Handle handle = buffer.dispatch(dispatch_args(trips[0], rank)).handle;
      DispatchArgs args = replay_args(trips[1], rank, handle);
      args.topk_weights = to_tensor(trips[1].tokens[rank].weights);
      const DispatchResult sent = buffer.dispatch(args);
      expect_received(trips[1].sent.ranks[rank], trips[1].rules, rank, sent);
      expect_replay(buffer, trips[1], sent.handle);
      expect_replay(buffer, trips[0], handle);
    });
  }
}

TEST(Replay, OfFixedSizes) {
  for (const Layout layout : kBothLayouts) {
    std::vector<Trip> trips;
    for (const bool drop : {false, true}) {
      TripSpec spec = base_spec(layout);
      spec.exact = false;
      spec.drop = drop;
      if (drop) spec.max_rows = 9;
      trips.push_back(make_trip(spec));
    }
    with_buffers(trips, [&](EPBuffer& buffer) {
      std::vector<Handle> handles;
      for (const Trip& trip : trips)
        handles.push_back(buffer.dispatch(dispatch_args(trip, buffer.rank())).handle);
      for (const uint32_t i : {1u, 0u, 1u})
        expect_replay(buffer, trips[i], handles[i]);
    });
  }
}

TEST(Replay, KeepsTheFormOfIds) {  // user report K3: the same ids and weights, bit for bit
  for (const bool global : {false, true}) {
    TripSpec spec = base_spec(Layout::kRank);
    spec.global_ids = global;
    const std::vector<Trip> trips{make_trip(spec)};
    with_buffers(trips, [&](EPBuffer& buffer) {
      const Handle handle = buffer.dispatch(dispatch_args(trips[0], buffer.rank())).handle;
      expect_replay(buffer, trips[0], handle);
    });
  }
}

TEST(Replay, HandlesSurviveSavingAndLoading) {  // user report K4
  for (const Layout layout : kBothLayouts) {
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      for (const bool exact : {true, false}) {
        TripSpec spec = base_spec(layout);
        spec.idx_dtype = dtype;
        spec.exact = exact;
        const std::vector<Trip> trips{make_trip(spec)};
        with_buffers(trips, [&](EPBuffer& buffer) {
          const uint32_t rank = buffer.rank();
          Handle saved;
          {
            const DispatchResult sent = buffer.dispatch(dispatch_args(trips[0], rank));
            sent.event.synchronize();
            saved = restored(sent.handle);
          }
          expect_combined(trips[0].back[rank], rank,
                          buffer.combine(combine_args(trips[0], rank, saved)));
          expect_replay(buffer, trips[0], saved);
          const Handle moved = std::move(saved);
          expect_replay(buffer, trips[0], restored(moved));
        });
      }
    }
  }
}

TEST(Replay, HandlesAreSnapshots) {  // user report K9: callers may overwrite everything they gave
  for (const Layout layout : kBothLayouts) {
    const std::vector<Trip> trips{make_trip(base_spec(layout))};
    with_buffers(trips, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      DispatchArgs args = dispatch_args(trips[0], rank);
      args.async_op = true;
      const DispatchResult sent = buffer.dispatch(args);
      sent.inputs_done.synchronize();
      const auto scribble = [](const Tensor& t) {
        if (t.num_elements() != 0) {
          std::memset(t.data, 0x5A, static_cast<uint64_t>(t.num_elements()) * num_bytes(t.dtype));
        }
      };
      for (const Tensor& t : {args.x, args.topk_idx, args.topk_weights})
        scribble(t);
      expect_received(trips[0].sent.ranks[rank], trips[0].rules, rank, sent);
      expect_combined(trips[0].back[rank], rank,
                      buffer.combine(combine_args(trips[0], rank, sent.handle)));
      expect_replay(buffer, trips[0], sent.handle);
    });
  }
}

TEST(Replay, TwoHandlesInFlight) {  // user reports G6, O4: dispatch, dispatch, combine, combine
  for (const Layout layout : kBothLayouts) {
    std::vector<Trip> trips;
    for (uint64_t seed = 1; seed <= 2; ++seed) {
      TripSpec spec = base_spec(layout);
      spec.seed = seed;
      spec.num_tokens = {5, 11, static_cast<uint32_t>(seed)};
      trips.push_back(make_trip(spec));
    }
    with_buffers(trips, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      for (uint32_t round = 0; round < scaled(10); ++round) {
        std::vector<DispatchResult> sent;
        for (const Trip& trip : trips) {
          DispatchArgs args = dispatch_args(trip, rank);
          args.async_op = true;
          sent.push_back(buffer.dispatch(args));
        }
        std::vector<CombineResult> back;
        for (uint32_t i = 0; i < 2; ++i) {
          CombineArgs args = combine_args(trips[i], rank, sent[i].handle);
          args.async_op = true;
          back.push_back(buffer.combine(args));
        }
        for (const uint32_t i : {round % 2, 1 - round % 2}) {
          expect_combined(trips[i].back[rank], rank, back[i]);
          expect_received(trips[i].sent.ranks[rank], trips[i].rules, rank, sent[i]);
        }
      }
    });
  }
}

TEST(Replay, ManyInFlight) {  // user report K7: more operations than regions
  const std::vector<Trip> trips{make_trip(base_spec(Layout::kRank))};
  with_buffers(trips, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const Handle handle = buffer.dispatch(dispatch_args(trips[0], rank)).handle;
    std::vector<CombineResult> back;
    for (uint32_t i = 0; i < 7; ++i) {
      DispatchArgs args = replay_args(trips[0], rank, handle);
      args.async_op = true;
      const DispatchResult dropped = buffer.dispatch(args);
      CombineArgs combine = combine_args(trips[0], rank, dropped.handle);
      combine.async_op = true;
      back.push_back(buffer.combine(combine));
    }
    for (const CombineResult& result : back)
      expect_combined(trips[0].back[rank], rank, result);
  });
}

TEST(Replay, RefusesForeignHandlesAndOtherOptions) {  // user report K6
  const std::vector<Trip> trips{make_trip(base_spec(Layout::kRank))};
  BufferConfig config = config_for(trips);
  ++config.max_tokens_per_rank;  // one token more is wrong for the handle alone
  run_threads(3, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config), other(group, config);
    const uint32_t rank = buffer.rank();
    const Handle handle = buffer.dispatch(dispatch_args(trips[0], rank)).handle;
    EXPECT_THROW(other.dispatch(replay_args(trips[0], rank, handle)), InvalidArgument);
    EXPECT_THROW(other.combine(combine_args(trips[0], rank, handle)), InvalidArgument);
    round_trip(other, trips[0]);
    DispatchArgs args = replay_args(trips[0], rank, handle);
    args.layout = Layout::kExpert;
    EXPECT_THROW(buffer.dispatch(args), InvalidArgument);
    args = replay_args(trips[0], rank, handle);
    args.x.shape[0] += 1;
    EXPECT_THROW(buffer.dispatch(args), InvalidArgument);
    CombineArgs combine = combine_args(trips[0], rank, handle);
    combine.x.shape[0] += 1;
    EXPECT_THROW(buffer.combine(combine), InvalidArgument);
    expect_replay(buffer, trips[0], handle);
  });
}

}  // namespace
}  // namespace ep::test
