// Communicator::tcp between processes.
#include <gtest/gtest.h>

#include "ep/communicator.hpp"
#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

TEST(TcpProcesses, GatherOverManyRounds) {
  for (const uint32_t num_ranks : {1u, 2u, 3u, 8u, 16u}) {
    const Port port;
    run_processes(num_ranks, [&](uint32_t rank) {
      expect_text_rounds(*Communicator::tcp(port.address(), rank, num_ranks, kLongS), "job", 50);
    });
  }
}

TEST(TcpProcesses, MeetOverIpv6AndByName) {
  const Port ipv6(/*ipv6=*/true);
  if (!ipv6.is_good()) GTEST_SKIP() << "needs ::1";
  const Port ipv4;
  const std::string by_name = "localhost" + ipv4.address().substr(ipv4.address().rfind(':'));
  for (const std::string& address : {ipv6.address(), by_name}) {
    run_processes(3, [&](uint32_t rank) {
      expect_text_rounds(*Communicator::tcp(address, rank, 3, kLongS), "job", 5);
    });
  }
}

TEST(TcpProcesses, TwoJobsAtOnceNeverMeet) {
  const Port ports[2];
  run_processes(4, [&](uint32_t i) {
    const Comm comm = Communicator::tcp(ports[i / 2].address(), i % 2, 2, kLongS);
    expect_text_rounds(*comm, i / 2 == 0 ? "one" : "two", 200);
  });
}

TEST(TcpProcesses, KilledRankIsLostForEverybody) {
  for (const uint32_t victim : {0u, 2u}) {
    const Port port;
    const Signal ready, killed[3];
    std::vector<Child> children;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      children.emplace_back([&, rank] {
        const Comm comm = Communicator::tcp(port.address(), rank, 3, kLongS);
        expect_text_rounds(*comm, "job", 3);
        if (rank == victim) ready.signal();
        killed[rank].wait();  // the victim for ever
        const auto start = std::chrono::steady_clock::now();
        try {
          comm->all_gather({}, kLongS);
          ADD_FAILURE() << "no PeerLost";
        } catch (const PeerLost& error) {
          EXPECT_EQ(error.peers, std::vector<uint32_t>{victim});
        }
        EXPECT_LT(seconds_since(start), kNoticeS);
      });
    }
    ready.wait();
    children[victim].kill();
    EXPECT_EQ(children[victim].join(), -1);
    for (uint32_t rank = 0; rank < 3; ++rank) {
      killed[rank].signal();
      if (rank != victim) {
        EXPECT_EQ(children[rank].join(), 0);
      }
    }
  }
}

TEST(TcpProcesses, RankKilledWhileAllWaitForIt) {
  const Port port;
  const Signal ready;
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    children.emplace_back([&, rank] {
      const Comm comm = Communicator::tcp(port.address(), rank, 3, kLongS);
      expect_text_rounds(*comm, "job", 1);
      if (rank == 1) {
        ready.signal();
        ::pause();
      }
      EXPECT_THROW(comm->all_gather({}, kLongS), PeerLost);
    });
  }
  ready.wait();
  children[1].kill();
  EXPECT_EQ(children[0].join(), 0);
  EXPECT_EQ(children[2].join(), 0);
}

TEST(TcpProcesses, ForkedChildThatEndsDisturbsNobody) {
  const Port port;
  run_processes(2, [&](uint32_t rank) {
    Comm comm = Communicator::tcp(port.address(), rank, 2, kLongS);
    Child grandchild([&] { comm.reset(); });
    EXPECT_EQ(grandchild.join(), 0);
    expect_text_rounds(*comm, "job", 5);
  });
}

}  // namespace
}  // namespace ep::fabric
