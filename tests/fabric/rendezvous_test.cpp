// How ranks meet over TCP, and who is kept out.
#include "fabric/host/rendezvous.hpp"

#include <atomic>
#include <optional>

#include <gtest/gtest.h>

#include "ep/communicator.hpp"
#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

Fd dial_port(const Port& port) {
  for (;;) {
    int error = 0;
    Fd fd = dial(resolve(parse_address(port.address())).at(0), Deadline(kLongS), error);
    if (fd) return fd;
    wait_ready({}, Deadline(0.01));
  }
}

TEST(TcpMeeting, EveryRankNamesWhoDidNotCome) {
  const Port port;
  const auto start = std::chrono::steady_clock::now();
  run_threads(4, [&](uint32_t rank) {
    if (rank == 1 || rank == 3) return;
    try {
      Communicator::tcp(port.address(), rank, 4, kShortS);
      ADD_FAILURE() << "no Timeout";
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peers, (std::vector<uint32_t>{1, 3}));
      EXPECT_EQ(error.phase, "connect");
    }
  });
  EXPECT_LT(seconds_since(start), kShortS + kMarginS);
}

TEST(TcpMeeting, WithoutRank0AllNameIt) {
  const Port port;
  run_threads(3, [&](uint32_t rank) {
    if (rank == 0) return;
    try {
      Communicator::tcp(port.address(), rank, 3, kShortS);
      ADD_FAILURE() << "no Timeout";
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
      EXPECT_TRUE(contains(error.what(), "Connection refused"));
    }
  });
}

constexpr auto kYes = [] { return true; };

TEST(TcpMeeting, InterruptLeavesWhenNobodyComes) {
  const Port port;
  for (const uint32_t rank : {0u, 1u}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(Communicator::tcp(port.address(), rank, 2, kLongS, kYes), Interrupted);
    EXPECT_LT(seconds_since(start), 0.1 + kMarginS);
  }
  EXPECT_THROW(Communicator::tcp(port.address(), 0, 2, kShortS, [] { return false; }), Timeout);
}

TEST(TcpMeeting, ItsInterruptBecomesTheGroups) {
  const Port port;
  Comm group[2];
  run_threads(2, [&](uint32_t rank) {
    std::atomic<bool> impatient{false};
    Comm& comm = group[rank];
    comm = Communicator::tcp(port.address(), rank, 2, kLongS, [&] { return impatient.load(); });
    expect_text_rounds(*comm, "job", 3);
    if (rank == 0) {
      impatient = true;
      EXPECT_THROW(comm->all_gather({}, kLongS), Interrupted);
    }
  });
  EXPECT_TRUE(Communicator::tcp(port.address(), 0, 1, kLongS, kYes)->interrupt());
}

TEST(TcpMeeting, DifferentNumbersOfRanksAreRefusedOnBothEnds) {
  const Port port;
  run_threads(2, [&](uint32_t i) {
    try {
      Communicator::tcp(port.address(), 2 * i, i == 0 ? 3 : 5, kLongS);
      ADD_FAILURE() << "no InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_TRUE(contains(error.what(), "rank 0 was given 3"));
      EXPECT_TRUE(contains(error.what(), "rank 2 was given 5"));
    }
  });
}

TEST(TcpMeeting, RankGivenTwiceIsRefusedOnBothEnds) {
  const Port port;
  run_threads(3, [&](uint32_t i) {
    const uint32_t rank = i == 0 ? 0 : 1;
    try {
      Communicator::tcp(port.address(), rank, 3, kLongS);
      ADD_FAILURE() << "no InvalidArgument";
    } catch (const InvalidArgument& error) {
      EXPECT_TRUE(contains(error.what(), "rank 1 was given to two processes"));
    }
  });
}

TEST(TcpMeeting, PortOfAnotherJobIsRefusedAtOnce) {
  const Port port;
  const std::vector<Fd> taken = listen_at(parse_address(port.address()));
  EXPECT_THROW(Communicator::tcp(port.address(), 0, 2, kLongS), InvalidArgument);
}

// Waits for a frame of `kind`; empty when the connection closes before.
std::optional<Frame> await_frame(Connection& connection, FrameKind kind) {
  std::optional<Frame> found;
  while (!found && !connection.is_closed()) {
    pollfd waiting{connection.fd(), POLLIN, 0};
    wait_ready({&waiting, 1}, Deadline(kLongS));
    connection.receive([&](Frame&& frame) {
      if (frame.kind == kind) found = std::move(frame);
      return !found;
    });
  }
  return found;
}

// Rank 1 of 3, whom rank 0 has admitted.
std::unique_ptr<Connection> join_as_rank_1(const Port& port) {
  auto connection = std::make_unique<Connection>(dial_port(port));
  connection->set_max_payload(1000);
  const uint32_t hello[3] = {1, 1, 3};  // version, rank, num_ranks
  const std::span<const std::byte> bytes = std::as_bytes(std::span(hello));
  connection->send(FrameKind::kHello, 0, std::make_shared<const Bytes>(bytes.begin(), bytes.end()));
  EXPECT_TRUE(await_frame(*connection, FrameKind::kAdmitted));
  return connection;
}

TEST(TcpMeeting, RankThatDiesBeforeAllHaveComeIsLost) {
  const Port port;
  run_threads(2, [&](uint32_t rank) {
    if (rank == 1) {
      join_as_rank_1(port);
      return;
    }
    try {
      Communicator::tcp(port.address(), 0, 3, kLongS);
      ADD_FAILURE() << "no PeerLost";
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
    }
  });
}

TEST(TcpMeeting, InterruptOfRank0IsToldToThoseWhoHaveCome) {
  const Port port;
  std::atomic<bool> impatient{false};
  run_threads(2, [&](uint32_t rank) {
    if (rank == 0) {
      EXPECT_THROW(
          Communicator::tcp(port.address(), 0, 3, kLongS, [&] { return impatient.load(); }),
          Interrupted);
      return;
    }
    const auto connection = join_as_rank_1(port);
    impatient = true;
    const std::optional<Frame> frame = await_frame(*connection, FrameKind::kVerdict);
    ASSERT_TRUE(frame);
    const std::optional<Verdict> verdict = decode(frame->payload, 0, 3);
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->cause, Cause::kInterrupted);
    EXPECT_EQ(verdict->ranks, std::vector<uint32_t>{0});
  });
}

TEST(TcpMeeting, InterruptOfAnotherRankEndsTheMeeting) {
  const Port port;
  run_threads(2, [&](uint32_t rank) {
    if (rank == 1) {
      join_as_rank_1(port)->send(FrameKind::kInterrupt, 0);
      return;
    }
    try {
      Communicator::tcp(port.address(), 0, 3, kLongS);
      ADD_FAILURE() << "no PeerError";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
      EXPECT_TRUE(contains(error.reason, "interrupted"));
    }
  });
}

TEST(TcpMeeting, AnotherRankTellsItsInterrupt) {
  const Port port;
  const std::vector<Fd> listeners = listen_at(parse_address(port.address()));
  std::atomic<bool> impatient{false};
  run_threads(2, [&](uint32_t rank) {
    if (rank == 1) {
      EXPECT_THROW(
          Communicator::tcp(port.address(), 1, 3, kLongS, [&] { return impatient.load(); }),
          Interrupted);
      return;
    }
    pollfd waiting{listeners[0].get(), POLLIN, 0};
    wait_ready({&waiting, 1}, Deadline(kLongS));
    Connection connection(accept_from(listeners[0].get(), 0));
    connection.set_max_payload(1000);
    connection.send(FrameKind::kAdmitted, 0);
    impatient = true;
    EXPECT_TRUE(await_frame(connection, FrameKind::kInterrupt));
  });
}

TEST(TcpMeeting, StrangersAreIgnored) {
  const Port port;
  std::vector<Fd> silent;
  const auto be_rude = [&] {
    for (const std::string& words :
         {std::string(), std::string("GET / HTTP/1.0\r\n\r\n"), std::string(100000, '\xff'),
          // The right magic, then a frame kind, a round and a length that are not.
          std::string("PEOM\x01\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f", 24),
          std::string("PEOM\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24),
          std::string("PEOM\x01\0\0\0\0\0\0\0\0\0\0\0\x0c\0\0\0", 20)}) {
      silent.push_back(dial_port(port));
      ::send(silent.back().get(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  };
  run_threads(3, [&](uint32_t rank) {
    if (rank == 2) be_rude();
    const Comm comm = Communicator::tcp(port.address(), rank, 3, kLongS);
    expect_text_rounds(*comm, "job", 3);
  });
}

TEST(TcpMeeting, WrongServerIsNotRank0) {
  const Port port;
  const std::vector<Fd> listeners = listen_at(parse_address(port.address()));
  run_threads(2, [&](uint32_t rank) {
    if (rank == 0) {
      pollfd waiting{listeners[0].get(), POLLIN, 0};
      wait_ready({&waiting, 1}, Deadline(kLongS));
      const Fd fd = accept_from(listeners[0].get(), 0);
      ::send(fd.get(), "SSH-2.0-OpenSSH_9.2 and more than a header\r\n", 44, MSG_NOSIGNAL);
      return;
    }
    try {
      Communicator::tcp(port.address(), 1, 2, kShortS);
      ADD_FAILURE() << "no Timeout";
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peers, std::vector<uint32_t>{0});
    }
  });
}

}  // namespace
}  // namespace ep::fabric
