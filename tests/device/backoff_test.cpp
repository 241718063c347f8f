#include "device/host/backoff.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <thread>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device.hpp"
#include "device/host/clock.hpp"
#include "device/host/worker.hpp"

namespace ep::device::host {
namespace {

using Order = kernels::Order;
using Scope = kernels::Scope;

constexpr WaitPolicy kSleepAtOnce{.spin_us = 0, .yield_us = 0};
constexpr WaitPolicy kYieldThenSleep{.spin_us = 0, .yield_us = 5};
constexpr WaitPolicy kSpinThenSleep{.spin_us = 3, .yield_us = 0};
constexpr WaitPolicy kPolicies[] = {kSleepAtOnce, kYieldThenSleep, kSpinThenSleep, WaitPolicy{}};

uint32_t sleepers(Doorbell& doorbell) {
  return std::atomic_ref<uint32_t>{doorbell.sleepers}.load();
}

// Two sides that answer each other; each lives in its own memory or process.
struct PingPong {
  Doorbell doorbell[2];
  alignas(64) uint32_t word[2];
};

// Each side announces its round to the other and waits for the other's.  A wake-up that got lost
// shows as a sleep of its full 50 ms.
uint32_t play(PingPong& game, uint32_t side, uint32_t num_rounds, const WaitPolicy* fixed) {
  uint32_t num_slow = 0;
  for (uint32_t round = 1; round <= num_rounds; ++round) {
    HostWorker worker(0, 1, &game.doorbell[side], fixed ? *fixed : kPolicies[(round + side) % 4]);
    HostWorker::store<Order::kRelease, Scope::kSystem>(&game.word[1 - side], round);
    HostWorker::ring(&game.doorbell[1 - side]);
    const uint64_t start = now_ns();
    auto backoff = worker.make_backoff();
    while (HostWorker::load<Order::kAcquire, Scope::kSystem>(&game.word[side]) < round) {
      HostWorker::back_off(backoff);
    }
    if (now_ns() - start >= Backoff::kMaxSleepNs) ++num_slow;
  }
  return num_slow;
}

// A lost wake-up is rare by nature; a descheduled test is not rarer.  So some slow rounds pass.
constexpr uint32_t kSlowRoundsAllowed = 20;

TEST(Backoff, ManyPingPongsBetweenThreadsLoseNoWakeUp) {
  PingPong game{};
  uint32_t other = 0;
  std::thread thread([&] { other = play(game, 1, 100'000, nullptr); });
  const uint32_t mine = play(game, 0, 100'000, nullptr);
  thread.join();
  EXPECT_LE(mine + other, kSlowRoundsAllowed);
  EXPECT_EQ(sleepers(game.doorbell[0]), 0u);
  EXPECT_EQ(sleepers(game.doorbell[1]), 0u);
}

TEST(Backoff, PingPongsBetweenProcessesThatSleepLoseNoWakeUp) {
  void* shared =
      mmap(nullptr, sizeof(PingPong), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& game = *new (shared) PingPong{};
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    _exit(play(game, 1, 20'000, &kSleepAtOnce) <= kSlowRoundsAllowed ? 0 : 1);
  }
  EXPECT_LE(play(game, 0, 20'000, &kSleepAtOnce), kSlowRoundsAllowed);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  munmap(shared, sizeof(PingPong));
}

TEST(Backoff, StormOfProcessesOnOneDoorbellEndsForAll) {
  struct Storm {
    Doorbell doorbell;
    uint32_t arrived;
  };
  constexpr uint32_t kProcesses = 6;
  constexpr uint32_t kRounds = 300;
  void* shared =
      mmap(nullptr, sizeof(Storm), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& storm = *new (shared) Storm{};
  for (uint32_t i = 0; i < kProcesses; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child != 0) continue;
    HostWorker worker(0, 1, &storm.doorbell, kPolicies[i % 4]);
    for (uint32_t round = 1; round <= kRounds; ++round) {
      HostWorker::fetch_add<Order::kAcqRel, Scope::kSystem>(&storm.arrived, 1);
      HostWorker::ring(&storm.doorbell);
      auto backoff = worker.make_backoff();
      while (HostWorker::load<Order::kAcquire, Scope::kSystem>(&storm.arrived) <
             round * kProcesses) {
        HostWorker::back_off(backoff);
      }
    }
    _exit(0);
  }
  for (uint32_t i = 0; i < kProcesses; ++i) {
    int status = -1;
    ASSERT_GT(wait(&status), 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(storm.arrived, kProcesses * kRounds);
  EXPECT_EQ(sleepers(storm.doorbell), 0u);
  munmap(shared, sizeof(Storm));
}

// The rule that makes a wake-up safe: the step that registers returns before it sleeps.
TEST(Backoff, LooksOnceMoreBetweenRegisteringAndSleeping) {
  Doorbell doorbell{};
  Backoff backoff(&doorbell, kSleepAtOnce);
  backoff.step();
  EXPECT_EQ(sleepers(doorbell), 1u);
  ring(doorbell);  // between look and sleep: the sleep must not happen
  const uint64_t start = now_ns();
  backoff.step();
  EXPECT_LT(now_ns() - start, Backoff::kMaxSleepNs);
}

TEST(Backoff, SleepsNoLongerThanAsked) {
  Doorbell doorbell{};
  Backoff backoff(&doorbell, kSleepAtOnce);
  backoff.step();
  const uint64_t wake_by = now_ns() + 2 * kNanosPerMilli;
  backoff.step(wake_by);
  EXPECT_GE(backoff.seen_ns(), wake_by);
  EXPECT_LT(backoff.seen_ns(), wake_by + Backoff::kMaxSleepNs);
}

TEST(Backoff, NeverSleepsWithoutADoorbell) {
  Backoff backoff(nullptr, kSleepAtOnce);
  const uint64_t start = now_ns();
  for (int i = 0; i < 10; ++i)
    backoff.step();
  EXPECT_LT(now_ns() - start, 10 * Backoff::kMaxSleepNs);
}

TEST(Backoff, FreshMemoryIsAValidDoorbellAndRingingNobodyIsLegal) {
  alignas(Doorbell) std::byte memory[sizeof(Doorbell)]{};
  auto& doorbell = *reinterpret_cast<Doorbell*>(memory);
  ring(doorbell);
  EXPECT_EQ(doorbell.generation, 1u);
  EXPECT_EQ(doorbell.sleepers, 0u);
}

class HostDeviceWait : public testing::TestWithParam<WaitPolicy> {
 protected:
  const std::shared_ptr<Device> device = create_host_device();
  Doorbell doorbell{};
};

TEST_P(HostDeviceWait, EndsWhenReady) {
  std::atomic<bool> go{false};
  std::thread thread([&] {
    go.store(true);
    ring(doorbell);
  });
  const auto result = device->wait(
      doorbell, [&] { return go.load(); }, kNoDeadline, {}, GetParam());
  EXPECT_EQ(result, WaitResult::kReady);
  thread.join();
}

TEST_P(HostDeviceWait, EndsAtTheDeadlineAndNotBefore) {
  const uint64_t deadline = device->now_ns() + 5 * kNanosPerMilli;
  const auto result = device->wait(
      doorbell, [] { return false; }, deadline, {}, GetParam());
  EXPECT_EQ(result, WaitResult::kDeadline);
  EXPECT_GE(device->now_ns(), deadline);
}

TEST_P(HostDeviceWait, IsReadyEvenWhenTheDeadlineHasPassed) {
  EXPECT_EQ(device->wait(
                doorbell, [] { return true; }, 0, {}, GetParam()),
            WaitResult::kReady);
}

TEST_P(HostDeviceWait, AsksTheInterruptAboutEvery50Ms) {
  int num_asked = 0;
  const uint64_t start = device->now_ns();
  const std::function<bool()> interrupt = [&] { return ++num_asked == 3; };
  const auto result = device->wait(
      doorbell, [] { return false; }, kNoDeadline, interrupt, GetParam());
  EXPECT_EQ(result, WaitResult::kInterrupted);
  EXPECT_EQ(num_asked, 3);
  EXPECT_GE(device->now_ns() - start, 150 * kNanosPerMilli);
}

TEST_P(HostDeviceWait, DeregistersWhenTheInterruptThrows) {
  const std::function<bool()> interrupt = []() -> bool { throw 1; };
  EXPECT_THROW(device->wait(
                   doorbell, [] { return false; }, kNoDeadline, interrupt, GetParam()),
               int);
  EXPECT_EQ(sleepers(doorbell), 0u);
}

INSTANTIATE_TEST_SUITE_P(Policies, HostDeviceWait, testing::ValuesIn(kPolicies));

TEST(HostWorker, FetchMinAndCompareExchangeReturnWhatWasThere) {
  uint64_t word = 5;
  const auto min = [&](uint64_t value) {
    return HostWorker::fetch_min<Order::kAcqRel, Scope::kDevice>(&word, value);
  };
  EXPECT_EQ(min(7), 5u);
  EXPECT_EQ(word, 5u);
  EXPECT_EQ(min(3), 5u);
  EXPECT_EQ(word, 3u);
  const auto swap = [&](uint64_t expected, uint64_t desired) {
    return HostWorker::compare_exchange<Order::kAcqRel, Scope::kDevice>(&word, expected, desired);
  };
  EXPECT_EQ(swap(4, 9), 3u);
  EXPECT_EQ(word, 3u);
  EXPECT_EQ(swap(3, 9), 3u);
  EXPECT_EQ(word, 9u);
}

}  // namespace
}  // namespace ep::device::host
