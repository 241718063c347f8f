// Memory that the host writes at once must be free at once, not in the order of a stream.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "device/host/host_device.hpp"
#include "device/host/host_kernels.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

constexpr uint32_t kHidden = 256;
constexpr int64_t kTokens = 64;

// The second block of a combine waits here before it does anything: a rank that has entered, and read half.
std::atomic<Gate*> half_way{nullptr};

void run_combine(device::host::HostWorker& worker, const void* params) {
  Gate* gate = half_way.load();
  if (worker.block() == 1 && gate != nullptr) gate->wait();
  kernels::KernelKey key;
  key.op = kernels::KernelOp::kCombine;
  key.combine.in = key.combine.out = kernels::Element::kFP32;
  device::host::find_kernel(key)(worker, params);
}

device::host::HostKernel find_gated(const kernels::KernelKey& key) {
  return key.op == kernels::KernelOp::kCombine ? &run_combine : device::host::find_kernel(key);
}

// What both ranks do: all tokens to both ranks, twice 2.0f comes back.
class TwoRanks {
 public:
  explicit TwoRanks(EPBuffer& buffer) : buffer_(buffer) {}

  DispatchResult dispatch() {
    DispatchArgs args;
    args.x = Tensor::contiguous(x_.data(), DType::kFloat32, {kTokens, kHidden});
    args.topk_idx = Tensor::contiguous(idx_.data(), DType::kInt32, {kTokens, 2});
    args.exact = false;
    args.async_op = true;
    return buffer_.dispatch(args);
  }
  CombineResult combine(const Tensor& rows, const Handle& handle) {
    CombineArgs args{.x = rows, .handle = &handle};
    args.async_op = true;
    args.num_sms = 2;
    return buffer_.combine(args);
  }
  // What an expert answers, in the window.
  Tensor answer(const Handle& handle, float value) {
    Tensor t = buffer_.expert_output(handle, kHidden, DType::kFloat32);
    std::fill_n(static_cast<float*>(t.data), t.num_elements(), value);
    return t;
  }

 private:
  EPBuffer& buffer_;
  std::vector<float> x_ = std::vector<float>(kTokens * kHidden, 1.0f);
  std::vector<int32_t> idx_ = [] {
    std::vector<int32_t> idx(kTokens * 2);
    for (size_t i = 0; i < idx.size(); ++i)
      idx[i] = static_cast<int32_t>(i % 2);
    return idx;
  }();
};

// Found by the soak: rank 0 has completed combine 2 and runs ahead asynchronously, while half of rank 1
// still reads rank 0's answer.  Dispatch 4 may have that memory, behind calls that wait for rank 1; the
// host, which writes at once, may not.
TEST(ExpertOutput, IsNotWhatALateRankStillReads) {
  Watchdog watchdog;
  BufferConfig config;
  config.num_experts = config.num_topk = 2;
  config.hidden = kHidden;
  config.max_tokens_per_rank = kTokens;
  config.arena_bytes = uint64_t{8} << 20;
  std::atomic<bool> asking{false};
  Gate gate;
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    const bool late = group->rank() == 1;
    buffer::Environment environment = buffer::host_environment();
    if (late) environment.device = std::make_shared<device::host::HostDevice>(&find_gated);
    EPBuffer buffer = BufferAccess::create(group, config, environment);
    TwoRanks calls(buffer);
    DispatchResult first = calls.dispatch();
    first.event.synchronize();
    Tensor rows = calls.answer(first.handle, 2.0f);
    if (late) half_way = &gate;
    const CombineResult back = calls.combine(rows, first.handle);
    rows = {};
    if (!late) back.event.synchronize();  // it needs rank 1's record, not that rank 1 has read
    std::vector<DispatchResult> later;
    std::vector<Tensor> answers;
    for (int i = 0; i < 3; ++i)
      later.push_back(calls.dispatch());
    if (late) {
      while (!asking)
        std::this_thread::yield();
      // Long enough for a write that does not wait; one that waits is not hurried by it.
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      while (std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
      half_way = nullptr;
      gate.open();
    } else {
      asking = true;
      for (int i = 0; i < 8; ++i)
        answers.push_back(calls.answer(later[0].handle, 9.0f));
    }
    back.event.synchronize();
    buffer.comm_stream().synchronize();
    const auto* y = static_cast<const float*>(back.x.data);
    EXPECT_EQ(std::count(y, y + kTokens * kHidden, 4.0f), kTokens * kHidden);
  });
}

}  // namespace
}  // namespace ep::test
