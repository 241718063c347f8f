// What the tests of faults and lifetimes share: errors that must come, gates, a bound for every
// test.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "buffer/buffer_impl.hpp"
#include "ep/ep.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {

constexpr double kBoundS = 60.0;  // of a test; a wait that outlives it had no bound
constexpr double kShortS = 0.3;   // a timeout that is reached on purpose
constexpr double kSlackS = 3.0;   // what a loaded machine may add to the promised second

// Ends the process, with the test's name, when a test hangs.
class Watchdog {
 public:
  explicit Watchdog(double seconds = kBoundS)
      : thread_([this, seconds] {
          std::unique_lock lock(mutex_);
          if (done_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [this] { return is_done_; }))
            return;
          const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
          std::fprintf(stderr, "watchdog: %s hangs after %g s\n",
                       test == nullptr ? "a test" : test->name(), seconds);
          std::fflush(stderr);
          std::abort();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    done_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::jthread thread_;  // the last: it uses the others
};

// Everybody waits until somebody has opened it.
class Gate {
 public:
  void open() {
    is_open_.store(true, std::memory_order_release);
    is_open_.notify_all();
  }
  void wait() const { is_open_.wait(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> is_open_{false};
};

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// The exception of type E that `call` must throw.
template <class E, class Call>
E caught(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const E& error) {
    return error;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("another error than wanted: ") + error.what());
  }
  throw std::runtime_error("no error");
}

inline void expect_text(const std::exception& error, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << '"' << error.what() << "\" lacks \"" << part << '"';
}

inline Tensor zeros(DType dtype, uint64_t rows, uint64_t columns) {
  return to_tensor(Table(dtype, rows, columns));
}

inline int32_t value_of(const Tensor& scalar) {
  return *static_cast<const int32_t*>(scalar.data);
}

// Returns once `rank` has entered call `sequence`, so that it is in it unless somebody ended it.
inline void await_entered(EPBuffer& buffer, uint32_t rank, uint64_t sequence) {
  uint64_t& entered = BufferAccess::impl(buffer).core().header(rank).entered;
  while (std::atomic_ref(entered).load(std::memory_order_acquire) < sequence)
    std::this_thread::yield();
}

using BufferFunction = std::function<void(EPBuffer&)>;
using Adapt = std::function<void(BufferConfig&, uint32_t rank)>;

// Runs `body` in a thread per rank, with a buffer in which `trip` fits.
inline void with_buffers(const Trip& trip, const BufferFunction& body, const Adapt& adapt = {}) {
  const Watchdog watchdog;
  run_threads(trip.num_ranks(), [&](std::shared_ptr<Communicator> group) {
    BufferConfig config = config_for({&trip, 1});
    if (adapt) adapt(config, group->rank());
    EPBuffer buffer(group, config);
    body(buffer);
  });
}

// A small trip that leaves no route out; every rank sends to every rank.
inline Trip plain_trip(uint32_t num_ranks, Layout layout = Layout::kRank, uint64_t seed = 1) {
  return make_trip({.num_tokens = std::vector<uint32_t>(num_ranks, 9),
                    .num_experts = 2 * num_ranks,
                    .num_topk = num_ranks,
                    .hidden = 32,
                    .seed = seed,
                    .layout = layout,
                    .combine_weights = layout == Layout::kExpert});
}

// A call that one rank gets wrong: it throws E, all others PeerError naming it; then all is well.
template <class E, class Call>
void expect_refusal(EPBuffer& buffer,
                    uint32_t culprit,
                    std::initializer_list<std::string> parts,
                    Call&& call) {
  if (buffer.rank() == culprit) {
    expect_text(caught<E>(call), parts);
    return;
  }
  const PeerError error = caught<PeerError>(call);
  EXPECT_EQ(error.peers, std::vector<uint32_t>{culprit});
  EXPECT_FALSE(error.reason.empty());
  expect_text(error, {"rank " + std::to_string(culprit), error.reason});
}

}  // namespace ep::test
