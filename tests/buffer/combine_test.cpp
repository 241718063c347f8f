// Combine: order and rounding of sums, weights, biases, and the three places where rows may be.
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/compare.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

constexpr DType kFloats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

void with_buffers(const Trip& trip, const std::function<void(EPBuffer&)>& body) {
  const BufferConfig config = config_for({&trip, 1});
  run_threads(trip.num_ranks(), [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    body(buffer);
  });
}

TEST(Combine, EveryPairOfDtypes) {
  for (const AnswerIn answer_in : {AnswerIn::kOrdinary, AnswerIn::kExpertOutput}) {
    std::vector<TripSpec> specs;
    for (const Layout layout : kBothLayouts) {
      for (const DType in : kFloats) {
        for (const DType out : kFloats) {
          specs.push_back({.num_tokens = {6, 0, 9},
                           .num_experts = 7,
                           .num_topk = 4,
                           .hidden = 72,
                           .routing = Routing::kMixed,
                           .layout = layout,
                           .answer_dtype = in,
                           .out_dtype = out});
        }
      }
    }
    run_specs(specs, {.answer_in = answer_in});
  }
}

TEST(Combine, WeightsBiasAndRowWeights) {  // user reports H1, H3
  for (const AnswerIn answer_in : {AnswerIn::kOrdinary, AnswerIn::kExpertOutput}) {
    std::vector<TripSpec> specs;
    for (uint32_t i = 0; i < 32; ++i) {
      const bool by_expert = (i & 1) != 0;
      TripSpec s{.num_tokens = {6, 9},
                 .num_experts = 7,
                 .num_topk = 4,
                 .hidden = 40,
                 .routing = i % 3 == 0 ? Routing::kMixed : Routing::kDuplicates,
                 .seed = i,
                 .weights_dtype = kFloats[i % 3],
                 .layout = by_expert ? Layout::kExpert : Layout::kRank,
                 .alignment = by_expert ? 4u : 1u,
                 .answer_dtype = kFloats[(i / 2) % 3],
                 .combine_weights = by_expert && (i & 2) != 0,
                 .row_weights = (i & 4) != 0,
                 .strided = (i & 16) != 0};
      if ((i & 8) != 0) s.bias = {kFloats[i % 3], kFloats[(i + 1) % 3]};
      if (i % 5 == 0) s.bias = {kFloats[i % 3]};
      specs.push_back(s);
    }
    run_specs(specs, {.answer_in = answer_in});
  }
}

TEST(Combine, LongSums) {  // user report T4: 32 terms of very different size, in slot order
  for (const Layout layout : kBothLayouts) {
    run_spec({.num_tokens = {3, 2, 4, 1, 2, 2, 3, 1},
              .num_experts = 64,
              .num_topk = 32,
              .hidden = 128,
              .layout = layout,
              .answer_dtype = DType::kFloat32,
              .combine_weights = layout == Layout::kExpert,
              .bias = {DType::kFloat32}});
  }
}

TEST(Combine, OtherHiddenThanDispatch) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const uint32_t hidden : {8u, 200u, 1024u}) {
      specs.push_back({.num_tokens = {6, 9},
                       .num_experts = 4,
                       .num_topk = 2,
                       .hidden = 64,
                       .layout = layout,
                       .answer_hidden = hidden});
    }
  }
  run_specs(specs);
  run_specs(specs, {.answer_in = AnswerIn::kExpertOutput});
}

// an identity expert: nothing is copied, rows are read where they are
TEST(Combine, OfDispatchsOwnRows) {
  for (const Layout layout : kBothLayouts) {
    for (const Outputs outputs : {Outputs::kWindow, Outputs::kCaller}) {
      Trip trip = make_trip({.num_tokens = {9, 4, 7},
                             .num_experts = 6,
                             .num_topk = 3,
                             .hidden = 64,
                             .layout = layout,
                             .alignment = layout == Layout::kExpert ? 4u : 1u});
      for (uint32_t r = 0; r < 3; ++r)
        trip.answers[r].x = trip.sent.ranks[r].x;
      trip.back = combine(trip.sent, trip.rules, trip.tokens, trip.answers);
      BufferConfig config = config_for({&trip, 1});
      config.outputs = outputs;
      run_threads(3, [&](std::shared_ptr<Communicator> group) {
        EPBuffer buffer(group, config);
        const uint32_t rank = buffer.rank();
        for (uint32_t round = 0; round < 5; ++round) {
          const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
          CombineArgs args{.x = sent.x};
          args.handle = &sent.handle;
          expect_combined(trip.back[rank], rank, buffer.combine(args));
          expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
          // The peers have read these rows: whatever comes next here is nobody else's business.
          for (uint64_t r = 0; r < trip.answers[rank].x.rows; ++r) {
            std::memset(static_cast<uint8_t*>(sent.x.data) +
                            r * static_cast<uint64_t>(sent.x.strides[0]) * 2,
                        0xFF, 128);
          }
        }
      });
    }
  }
}

// Views that begin at a block of the window's, or elsewhere in it, or cover some columns: read in
// place or copied, the rows are what the view says.
TEST(Combine, OfViewsIntoDispatchsRows) {
  for (const Layout layout : kBothLayouts) {
    Trip trip = make_trip({.num_tokens = {9, 4, 7},
                           .num_experts = 6,
                           .num_topk = 3,
                           .hidden = 64,
                           .extras = {{DType::kBFloat16, {24}}},
                           .layout = layout,
                           .answer_hidden = 16});
    const auto columns_of = [](const Table& from, uint64_t first) {
      Table part(DType::kBFloat16, from.rows, 16);
      for (uint64_t r = 0; r < from.rows; ++r)
        std::memcpy(part.row(r), from.at(r, first), 32);
      return part;
    };
    for (const bool of_extra : {false, true}) {
      for (const uint64_t first : {0, 8}) {
        for (uint32_t r = 0; r < 3; ++r) {
          const Received& received = trip.sent.ranks[r];
          trip.answers[r].x = columns_of(of_extra ? received.extras[0] : received.x, first);
        }
        trip.back = combine(trip.sent, trip.rules, trip.tokens, trip.answers);
        with_buffers(trip, [&](EPBuffer& buffer) {
          const uint32_t rank = buffer.rank();
          const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
          CombineArgs args{.x = of_extra ? sent.extras[0] : sent.x};
          args.x.data = static_cast<uint8_t*>(args.x.data) + 2 * first;
          args.x.shape[1] = 16;
          args.handle = &sent.handle;
          expect_combined(trip.back[rank], rank, buffer.combine(args));
        });
      }
    }
  }
}

TEST(Combine, TheSameRowsTwice) {
  for (const Layout layout : kBothLayouts) {
    const Trip trip = make_trip({.num_tokens = {9, 4},
                                 .num_experts = 6,
                                 .num_topk = 3,
                                 .hidden = 64,
                                 .layout = layout,
                                 .row_weights = true});
    with_buffers(trip, [&](EPBuffer& buffer) {
      const uint32_t rank = buffer.rank();
      const Handle handle = buffer.dispatch(dispatch_args(trip, rank)).handle;
      const CombineArgs args = combine_args(trip, rank, handle);
      for (uint32_t i = 0; i < 3; ++i)
        expect_combined(trip.back[rank], rank, buffer.combine(args));
    });
  }
}

TEST(Combine, IntoTheCallersTensor) {
  const Trip trip = make_trip({.num_tokens = {9, 0, 4},
                               .num_experts = 6,
                               .num_topk = 3,
                               .hidden = 64,
                               .out_dtype = DType::kFloat32});
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const Handle handle = buffer.dispatch(dispatch_args(trip, rank)).handle;
    CombineArgs args = combine_args(trip, rank, handle);
    args.out = to_tensor(Table(DType::kFloat32, trip.tokens[rank].num_tokens, 64), rank == 0);
    const CombineResult back = buffer.combine(args);
    expect_combined(trip.back[rank], rank, back);
    EXPECT_EQ(back.x.data, args.out.data);
    EXPECT_EQ(difference({rank, "out"}, args.out, trip.back[rank].x), "");
  });
}

// two at once, filled in turn: neither disturbs the other or dispatch's x
TEST(Combine, ExpertOutputsHaveTheirOwnRows) {
  const Trip a = make_trip({.num_tokens = {9, 4}, .num_experts = 6, .num_topk = 3, .hidden = 64});
  const Trip b = make_trip(
      {.num_tokens = {9, 4}, .num_experts = 6, .num_topk = 3, .hidden = 64, .payload_seed = 1});
  with_buffers(a, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(a, rank));
    const CombineArgs first = window_combine_args(buffer, a, rank, sent.handle);
    const CombineArgs second = window_combine_args(buffer, b, rank, sent.handle);
    expect_combined(b.back[rank], rank, buffer.combine(second));
    expect_combined(a.back[rank], rank, buffer.combine(first));
    expect_received(a.sent.ranks[rank], a.rules, rank, sent);
  });
}

// user report G1: x in {0,1}, all 8 experts on rank 0, so 8 x or 0 exactly
TEST(Combine, EightRowsOfOneRank) {
  Trip trip = make_trip({.num_tokens = {16, 16},
                         .num_experts = 16,
                         .num_topk = 8,
                         .hidden = 64,
                         .routing = Routing::kOneRank,
                         .layout = Layout::kExpert});
  for (Tokens& t : trip.tokens) {
    for (uint64_t i = 0; i < t.num_tokens; ++i) {
      for (uint64_t c = 0; c < 64; ++c)
        t.x.set_value(i, c, static_cast<float>((i + c) % 2));
    }
  }
  trip.sent = dispatch(trip.tokens, trip.rules);
  for (uint32_t r = 0; r < 2; ++r)
    trip.answers[r].x = trip.sent.ranks[r].x;
  trip.back = combine(trip.sent, trip.rules, trip.tokens, trip.answers);
  ASSERT_EQ(trip.back[1].x.value(0, 1), 8.0f);
  const BufferConfig config = config_for({&trip, 1});
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    const uint32_t rank = buffer.rank();
    for (uint32_t round = 0; round < scaled(300); ++round) {
      const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
      CombineArgs args{.x = sent.x};
      args.handle = &sent.handle;
      expect_combined(trip.back[rank], rank, buffer.combine(args));
    }
  });
}

// user reports H5, K6; every refusal spends the turn and nothing else
TEST(Combine, RefusesWhatItCannotDo) {
  const Trip trip =
      make_trip({.num_tokens = {9, 4}, .num_experts = 6, .num_topk = 3, .hidden = 64});
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const Handle handle = buffer.dispatch(dispatch_args(trip, rank)).handle;
    CombineArgs args = combine_args(trip, rank, handle);
    args.weights = to_tensor(trip.tokens[rank].weights);  // "rank": the experts have multiplied
    EXPECT_THROW(buffer.combine(args), InvalidArgument);
    args = combine_args(trip, rank, handle);
    args.x.shape[0] += 1;
    EXPECT_THROW(buffer.combine(args), InvalidArgument);
    args = combine_args(trip, rank, handle);
    args.handle = nullptr;
    EXPECT_THROW(buffer.combine(args), InvalidArgument);
    args = combine_args(trip, rank, handle);
    args.x.dtype = DType::kInt16;
    EXPECT_THROW(buffer.combine(args), InvalidArgument);
    args = combine_args(trip, rank, handle);
    args.bias = {to_tensor(Table(DType::kFloat32, trip.tokens[rank].num_tokens + 1, 64))};
    EXPECT_THROW(buffer.combine(args), InvalidArgument);
    expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, handle)));
  });
}

}  // namespace
}  // namespace ep::test
