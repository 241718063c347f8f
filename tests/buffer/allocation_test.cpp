// Steady calls ask the system for no memory: every operator new of this program is counted.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "support/trip.hpp"

namespace {

std::atomic<uint64_t> num_allocations{0};

void* counted(size_t num_bytes, size_t align) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t size = (std::max<size_t>(num_bytes, 1) + align - 1) / align * align;
  if (void* memory = std::aligned_alloc(align, size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t n) {
  return counted(n, alignof(std::max_align_t));
}
void* operator new(size_t n, std::align_val_t align) {
  return counted(n, std::max(static_cast<size_t>(align), alignof(std::max_align_t)));
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace ep::test {
namespace {

constexpr uint32_t kRanks = 2, kRounds = 50, kWindows = 8;

TripSpec spec_of(Layout layout, bool exact) {
  TripSpec spec;
  spec.num_tokens = {9, 5};
  spec.num_experts = 6;
  spec.num_topk = 3;
  spec.hidden = 64;
  spec.layout = layout;
  spec.exact = exact;
  return spec;
}

// One rank's steady work; everything that it re-uses is a member.
class Engine {
 public:
  Engine(EPBuffer& buffer, const Trip& trip) : buffer_(buffer), trip_(trip) {
    dispatch_ = dispatch_args(trip, buffer.rank());
    dispatch_.outputs = Outputs::kWindow;
    buffer_.dispatch(dispatch_, result_);
    combine_ = combine_args(trip, buffer.rank(), result_.handle);
    out_ = buffer_.combine(combine_).x;
    combine_.out = out_;
  }

  // The answer is the caller's memory.
  void fresh() {
    check(buffer_.try_dispatch(dispatch_, result_));
    combine();
  }
  void replayed() {
    replay_ = result_.handle;
    check(buffer_.try_dispatch(replay_args(), result_));
    combine();
  }
  void asynchronous() {
    DispatchArgs& args = replay_args();
    replay_ = result_.handle;
    args.async_op = combine_.async_op = true;
    check(buffer_.try_dispatch(args, result_));
    combine();
    combined_.event.synchronize();
    args.async_op = combine_.async_op = false;
  }
  // The answer is computed into the window.
  void in_window() {
    check(buffer_.try_dispatch(dispatch_, result_));
    Tensor answer;
    check(buffer_.try_expert_output(result_.handle, 64, DType::kBFloat16, answer));
    std::fill_n(static_cast<uint16_t*>(answer.data), answer.num_elements(), uint16_t{0});
    const Tensor own = combine_.x;
    combine_.x = answer;
    combine();
    combine_.x = own;
  }
  // Every result is the caller's memory.
  void into_given() {
    if (!dispatch_.out.x.defined()) give();
    check(buffer_.try_dispatch(dispatch_, result_));
    combine();
  }
  void take_back() { dispatch_.out = {}; }

 private:
  static void check(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

  DispatchArgs& replay_args() {
    if (replayed_.handle == nullptr) {
      replayed_ = dispatch_;
      replayed_.topk_idx = {};
      replayed_.handle = &replay_;
    }
    return replayed_;
  }
  void combine() {
    combine_.handle = &result_.handle;
    check(buffer_.try_combine(combine_, combined_));
  }
  void give() {
    const DispatchTensors spec = buffer_.output_spec(dispatch_);
    for (const auto member :
         {&DispatchTensors::x, &DispatchTensors::topk_idx, &DispatchTensors::topk_weights,
          &DispatchTensors::source, &DispatchTensors::num_rows_device,
          &DispatchTensors::rows_needed_device, &DispatchTensors::tokens_per_expert_device,
          &DispatchTensors::expert_offsets, &DispatchTensors::rank_offsets,
          &DispatchTensors::status}) {
      Tensor t = spec.*member;
      if (!t.defined()) continue;
      const int64_t elements = t.shape[0] * t.strides[0];
      memory_.emplace_back(static_cast<size_t>(elements) * num_bytes(t.dtype) / 16 + 1);
      t.data = memory_.back().data();
      dispatch_.out.*member = t;
    }
  }

  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  EPBuffer& buffer_;
  const Trip& trip_;
  DispatchArgs dispatch_, replayed_{};
  CombineArgs combine_;
  DispatchResult result_;
  CombineResult combined_;
  Handle replay_;
  Tensor out_;
  std::vector<std::vector<Unit>> memory_;
};

// Of the windows that follow the warm-up, the quietest: what a call allocates, it allocates in each.
uint64_t fewest_allocations(const Trip& trip, void (Engine::*round)()) {
  std::atomic<uint64_t> fewest{~uint64_t{0}};
  std::barrier meet(kRanks);
  run_threads(kRanks, [&](std::shared_ptr<Communicator> group) {
    EPBuffer buffer(group, config_for(std::span(&trip, 1)));
    Engine engine(buffer, trip);
    for (uint32_t window = 0; window < kWindows; ++window) {
      meet.arrive_and_wait();
      const uint64_t before = num_allocations.load();
      meet.arrive_and_wait();
      for (uint32_t i = 0; i < kRounds; ++i)
        (engine.*round)();
      meet.arrive_and_wait();
      if (window != 0 && group->rank() == 0)
        fewest = std::min(fewest.load(), num_allocations.load() - before);
    }
    engine.take_back();
  });
  return fewest;
}

class Allocation : public testing::TestWithParam<std::tuple<Layout, bool>> {};

TEST_P(Allocation, IsCounted) {  // or the others prove nothing
  const uint64_t before = num_allocations.load();
  delete new std::vector<int>(3);
  EXPECT_EQ(num_allocations.load() - before, 2u);
}
TEST_P(Allocation, NoneInAFreshCall) {
  const Trip trip = make_trip(spec_of(std::get<0>(GetParam()), std::get<1>(GetParam())));
  EXPECT_EQ(fewest_allocations(trip, &Engine::fresh), 0u);
}
TEST_P(Allocation, NoneInAReplay) {
  const Trip trip = make_trip(spec_of(std::get<0>(GetParam()), std::get<1>(GetParam())));
  EXPECT_EQ(fewest_allocations(trip, &Engine::replayed), 0u);
}
TEST_P(Allocation, NoneInAnAsynchronousReplay) {
  const Trip trip = make_trip(spec_of(std::get<0>(GetParam()), std::get<1>(GetParam())));
  EXPECT_EQ(fewest_allocations(trip, &Engine::asynchronous), 0u);
}
TEST_P(Allocation, NoneWithTheAnswerInTheWindow) {
  const Trip trip = make_trip(spec_of(std::get<0>(GetParam()), std::get<1>(GetParam())));
  EXPECT_EQ(fewest_allocations(trip, &Engine::in_window), 0u);
}
TEST_P(Allocation, NoneIntoTheCallersMemory) {
  const Trip trip = make_trip(spec_of(std::get<0>(GetParam()), std::get<1>(GetParam())));
  EXPECT_EQ(fewest_allocations(trip, &Engine::into_given), 0u);
}

INSTANTIATE_TEST_SUITE_P(Calls,
                         Allocation,
                         testing::Combine(testing::ValuesIn(kBothLayouts), testing::Bool()));

}  // namespace
}  // namespace ep::test
