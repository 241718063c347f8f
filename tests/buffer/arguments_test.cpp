// Wrong arguments: the rank that gave them learns what and where, the others that it refused, in
// the same call; and the next call is exact on all.
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 3;

Tensor with_shape(Tensor t, std::vector<int64_t> shape) {
  t.num_dims = static_cast<uint32_t>(shape.size());
  int64_t stride = 1;
  for (uint32_t d = t.num_dims; d-- > 0; stride *= std::max<int64_t>(1, shape[d])) {
    t.shape[d] = shape[d];
    t.strides[d] = stride;
  }
  return t;
}
Tensor with_strides(Tensor t, int64_t row, int64_t column) {
  t.strides = {row, column};
  return t;
}
Tensor null_of(Tensor t) {
  t.data = nullptr;
  return t;
}
Tensor on_cuda(Tensor t) {
  t.device.kind = DeviceKind::kCUDA;
  return t;
}

// What a bad call may want to use.
struct Handles {
  Handle own, foreign;
};

template <class Args>
struct BadCall {
  std::vector<std::string> parts;  // of the message
  std::function<void(Args&, const Handles&)> spoil;
};
using BadDispatch = BadCall<DispatchArgs>;
using BadCombine = BadCall<CombineArgs>;

void expect_refused(EPBuffer& buffer,
                    uint32_t culprit,
                    const std::vector<std::string>& parts,
                    const std::function<void()>& call) {
  SCOPED_TRACE(parts[0]);
  if (buffer.rank() != culprit) return expect_refusal<InvalidArgument>(buffer, culprit, {}, call);
  const InvalidArgument error = caught<InvalidArgument>(call);
  for (const std::string& part : parts)
    expect_text(error, {part});
}

// Every rank in turn is the one that errs.
void run_bad_calls(const Trip& trip,
                   const std::vector<BadDispatch>& dispatches,
                   const std::vector<BadCombine>& combines) {
  const Watchdog watchdog;
  run_threads(trip.num_ranks(), [&](std::shared_ptr<Communicator> group) {
    const BufferConfig config = config_for({&trip, 1});
    EPBuffer other(group, config), buffer(group, config);
    const uint32_t rank = buffer.rank();
    const Handles handles{buffer.dispatch(dispatch_args(trip, rank)).handle,
                          other.dispatch(dispatch_args(trip, rank)).handle};
    uint32_t culprit = 0;
    for (const BadDispatch& bad : dispatches) {
      DispatchArgs args = dispatch_args(trip, rank);
      if (rank == culprit) bad.spoil(args, handles);
      expect_refused(buffer, culprit, bad.parts, [&] { buffer.dispatch(args); });
      round_trip(buffer, trip);
      culprit = (culprit + 1) % trip.num_ranks();
    }
    for (const BadCombine& bad : combines) {
      CombineArgs args = combine_args(trip, rank, handles.own);
      if (rank == culprit) bad.spoil(args, handles);
      expect_refused(buffer, culprit, bad.parts, [&] { buffer.combine(args); });
      expect_combined(trip.back[rank], rank, buffer.combine(combine_args(trip, rank, handles.own)));
      culprit = (culprit + 1) % trip.num_ranks();
    }
    EXPECT_GT(buffer.stats().faults, 0u);
  });
}

// user reports R1, R2, R5: dtype, shape and layout of x have messages of their own.
TEST(Arguments, X) {
  using A = DispatchArgs;
  const std::vector<BadDispatch> cases = {
      {{"x is required"}, [](A& a, auto&) { a.x = {}; }},
      {{"x has shape [9]", "2 dimensions"}, [](A& a, auto&) { a.x = with_shape(a.x, {9}); }},
      {{"x has shape [3, 3, 32]", "2 dim"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {3, 3, 32});
       }},
      {{"x has shape [-1, 32]"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {-1, 32});
       }},
      {{"x has dtype int32", "bfloat16"}, [](A& a, auto&) { a.x.dtype = DType::kInt32; }},
      {{"x has dtype bool"}, [](A& a, auto&) { a.x.dtype = DType::kBool; }},
      {{"x has a null pointer"}, [](A& a, auto&) { a.x = null_of(a.x); }},
      {{"x is on a CUDA device"}, [](A& a, auto&) { a.x = on_cuda(a.x); }},
      {{"x has column stride 2"}, [](A& a, auto&) { a.x = with_strides(a.x, 32, 2); }},
      {{"x has column stride 9"}, [](A& a, auto&) { a.x = with_strides(a.x, 1, 9); }},
      {{"x has H=7", "14 bytes", "multiple of 8"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {9, 7});
       }},
      {{"x has H=0"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {9, 0});
       }},
      {{"H=40", "hidden=32"}, [](A& a, auto&) { a.x = zeros(DType::kBFloat16, 9, 40); }},
      {{"160 bytes", "token_bytes=128"}, [](A& a, auto&) { a.x = zeros(DType::kFloat32, 9, 40); }},
      {{"multiple of 128", "H=32"}, [](A& a, auto&) { a.quant = Quant::kFp8Block128; }},
      {{"quant is given"},
       [](A& a, auto&) {
         a.quant = Quant::kFp8Block128;
         a.scales = zeros(DType::kFloat32, 9, 1);
       }},
  };
  run_bad_calls(plain_trip(kRanks), cases, {});
}

// user reports R3, R4.
TEST(Arguments, RoutingAndWeights) {
  using A = DispatchArgs;
  const std::vector<BadDispatch> cases = {
      {{"topk_idx is required"}, [](A& a, auto&) { a.topk_idx = {}; }},
      {{"topk_idx has dtype float32", "int64"},
       [](A& a, auto&) { a.topk_idx.dtype = DType::kFloat32; }},
      {{"topk_idx has shape [27]"}, [](A& a, auto&) { a.topk_idx = with_shape(a.topk_idx, {27}); }},
      {{"topk_idx has shape [8, 3]", "[9, 3]"},
       [](A& a, auto&) {
         a.topk_idx = with_shape(a.topk_idx, {8, 3});
       }},
      {{"K=4", "num_topk=3"}, [](A& a, auto&) { a.topk_idx = zeros(DType::kInt64, 9, 4); }},
      {{"K=0"},
       [](A& a, auto&) {
         a.topk_idx = with_shape(a.topk_idx, {9, 0});
       }},
      {{"topk_idx has a null"}, [](A& a, auto&) { a.topk_idx = null_of(a.topk_idx); }},
      {{"topk_idx is on a CUDA"}, [](A& a, auto&) { a.topk_idx = on_cuda(a.topk_idx); }},
      {{"topk_weights has dtype int32", "float32"},
       [](A& a, auto&) { a.topk_weights.dtype = DType::kInt32; }},
      {{"topk_weights has shape [9, 2]", "[9, 3]"},
       [](A& a, auto&) {
         a.topk_weights = with_shape(a.topk_weights, {9, 2});
       }},
      {{"topk_weights has a null"}, [](A& a, auto&) { a.topk_weights = null_of(a.topk_weights); }},
      {{"scales has shape [8, 1]", "[9, S]"},
       [](A& a, auto&) { a.scales = zeros(DType::kFloat32, 8, 1); }},
      {{"scales has shape", "int64"}, [](A& a, auto&) { a.scales = zeros(DType::kInt64, 9, 1); }},
      {{"scales has shape [9]", "2 dim"},
       [](A& a, auto&) { a.scales = with_shape(zeros(DType::kFloat32, 9, 1), {9}); }},
  };
  run_bad_calls(plain_trip(kRanks), cases, {});
}

TEST(Arguments, Options) {
  using A = DispatchArgs;
  const std::vector<BadDispatch> cases = {
      {{"expert_alignment=0"}, [](A& a, auto&) { a.expert_alignment = 0; }},
      {{"expert_alignment=8", "expert"}, [](A& a, auto&) { a.expert_alignment = 8; }},
      {{"2147483647 are possible"},
       [](A& a, auto&) {
         a.layout = Layout::kExpert;
         a.expert_alignment = 0xFFFFFFFFu;
       }},
      {{"max_tokens=0", "max_tokens_per_rank=9"}, [](A& a, auto&) { a.max_tokens = 0; }},
      {{"max_tokens=10", "max_tokens_per_rank=9"}, [](A& a, auto&) { a.max_tokens = 10; }},
      {{"max_rows=0"}, [](A& a, auto&) { a.max_rows = 0; }},
      {{"max_rows=5", "exact"},
       [](A& a, auto&) {
         a.max_rows = 5;
         a.exact = true;
       }},
      {{"overflow=drop", "max_rows"}, [](A& a, auto&) { a.overflow = Overflow::kDrop; }},
      {{"num_sms=65", "64"}, [](A& a, auto&) { a.num_sms = 65; }},
      {{"9 extras", "8"}, [](A& a, auto&) { a.extras.assign(9, zeros(DType::kInt8, 9, 1)); }},
      {{"extras[1] has shape [8, 1]", "9 rows"},
       [](A& a, auto&) {
         a.extras = {zeros(DType::kInt8, 9, 1), zeros(DType::kInt8, 8, 1)};
       }},
      {{"extras[0] has stride 2"},
       [](A& a, auto&) { a.extras = {with_strides(zeros(DType::kInt8, 9, 4), 4, 2)}; }},
      {{"extras[0] is required"}, [](A& a, auto&) { a.extras = {Tensor{}}; }},
      {{"extras[0] has 0 bytes"}, [](A& a, auto&) { a.extras = {zeros(DType::kInt8, 9, 0)}; }},
      {{"token_bytes=128", "164 bytes"},
       [](A& a, auto&) { a.extras = {zeros(DType::kInt8, 9, 100)}; }},
  };
  run_bad_calls(plain_trip(kRanks), cases, {});
}

TEST(Arguments, Handles) {  // user report K6
  using A = DispatchArgs;
  static const Handle kEmpty;
  const auto replay = [](A& a, const Handle& handle) {
    a.topk_idx = a.topk_weights = {};
    a.handle = &handle;
  };
  const std::vector<BadDispatch> cases = {
      {{"topk_idx and handle"}, [](A& a, const Handles& h) { a.handle = &h.own; }},
      {{"another buffer"}, [=](A& a, const Handles& h) { replay(a, h.foreign); }},
      {{"handle is empty"}, [=](A& a, const Handles&) { replay(a, kEmpty); }},
      {{"x has 8 rows, the handle 9"},
       [=](A& a, const Handles& h) {
         replay(a, h.own);
         a.x = with_shape(a.x, {8, 32});
       }},
      {{"layout differs from the handle's"},
       [=](A& a, const Handles& h) {
         replay(a, h.own);
         a.layout = Layout::kExpert;
       }},
      {{"exact differs from the handle's"},
       [=](A& a, const Handles& h) {
         replay(a, h.own);
         a.exact = false;
       }},
      {{"max_tokens differs from the handle's"},
       [=](A& a, const Handles& h) {
         replay(a, h.own);
         a.max_tokens = 5;
       }},
  };
  run_bad_calls(plain_trip(kRanks), cases, {});
}

std::vector<BadCombine> bad_combines() {
  using A = CombineArgs;
  static const Handle kEmpty;
  return {
      {{"handle is required"}, [](A& a, auto&) { a.handle = nullptr; }},
      {{"handle is empty"}, [](A& a, auto&) { a.handle = &kEmpty; }},
      {{"another buffer"}, [](A& a, const Handles& h) { a.handle = &h.foreign; }},
      {{"x is required"}, [](A& a, auto&) { a.x = {}; }},
      {{"x has 2 rows", "handle"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {2, 32});
       }},
      {{"x has dtype int16"}, [](A& a, auto&) { a.x.dtype = DType::kInt16; }},
      {{"x has column stride 2"}, [](A& a, auto&) { a.x = with_strides(a.x, 32, 2); }},
      {{"x has H'=4", "multiple of 8"},
       [](A& a, auto&) {
         a.x = with_shape(a.x, {a.x.shape[0], 4});
       }},
      {{"160 bytes", "output_bytes=128"},
       [](A& a, auto&) { a.x = zeros(DType::kFloat32, a.x.shape[0], 40); }},
      {{"row_weights has dtype float16"},
       [](A& a, auto&) { a.row_weights = zeros(DType::kFloat16, a.x.shape[0], 3); }},
      {{"row_weights has shape [1, 1]"},
       [](A& a, auto&) { a.row_weights = zeros(DType::kFloat32, 1, 1); }},
      {{"3 biases", "2"}, [](A& a, auto&) { a.bias.assign(3, zeros(DType::kFloat32, 9, 32)); }},
      {{"bias has shape [8, 32]", "[9, 32]"},
       [](A& a, auto&) { a.bias = {zeros(DType::kFloat32, 8, 32)}; }},
      {{"bias has dtype int32"}, [](A& a, auto&) { a.bias = {zeros(DType::kInt32, 9, 32)}; }},
      {{"bias has column stride"},
       [](A& a, auto&) { a.bias = {with_strides(zeros(DType::kFloat32, 9, 32), 1, 9)}; }},
      {{"out has shape [9, 16]", "[9, 32]"},
       [](A& a, auto&) { a.out = zeros(DType::kBFloat16, 9, 16); }},
      {{"out has dtype float32", "float16"},
       [](A& a, auto&) {
         a.out = zeros(DType::kFloat32, 9, 32);
         a.out_dtype = DType::kFloat16;
       }},
      {{"out has a null"}, [](A& a, auto&) { a.out = null_of(zeros(DType::kBFloat16, 9, 32)); }},
      {{"out_dtype has dtype int8"}, [](A& a, auto&) { a.out_dtype = DType::kInt8; }},
      {{"num_sms=65"}, [](A& a, auto&) { a.num_sms = 65; }},
  };
}

TEST(Arguments, CombineByRank) {
  std::vector<BadCombine> cases = bad_combines();
  cases.push_back({{"weights", "layout \"rank\"", "expert"},  // user report H5
                   [](CombineArgs& a, auto&) { a.weights = zeros(DType::kFloat32, 9, 3); }});
  run_bad_calls(plain_trip(kRanks), {}, cases);
}

TEST(Arguments, CombineByExpert) {
  std::vector<BadCombine> cases = bad_combines();
  cases.push_back({{"weights has shape [9, 2]", "[9, 3]"},
                   [](CombineArgs& a, auto&) { a.weights = zeros(DType::kFloat32, 9, 2); }});
  cases.push_back({{"weights has dtype int32"},
                   [](CombineArgs& a, auto&) { a.weights = zeros(DType::kInt32, 9, 3); }});
  run_bad_calls(plain_trip(kRanks, Layout::kExpert), {}, cases);
}

// expert_output is this rank's own: it raises here, spends no turn and disturbs nobody.
TEST(Arguments, ExpertOutput) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
    if (rank == 0) {
      expect_text(caught<InvalidArgument>([&] { buffer.expert_output(Handle()); }), {"empty"});
      expect_text(caught<InvalidArgument>([&] { buffer.expert_output(sent.handle, 4); }),
                  {"H'=4", "multiple of 8"});
      expect_text(caught<InvalidArgument>([&] { buffer.expert_output(sent.handle, 1024); }),
                  {"2048 bytes", "output_bytes=128"});
      expect_text(
          caught<InvalidArgument>([&] { buffer.expert_output(sent.handle, 32, DType::kInt8); }),
          {"int8"});
    }
    expect_combined(trip.back[rank], rank,
                    buffer.combine(window_combine_args(buffer, trip, rank, sent.handle)));
    EXPECT_EQ(buffer.stats().faults, 0u);
  });
}

// user report R1: views that need no copy are no mistake.
TEST(Arguments, ViewsThatPass) {
  const Trip trip = plain_trip(2);
  with_buffers(trip, [&](EPBuffer& buffer) {
    const uint32_t rank = buffer.rank();
    const Tokens& tokens = trip.tokens[rank];
    DispatchArgs args = dispatch_args(trip, rank);
    Table twice(DType::kBFloat16, 18, 32);  // x[::2]
    for (uint64_t t = 0; t < 9; ++t)
      std::copy_n(tokens.x.row(t), tokens.x.row_bytes(), twice.row(2 * t));
    args.x = with_strides(with_shape(to_tensor(twice), {9, 32}), 64, 1);
    args.topk_idx = to_transposed_tensor(tokens.idx);
    expect_received(trip.sent.ranks[rank], trip.rules, rank, buffer.dispatch(args));
    args.x = with_strides(args.x, 0, 1);  // expand: every token is the first
    EXPECT_NO_THROW(buffer.dispatch(args));
    DispatchArgs one = dispatch_args(trip, rank);  // strides of dimensions of 1 and 0 mean nothing
    one.x = with_strides(with_shape(one.x, {1, 32}), 12345, 1);
    one.topk_idx = with_strides(with_shape(one.topk_idx, {1, 2}), -7, 1);
    one.topk_weights = with_shape(one.topk_weights, {1, 2});
    EXPECT_NO_THROW(buffer.dispatch(one));
    one.x = with_strides(with_shape(null_of(one.x), {0, 32}), 5, 77);
    one.topk_idx = with_shape(null_of(one.topk_idx), {0, 2});
    one.topk_weights = with_shape(null_of(one.topk_weights), {0, 2});
    EXPECT_EQ(buffer.dispatch(one).num_rows, 0u);  // user report C1
  });
}

}  // namespace
}  // namespace ep::test
