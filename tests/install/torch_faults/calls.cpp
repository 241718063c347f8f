// Calls with at::Tensor: what users of other libraries tripped over (kinds H, K, Q, R).
#include <cstring>

#include "support.hpp"

namespace {

// Both ways of asking: rows come, are tripled, and go home with weights 0.5 and 0.25.
at::Tensor tripled(ep::EPBuffer& buffer,
                   const at::Tensor& x,
                   const at::Tensor& ids,
                   const at::Tensor& weights) {
  ep::DispatchArgs args = call_with(x, ids);
  args.topk_weights = ep::from_torch(weights, "topk_weights");
  args.layout = ep::Layout::kExpert;
  const ep::DispatchResult rows = buffer.dispatch(args);
  const at::Tensor answers = ep::to_torch(rows.x).mul(3);
  ep::CombineArgs back{.x = ep::from_torch(answers), .handle = &rows.handle};
  back.weights = ep::from_torch(weights);
  return ep::to_torch(buffer.combine(back).x);
}

at::Tensor half_and_quarter(c10::ScalarType type = at::kFloat) {
  return at::tensor({0.5, 0.25, 0.5, 0.25, 0.5, 0.25}).to(type).view({3, 2});
}

// Whole numbers, so exact: 3 * 0.75 * x, 3 * 0.5 * x, 0.
void expect_tripled(const at::Tensor& y, const at::Tensor& x) {
  ASSERT_EQ(y.sizes(), x.sizes());
  const float factors[] = {2.25f, 1.5f, 0.0f};
  for (int64_t t = 0; t < 3; ++t)
    EXPECT_TRUE(at::equal(y[t].to(at::kFloat), x[t].to(at::kFloat).mul(factors[t]))) << t;
}

TEST(Contract, CombineMultipliesByTheWeightsOnce) {  // user reports H1, H7
  for (const uint32_t num_ranks : {1u, 2u}) {
    with_ranks(num_ranks, [](ep::EPBuffer& buffer) {
      const at::Tensor x = counting(3, 8);
      expect_tripled(tripled(buffer, x, routing(), half_and_quarter()), x);
    });
  }
}

TEST(Contract, AlignedCountsAndTrueOnes) {  // user report H4
  const auto ids =
      at::tensor({0, -1, 1, -1, 1, -1, 1, 3, 3, -1, 3, 3, 3, -1}, at::kInt).view({7, 2});
  with_ranks(1, [&](ep::EPBuffer& buffer) {
    ep::DispatchArgs args = call_with(counting(7, 8), ids);
    args.layout = ep::Layout::kExpert;
    args.expert_alignment = 4;
    const ep::DispatchResult rows = buffer.dispatch(args);
    EXPECT_EQ(rows.tokens_per_expert, (std::vector<uint32_t>{1, 3, 0, 5}));
    EXPECT_EQ(rows.num_rows, 16u);
    EXPECT_TRUE(
        at::equal(ep::to_torch(rows.expert_offsets), at::tensor({0, 4, 8, 8, 16}, at::kInt)));
    EXPECT_TRUE(
        at::equal(ep::to_torch(rows.tokens_per_expert_device), at::tensor({1, 3, 0, 5}, at::kInt)));
  });
}

// user report R1: a gradient, an expanded row, every other row; columns must be contiguous.
TEST(Layout, AnyRowStrideAndUnitColumnStride) {
  with_ranks(1, [](ep::EPBuffer& buffer) {
    const at::Tensor base = counting(6, 16);
    const at::Tensor good[] = {base.slice(0, 0, 6, 2).narrow(1, 0, 8),
                               base.narrow(0, 2, 1).narrow(1, 5, 8).expand({3, 8}),
                               base.narrow(0, 3, 3).narrow(1, 8, 8)};
    for (const at::Tensor& x : good)
      expect_tripled(tripled(buffer, x, routing(), half_and_quarter()), x);
    const at::Tensor wrong[] = {base.narrow(0, 0, 3).slice(1, 0, 16, 2), counting(8, 3).t()};
    for (const at::Tensor& x : wrong)
      expect_parts(message<ep::InvalidArgument>([&] { buffer.dispatch(call_with(x)); }),
                   {"x has column stride", "stride 1"});
    // Ids and weights may have any strides: here those of a transposed tensor.
    const at::Tensor x = counting(3, 8);
    expect_tripled(
        tripled(buffer, x, routing().t().contiguous().t(), half_and_quarter().t().contiguous().t()),
        x);
  });
  with_ranks(1, [](ep::EPBuffer& buffer) {  // the stride of a dimension of size 1 means nothing
    const at::Tensor x = counting(1, 8).as_strided({1, 8}, {3, 1});
    const at::Tensor ids = routing().as_strided({1, 1}, {7, 5}, 1);
    const ep::DispatchResult rows = buffer.dispatch(call_with(x, ids));
    EXPECT_TRUE(at::equal(ep::to_torch(rows.x), x));
  });
}

TEST(Types, MessagesNameTheDTypeNotTheLayout) {  // user report R2
  with_ranks(1, [](ep::EPBuffer& buffer) {
    const std::string text = message<ep::InvalidArgument>(
        [&] { buffer.dispatch(call_with(counting(3, 8, at::kDouble))); });
    expect_parts(text, {"x has dtype float64", "bfloat16, float16 or float32"});
    EXPECT_EQ(text.find("stride"), std::string::npos);
    expect_parts(message<ep::InvalidArgument>(
                     [&] { buffer.dispatch(call_with(counting(3, 8), routing(at::kShort))); }),
                 {"topk_idx has dtype int16", "int32 or int64"});
    for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor x = counting(3, 8).slice(0, 0, 3).to(type);
      expect_tripled(tripled(buffer, x, routing(), half_and_quarter()), x);
    }
  });
}

TEST(Types, IdsOfEitherWidth) {  // user report R3
  with_ranks(2, [](ep::EPBuffer& buffer) {
    const at::Tensor x = counting(3, 8);
    for (const auto type : {at::kInt, at::kLong}) {
      const ep::DispatchResult rows = buffer.dispatch(call_with(x, routing(type)));
      EXPECT_EQ(ep::to_torch(rows.topk_idx).scalar_type(), type);
      expect_tripled(tripled(buffer, x, routing(type), half_and_quarter()), x);
    }
    const auto mixed = buffer.rank() == 0 ? at::kInt : at::kLong;
    expect_parts(message<ep::Desync>([&] { buffer.dispatch(call_with(x, routing(mixed))); }),
                 {"idx"});
    expect_tripled(tripled(buffer, x, routing(), half_and_quarter()), x);
  });
}

TEST(Types, WeightsOfSmallerTypesAreConverted) {  // user report R4
  with_ranks(1, [](ep::EPBuffer& buffer) {
    const at::Tensor x = counting(3, 8);
    for (const auto type : {at::kHalf, at::kBFloat16})
      expect_tripled(tripled(buffer, x, routing(), half_and_quarter(type)), x);
  });
}

TEST(Missing, EveryArgumentIsNamed) {  // user report R5
  with_ranks(1, [](ep::EPBuffer& buffer) {
    const at::Tensor x = counting(3, 8);
    expect_parts(message<ep::InvalidArgument>([&] { buffer.dispatch(call_with({})); }),
                 {"x is required"});
    expect_parts(message<ep::InvalidArgument>([&] { buffer.dispatch(call_with(x, {})); }),
                 {"topk_idx"});
    const ep::DispatchResult rows = buffer.dispatch(call_with(x));
    expect_parts(message<ep::InvalidArgument>([&] { buffer.combine({.x = rows.x}); }), {"handle"});
    expect_parts(
        message<ep::InvalidArgument>([&] { buffer.combine({.x = {}, .handle = &rows.handle}); }),
        {"x is required"});
  });
}

// A handle as bytes and tensors: what a checkpoint or another process of the same rank has.
ep::Handle saved_and_loaded(const ep::Handle& handle) {
  static_assert(std::is_trivially_copyable_v<ep::Handle::Header>);
  std::vector<std::byte> bytes(sizeof(ep::Handle::Header));
  std::memcpy(bytes.data(), &handle.header(), bytes.size());
  std::vector<at::Tensor> saved;
  for (const ep::Tensor& tensor : handle.tensors())
    saved.push_back(tensor.defined() ? ep::to_torch(tensor).clone() : at::Tensor());
  ep::Handle::Header header;
  std::memcpy(&header, bytes.data(), bytes.size());
  std::vector<ep::Tensor> loaded;
  for (const at::Tensor& tensor : saved)
    loaded.push_back(ep::from_torch(tensor));
  return ep::Handle::from_tensors(header, loaded);
}

TEST(Handles, SurviveCopyingMovingAndSaving) {  // user report K4
  for (const auto type : {at::kInt, at::kLong}) {
    with_ranks(2, [type](ep::EPBuffer& buffer) {
      const at::Tensor x = counting(3, 8);
      ep::DispatchArgs args = call_with(x, routing(type));
      args.topk_weights = ep::from_torch(half_and_quarter());
      args.layout = ep::Layout::kExpert;
      ep::DispatchResult rows = buffer.dispatch(args);
      const at::Tensor answers = ep::to_torch(rows.x).mul(3);
      const ep::Handle copied = rows.handle;
      const ep::Handle loaded = saved_and_loaded(rows.handle);
      const ep::Handle moved = std::move(rows.handle);
      rows = {};
      for (const ep::Handle* handle : {&copied, &loaded, &moved}) {
        EXPECT_EQ(handle->header().idx_is_64, type == at::kLong);
        ep::CombineArgs back{.x = ep::from_torch(answers), .handle = handle};
        back.weights = ep::from_torch(half_and_quarter());
        expect_tripled(ep::to_torch(buffer.combine(back).x), x);
        ep::DispatchArgs replay;
        replay.x = ep::from_torch(x);
        replay.handle = handle;
        EXPECT_TRUE(at::equal(ep::to_torch(buffer.dispatch(replay).x).mul(3), answers));
      }
    });
  }
}

TEST(Lifetime, TensorsOutliveTheBuffer) {  // user report Q5
  std::vector<at::Tensor> kept(2), results(2);
  std::vector<ep::Handle> handles(2);
  with_ranks(2, [&](ep::EPBuffer& buffer) {
    const at::Tensor x = counting(3, 8);
    const ep::DispatchResult rows = buffer.dispatch(call_with(x));
    kept[buffer.rank()] = ep::to_torch(rows.x);
    handles[buffer.rank()] = rows.handle;
    results[buffer.rank()] = ep::to_torch(
        buffer.combine({.x = ep::from_torch(kept[buffer.rank()]), .handle = &rows.handle}).x);
  });
  // Both ranks sent alike; token 0 goes to both ranks, token 1 to rank 1 alone.
  const at::Tensor x = counting(3, 8);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(kept[rank].size(0), rank == 0 ? 2 : 4);
    EXPECT_TRUE(at::equal(kept[rank][0], x[0]));
    EXPECT_TRUE(at::equal(results[rank][0], x[0].mul(2)));
    EXPECT_TRUE(at::equal(results[rank][1], x[1]));
  }
  with_ranks(2, [&](ep::EPBuffer& buffer) {  // a handle alone is good for nothing, and says so
    ep::DispatchArgs replay;
    replay.x = ep::from_torch(x);
    replay.handle = &handles[buffer.rank()];
    expect_parts(message<ep::InvalidArgument>([&] { buffer.dispatch(replay); }),
                 {"another buffer"});
  });
}

}  // namespace
