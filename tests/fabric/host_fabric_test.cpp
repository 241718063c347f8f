// connect_host() between threads of one process.
#include <barrier>
#include <cmath>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "fabric/fabric.hpp"
#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kWindowBytes = 3 * 4096 + 100;

// Passes calls on and lets a test come in between.
class Wrapped final : public Communicator {
 public:
  using Before = std::function<void(int call, Bytes& mine)>;
  using After = std::function<void(int call)>;
  Wrapped(Comm inner, Before before, After after)
      : inner_(std::move(inner)), before_(std::move(before)), after_(std::move(after)) {}
  uint32_t rank() const override { return inner_->rank(); }
  uint32_t num_ranks() const override { return inner_->num_ranks(); }
  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    Bytes bytes(mine.begin(), mine.end());
    const int call = ++num_calls_;
    if (before_) before_(call, bytes);
    std::vector<Bytes> by_rank = inner_->all_gather(bytes, timeout_s);
    if (after_) after_(call);
    return by_rank;
  }

 private:
  Comm inner_;
  Before before_;
  After after_;
  int num_calls_ = 0;
};

// connect_host() in every rank; the error's kind and text, by rank, where it throws.
struct Outcome {
  std::unique_ptr<Fabric> fabric{};
  ErrorKind kind = ErrorKind::kError;
  std::string text{};
};

Outcome connect(Communicator& comm, uint64_t num_bytes = kWindowBytes, double timeout_s = kLongS) {
  Outcome outcome;
  try {
    outcome.fabric = connect_host(comm, num_bytes, timeout_s);
  } catch (const Error& error) {
    outcome.kind = error.kind();
    outcome.text = error.what();
  }
  return outcome;
}

uint64_t num_resident_pages(const std::byte* base, uint64_t num_bytes) {
  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((num_bytes + page - 1) / page);
  EXPECT_EQ(::mincore(const_cast<std::byte*>(base), num_bytes, pages.data()), 0);
  return static_cast<uint64_t>(
      std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; }));
}

TEST(HostFabric, ThreadsShareTheVerySameMapping) {
  for (const uint32_t num_ranks : {1u, 2u, 5u}) {
    const std::vector<Comm> group = Communicator::threads(num_ranks);
    std::vector<std::byte*> own(num_ranks);
    run_threads(num_ranks, [&](uint32_t rank) {
      const std::unique_ptr<Fabric> fabric = connect_host(*group[rank], kWindowBytes, kLongS);
      EXPECT_EQ(fabric->num_nodes(), 1u);
      own[rank] = fabric->window(rank);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(own[rank]) % 4096, 0u);
      for (uint64_t i = 0; i < kWindowBytes; ++i)
        EXPECT_EQ(own[rank][i], std::byte{0});
      own[rank][kWindowBytes - 1] = static_cast<std::byte>(rank + 1);
      group[rank]->all_gather({}, kLongS);
      for (uint32_t peer = 0; peer < num_ranks; ++peer) {
        EXPECT_EQ(fabric->window(peer), own[peer]);
        EXPECT_EQ(fabric->window(peer)[kWindowBytes - 1], static_cast<std::byte>(peer + 1));
      }
      group[rank]->all_gather({}, kLongS);  // nobody leaves while others look
    });
  }
}

TEST(HostFabric, MemoryIsTakenOnlyWhenTouched) {
  const uint64_t num_bytes = uint64_t{1} << 30;
  const std::unique_ptr<Fabric> fabric = connect_host(*Communicator::single(), num_bytes, kLongS);
  std::byte* base = fabric->window(0);
  EXPECT_EQ(num_resident_pages(base, num_bytes), 0u);
  for (const uint64_t at : {uint64_t{0}, num_bytes / 2, num_bytes - 1})
    base[at] = std::byte{1};
  EXPECT_EQ(num_resident_pages(base, num_bytes), 3u);
}

TEST(HostFabric, WindowsOutliveTheirFabric) {
  const std::vector<Comm> group = Communicator::threads(2);
  std::barrier gone(2);
  run_threads(2, [&](uint32_t rank) {
    std::unique_ptr<Fabric> fabric = connect_host(*group[rank], kWindowBytes, kLongS);
    if (rank == 0) {
      const std::shared_ptr<void> window = fabric->own_window();
      EXPECT_EQ(window.get(), fabric->window(0));
      fabric.reset();
      gone.arrive_and_wait();
      *static_cast<std::byte*>(window.get()) = std::byte{5};
      gone.arrive_and_wait();
    } else {
      gone.arrive_and_wait();
      gone.arrive_and_wait();
      EXPECT_EQ(*fabric->window(0), std::byte{5});
    }
  });
}

TEST(HostFabric, LeavesNothingBehind) {
  connect_host(*Communicator::single(), kWindowBytes, kLongS);
  const Census before = take_census();
  for (int i = 0; i < 200; ++i) {
    const std::vector<Comm> group = Communicator::threads(2);
    run_threads(2, [&](uint32_t rank) {
      const std::unique_ptr<Fabric> fabric = connect_host(*group[rank], kWindowBytes, kLongS);
      fabric->watch([](uint32_t) {});
    });
  }
  EXPECT_EQ(settled_census(before), before);
}

TEST(HostFabric, DifferentSizesAreRefusedOnEveryRankNamingBoth) {
  const std::vector<Comm> group = Communicator::threads(3);
  run_threads(3, [&](uint32_t rank) {
    const Outcome outcome = connect(*group[rank], rank == 2 ? 8192 : 4096);
    EXPECT_EQ(outcome.kind, ErrorKind::kInvalidArgument);
    EXPECT_TRUE(contains(outcome.text, "4096"));
    EXPECT_TRUE(contains(outcome.text, "rank 2 has 8192"));
  });
  EXPECT_EQ(connect(*Communicator::single(), 0).kind, ErrorKind::kInvalidArgument);
  EXPECT_EQ(connect(*Communicator::single(), 4096, -1.0).kind, ErrorKind::kInvalidArgument);
}

TEST(HostFabric, WindowThatCannotBeIsACapacityError) {
  for (const uint64_t num_bytes : {uint64_t{1} << 61, ~uint64_t{0}}) {
    const std::vector<Comm> group = Communicator::threads(2);
    run_threads(2, [&](uint32_t rank) {
      try {
        connect_host(*group[rank], num_bytes, kLongS);
        ADD_FAILURE() << "no CapacityError";
      } catch (const CapacityError& error) {
        EXPECT_EQ(error.rank, rank);
        EXPECT_EQ(error.needed, num_bytes);
        EXPECT_LT(error.available, num_bytes);
      }
    });
  }
}

TEST(HostFabric, MissingRankIsNamedByAll) {
  const std::vector<Comm> group = Communicator::threads(3);
  const auto start = std::chrono::steady_clock::now();
  run_threads(3, [&](uint32_t rank) {
    if (rank == 1) return;
    try {
      connect_host(*group[rank], kWindowBytes, kShortS);
      ADD_FAILURE() << "no Timeout";
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
    }
  });
  EXPECT_LT(seconds_since(start), kShortS + kMarginS);
}

TEST(HostFabric, OtherMachinesAndUsersAreUnsupportedOnEveryRank) {
  struct Case {
    size_t offset;  // in the first record: 16 bytes of header, then Identity
    const char* text;
  };
  for (const Case& c : {Case{16, "different machines"}, Case{16 + 48, "network namespaces"},
                        Case{16 + 88, "different users"}}) {
    const std::vector<Comm> group = Communicator::threads(3);
    run_threads(3, [&](uint32_t rank) {
      Wrapped comm(
          group[rank],
          [&](int, Bytes& mine) {
            if (rank == 1) mine.at(c.offset) ^= std::byte{1};
          },
          nullptr);
      const Outcome outcome = connect(comm);
      EXPECT_EQ(outcome.kind, ErrorKind::kUnsupported);
      EXPECT_TRUE(contains(outcome.text, "ranks 0 and 1"));
      EXPECT_TRUE(contains(outcome.text, c.text));
    });
  }
}

TEST(HostFabric, RankInAnotherCallIsADesync) {
  const std::vector<Comm> group = Communicator::threads(2);
  run_threads(2, [&](uint32_t rank) {
    if (rank == 0) {
      group[0]->all_gather(bytes_of_text("something else"), kLongS);
    } else {
      EXPECT_EQ(connect(*group[1]).kind, ErrorKind::kDesync);
    }
  });
}

// Rank 0 leaves after it has offered its window and before rank 1 takes it: rank 1 must find
// nothing, not a dangling address.
TEST(HostFabric, WindowOfARankThatGaveUpIsNotTaken) {
  const std::vector<Comm> group = Communicator::threads(2);
  std::barrier rank_0_has_left(2);
  run_threads(2, [&](uint32_t rank) {
    Wrapped comm(
        group[rank],
        [&](int call, Bytes&) {
          if (rank == 0 && call == 3) throw Interrupted("test");
        },
        [&](int call) {
          if (rank == 1 && call == 2) rank_0_has_left.arrive_and_wait();
        });
    const Outcome outcome = connect(comm, kWindowBytes, kShortS);
    if (rank == 0) rank_0_has_left.arrive_and_wait();
    EXPECT_EQ(outcome.kind, rank == 0 ? ErrorKind::kInterrupted : ErrorKind::kPeer);
  });
}

}  // namespace
}  // namespace ep::fabric
