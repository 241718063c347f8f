// at::Tensor <-> ep::Tensor: every dtype and stride, lifetimes, and what is refused.
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include "support.hpp"

namespace {

std::set<ep::DType> known_types() {
  std::set<ep::DType> known;
  for (uint32_t i = 0; i <= static_cast<uint32_t>(ep::DType::kFloat4E2M1FNx2); ++i) {
    try {
      ep::to_torch(static_cast<ep::DType>(i));
      known.insert(static_cast<ep::DType>(i));
    } catch (const ep::Unsupported&) {
    }
  }
  return known;
}

TEST(Conversion, EveryDTypeThereAndBack) {
  const std::set<ep::DType> known = known_types();
  EXPECT_EQ(known.size(), 19u);  // torch 2.8 and newer have them all
  for (const ep::DType dtype : known) {
    SCOPED_TRACE(ep::name_of(dtype));
    const at::Tensor tensor = at::empty({3, 4}, at::TensorOptions().dtype(ep::to_torch(dtype)));
    EXPECT_EQ(tensor.element_size(), ep::num_bytes(dtype));
    const ep::Tensor view = ep::from_torch(tensor);
    EXPECT_EQ(view.dtype, dtype);
    const at::Tensor back = ep::to_torch(view);
    EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(back.data_ptr(), tensor.data_ptr());
  }
}

TEST(Conversion, NamesAreTorchs) {  // a swapped pair of equal size would pass the test above
  const std::pair<ep::DType, c10::ScalarType> pairs[] = {
      {ep::DType::kUInt8, at::kByte},
      {ep::DType::kInt8, at::kChar},
      {ep::DType::kBool, at::kBool},
      {ep::DType::kInt16, at::kShort},
      {ep::DType::kUInt16, at::kUInt16},
      {ep::DType::kInt32, at::kInt},
      {ep::DType::kUInt32, at::kUInt32},
      {ep::DType::kInt64, at::kLong},
      {ep::DType::kUInt64, at::kUInt64},
      {ep::DType::kFloat32, at::kFloat},
      {ep::DType::kFloat64, at::kDouble},
      {ep::DType::kFloat16, at::kHalf},
      {ep::DType::kBFloat16, at::kBFloat16},
      {ep::DType::kComplex64, at::kComplexFloat},
      {ep::DType::kComplex128, at::kComplexDouble},
      {ep::DType::kFloat8E4M3FN, at::kFloat8_e4m3fn},
      {ep::DType::kFloat8E5M2, at::kFloat8_e5m2},
      {ep::DType::kFloat8E8M0FNU, c10::ScalarType::Float8_e8m0fnu},
      {ep::DType::kFloat4E2M1FNx2, c10::ScalarType::Float4_e2m1fn_x2}};
  for (const auto& [ours, torchs] : pairs)
    EXPECT_EQ(ep::to_torch(ours), torchs) << ep::name_of(ours);
}

// What a libtorch older than 2.1 has: the newer dtypes are left out, not a compile error.
enum class OldScalarType : uint8_t {
  Byte,
  Char,
  Bool,
  Short,
  Int,
  Long,
  ComplexFloat,
  ComplexDouble,
  Double,
  Float,
  Half,
  BFloat16,
};

TEST(Conversion, AnOlderLibtorchHasFewerTypes) {
  std::set<ep::DType> known;
  ep::detail::torch_bridge::for_each_type<OldScalarType>(
      [&](ep::DType dtype, OldScalarType) { known.insert(dtype); });
  EXPECT_EQ(known.size(), 12u);
  EXPECT_FALSE(known.contains(ep::DType::kFloat8E4M3FN) || known.contains(ep::DType::kUInt16));
}

TEST(Conversion, StridesAndOffsetsAreKept) {  // user report R1
  const at::Tensor base = counting(6, 8);
  const at::Tensor views[] = {base,
                              base.t(),
                              base.slice(0, 1, 6, 2),
                              base.slice(1, 0, 8, 2),
                              base.narrow(1, 3, 2),
                              base.select(0, 4),
                              base.narrow(0, 0, 1).expand({5, 8}),
                              base.view({2, 3, 2, 2, 2})};
  for (const at::Tensor& view : views) {
    const ep::Tensor ours = ep::from_torch(view);
    ASSERT_EQ(static_cast<int64_t>(ours.num_dims), view.dim());
    EXPECT_EQ(ours.data, view.data_ptr());
    const at::Tensor back = ep::to_torch(ours);
    EXPECT_EQ(back.sizes(), view.sizes());
    EXPECT_EQ(back.strides(), view.strides());
    EXPECT_TRUE(at::equal(back, view));
  }
}

TEST(Conversion, NothingStaysNothing) {
  EXPECT_FALSE(ep::from_torch(at::Tensor()).defined());
  EXPECT_FALSE(ep::to_torch(ep::Tensor()).defined());
  const at::Tensor empty = ep::to_torch(ep::from_torch(at::empty({0, 8})));
  EXPECT_EQ(empty.sizes(), at::IntArrayRef({0, 8}));
  const at::Tensor null =
      ep::to_torch(ep::Tensor::contiguous(nullptr, ep::DType::kFloat16, {0, 8}));
  EXPECT_EQ(null.numel(), 0);
}

TEST(Lifetime, OurViewKeepsTorchsStorage) {
  bool freed = false;
  float memory[8] = {};
  at::Tensor tensor = at::from_blob(memory, {2, 4}, [&freed](void*) { freed = true; });
  ep::Tensor view = ep::from_torch(tensor);
  const ep::Tensor copy = view;
  tensor.reset();
  view = {};
  EXPECT_FALSE(freed);
  const_cast<ep::Tensor&>(copy) = {};
  EXPECT_TRUE(freed);
}

TEST(Lifetime, TorchsViewKeepsOurOwner) {
  auto memory = std::make_shared<std::vector<float>>(8, 3.0f);
  const std::weak_ptr<void> watched = memory;
  at::Tensor row;
  {
    ep::Tensor ours = ep::Tensor::contiguous(memory->data(), ep::DType::kFloat32, {2, 4}, memory);
    memory.reset();
    const at::Tensor all = ep::to_torch(ours);
    row = all.select(0, 1);
  }
  EXPECT_FALSE(watched.expired());
  EXPECT_EQ(row.sum().item<float>(), 12.0f);
  row.reset();
  EXPECT_TRUE(watched.expired());
}

TEST(Refused, GradientsThatNobodyWouldRecord) {
  const at::Tensor x = counting(3, 8).requires_grad_();
  expect_parts(message<ep::InvalidArgument>([&] { ep::from_torch(x, "x"); }),
               {"x requires grad", "NoGradGuard", "detach()"});
  EXPECT_TRUE(ep::from_torch(x.detach(), "x").defined());
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(ep::from_torch(x, "x").defined());
}

TEST(Refused, WhatIsNotPlainMemory) {  // user report R2: each in its own words
  const at::Tensor x = counting(3, 8);
  const auto refused = [](const at::Tensor& t) {
    return message<ep::InvalidArgument>([&] { ep::from_torch(t, "rows"); });
  };
  expect_parts(refused(x.select(0, 0).select(0, 0)), {"rows has 0 dimensions", "1 to 8"});
  expect_parts(refused(x.view({3, 8, 1, 1, 1, 1, 1, 1, 1})), {"rows has 9 dimensions"});
  expect_parts(refused(x.to_sparse()), {"rows is not a strided tensor", "[3, 8]"});
  expect_parts(refused(x.to(at::kComplexFloat).conj()), {"lazy conjugate", "resolve_conj()"});
  expect_parts(refused(at::empty({3}, at::TensorOptions().device(at::kMeta))),
               {"rows is on meta", "cpu and cuda"});
  expect_parts(refused(at::empty({3}, at::TensorOptions().dtype(c10::ScalarType::Float8_e4m3fnuz))),
               {"rows has dtype Float8_e4m3fnuz"});
}

TEST(Allocator, GivesAlignedMemoryAndTakesItBack) {
  const auto allocate = ep::torch_allocator();
  for (const uint64_t bytes : {1u, 255u, 256u, 100'000u}) {
    const std::shared_ptr<void> memory = allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 256, 0u);
    std::memset(memory.get(), 0xFF, bytes);
  }
}

// Counts what it gives, and has a limit.
struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > limit) TORCH_CHECK(false, "no room for ", bytes);
    ++live;
    auto* const counted = new std::pair<Counting*, std::vector<char>>(this, bytes);
    return {counted->second.data(), counted,
            [](void* p) {
              auto* const mine = static_cast<std::pair<Counting*, std::vector<char>>*>(p);
              --mine->first->live;
              delete mine;
            },
            at::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  int live = 0;
  size_t limit = std::numeric_limits<size_t>::max();
};

TEST(Allocator, OutputsComeFromTheOneThatIsGiven) {
  Counting counting_allocator;
  ep::BufferConfig config = kConfig;
  config.outputs = ep::Outputs::kCaller;
  config.allocator = ep::torch_allocator(&counting_allocator);
  ep::EPBuffer buffer(ep::Communicator::single(), config);
  {
    const ep::DispatchResult rows = buffer.dispatch(call_with(counting(3, 8)));
    at::Tensor x = ep::to_torch(rows.x);
    EXPECT_GT(counting_allocator.live, 0);
  }
  EXPECT_EQ(counting_allocator.live, 0);
  counting_allocator.limit = 16;  // torch's error becomes ours, with the bytes: user report N3
  expect_parts(message<ep::CapacityError>([&] { buffer.dispatch(call_with(counting(3, 8))); }),
               {"out of memory", "bytes"});
  counting_allocator.limit = std::numeric_limits<size_t>::max();
  EXPECT_EQ(buffer.dispatch(call_with(counting(3, 8))).num_rows, 2u);
}

}  // namespace
