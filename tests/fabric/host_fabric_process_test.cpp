// connect_host() between processes, and between processes and threads.
#include <atomic>

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include "fabric/fabric.hpp"
#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kWindowBytes = 3 * 4096 + 100;

Comm meet(const Port& port, uint32_t rank, uint32_t num_ranks) {
  return Communicator::tcp(port.address(), rank, num_ranks, kLongS);
}

void barrier(Communicator& comm) {
  comm.all_gather({}, kLongS);
}

std::byte mark(uint32_t writer, uint32_t owner) {
  return static_cast<std::byte>(1 + writer * 16 + owner);
}

// Everybody writes into everybody's window and then sees all that was written.
void expect_shared(Communicator& comm, Fabric& fabric) {
  const uint32_t me = comm.rank(), num_ranks = comm.num_ranks();
  const uint64_t at = kWindowBytes - num_ranks;
  for (uint32_t owner = 0; owner < num_ranks; ++owner) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(fabric.window(owner)) % 4096, 0u);
    EXPECT_EQ(fabric.window(owner)[at + me], std::byte{0});
    fabric.window(owner)[at + me] = mark(me, owner);
  }
  barrier(comm);
  for (uint32_t owner = 0; owner < num_ranks; ++owner) {
    for (uint32_t writer = 0; writer < num_ranks; ++writer) {
      EXPECT_EQ(fabric.window(owner)[at + writer], mark(writer, owner));
    }
  }
  barrier(comm);
}

TEST(HostFabricProcesses, ShareTheirWindows) {
  for (const uint32_t num_ranks : {2u, 3u, 8u}) {
    const Port port;
    run_processes(num_ranks, [&](uint32_t rank) {
      const Comm comm = meet(port, rank, num_ranks);
      const std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      expect_shared(*comm, *fabric);
    });
  }
}

TEST(HostFabricProcesses, MixWithThreads) {
  const Port port;
  const std::vector<std::vector<uint32_t>> ranks_of{{0, 3}, {1}, {2, 4, 5}};
  run_processes(3, [&](uint32_t process) {
    const std::vector<uint32_t>& ranks = ranks_of[process];
    run_threads(static_cast<uint32_t>(ranks.size()), [&](uint32_t i) {
      const Comm comm = meet(port, ranks[i], 6);
      const std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      expect_shared(*comm, *fabric);
    });
  });
}

// A communicator that does something behind its second call: the set-up has its windows then, and the
// ranks go on to connect.
class Paced final : public Communicator {
 public:
  Paced(Comm comm, std::function<void()> after_second)
      : comm_(std::move(comm)), after_second_(std::move(after_second)) {}
  uint32_t rank() const override { return comm_->rank(); }
  uint32_t num_ranks() const override { return comm_->num_ranks(); }
  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    comm_->interrupt = interrupt;
    std::vector<Bytes> all = comm_->all_gather(mine, timeout_s);
    if (++num_calls_ == 2) after_second_();
    return all;
  }

 private:
  Comm comm_;
  std::function<void()> after_second_;
  uint32_t num_calls_ = 0;
};

// Rank 1 hangs where it should connect, and the user of rank 0 has enough.
TEST(HostFabricProcesses, InterruptLeavesTheMesh) {
  const Port port;
  const Signal left;
  run_processes(2, [&](uint32_t rank) {
    std::atomic<bool> impatient{false};
    Paced comm(meet(port, rank, 2), [&] {
      if (rank == 0) impatient = true;
      if (rank == 1) left.wait();
    });
    if (rank == 1) {
      try {
        connect_host(comm, kWindowBytes, kLongS);
        ADD_FAILURE() << "no PeerError";
      } catch (const PeerError& error) {
        EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
        EXPECT_TRUE(contains(error.what(), "interrupted"));
      }
    } else {
      comm.interrupt = [&] { return impatient.exchange(false); };
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THROW(connect_host(comm, kWindowBytes, kLongS), Interrupted);
      EXPECT_LT(seconds_since(start), 0.2 + kMarginS);
      EXPECT_FALSE(comm.interrupt());
      left.signal();
    }
    const std::unique_ptr<Fabric> fabric = connect_host(comm, kWindowBytes, kLongS);
    expect_shared(comm, *fabric);
  });
}

TEST(HostFabricProcesses, TwoJobsAtOnceNeverMeet) {
  const Port ports[2];
  run_processes(4, [&](uint32_t i) {
    const Comm comm = meet(ports[i / 2], i % 2, 2);
    for (int round = 0; round < 10; ++round) {
      const std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      fabric->window(i % 2)[0] = static_cast<std::byte>(i + 1);
      barrier(*comm);
      EXPECT_EQ(fabric->window(1 - i % 2)[0], static_cast<std::byte>((i ^ 1) + 1));
      barrier(*comm);
    }
  });
}

TEST(HostFabricProcesses, LeaveNothingBehind) {
  const Port port;
  run_processes(2, [&](uint32_t rank) {
    const Comm comm = meet(port, rank, 2);
    Census before{};
    for (int round = 0; round < 201; ++round) {
      std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      fabric->watch([](uint32_t) {});
      fabric.reset();
      if (round == 0) before = take_census();
    }
    EXPECT_EQ(settled_census(before), before);
  });
}

// Who was lost, and when, as told by a watching Fabric.
class Lost {
 public:
  std::function<void(uint32_t)> callback() {
    return [this](uint32_t rank) {
      ranks_ |= 1u << rank;
      ++num_calls_;
      happened_.signal();
    };
  }
  void expect(uint32_t ranks, std::chrono::steady_clock::time_point since) {
    happened_.wait();
    EXPECT_LT(seconds_since(since), kNoticeS);
    EXPECT_EQ(ranks_, ranks);
    EXPECT_EQ(num_calls_, 1);
  }
  int num_calls() const { return num_calls_; }

 private:
  std::atomic<uint32_t> ranks_ = 0;
  std::atomic<int> num_calls_ = 0;
  Signal happened_;
};

// Three ranks watch; then rank 1 ends as `end` says, and the others must notice.
void expect_noticed(const std::function<void(std::unique_ptr<Fabric>&)>& end) {
  const Port port;
  const Signal done, may_leave[3];
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      const Comm comm = meet(port, rank, 3);
      std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      Lost lost;
      fabric->watch(lost.callback());
      barrier(*comm);
      const auto start = std::chrono::steady_clock::now();
      if (rank == 1) {
        fabric->stop_watching();
        end(fabric);
        done.wait();
        return;
      }
      lost.expect(1u << 1, start);
      EXPECT_EQ(fabric->window(1)[0], std::byte{0});  // its memory stays
      fabric->stop_watching();
      fabric->watch(lost.callback());  // nobody is reported twice
      fabric->stop_watching();
      EXPECT_EQ(lost.num_calls(), 1);
      may_leave[2 - rank].signal();
      may_leave[rank].wait();  // or the other survivor sees the end of this one
    });
  }
  EXPECT_EQ(children[0].join(), 0);
  EXPECT_EQ(children[2].join(), 0);
  done.signal();
}

TEST(HostFabricProcesses, KilledRankIsNoticedOnce) {
  expect_noticed([](auto&) { ::kill(::getpid(), SIGKILL); });
}

TEST(HostFabricProcesses, CleanExitIsNoticed) {
  expect_noticed([](auto&) { ::_exit(0); });
}

TEST(HostFabricProcesses, DestroyedFabricIsNoticed) {
  expect_noticed([](auto& fabric) { fabric.reset(); });
}

TEST(HostFabricProcesses, DeathIsNoticedAlthoughAForkedChildKeepsTheSockets) {
  const Signal end;
  expect_noticed([&](auto&) {
    const pid_t child = ::fork();
    if (child == 0) {
      end.wait();
      ::_exit(0);
    }
    ::kill(::getpid(), SIGKILL);
  });
  end.signal();
}

TEST(HostFabricProcesses, ForkedChildThatDestroysItsCopyDisturbsNobody) {
  const Port port;
  run_processes(2, [&](uint32_t rank) {
    const Comm comm = meet(port, rank, 2);
    std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
    Child before_watching([&] { fabric.reset(); });
    EXPECT_EQ(before_watching.join(), 0);
    Lost lost;
    fabric->watch(lost.callback());
    Child while_watching([&] {
      fabric->window(rank)[7] = std::byte{9};  // a child's mappings work
      fabric.reset();
    });
    EXPECT_EQ(while_watching.join(), 0);
    barrier(*comm);
    EXPECT_EQ(fabric->window(1 - rank)[7], std::byte{9});
    expect_shared(*comm, *fabric);
    fabric->stop_watching();
    EXPECT_EQ(lost.num_calls(), 0);
    barrier(*comm);  // nobody leaves while the other watches
  });
}

TEST(HostFabricProcesses, StoppedWatchingMeansNoMoreCalls) {
  const Port port;
  const Signal rank_1_has_ended;
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    children.emplace_back([&, rank] {
      const Comm comm = meet(port, rank, 2);
      std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
      Lost before, after;
      fabric->watch(before.callback());
      fabric->stop_watching();
      fabric->stop_watching();
      barrier(*comm);
      if (rank == 1) return;
      rank_1_has_ended.wait();
      EXPECT_EQ(before.num_calls(), 0);
      fabric->watch(after.callback());  // an end in between is not missed
      after.expect(1u << 1, std::chrono::steady_clock::now());
    });
  }
  EXPECT_EQ(children[1].join(), 0);
  rank_1_has_ended.signal();
  EXPECT_EQ(children[0].join(), 0);
}

TEST(HostFabricProcesses, RankWithoutRoomFailsEverywhere) {
  const Port port;
  const uint64_t limit = 1 << 20;
  run_processes(3, [&](uint32_t rank) {
    const Comm comm = meet(port, rank, 3);
    const rlimit files{limit, RLIM_INFINITY};
    if (rank == 1) ::setrlimit(RLIMIT_FSIZE, &files);
    try {
      connect_host(*comm, 16 * limit, kLongS);
      ADD_FAILURE() << "no error";
    } catch (const CapacityError& error) {
      EXPECT_EQ(rank, 1u);
      EXPECT_EQ(error.rank, 1u);
      EXPECT_EQ(error.needed, 16 * limit);
      EXPECT_EQ(error.available, limit);
    } catch (const PeerError& error) {
      EXPECT_NE(rank, 1u);
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
      EXPECT_TRUE(contains(error.what(), "RLIMIT_FSIZE"));
    }
    // The group is as good as before.
    const std::unique_ptr<Fabric> fabric = connect_host(*comm, kWindowBytes, kLongS);
    expect_shared(*comm, *fabric);
  });
}

// Rank 2 may open `room` more descriptors.
void expect_no_room_for_files(Communicator& comm, rlim_t room) {
  const uint32_t rank = comm.rank();
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const Fd next(::dup(0));  // the lowest number that is free
  const rlimit few{static_cast<rlim_t>(next.get()) + 1 + room, files.rlim_max};
  if (rank == 2) ::setrlimit(RLIMIT_NOFILE, &few);
  const auto start = std::chrono::steady_clock::now();
  try {
    connect_host(comm, kWindowBytes, kLongS);
    ADD_FAILURE() << "no error";
  } catch (const CapacityError& error) {
    EXPECT_EQ(rank, 2u);
    EXPECT_TRUE(contains(error.what(), "RLIMIT_NOFILE"));
  } catch (const PeerError& error) {
    EXPECT_NE(rank, 2u);
    EXPECT_EQ(error.peers, std::vector<uint32_t>{2});
    EXPECT_TRUE(contains(error.what(), "RLIMIT_NOFILE"));
  }
  EXPECT_LT(seconds_since(start), kMarginS);
}

TEST(HostFabricProcesses, RankWithoutDescriptorsFailsEverywhere) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the undefined behaviour sanitizer needs descriptors for its own checks";
#endif
  // 0: none for the window's file; 1: none for the listener; then none for the mesh, at different
  // points.
  for (rlim_t room = 0; room < 5; ++room) {
    const Port port;
    run_processes(3, [&](uint32_t rank) { expect_no_room_for_files(*meet(port, rank, 3), room); });
  }
}

// Rank 2 dies when all know its door and nobody has seen it connect.
TEST(HostFabricProcesses, RankKilledDuringSetUpIsLost) {
  const Port port;
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      const Comm comm = meet(port, rank, 3);
      int num_calls = 0;
      const Comm mortal =
          Communicator::callbacks(rank, 3, [&](std::span<const std::byte> mine, double s) {
            std::vector<Bytes> by_rank = comm->all_gather(mine, s);
            if (rank == 2 && ++num_calls == 2) ::kill(::getpid(), SIGKILL);
            return by_rank;
          });
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THROW(connect_host(*mortal, kWindowBytes, kLongS), PeerLost);
      EXPECT_LT(seconds_since(start), kNoticeS);
    });
  }
  EXPECT_EQ(children[2].join(), -1);
  EXPECT_EQ(children[0].join(), 0);
  EXPECT_EQ(children[1].join(), 0);
}

TEST(HostFabricProcesses, NetworkNamespacesAreApart) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  const Port port;
  run_processes(2, [&](uint32_t rank) {
    const Comm comm = meet(port, rank, 2);  // its connection outlives the move
    if (rank == 1) {
      ASSERT_EQ(::unshare(CLONE_NEWNET), 0);
    }
    try {
      connect_host(*comm, kWindowBytes, kLongS);
      ADD_FAILURE() << "no Unsupported";
    } catch (const Unsupported& error) {
      EXPECT_TRUE(contains(error.what(), "ranks 0 and 1"));
      EXPECT_TRUE(contains(error.what(), "network namespaces"));
    }
  });
}

}  // namespace
}  // namespace ep::fabric
