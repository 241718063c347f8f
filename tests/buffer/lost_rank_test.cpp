// Ranks whose processes end: killed, gone without a word, or closed.  Ranks here are forked
// processes; their timeout is far longer than a test may take, so whatever ends a wait is not that.
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "fabric/rank_processes.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

using fabric::Child;
using fabric::Port;
using fabric::Signal;

constexpr uint32_t kRanks = 3;
constexpr double kNoticeS = 2.0 + kSlackS;  // after the death
constexpr double kExitS = 15.0;

// A test here forks, so its bound is a timer and not a thread; in the parent and in every child.
struct Bound {
  Bound() { ::alarm(static_cast<unsigned>(kBoundS)); }
  ~Bound() { ::alarm(0); }
};

struct Job {
  Trip trip = plain_trip(kRanks);
  Port port{};  // kept, so that nobody else is given it

  Child start(uint32_t rank, const std::function<void(EPBuffer&)>& body) const {
    return Child([&] {
      const Bound bound;
      BufferConfig config = config_for({&trip, 1});
      config.timeout_s = 10 * kBoundS;
      EPBuffer buffer(Communicator::tcp(port.address(), rank, trip.num_ranks(), 30.0), config);
      round_trip(buffer, trip);  // calls 1 and 2
      body(buffer);
    });
  }
};

void dispatch(EPBuffer& buffer, const Trip& trip) {
  buffer.dispatch(dispatch_args(trip, buffer.rank()));
}

// The rank that dies waits to be killed, and says when it is there.
[[noreturn]] void await_death(const Signal& ready) {
  ready.signal();
  while (true)
    ::pause();
}

void expect_lost(const std::function<void()>& call, uint32_t lost) {
  const Stopwatch watch;
  const PeerLost error = caught<PeerLost>(call);
  EXPECT_EQ(error.peers, std::vector<uint32_t>{lost});
  expect_text(error, {"rank " + std::to_string(lost)});
  EXPECT_LT(watch.seconds(), kNoticeS);
}

// Survivors wait in a call while rank 1 is killed: PeerLost in time, on all of them, and they leave
// by themselves.
void run_kill(const Job& job, const std::function<void(EPBuffer&)>& victim_does) {
  const Bound bound;
  Signal ready, entered[kRanks];
  std::vector<Child> survivors;
  Child victim = job.start(1, [&](EPBuffer& buffer) {
    victim_does(buffer);
    await_death(ready);
  });
  for (const uint32_t rank : {0u, 2u}) {
    survivors.push_back(job.start(rank, [&, rank](EPBuffer& buffer) {
      entered[rank].signal();
      const PeerLost error = caught<PeerLost>([&] { dispatch(buffer, job.trip); });
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
      expect_text(error, {"rank 1", "gone"});
      EXPECT_EQ(caught<Error>([&] { dispatch(buffer, job.trip); }).kind(), ErrorKind::kError);
      expect_lost([&] { buffer.resync(); }, 1);
      EXPECT_EQ(buffer.num_ranks(), kRanks);
    }));
  }
  ready.wait();
  for (const uint32_t rank : {0u, 2u})
    entered[rank].wait();
  victim.kill();
  const Stopwatch watch;
  for (Child& survivor : survivors)
    EXPECT_EQ(survivor.join(kExitS), 0);
  EXPECT_LT(watch.seconds(), kNoticeS + 2.0);  // close() is patient for 2 s at most
  EXPECT_EQ(victim.join(), -1);
}

TEST(LostRank, KilledBeforeTheCall) {  // user report L1
  run_kill(Job(), [](EPBuffer&) {});
}

TEST(LostRank, KilledWithACallInFlight) {
  const Job job;
  run_kill(job, [&](EPBuffer& buffer) {  // its own call waits for nothing but a stream
    static Gate never;
    Stream held = Stream::host();
    held.call([] { never.wait(); });
    DispatchArgs args = dispatch_args(job.trip, 1);
    args.exact = false;
    args.async_op = true;
    args.wait_for = {held.record()};
    new DispatchResult(buffer.dispatch(args));
    new Stream(held);
  });
}

TEST(LostRank, KilledWhileItWaits) {
  const Bound bound;
  const Job job;
  Signal in_call, dead;
  Child waiter =
      job.start(0, [&](EPBuffer& buffer) { expect_lost([&] { dispatch(buffer, job.trip); }, 1); });
  Child victim = job.start(1, [&](EPBuffer& buffer) {
    const std::jthread teller([&] {
      await_entered(buffer, 0, 3);
      await_entered(buffer, 1, 3);
      in_call.signal();
    });
    dispatch(buffer, job.trip);
  });
  Child late = job.start(2, [&](EPBuffer& buffer) {
    dead.wait();
    expect_lost([&] { dispatch(buffer, job.trip); }, 1);
  });
  in_call.wait();
  victim.kill();
  EXPECT_EQ(victim.join(), -1);
  EXPECT_EQ(waiter.join(kExitS), 0);
  dead.signal();
  EXPECT_EQ(late.join(kExitS), 0);
}

// user report L6: a rank that ends with status 0 and says nothing is as lost as a killed one.
TEST(LostRank, ExitWithoutCloseIsAFault) {
  const Bound bound;
  const Job job;
  Signal entered;
  Child leaver = job.start(1, [&](EPBuffer& buffer) {
    await_entered(buffer, 0, 3);
    await_entered(buffer, 2, 3);
    ::_exit(0);
  });
  Child first =
      job.start(0, [&](EPBuffer& buffer) { expect_lost([&] { dispatch(buffer, job.trip); }, 1); });
  Child last =
      job.start(2, [&](EPBuffer& buffer) { expect_lost([&] { dispatch(buffer, job.trip); }, 1); });
  EXPECT_EQ(leaver.join(kExitS), 0);
  EXPECT_EQ(first.join(kExitS), 0);
  EXPECT_EQ(last.join(kExitS), 0);
}

TEST(LostRank, CloseIsAGoodbye) {
  const Bound bound;
  const Job job;
  Signal gone[2];
  Child leaver = job.start(1, [&](EPBuffer& buffer) { buffer.close(); });
  std::vector<Child> stayers;
  for (const uint32_t rank : {0u, 2u}) {
    stayers.push_back(job.start(rank, [&, rank](EPBuffer& buffer) {
      gone[rank / 2].wait();  // the process is gone, so is its socket
      const PeerError error = caught<PeerError>([&] { dispatch(buffer, job.trip); });
      EXPECT_EQ(error.peers, std::vector<uint32_t>{1});
      expect_text(error, {"closed"});
    }));
  }
  EXPECT_EQ(leaver.join(kExitS), 0);
  for (const Signal& signal : gone)
    signal.signal();
  for (Child& stayer : stayers)
    EXPECT_EQ(stayer.join(kExitS), 0);
}

// Nothing is left that a second run of the same job could stumble over.
TEST(LostRank, ARerunWorksAtOnce) {
  const Job job;
  for (uint32_t run = 0; run < 3; ++run) {
    run_kill(job, [](EPBuffer&) {});
    const Bound bound;
    std::vector<Child> ranks;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      ranks.push_back(job.start(rank, [&](EPBuffer& buffer) { round_trip(buffer, job.trip); }));
    for (Child& rank : ranks)
      EXPECT_EQ(rank.join(kExitS), 0);
  }
}

// What a dead rank sent stays readable; what it still owes is the only loss.
TEST(LostRank, OutputsSurviveTheirSource) {
  const Bound bound;
  const Job job;
  Signal sent_all, dead[2];
  std::vector<Child> survivors;
  Child victim = job.start(1, [&](EPBuffer& buffer) {
    const DispatchResult sent = buffer.dispatch(dispatch_args(job.trip, 1));
    await_entered(buffer, 0, 4);  // they have left call 3
    await_entered(buffer, 2, 4);
    await_death(sent_all);
  });
  for (const uint32_t rank : {0u, 2u}) {
    survivors.push_back(job.start(rank, [&, rank](EPBuffer& buffer) {
      const DispatchResult sent = buffer.dispatch(dispatch_args(job.trip, rank));
      expect_lost(
          [&] {
            try {
              buffer.combine(combine_args(job.trip, rank, sent.handle));
            } catch (...) {
              dead[rank / 2].wait();
              throw;
            }
          },
          1);
      expect_received(job.trip.sent.ranks[rank], job.trip.rules, rank, sent);
    }));
  }
  sent_all.wait();
  victim.kill();
  EXPECT_EQ(victim.join(), -1);
  for (const Signal& signal : dead)
    signal.signal();
  for (Child& survivor : survivors)
    EXPECT_EQ(survivor.join(kExitS), 0);
}

// After fork the child's buffers are inert: errors instead of calls, and its end disturbs nobody.
TEST(LostRank, AForkedChildsBufferIsInert) {
  const Bound bound;
  const Job job;
  std::vector<Child> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(job.start(rank, [&](EPBuffer& buffer) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        bool inert = false;
        try {
          dispatch(buffer, job.trip);
        } catch (const Error& error) {
          inert = std::string(error.what()).find("fork") != std::string::npos;
        }
        buffer.check();
        buffer.abort("from a child");
        buffer.close();
        ::_exit(inert ? 0 : 1);
      }
      int status = -1;
      EXPECT_EQ(::waitpid(pid, &status, 0), pid);
      EXPECT_EQ(status, 0);
      round_trip(buffer, job.trip);
    }));
  }
  for (Child& rank : ranks)
    EXPECT_EQ(rank.join(kExitS), 0);
}

// protocol rule 21: a stopped process is late, not lost, and may come back.
TEST(LostRank, AStoppedRankIsLate) {
  const Bound bound;
  const Job job;
  Signal ready, is_stopped[2], timed_out[2], go_on;
  const auto recover = [&](EPBuffer& buffer) {
    buffer.set_timeout_s(kBoundS);
    EXPECT_EQ(buffer.resync(), 2u);
    round_trip(buffer, job.trip);
  };
  Child stopped = job.start(1, [&](EPBuffer& buffer) {
    ready.signal();
    go_on.wait();
    caught<PeerError>([&] { dispatch(buffer, job.trip); });
    recover(buffer);
  });
  std::vector<Child> others;
  for (const uint32_t rank : {0u, 2u}) {
    others.push_back(job.start(rank, [&, rank](EPBuffer& buffer) {
      is_stopped[rank / 2].wait();
      buffer.set_timeout_s(kShortS);
      EXPECT_EQ(caught<Timeout>([&] { dispatch(buffer, job.trip); }).peers,
                std::vector<uint32_t>{1});
      timed_out[rank / 2].signal();
      recover(buffer);
    }));
  }
  ready.wait();
  EXPECT_EQ(::kill(stopped.pid(), SIGSTOP), 0);
  for (const Signal& signal : is_stopped)
    signal.signal();
  for (const Signal& signal : timed_out)
    signal.wait();
  EXPECT_EQ(::kill(stopped.pid(), SIGCONT), 0);
  go_on.signal();
  EXPECT_EQ(stopped.join(kExitS), 0);
  for (Child& other : others)
    EXPECT_EQ(other.join(kExitS), 0);
}

// user report B3: behind a Timeout the process leaves by itself, at once, while the late rank still
// lives.
TEST(LostRank, ATimeoutLetsTheProcessLeave) {
  const Bound bound;
  const Job job;
  Signal over[2];
  std::vector<Child> late;
  for (const uint32_t rank : {1u, 2u})
    late.push_back(job.start(rank, [&, rank](EPBuffer&) { over[rank - 1].wait(); }));
  Child waiter = job.start(0, [&](EPBuffer& buffer) {
    buffer.set_timeout_s(kShortS);
    EXPECT_EQ(caught<Timeout>([&] { dispatch(buffer, job.trip); }).peers,
              (std::vector<uint32_t>{1, 2}));
  });
  EXPECT_EQ(waiter.join(kExitS), 0);
  for (const Signal& signal : over)
    signal.signal();
  for (Child& child : late)
    EXPECT_EQ(child.join(kExitS), 0);
}

// user report F6: separate jobs on one machine, same defaults, other data.
TEST(LostRank, JobsAtOnceDoNotMeet) {
  const Bound bound;
  const Job jobs[] = {{.trip = plain_trip(kRanks, Layout::kRank, 5)},
                      {.trip = plain_trip(kRanks, Layout::kRank, 6)}};
  std::vector<Child> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (const Job& job : jobs) {
      ranks.push_back(job.start(rank, [&](EPBuffer& buffer) {
        for (uint32_t round = 0; round < 20; ++round)
          round_trip(buffer, job.trip);
      }));
    }
  }
  for (Child& rank : ranks)
    EXPECT_EQ(rank.join(kExitS), 0);
}

}  // namespace
}  // namespace ep::test
