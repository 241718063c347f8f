// The calling half of trip.hpp: tensors, arguments, comparisons.
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

constexpr uint8_t kGapByte = 0xEE;

Tensor owned(DType dtype, uint64_t num_elements) {
  const auto memory =
      std::make_shared<std::vector<uint8_t>>(num_elements * num_bytes(dtype) + 1, kGapByte);
  Tensor t;
  t.data = memory->data();
  t.dtype = dtype;
  t.owner = memory;
  return t;
}

void expect_same(const std::string& text) {
  if (!text.empty()) ADD_FAILURE() << text;
}

void expect_pitch(uint32_t rank, const char* name, const Tensor& t) {
  if (!t.defined() || t.shape[0] <= 1) return;
  EXPECT_EQ(t.strides[0] * static_cast<int64_t>(num_bytes(t.dtype)) % 16, 0)
      << "rank " << rank << ", pitch of " << name;
}

}  // namespace

Tensor to_tensor(const Table& table, bool strided) {
  const uint64_t pitch = table.columns + (strided ? 1 : 0);
  Tensor t = owned(table.dtype, table.rows * pitch);
  t.num_dims = 2;
  t.shape = {static_cast<int64_t>(table.rows), static_cast<int64_t>(table.columns)};
  t.strides = {static_cast<int64_t>(pitch), 1};
  fill(t, table);
  return t;
}

Tensor to_transposed_tensor(const Table& table) {
  Tensor t = owned(table.dtype, table.rows * table.columns);
  t.num_dims = 2;
  t.shape = {static_cast<int64_t>(table.rows), static_cast<int64_t>(table.columns)};
  t.strides = {1, static_cast<int64_t>(table.rows)};
  fill(t, table);
  return t;
}

Tensor to_shaped_tensor(const Table& table, const std::vector<int64_t>& row_shape) {
  Tensor t = to_tensor(table);
  t.num_dims = static_cast<uint32_t>(row_shape.size()) + 1;
  int64_t stride = 1;
  for (uint32_t d = t.num_dims; d-- > 1;) {
    t.shape[d] = row_shape[d - 1];
    t.strides[d] = stride;
    stride *= row_shape[d - 1];
  }
  t.strides[0] = stride;
  return t;
}

void fill(const Tensor& to, const Table& from) {
  const uint64_t size = num_bytes(from.dtype);
  if (from.columns == 0) return;  // no bytes, and no pointers for memcpy
  for (uint64_t r = 0; r < from.rows; ++r) {
    uint8_t* row = static_cast<uint8_t*>(to.data) + static_cast<uint64_t>(to.strides[0]) * r * size;
    if (to.strides[1] == 1) {
      std::memcpy(row, from.row(r), from.row_bytes());
      continue;
    }
    for (uint64_t c = 0; c < from.columns; ++c) {
      std::memcpy(row + static_cast<uint64_t>(to.strides[1]) * c * size, from.at(r, c), size);
    }
  }
}

BufferConfig config_for(std::span<const Trip> trips) {
  BufferConfig config;
  config.timeout_s = 30.0;
  config.num_sms = 1;
  config.num_experts = trips[0].rules.num_experts();
  config.expert_offsets = trips[0].rules.expert_offsets;
  for (const Trip& trip : trips) {
    const Tokens& t = trip.tokens[0];
    const Answer& a = trip.answers[0];
    uint64_t row_bytes =
        t.x.row_bytes() + t.scales.row_bytes() + trip.sent.ranks[0].scales.row_bytes() + 64;
    for (const Table& extra : t.extras)
      row_bytes += extra.row_bytes() + 16;
    config.num_topk = std::max(config.num_topk, trip.spec.num_topk);
    config.hidden = std::max({config.hidden, trip.spec.hidden, static_cast<uint32_t>(a.x.columns)});
    config.max_tokens_per_rank = std::max(config.max_tokens_per_rank, trip.rules.max_tokens);
    config.token_bytes = std::max(config.token_bytes, row_bytes);
    config.output_bytes = std::max(config.output_bytes, a.x.columns * 4);
  }
  config.max_tokens_per_rank = std::max(config.max_tokens_per_rank, 1u);
  return config;
}

DispatchArgs dispatch_args(const Trip& trip, uint32_t rank) {
  const TripSpec& s = trip.spec;
  const Tokens& t = trip.tokens[rank];
  DispatchArgs args{.x = to_tensor(t.x, s.strided)};
  args.topk_idx = to_tensor(t.idx, s.strided);
  if (t.weights.defined()) args.topk_weights = to_tensor(t.weights, s.strided);
  if (t.scales.defined())
    args.scales = s.strided ? to_transposed_tensor(t.scales) : to_tensor(t.scales);
  for (uint32_t i = 0; i < t.extras.size(); ++i) {
    args.extras.push_back(s.strided ? to_tensor(t.extras[i], true)
                                    : to_shaped_tensor(t.extras[i], s.extras[i].shape));
  }
  args.quant = s.quant;
  // What is the default is left out, so that defaults are tested too.
  if (s.layout != Layout::kRank) args.layout = s.layout;
  if (s.alignment != 1) args.expert_alignment = s.alignment;
  if (!s.exact) args.exact = false;
  if (s.max_tokens != 0) args.max_tokens = s.max_tokens;
  args.max_rows = s.max_rows;
  if (s.drop) args.overflow = Overflow::kDrop;
  if (s.global_ids) args.ids = Ids::kGlobal;
  return args;
}

CombineArgs combine_args(const Trip& trip, uint32_t rank, const Handle& handle) {
  const bool strided = trip.spec.strided;
  const Answer& a = trip.answers[rank];
  CombineArgs args{.x = to_tensor(a.x, strided)};
  args.handle = &handle;
  args.out_dtype = a.out_dtype;
  if (a.weights.defined()) args.weights = to_tensor(a.weights, strided);
  if (a.row_weights.defined()) {
    args.row_weights = to_tensor(a.row_weights, strided);
    if (trip.rules.layout == Layout::kExpert) args.row_weights.num_dims = 1;  // [N]
  }
  for (const Table& bias : a.bias)
    args.bias.push_back(to_tensor(bias, strided));
  return args;
}

CombineArgs window_combine_args(EPBuffer& buffer,
                                const Trip& trip,
                                uint32_t rank,
                                const Handle& handle) {
  const Table& x = trip.answers[rank].x;
  CombineArgs args = combine_args(trip, rank, handle);
  args.x = buffer.expert_output(handle, static_cast<uint32_t>(x.columns), x.dtype);
  fill(args.x, x);
  return args;
}

void expect_received(const Received& want,
                     const Rules& rules,
                     uint32_t rank,
                     const DispatchResult& got) {
  got.event.synchronize();
  const auto payload = [&](const char* name, const Tensor& tensor, const Table& table) {
    expect_same(difference({rank, name, &want.rows, true}, tensor, table));
  };
  const auto metadata = [&](const char* name, const Tensor& tensor, const Table& table) {
    expect_same(difference({rank, name, &want.rows}, tensor, table));
  };
  const auto numbers = [&](const char* name, const Tensor& tensor,
                           const std::vector<uint32_t>& values) {
    expect_same(difference({rank, name}, tensor, values));
  };
  numbers("status", got.status, {0});
  numbers("num_rows_device", got.num_rows_device, {static_cast<uint32_t>(want.num_rows)});
  numbers("rows_needed_device", got.rows_needed_device, {static_cast<uint32_t>(want.rows_needed)});
  numbers("tokens_per_expert_device", got.tokens_per_expert_device, want.tokens_per_expert);
  numbers("expert_offsets", got.expert_offsets, want.expert_offsets);
  EXPECT_EQ(got.rank_offsets.defined(), rules.layout == Layout::kRank) << "rank " << rank;
  if (rules.layout == Layout::kRank) numbers("rank_offsets", got.rank_offsets, want.rank_offsets);
  EXPECT_EQ(got.num_rows, rules.exact ? std::optional(want.num_rows) : std::nullopt)
      << "rank " << rank;
  EXPECT_EQ(got.tokens_per_expert,
            rules.exact ? std::optional(want.tokens_per_expert) : std::nullopt)
      << "rank " << rank;  // absent, never an empty list: user report I2
  metadata("topk_idx", got.topk_idx, want.idx);
  EXPECT_EQ(got.topk_weights.defined(), want.weights.defined()) << "rank " << rank;
  if (want.weights.defined()) metadata("topk_weights", got.topk_weights, want.weights);
  metadata("source", got.source, want.source);
  payload("x", got.x, want.x);
  expect_pitch(rank, "x", got.x);
  EXPECT_EQ(got.scales.defined(), want.scales.defined()) << "rank " << rank;
  if (want.scales.defined()) payload("scales", got.scales, want.scales);
  expect_pitch(rank, "scales", got.scales);
  ASSERT_EQ(got.extras.size(), want.extras.size()) << "rank " << rank;
  for (uint32_t i = 0; i < want.extras.size(); ++i)
    payload("an extra", got.extras[i], want.extras[i]);
}

void expect_combined(const Combined& want, uint32_t rank, const CombineResult& got) {
  got.event.synchronize();
  expect_same(difference({rank, "status"}, got.status, std::vector<uint32_t>{0}));
  expect_same(difference({rank, "combined x"}, got.x, want.x));
  EXPECT_EQ(got.topk_weights.defined(), want.topk_weights.defined()) << "rank " << rank;
  if (want.topk_weights.defined()) {
    expect_same(difference({rank, "combined topk_weights"}, got.topk_weights, want.topk_weights));
  }
}

void round_trip(EPBuffer& buffer, const Trip& trip, AnswerIn answer_in) {
  const uint32_t rank = buffer.rank();
  const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
  expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
  const bool in_window = answer_in == AnswerIn::kExpertOutput;
  const CombineResult back =
      buffer.combine(in_window ? window_combine_args(buffer, trip, rank, sent.handle)
                               : combine_args(trip, rank, sent.handle));
  expect_combined(trip.back[rank], rank, back);
}

void run_trips(std::span<const Trip> trips, const RunOptions& options) {
  BufferConfig config = config_for(trips);
  if (options.adapt) options.adapt(config);
  options.run(trips[0].num_ranks(), [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config);
    for (const Trip& trip : trips) {
      SCOPED_TRACE(trip.spec.name());
      round_trip(buffer, trip, options.answer_in);
    }
  });
}

void run_specs(const std::vector<TripSpec>& specs, const RunOptions& options) {
  run_trips(make_trips(specs), options);
}

}  // namespace ep::test
