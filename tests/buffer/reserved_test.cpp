// Names that exist for later versions say so: Unsupported, what, and what would do.
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"

namespace ep::test {
namespace {

BufferConfig config() {
  BufferConfig c;
  c.num_experts = 2;
  c.num_topk = 1;
  c.hidden = 128;
  c.max_tokens_per_rank = 4;
  return c;
}

void expect_unsupported(const std::function<void()>& call, const std::string& name) {
  try {
    call();
    ADD_FAILURE() << name << " was accepted";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
  }
}

TEST(Reserved, AtConstruction) {
  const auto make = [](const std::function<void(BufferConfig&)>& change) {
    BufferConfig c = config();
    change(c);
    EPBuffer(Communicator::single(), c);
  };
  expect_unsupported([&] { make([](BufferConfig& c) { c.device = "cuda:0"; }); }, "cuda:0");
  expect_unsupported([&] { make([](BufferConfig& c) { c.elastic = true; }); }, "elastic");
  expect_unsupported([&] { make([](BufferConfig& c) { c.expert_slot = {0, 1}; }); }, "expert_slot");
  expect_unsupported([] { Communicator::from_nccl(nullptr); }, "from_nccl");
}

TEST(Reserved, InCallsWhichSpendTheirTurn) {
  EPBuffer buffer(Communicator::single(), config());
  std::vector<float> x(128, 1.0f);
  std::vector<int32_t> idx{1};
  DispatchArgs good;
  good.x = Tensor::contiguous(x.data(), DType::kFloat32, {1, 128});
  good.topk_idx = Tensor::contiguous(idx.data(), DType::kInt32, {1, 1});
  const auto dispatch = [&](const std::function<void(DispatchArgs&)>& change) {
    DispatchArgs args = good;
    change(args);
    buffer.dispatch(args);
  };
  expect_unsupported([&] { dispatch([](auto& a) { a.mode = Mode::kLatency; }); }, "latency");
  expect_unsupported([&] { dispatch([](auto& a) { a.layout = Layout::kBatched; }); }, "batched");
  expect_unsupported([&] { dispatch([](auto& a) { a.split = true; }); }, "split");
  expect_unsupported([&] { dispatch([](auto& a) { a.quant = Quant::kMxFp8; }); }, "quant");
  expect_unsupported([&] { dispatch([](auto& a) { a.scale_layout = ScaleLayout::kCol; }); },
                     "scale_layout");
  const DispatchResult out = buffer.dispatch(good);
  CombineArgs combine{.x = out.x, .handle = &out.handle};
  combine.quant = Quant::kFp8Block128;
  expect_unsupported([&] { buffer.combine(combine); }, "quant");
  combine.quant = Quant::kNone;
  combine.split = true;
  expect_unsupported([&] { buffer.combine(combine); }, "split");
  combine.split = false;
  EXPECT_EQ(static_cast<const float*>(buffer.combine(combine).x.data)[127], 1.0f);
}

}  // namespace
}  // namespace ep::test
