// Memory that runs out, in the allocator and in the arena, and memory that must not grow.
#include <atomic>
#include <fstream>
#include <functional>
#include <mutex>
#include <new>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "support/faults.hpp"

namespace ep::test {
namespace {

// An allocator that fails at a chosen allocation, by throwing or by giving nothing.
class FailingAllocator {
 public:
  void fail_at(uint32_t nth, bool by_throwing) {
    left_ = nth;
    by_throwing_ = by_throwing;
    has_failed_ = false;
  }
  void never_fail() { left_ = ~0u; }
  bool has_failed() const { return has_failed_; }
  uint64_t failed_bytes() const { return failed_bytes_; }

  std::shared_ptr<void> allocate(uint64_t num_bytes) {
    if (left_ != ~0u && left_-- == 0) {
      has_failed_ = true;
      failed_bytes_ = num_bytes;
      never_fail();
      if (by_throwing_) throw std::bad_alloc();
      return nullptr;
    }
    constexpr std::align_val_t kAlign{256};
    return {::operator new(num_bytes, kAlign), [](void* p) { ::operator delete(p, kAlign); }};
  }

 private:
  std::atomic<uint32_t> left_{~0u};
  std::atomic<bool> by_throwing_{true}, has_failed_{false};
  std::atomic<uint64_t> failed_bytes_{0};
};

struct AllocationCase {
  Outputs outputs;
  bool exact;
};

// user report N3: every allocation of a dispatch and a combine fails in turn, on one rank.  That
// rank is told how many bytes are missing, the others that it had no room, and the next call is
// exact.  Where an exact dispatch allocates only once it knows the counts, its peers are past the
// call: theirs is the next one.
void run_failing_allocations(const AllocationCase& c) {
  TripSpec spec = plain_trip(2).spec;
  spec.exact = c.exact;
  const Trip trip = make_trip(spec);
  FailingAllocator allocator;
  std::atomic<uint32_t> num_failures{0};
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        DispatchResult sent;
        const auto dispatch = [&] { sent = buffer.dispatch(dispatch_args(trip, rank)); };
        const auto combine = [&] { buffer.combine(combine_args(trip, rank, sent.handle)); };
        const auto no_room = [&](const std::function<void()>& call) {
          if (rank == 0) {
            const CapacityError error = caught<CapacityError>(call);
            EXPECT_EQ(error.rank, 0u);
            EXPECT_EQ(error.needed, allocator.failed_bytes());
            expect_text(error, {"out of memory", std::to_string(error.needed) + " bytes"});
            ++num_failures;
          } else {
            const PeerError error = caught<PeerError>(call);
            EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
            expect_text(error, {"no room"});
          }
        };
        const uint32_t early = c.exact || c.outputs == Outputs::kWindow ? 1 : 3;
        const uint32_t late = c.exact && c.outputs == Outputs::kCaller ? 2 : 0;
        for (uint32_t i = 0; i < early + late; ++i) {
          if (rank == 0) allocator.fail_at(i, i % 2 == 0);
          if (i >= early && rank == 1) dispatch();
          no_room(dispatch);
          round_trip(buffer, trip);
        }
        dispatch();
        if (rank == 0) allocator.fail_at(0, true);
        no_room(combine);
        round_trip(buffer, trip);
        EXPECT_EQ(num_failures, early + late + 1);
        EXPECT_EQ(buffer.memory().used == 0, c.outputs == Outputs::kCaller);
        sent = {};
        EXPECT_EQ(buffer.memory().used, 0u);
      },
      [&](BufferConfig& config, uint32_t rank) {
        config.outputs = c.outputs;
        if (rank == 0) config.allocator = [&](uint64_t n) { return allocator.allocate(n); };
      });
}

TEST(Memory, AllocationsOfAnExactDispatch) {
  run_failing_allocations({Outputs::kWindow, true});
}
TEST(Memory, AllocationsOfAnExactDispatchIntoCallersMemory) {
  run_failing_allocations({Outputs::kCaller, true});
}
TEST(Memory, AllocationsOfAFixedSizeDispatch) {
  run_failing_allocations({Outputs::kWindow, false});
}
TEST(Memory, AllocationsOfAFixedSizeDispatchIntoCallersMemory) {
  run_failing_allocations({Outputs::kCaller, false});
}

// The numbers that every rank must be told alike.
struct Numbers {
  uint32_t rank;
  uint64_t needed, available;
  bool operator==(const Numbers&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Numbers& n) {
    return out << "rank " << n.rank << ", needed " << n.needed << ", available " << n.available;
  }
};

class SameNumbers {
 public:
  void add(const CapacityError& error) {
    const std::lock_guard lock(mutex_);
    seen_.push_back({error.rank, error.needed, error.available});
    expect_text(error, {"rank " + std::to_string(error.rank), std::to_string(error.needed),
                        std::to_string(error.available), "arena"});
  }
  ~SameNumbers() {
    for (const Numbers& numbers : seen_) {
      EXPECT_EQ(numbers, seen_[0]);
      EXPECT_EQ(numbers.rank, 1u);
      EXPECT_GT(numbers.needed, numbers.available);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Numbers> seen_;
};

// Rank 1 keeps expert outputs until no more fit.
std::vector<Tensor> fill_arena(EPBuffer& buffer, const Handle& handle) {
  std::vector<Tensor> kept;
  try {
    while (kept.size() < 10000)
      kept.push_back(buffer.expert_output(handle));
  } catch (const CapacityError& error) {
    EXPECT_EQ(error.rank, buffer.rank());
    EXPECT_GT(error.needed, error.available);
  }
  return kept;
}

// api.md: rows that fit no free extent on arrival are a CapacityError on every rank, with the same
// numbers; once outputs are dropped the next call is exact.
void run_full_arena(bool exact, bool in_combine, bool row_weights) {
  TripSpec spec = plain_trip(3).spec;
  spec.row_weights = row_weights;
  const Trip trip = make_trip(spec);
  SameNumbers numbers;
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
        std::vector<Tensor> kept;
        if (rank == 1) kept = fill_arena(buffer, sent.handle);
        DispatchArgs args = dispatch_args(trip, rank);
        args.exact = exact;
        for (uint32_t i = 0; i < 2; ++i) {
          const CapacityError error = caught<CapacityError>([&] {
            if (in_combine)
              buffer.combine(combine_args(trip, rank, sent.handle));
            else
              buffer.dispatch(args);
          });
          if (i == 0) numbers.add(error);
        }
        kept.clear();
        EXPECT_NO_THROW(buffer.check());
        round_trip(buffer, trip);
        expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
      },
      [](BufferConfig& config, uint32_t) {
        config.outputs = Outputs::kWindow;
        config.arena_bytes = 64 << 10;
      });
}

TEST(Memory, NoRoomForAnExactDispatch) {
  run_full_arena(true, false, false);
}
TEST(Memory, NoRoomForAFixedSizeDispatch) {
  run_full_arena(false, false, false);
}
TEST(Memory, NoRoomForTheRowsOfACombine) {
  run_full_arena(true, true, false);
}
TEST(Memory, NoRoomForTheRowWeightsOfACombine) {
  run_full_arena(true, true, true);
}

// outputs = auto: kept outputs move to the caller's memory before the arena is full; nobody
// notices.
TEST(Memory, OutputsMoveToTheCallersMemory) {
  const Trip trip = plain_trip(2, Layout::kExpert);
  with_buffers(
      trip,
      [&](EPBuffer& buffer) {
        const uint32_t rank = buffer.rank();
        std::vector<DispatchResult> kept;
        for (uint32_t i = 0; i < 30; ++i) {
          kept.push_back(buffer.dispatch(dispatch_args(trip, rank)));
          expect_combined(trip.back[rank], rank,
                          buffer.combine(combine_args(trip, rank, kept.back().handle)));
        }
        for (const DispatchResult& sent : kept)
          expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
        EXPECT_GT(buffer.stats().window_outputs, 0u);
        EXPECT_GT(buffer.stats().caller_outputs, 0u);
        EXPECT_EQ(buffer.stats().window_outputs + buffer.stats().caller_outputs, 30u);
      },
      [](BufferConfig& config, uint32_t) { config.arena_bytes = 32 << 10; });
}

// A fault leaves the arena as it found it: one that holds a single output takes the next call's.
TEST(Memory, AFaultHoldsNoMemory) {
  for (const bool exact : {true, false}) {
    TripSpec spec = plain_trip(2).spec;
    spec.exact = exact;
    const Trip trip = make_trip(spec);
    with_buffers(
        trip,
        [&](EPBuffer& buffer) {
          const uint32_t rank = buffer.rank();
          for (uint32_t i = 0; i < 4; ++i) {
            DispatchArgs args = dispatch_args(trip, rank);
            args.async_op = i % 2 == 1;
            if (rank == 1) args.max_tokens = 8 - i;
            if (rank == 1) args.x.dtype = DType::kInt32;
            try {
              buffer.dispatch(args).event.synchronize();
              ADD_FAILURE() << "no error";
            } catch (const Error&) {
            }
            const DispatchResult sent = buffer.dispatch(dispatch_args(trip, rank));
            expect_received(trip.sent.ranks[rank], trip.rules, rank, sent);
          }
        },
        [](BufferConfig& config, uint32_t) {
          config.outputs = Outputs::kWindow;
          config.arena_bytes = 4096;
        });
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Memory, ResidentMemoryIsFlat) {  // user report N5
  const Trip trip = plain_trip(2, Layout::kExpert);
  if (kSanitized) GTEST_SKIP() << "needs a build without sanitizers: theirs keep freed memory";
  const uint32_t rounds = scaled(2000);
  std::atomic<uint64_t> before{0};
  const auto round = [&](EPBuffer& buffer, uint32_t i) {
    const uint32_t rank = buffer.rank();
    DispatchArgs args = dispatch_args(trip, rank);
    args.async_op = i % 2 == 0 && i % 50 != 0;
    args.exact = i % 3 != 0;
    if (i % 50 == 0 && rank == 1) args.x.dtype = DType::kInt32;
    try {
      const DispatchResult sent = buffer.dispatch(args);
      CombineArgs back{.x = sent.x};
      back.handle = &sent.handle;
      back.async_op = i % 4 == 0;
      buffer.combine(back);
    } catch (const Error&) {
      EXPECT_EQ(i % 50, 0u);
    }
  };
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (uint32_t i = 1; i <= rounds; ++i) {
      round(buffer, i);
      if (i == rounds / 5 && buffer.rank() == 0) before = resident_bytes();
    }
    buffer.comm_stream().synchronize();
    EXPECT_EQ(buffer.memory().used, 0u);
  });
  EXPECT_LT(resident_bytes(), before + (uint64_t{2} << 20)) << "after " << rounds << " rounds";
}

}  // namespace
}  // namespace ep::test
