#include "device/host/host_stream.hpp"

#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "device/host/host_event.hpp"
#include "ep/error.hpp"

namespace ep::device::host {
namespace {

using Order = kernels::Order;
using Scope = kernels::Scope;
using detail::StreamImpl;

// The kernel of these tests calls what its parameters say.
struct TestParams {
  void (*body)(HostWorker& worker, const TestParams& params);
  void* state;
  uint64_t number;
};

void run_test_params(HostWorker& worker, const void* params) {
  const auto& test = *static_cast<const TestParams*>(params);
  test.body(worker, test);
}

HostKernel find_test_kernel(const kernels::KernelKey& key) {
  return key.op == kernels::KernelOp::kRefuse ? &run_test_params : nullptr;
}

StreamImpl::Launch launch_of(const TestParams& params,
                             uint32_t num_blocks = 1,
                             Doorbell* doorbell = nullptr) {
  return {.params = std::as_bytes(std::span(&params, 1)),
          .num_blocks = num_blocks,
          .doorbell = doorbell};
}

void drain(StreamImpl& stream) {
  ASSERT_EQ(stream.record()->wait(kNoDeadline, {}), WaitResult::kReady);
}

TEST(HostStream, KeepsTheOrderOfLaunchesAndCalls) {
  HostStream stream(find_test_kernel);
  std::vector<uint64_t> seen;
  constexpr uint64_t kItems = 1000;
  for (uint64_t i = 0; i < kItems; ++i) {
    if (i % 3 == 0) {
      stream.call([&seen, i] { seen.push_back(i); });
    } else {
      // The parameters' memory ends right after launch(): they must have been copied.
      TestParams params{[](HostWorker&, const TestParams& p) {
                          static_cast<std::vector<uint64_t>*>(p.state)->push_back(p.number);
                        },
                        &seen, i};
      stream.launch(launch_of(params));
      std::memset(static_cast<void*>(&params), 0xEE, sizeof(params));
    }
  }
  drain(stream);
  std::vector<uint64_t> expected(kItems);
  std::iota(expected.begin(), expected.end(), 0u);
  EXPECT_EQ(seen, expected);
}

TEST(HostStream, TakesParametersUpToItsLimitAndNamesIt) {
  static constexpr auto kCheck = [](HostWorker&, const void* params) {
    const auto* bytes = static_cast<const std::byte*>(params);
    for (size_t i = 0; i < kMaxParamsBytes; ++i)
      ASSERT_EQ(bytes[i], std::byte(i % 251));
  };
  HostStream stream([](const kernels::KernelKey&) -> HostKernel { return kCheck; });
  std::vector<std::byte> params(kMaxParamsBytes + 1);
  for (size_t i = 0; i < params.size(); ++i)
    params[i] = std::byte(i % 251);
  stream.launch({.params = std::span(params).first(kMaxParamsBytes)});
  drain(stream);
  EXPECT_THROW(stream.launch({.params = params}), Error);
}

TEST(HostStream, RefusesWhatItCannotRun) {
  HostStream stream(find_test_kernel);
  const TestParams params{};
  EXPECT_THROW(stream.launch(launch_of(params, 0)), Error);
  EXPECT_THROW(stream.launch(launch_of(params, BlockTeam::kMaxBlocks + 1)), Error);
  auto launch = launch_of(params);
  launch.kernel.op = kernels::KernelOp::kCopyOut;
  EXPECT_THROW(stream.launch(launch), Unsupported);
  drain(stream);
}

struct Barrier {
  Doorbell doorbell{};
  uint32_t arrived = 0;
  uint32_t blocks_seen = 0;
};

// Returns only if all blocks of the launch run at once.
void meet(HostWorker& worker, const TestParams& params) {
  auto& barrier = *static_cast<Barrier*>(params.state);
  HostWorker::fetch_add<Order::kRelaxed, Scope::kDevice>(&barrier.blocks_seen,
                                                         1u << worker.block());
  HostWorker::fetch_add<Order::kAcqRel, Scope::kDevice>(&barrier.arrived, 1);
  HostWorker::ring(&barrier.doorbell);
  auto backoff = worker.make_backoff();
  while (HostWorker::load<Order::kAcquire, Scope::kDevice>(&barrier.arrived) <
         worker.num_blocks()) {
    HostWorker::back_off(backoff);
  }
}

TEST(HostStream, BlocksOfALaunchAreAliveAtOnceWhateverTheirNumber) {
  HostStream stream(find_test_kernel);
  for (const uint32_t num_blocks : {8u, 1u, 3u, 16u, 8u, 2u}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      Barrier barrier{};
      stream.launch(launch_of({meet, &barrier, 0}, num_blocks, &barrier.doorbell));
      drain(stream);
      EXPECT_EQ(barrier.arrived, num_blocks);
      EXPECT_EQ(barrier.blocks_seen, (1u << num_blocks) - 1);
    }
  }
}

TEST(HostStream, RunsAsManyBlocksAsTheDevicePromises) {
  HostStream stream(find_test_kernel);
  const uint32_t num_blocks = create_host_device()->max_blocks();
  uint32_t arrived = 0;
  stream.launch(launch_of({[](HostWorker&, const TestParams& p) {
                             HostWorker::fetch_add<Order::kAcqRel, Scope::kDevice>(
                                 static_cast<uint32_t*>(p.state), 1);
                           },
                           &arrived, 0},
                          num_blocks));
  drain(stream);
  EXPECT_EQ(arrived, num_blocks);
}

TEST(HostStream, LaunchesFromSeveralThreadsAllRunEachThreadsInItsOrder) {
  HostStream stream(find_test_kernel);
  constexpr uint64_t kThreads = 4;
  constexpr uint64_t kItems = 500;
  std::array<uint64_t, kThreads> last{};  // written by the stream's worker alone
  std::atomic<uint64_t> num_disordered{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 1; i <= kItems; ++i) {
        stream.call([&, t, i] {
          if (last[t] != i - 1) ++num_disordered;
          last[t] = i;
        });
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  drain(stream);
  EXPECT_EQ(num_disordered.load(), 0u);
  for (const uint64_t i : last)
    EXPECT_EQ(i, kItems);
}

TEST(HostStream, BlockCountsFromSeveralThreadsStartTheHelpersOnce) {
  HostStream stream(find_test_kernel);
  constexpr uint32_t kThreads = 4;
  std::array<Barrier, kThreads> barriers{};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Barrier& barrier = barriers[t];
      stream.launch(launch_of({meet, &barrier, 0}, 2 + 2 * t, &barrier.doorbell));
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  drain(stream);
  for (uint32_t t = 0; t < kThreads; ++t)
    EXPECT_EQ(barriers[t].arrived, 2 + 2 * t);
}

TEST(HostStream, DestructorRunsWhatIsQueued) {
  int num_run = 0;
  Barrier barrier{};
  {
    HostStream stream(find_test_kernel);
    for (int i = 0; i < 100; ++i)
      stream.call([&] { ++num_run; });
    stream.launch(launch_of({meet, &barrier, 0}, 4, &barrier.doorbell));
  }
  EXPECT_EQ(num_run, 100);
  EXPECT_EQ(barrier.arrived, 4u);
}

TEST(HostStream, AnUnusedStreamEndsWithoutAThread) {
  HostStream stream(find_test_kernel);
}

TEST(HostStream, MayEndInsideItsOwnWork) {
  for (int i = 0; i < 50; ++i) {
    auto stream = std::make_shared<HostStream>(find_test_kernel);
    std::promise<void> released;
    std::promise<void> after;
    Barrier barrier{};
    stream->launch(launch_of({meet, &barrier, 0}, 3, &barrier.doorbell));
    // The work itself holds the last reference, and more work is queued behind it.
    stream->call([self = stream, ready = released.get_future().share()]() mutable {
      ready.wait();
      self.reset();
    });
    stream->call([&after] { after.set_value(); });
    const std::shared_ptr<detail::EventImpl> end = stream->record();
    stream.reset();
    released.set_value();
    after.get_future().wait();
    EXPECT_EQ(end->wait(kNoDeadline, {}), WaitResult::kReady);
  }
}

// What an item holds must not outlive it: callers free memory once its event is reached.
TEST(HostStream, DropsWhatItsWorkHeldBeforeItsEventIsReached) {
  HostStream stream(find_test_kernel);
  auto held = std::make_shared<int>(7);
  const std::weak_ptr<int> watch = held;
  stream.call([held = std::move(held)] {});
  drain(stream);
  EXPECT_TRUE(watch.expired());
}

TEST(HostStream, ALongQueueDrains) {
  HostStream stream(find_test_kernel);
  std::promise<void> gate;
  uint64_t num_run = 0;
  stream.call([opened = gate.get_future().share()] { opened.wait(); });
  constexpr uint64_t kItems = 20'000;
  for (uint64_t i = 0; i < kItems; ++i)
    stream.call([&] { ++num_run; });
  gate.set_value();
  drain(stream);
  EXPECT_EQ(num_run, kItems);
}

}  // namespace
}  // namespace ep::device::host
