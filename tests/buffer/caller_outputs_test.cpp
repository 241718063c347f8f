// DispatchArgs::out and output_spec(): results in memory that the caller brings.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/trip.hpp"

namespace ep::test {
namespace {

constexpr std::byte kUntouched{0xA5};

struct Named {
  const char* name;
  Tensor DispatchTensors::*member;
};
constexpr Named kTensors[] = {
    {"x", &DispatchTensors::x},
    {"scales", &DispatchTensors::scales},
    {"topk_idx", &DispatchTensors::topk_idx},
    {"topk_weights", &DispatchTensors::topk_weights},
    {"source", &DispatchTensors::source},
    {"num_rows_device", &DispatchTensors::num_rows_device},
    {"rows_needed_device", &DispatchTensors::rows_needed_device},
    {"tokens_per_expert_device", &DispatchTensors::tokens_per_expert_device},
    {"expert_offsets", &DispatchTensors::expert_offsets},
    {"rank_offsets", &DispatchTensors::rank_offsets},
    {"status", &DispatchTensors::status},
};

uint64_t span_bytes(const Tensor& t) {  // exactly: nothing behind the last row is ours
  if (t.num_elements() == 0) return 0;
  int64_t last = 0;
  for (uint32_t d = 0; d < t.num_dims; ++d)
    last += (t.shape[d] - 1) * t.strides[d];
  return static_cast<uint64_t>(last + 1) * num_bytes(t.dtype);
}

// Memory for a specification, with a guard behind it.
class Own {
 public:
  explicit Own(const Tensor& spec, int64_t more_rows = 0) : tensor_(spec) {
    tensor_.shape[0] += more_rows;
    size_ = span_bytes(tensor_);
    bytes_ = std::make_shared<std::vector<std::byte>>(size_ + 64 + 16, kUntouched);
    auto at = reinterpret_cast<uintptr_t>(bytes_->data());
    base_ = bytes_->data() + ((at + 15) / 16 * 16 - at);
    tensor_.data = base_;
  }
  const Tensor& tensor() const { return tensor_; }
  bool is_guarded() const {
    return std::all_of(base_ + size_, base_ + size_ + 64,
                       [](std::byte b) { return b == kUntouched; });
  }

 private:
  Tensor tensor_;
  uint64_t size_ = 0;
  std::shared_ptr<std::vector<std::byte>> bytes_;
  std::byte* base_ = nullptr;
};

TripSpec wide_spec(Layout layout, bool exact) {
  TripSpec spec;
  spec.num_tokens = {7, 0, 11};
  spec.num_experts = 5;
  spec.num_topk = 3;
  spec.hidden = 48;
  spec.layout = layout;
  spec.exact = exact;
  spec.routing = Routing::kMixed;
  spec.scale_columns = 7;  // 28 bytes a row: a row is not the pitch
  spec.extras = {{DType::kInt16, {3}}, {DType::kUInt8, {}}};
  return spec;
}

void expect_same_spec(const Tensor& spec, const Tensor& made, const char* name, bool rows_too) {
  SCOPED_TRACE(name);
  ASSERT_EQ(spec.defined(), made.defined());
  if (!made.defined()) return;
  EXPECT_EQ(spec.data, nullptr);
  EXPECT_EQ(spec.dtype, made.dtype);
  ASSERT_EQ(spec.num_dims, made.num_dims);
  if (rows_too)
    EXPECT_EQ(spec.shape[0], made.shape[0]);
  else
    EXPECT_GE(spec.shape[0], made.shape[0]);
  for (uint32_t d = 1; d < made.num_dims; ++d)
    EXPECT_EQ(spec.shape[d], made.shape[d]);
  for (uint32_t d = 0; d < made.num_dims; ++d)
    EXPECT_EQ(spec.strides[d], made.strides[d]);
}

class CallerOutputs : public testing::TestWithParam<std::tuple<Layout, bool>> {
 protected:
  void in_ranks(const std::function<void(EPBuffer&, const Trip&)>& rank) {
    const Trip trip = make_trip(wide_spec(std::get<0>(GetParam()), std::get<1>(GetParam())));
    run_threads(trip.num_ranks(), [&](std::shared_ptr<Communicator> group) {
      EPBuffer buffer(group, config_for(std::span(&trip, 1)));
      rank(buffer, trip);
    });
  }
};

TEST_P(CallerOutputs, SpecIsWhatDispatchMakesWithoutReadingAnything) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    const DispatchArgs args = dispatch_args(trip, buffer.rank());
    DispatchArgs blind = args;
    blind.x.data = blind.topk_idx.data = blind.topk_weights.data = blind.scales.data = nullptr;
    for (Tensor& t : blind.extras)
      t.data = nullptr;
    const DispatchTensors spec = buffer.output_spec(blind);
    const DispatchResult made = buffer.dispatch(args);
    for (const Named& t : kTensors)
      expect_same_spec(spec.*t.member, made.*t.member, t.name, !trip.spec.exact);
    ASSERT_EQ(spec.extras.size(), made.extras.size());
    for (size_t i = 0; i < spec.extras.size(); ++i)
      expect_same_spec(spec.extras[i], made.extras[i], "extra", !trip.spec.exact);
    DispatchArgs replay = blind;  // of which the size is known
    replay.topk_idx = {};
    replay.handle = &made.handle;
    const DispatchTensors known = buffer.output_spec(replay);
    for (const Named& t : kTensors)
      expect_same_spec(known.*t.member, made.*t.member, t.name, true);
  });
}

// One at a time, all, and all but one: the rest goes where the policy says.
TEST_P(CallerOutputs, AnySubsetIsFilledAndNothingBehindIt) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    const DispatchTensors spec = buffer.output_spec(args);
    constexpr size_t kCount = std::size(kTensors) + 1;  // and the extras
    for (uint32_t round = 0; round < 2 * kCount + 2; ++round) {
      args.outputs = round % 2 == 0 ? Outputs::kWindow : Outputs::kCaller;
      const auto is_given = [&](size_t i) {
        return round < kCount ? i == round : round == 2 * kCount || i != round - kCount;
      };
      std::vector<Own> memory;
      args.out = {};
      for (size_t i = 0; i < std::size(kTensors); ++i) {
        const Tensor& wanted = spec.*kTensors[i].member;
        if (!wanted.defined() || !is_given(i)) continue;
        args.out.*kTensors[i].member = memory.emplace_back(wanted, i % 3).tensor();
      }
      for (size_t i = 0; is_given(kCount - 1) && i < spec.extras.size(); ++i)
        args.out.extras.push_back(memory.emplace_back(spec.extras[i]).tensor());
      const DispatchResult got = buffer.dispatch(args);
      expect_received(trip.sent.ranks[rank], trip.rules, rank, got);
      for (const Named& t : kTensors) {
        const Tensor& own = args.out.*t.member;
        EXPECT_TRUE(!own.defined() || (got.*t.member).data == own.data) << t.name;
      }
      for (size_t i = 0; i < args.out.extras.size(); ++i)
        EXPECT_EQ(got.extras[i].data, args.out.extras[i].data);
      for (const Own& own : memory)
        EXPECT_TRUE(own.is_guarded());
      const CombineResult back = buffer.combine(combine_args(trip, rank, got.handle));
      expect_combined(trip.back[rank], rank, back);
    }
  });
}

// Of a replay the size is known: its memory ends with the last element of the last row, where a row of scales
// (28 bytes) is followed by padding (4 bytes) in the window.
TEST_P(CallerOutputs, WhatFollowsTheLastRowIsNotWritten) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    const DispatchArgs args = dispatch_args(trip, buffer.rank());
    const DispatchResult first = buffer.dispatch(args);
    DispatchArgs replay = args;
    replay.topk_idx = replay.topk_weights = {};
    replay.handle = &first.handle;
    const DispatchTensors spec = buffer.output_spec(replay);
    const Own x(spec.x), scales(spec.scales);
    replay.out.x = x.tensor();
    replay.out.scales = scales.tensor();
    const DispatchResult got = buffer.dispatch(replay);
    EXPECT_EQ(got.scales.shape[0], first.scales.shape[0]);
    EXPECT_TRUE(x.is_guarded() && scales.is_guarded());
  });
}

TEST_P(CallerOutputs, AllGivenLeavesTheArenaFree) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.outputs = Outputs::kWindow;
    const DispatchTensors spec = buffer.output_spec(args);
    std::vector<Own> memory;
    for (const Named& t : kTensors) {
      if ((spec.*t.member).defined())
        args.out.*t.member = memory.emplace_back(spec.*t.member).tensor();
    }
    for (const Tensor& extra : spec.extras)
      args.out.extras.push_back(memory.emplace_back(extra).tensor());
    const DispatchResult got = buffer.dispatch(args);
    EXPECT_EQ(buffer.memory().used, 0u);
    expect_received(trip.sent.ranks[buffer.rank()], trip.rules, buffer.rank(), got);
  });
}

// What does not fit is this rank's InvalidArgument and the others' PeerError; the next call is exact.
TEST_P(CallerOutputs, WhatDoesNotFitIsRefusedByName) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    const uint32_t rank = buffer.rank();
    const DispatchArgs good = dispatch_args(trip, rank);
    const DispatchTensors spec = buffer.output_spec(good);
    const std::vector<std::pair<std::string, std::function<void(DispatchTensors&)>>> wrongs = {
        {"out.x has dtype", [](DispatchTensors& out) { out.x.dtype = DType::kFloat16; }},
        {"out.x has shape", [](DispatchTensors& out) { --out.x.shape[0]; }},
        {"out.x has shape", [](DispatchTensors& out) { --out.x.shape[1]; }},
        {"stride", [](DispatchTensors& out) { out.x.strides[0] += 8; }},
        {"16 bytes",
         [](DispatchTensors& out) { out.x.data = static_cast<std::byte*>(out.x.data) + 8; }},
        {"out.x has a null pointer", [](DispatchTensors& out) { out.x.data = nullptr; }},
        {"out.x is on a CUDA", [](DispatchTensors& out) { out.x.device.kind = DeviceKind::kCUDA; }},
        {"out.extras has 1", [](DispatchTensors& out) { out.extras.pop_back(); }},
        {"out.extras[1] has", [](DispatchTensors& out) { out.extras[1].dtype = DType::kInt8; }},
    };
    const Own x(spec.x), first(spec.extras[0]), second(spec.extras[1]);
    for (const auto& [text, wrong] : wrongs) {
      SCOPED_TRACE(text);
      DispatchArgs args = good;
      args.out.x = x.tensor();
      args.out.extras = {first.tensor(), second.tensor()};
      if (rank == 0) wrong(args.out);
      try {
        buffer.dispatch(args);
        ADD_FAILURE() << "accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(rank, 0u);
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      } catch (const PeerError& error) {
        EXPECT_NE(rank, 0u);
        EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
      }
      round_trip(buffer, trip);
    }
  });
}

TEST_P(CallerOutputs, WhatTheDispatchHasNotIsRefused) {
  TripSpec plain = wide_spec(std::get<0>(GetParam()), std::get<1>(GetParam()));
  plain.num_tokens = {3};
  plain.scale_columns = 0;
  plain.extras.clear();
  const Trip trip = make_trip(plain);
  EPBuffer buffer(Communicator::single(), config_for(std::span(&trip, 1)));
  DispatchArgs args = dispatch_args(trip, 0);
  alignas(16) std::byte some[64]{};
  args.out.scales = Tensor::contiguous(some, DType::kFloat32, {1, 1});
  EXPECT_THROW(buffer.dispatch(args), InvalidArgument);
  args.out = {};
  args.out.extras = {Tensor::contiguous(some, DType::kFloat32, {1, 1})};
  EXPECT_THROW(buffer.dispatch(args), InvalidArgument);
  round_trip(buffer, trip);
}

// An asynchronous call keeps what owns the caller's memory until it is done with it.
TEST_P(CallerOutputs, OwnersLiveAsLongAsTheCall) {
  in_ranks([](EPBuffer& buffer, const Trip& trip) {
    DispatchArgs args = dispatch_args(trip, buffer.rank());
    args.async_op = true;
    const Tensor spec = buffer.output_spec(args).x;
    std::weak_ptr<void> watch;
    {
      struct alignas(16) Unit {
        std::byte bytes[16];
      };
      const auto memory = std::make_shared<std::vector<Unit>>(span_bytes(spec) / 16 + 1);
      watch = memory;
      args.out.x = spec;
      args.out.x.data = memory->data();
      args.out.x.owner = memory;
    }
    const Event event = buffer.dispatch(args).event;
    args.out = {};
    event.synchronize();
    EXPECT_TRUE(watch.expired());
  });
}

INSTANTIATE_TEST_SUITE_P(Dispatch,
                         CallerOutputs,
                         testing::Combine(testing::ValuesIn(kBothLayouts), testing::Bool()));

}  // namespace
}  // namespace ep::test
