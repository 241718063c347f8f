#include "ep/communicator.hpp"

#include <barrier>
#include <map>

#include <gtest/gtest.h>

#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

// Other sizes for every rank and round, 0 among them.
Bytes sample(uint32_t rank, uint32_t round) {
  const size_t num_bytes = round % 16 == 7 ? 20000 + rank : (rank * 31 + round * 17) % 97;
  return Bytes(num_bytes, static_cast<std::byte>(rank * 16 + round));
}

void gather_many(Communicator& comm, uint32_t num_rounds) {
  for (uint32_t round = 0; round < num_rounds; ++round) {
    const std::vector<Bytes> got = comm.all_gather(sample(comm.rank(), round), kLongS);
    ASSERT_EQ(got.size(), comm.num_ranks());
    for (uint32_t rank = 0; rank < got.size(); ++rank) {
      ASSERT_TRUE(is_same(got[rank], sample(rank, round))) << "round " << round << " rank " << rank;
    }
  }
}

// Everybody comes and gets what was given.
void expect_good_round(Communicator& comm) {
  const std::vector<Bytes> got = comm.all_gather(sample(comm.rank(), 3), kLongS);
  for (uint32_t rank = 0; rank < got.size(); ++rank)
    EXPECT_EQ(got[rank], sample(rank, 3));
}

void expect_timeout(Communicator& comm, const std::vector<uint32_t>& missing) {
  const auto start = std::chrono::steady_clock::now();
  try {
    comm.all_gather(bytes_of_text("early"), kShortS);
    ADD_FAILURE() << "rank " << comm.rank() << ": no Timeout";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peers, missing);
    EXPECT_EQ(error.phase, "all_gather");
    EXPECT_TRUE(contains(error.what(), str("rank ", missing.front())));
  }
  EXPECT_LT(seconds_since(start), kShortS + kMarginS);
}

void expect_peer_error(Communicator& comm, const std::vector<uint32_t>& waiters) {
  try {
    comm.all_gather(bytes_of_text("late"), kLongS);
    ADD_FAILURE() << "rank " << comm.rank() << ": no PeerError";
  } catch (const PeerError& error) {
    EXPECT_EQ(error.peers, waiters);
    EXPECT_TRUE(contains(error.reason, "gave up"));
  }
}

void expect_lost(Communicator& comm, const std::vector<uint32_t>& lost) {
  for (int i = 0; i < 2; ++i) {  // it stays so
    try {
      comm.all_gather(bytes_of_text("to the dead"), kLongS);
      ADD_FAILURE() << "rank " << comm.rank() << ": no PeerLost";
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.peers, lost);
    }
  }
}

// The same behaviour of threads() and of tcp(), whose ranks are threads here.
class AnyCommunicator : public ::testing::TestWithParam<const char*> {
 protected:
  std::vector<Comm> make(uint32_t num_ranks) {
    if (GetParam() == std::string("threads")) return Communicator::threads(num_ranks);
    std::vector<Comm> group(num_ranks);
    run_threads(num_ranks, [&](uint32_t rank) {
      group[rank] = Communicator::tcp(port_.address(), rank, num_ranks, kLongS);
    });
    return group;
  }

 private:
  Port port_;
};

INSTANTIATE_TEST_SUITE_P(Kinds,
                         AnyCommunicator,
                         ::testing::Values("threads", "tcp"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST_P(AnyCommunicator, GathersRaggedBytesOverManyRounds) {
  for (const uint32_t num_ranks : {1u, 2u, 3u, 8u, 16u}) {
    std::vector<Comm> group = make(num_ranks);
    run_threads(num_ranks, [&](uint32_t rank) {
      EXPECT_EQ(group[rank]->rank(), rank);
      EXPECT_EQ(group[rank]->num_ranks(), num_ranks);
      gather_many(*group[rank], 40);
    });
  }
}

TEST_P(AnyCommunicator, EveryRankNamesTheMissingOne) {
  for (const uint32_t missing : {0u, 2u}) {
    std::vector<Comm> group = make(4);
    run_threads(4, [&](uint32_t rank) {
      if (rank != missing) expect_timeout(*group[rank], {missing});
    });
  }
}

TEST_P(AnyCommunicator, LateRankLearnsItOnceThenAllGoOn) {
  for (const uint32_t late : {0u, 1u}) {
    for (const int num_missed : {1, 3}) {
      std::vector<Comm> group = make(3);
      const std::vector<uint32_t> on_time =
          late == 0 ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{0, 2};
      std::barrier gave_up(3);
      run_threads(3, [&](uint32_t rank) {
        expect_good_round(*group[rank]);
        for (int i = 0; rank != late && i < num_missed; ++i)
          expect_timeout(*group[rank], {late});
        gave_up.arrive_and_wait();
        if (rank == late) expect_peer_error(*group[rank], on_time);
        expect_good_round(*group[rank]);
        gather_many(*group[rank], 5);
      });
    }
  }
}

TEST_P(AnyCommunicator, LateRankNeedNotCatchUpWhileOthersWait) {
  for (const uint32_t late : {0u, 1u}) {
    std::vector<Comm> group = make(3);
    std::barrier gave_up(3);
    run_threads(3, [&](uint32_t rank) {
      if (rank != late) expect_timeout(*group[rank], {late});
      gave_up.arrive_and_wait();
      // The others are (or soon will be) in their second call when it finds that it missed the
      // first.
      if (rank == late) {
        EXPECT_THROW(group[rank]->all_gather({}, kLongS), PeerError);
      }
      expect_good_round(*group[rank]);
    });
  }
}

// One rank's user leaves the call: whoever waits in it, or comes to it later, hears of that, and the
// next call is good for all.
TEST_P(AnyCommunicator, InterruptEndsTheCallForAll) {
  for (const uint32_t user : {0u, 1u, 2u}) {
    std::vector<Comm> group = make(3);
    const uint32_t late = (user + 1) % 3;
    std::barrier has_left(2);
    run_threads(3, [&](uint32_t rank) {
      expect_good_round(*group[rank]);
      if (rank == user) {
        group[rank]->interrupt = [] { return true; };
        const auto start = std::chrono::steady_clock::now();
        EXPECT_THROW(group[rank]->all_gather(bytes_of_text("user"), kLongS), Interrupted);
        EXPECT_LT(seconds_since(start), 0.1 + kMarginS);
        group[rank]->interrupt = nullptr;
        has_left.arrive_and_wait();
      } else {
        if (rank == late) has_left.arrive_and_wait();
        try {
          group[rank]->all_gather(bytes_of_text("other"), kLongS);
          ADD_FAILURE() << "rank " << rank << ": no PeerError";
        } catch (const PeerError& error) {
          EXPECT_EQ(error.peers, std::vector<uint32_t>{user});
          EXPECT_TRUE(contains(error.reason, "interrupted"));
        }
      }
      expect_good_round(*group[rank]);
      gather_many(*group[rank], 5);
    });
  }
}

TEST_P(AnyCommunicator, InterruptIsAskedAboutEvery50Ms) {
  std::vector<Comm> group = make(2);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    uint32_t num_asked = 0;
    group[rank]->interrupt = [&] { return ++num_asked > 1000; };
    EXPECT_THROW(group[rank]->all_gather({}, kShortS), Timeout);
    EXPECT_GE(num_asked, 1u);
    EXPECT_LE(num_asked, 20u);  // also while it waits for rank 0 to say who was missing
    group[rank]->interrupt = nullptr;
    group = make(2);
  }
}

TEST_P(AnyCommunicator, InterruptThatThrowsLeavesLikeOne) {
  std::vector<Comm> group = make(2);
  for (const uint32_t user : {0u, 1u}) {
    group[user]->interrupt = []() -> bool { throw std::runtime_error("the user's"); };
    EXPECT_THROW(group[user]->all_gather({}, kLongS), std::runtime_error);
    group[user]->interrupt = nullptr;
    EXPECT_THROW(group[1 - user]->all_gather({}, kLongS), PeerError);
    run_threads(2, [&](uint32_t rank) { expect_good_round(*group[rank]); });
  }
}

TEST_P(AnyCommunicator, RankThatLeavesIsLostForEverybody) {
  for (const uint32_t leaver : {0u, 2u}) {
    std::vector<Comm> group = make(3);
    run_threads(3, [&](uint32_t rank) {
      expect_good_round(*group[rank]);
      if (rank == leaver) {
        group[rank].reset();
      } else {
        expect_lost(*group[rank], {leaver});
      }
    });
  }
}

TEST_P(AnyCommunicator, RefusesBadTimeoutsAndTooManyBytes) {
  std::vector<Comm> group = make(2);
  EXPECT_THROW(group[0]->all_gather({}, -1.0), InvalidArgument);
  EXPECT_THROW(group[0]->all_gather({}, std::nan("")), InvalidArgument);
  const Bytes many((size_t{16} << 20) + 1);
  EXPECT_THROW(group[1]->all_gather(many, kLongS), InvalidArgument);
  run_threads(2, [&](uint32_t rank) { expect_good_round(*group[rank]); });
}

TEST_P(AnyCommunicator, CarriesTheLargestContribution) {
  std::vector<Comm> group = make(3);
  const Bytes large(size_t{16} << 20, std::byte{7});
  run_threads(3, [&](uint32_t rank) {
    for (const Bytes& bytes : group[rank]->all_gather(large, kLongS))
      EXPECT_TRUE(is_same(bytes, large));
  });
}

TEST_P(AnyCommunicator, LeavesNothingBehind) {
  make(4);
  const Census before = take_census();
  for (int i = 0; i < 50; ++i)
    make(4);
  EXPECT_EQ(settled_census(before), before);
}

TEST(Communicator, RefusesRanksThatCannotBe) {
  EXPECT_THROW(Communicator::threads(0), InvalidArgument);
  EXPECT_THROW(Communicator::threads(1025), InvalidArgument);
  EXPECT_EQ(Communicator::threads(1024).size(), 1024u);
  const std::vector<std::pair<uint32_t, uint32_t>> bad{{0, 0}, {2, 2}, {~0u, 2}, {0, 1025}};
  for (const auto& [rank, num_ranks] : bad) {
    EXPECT_THROW(Communicator::tcp("127.0.0.1:9", rank, num_ranks), InvalidArgument);
    EXPECT_THROW(
        Communicator::callbacks(rank, num_ranks, [](auto, double) { return std::vector<Bytes>(); }),
        InvalidArgument);
  }
  EXPECT_THROW(Communicator::callbacks(0, 1, nullptr), InvalidArgument);
}

TEST(Communicator, RefusesBadAddressesNamingThem) {
  for (const char* address :
       {"", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:8o",
        "127.0.0.1:-1", "::1:80", "[]:80", "[::1]80", "127.0.0.1:99999999999999999999"}) {
    for (const uint32_t num_ranks : {1u, 2u}) {
      try {
        Communicator::tcp(address, 0, num_ranks, kLongS);
        ADD_FAILURE() << address << " was accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_TRUE(contains(error.what(), str("\"", address, "\"")));
      }
    }
  }
  EXPECT_THROW(Communicator::tcp("no-such-host.invalid:80", 0, 2, 1.0), Error);
  EXPECT_THROW(Communicator::tcp("192.0.2.1:8080", 0, 2, 1.0),
               InvalidArgument);  // not of this machine
}

TEST(Communicator, SingleGathersItself) {
  const Comm comm = Communicator::single();
  EXPECT_EQ(comm->rank(), 0u);
  EXPECT_EQ(comm->num_ranks(), 1u);
  EXPECT_LT(comm->timeout_s(), 0.0);
  gather_many(*comm, 20);
}

TEST(Communicator, ChecksWhatCallbacksReturn) {
  std::vector<Bytes> answer{bytes_of_text("a"), bytes_of_text("b")};
  const Comm comm = Communicator::callbacks(1, 2, [&](auto, double) { return answer; });
  EXPECT_EQ(comm->all_gather(answer[1], 1.0), answer);
  EXPECT_THROW(comm->all_gather(answer[0], 1.0), InvalidArgument);  // ranks in another order
  answer.pop_back();
  EXPECT_THROW(comm->all_gather(bytes_of_text("b"), 1.0), InvalidArgument);
  const Comm thrower = Communicator::callbacks(
      0, 2, [](auto, double) -> std::vector<Bytes> { throw Timeout("mine", {1}, "theirs"); });
  EXPECT_THROW(thrower->all_gather({}, 1.0), Timeout);
}

}  // namespace
}  // namespace ep::fabric
