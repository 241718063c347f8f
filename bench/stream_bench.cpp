// What a launch on a host stream costs the caller, and how long its round trip takes.
//
//   launch_awake   launch() while the worker still spins or works: no system call
//   launch_asleep  launch() after the worker went to sleep: one futex wake
//   round_trip     launch(), record(), wait() of an empty kernel; the argument is its blocks
//   record_query   record() and query() of a point that is reached
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>

#include <benchmark/benchmark.h>

#include "device/host/clock.hpp"
#include "device/host/host_stream.hpp"

namespace {

using ep::WaitPolicy;
using ep::detail::StreamImpl;
using ep::device::kNoDeadline;
using namespace ep::device::host;

constexpr size_t kParamsBytes = 512;  // about what dispatch takes
constexpr int kLaunchesPerDrain = 64;
constexpr WaitPolicy kSleepAtOnce{.spin_us = 0, .yield_us = 0};

void nothing(HostWorker&, const void*) {}

HostKernel find_nothing(const ep::kernels::KernelKey&) {
  return &nothing;
}

struct Fixture {
  HostStream stream{find_nothing};
  std::byte params[kParamsBytes]{};

  void launch(uint32_t num_blocks, const WaitPolicy& policy) {
    stream.launch({.params = params, .num_blocks = num_blocks, .wait_policy = policy});
  }
  void drain() { stream.record()->wait(kNoDeadline, {}); }
};

void launch_awake(benchmark::State& state) {
  Fixture fixture;
  int num_queued = 0;
  for (auto _ : state) {
    fixture.launch(1, {});
    if (++num_queued == kLaunchesPerDrain) {
      state.PauseTiming();
      fixture.drain();
      num_queued = 0;
      state.ResumeTiming();
    }
  }
}
BENCHMARK(launch_awake);

void launch_asleep(benchmark::State& state) {
  Fixture fixture;
  for (auto _ : state) {
    fixture.launch(1, kSleepAtOnce);
    fixture.drain();
    std::this_thread::sleep_for(std::chrono::microseconds(200));  // the worker is asleep by then
    const uint64_t start = now_ns();
    fixture.launch(1, kSleepAtOnce);
    state.SetIterationTime(static_cast<double>(now_ns() - start) * 1e-9);
    fixture.drain();
  }
}
BENCHMARK(launch_asleep)->UseManualTime()->Iterations(2000);

void round_trip(benchmark::State& state) {
  Fixture fixture;
  const auto num_blocks = static_cast<uint32_t>(state.range(0));
  for (auto _ : state) {
    fixture.launch(num_blocks, {});
    fixture.drain();
  }
}
BENCHMARK(round_trip)->Arg(1)->Arg(2)->Arg(4)->Arg(8)->UseRealTime();

void round_trip_asleep(benchmark::State& state) {
  Fixture fixture;
  const auto num_blocks = static_cast<uint32_t>(state.range(0));
  for (auto _ : state) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const uint64_t start = now_ns();
    fixture.launch(num_blocks, kSleepAtOnce);
    fixture.drain();
    state.SetIterationTime(static_cast<double>(now_ns() - start) * 1e-9);
  }
}
BENCHMARK(round_trip_asleep)->Arg(1)->Arg(2)->UseManualTime()->Iterations(2000);

void record_query(benchmark::State& state) {
  Fixture fixture;
  fixture.launch(1, {});
  fixture.drain();
  for (auto _ : state)
    benchmark::DoNotOptimize(fixture.stream.record()->query());
}
BENCHMARK(record_query);

}  // namespace

BENCHMARK_MAIN();
