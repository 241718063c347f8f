#include "bench/ep_bench/ranks.hpp"

#include <cstdio>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/port.hpp"
#include "bench/ep_bench/supervisor.hpp"
#include "bench/ep_bench/text.hpp"

namespace ep::bench {
namespace {

using Body = std::function<void(const RankContext&)>;

Blame blame_of(const std::exception& error) {
  if (dynamic_cast<const Stopped*>(&error)) return Blame::kStopped;
  const auto* ours = dynamic_cast<const Error*>(&error);
  if (!ours) return Blame::kSelf;
  if (ours->kind() == ErrorKind::kPeer || ours->kind() == ErrorKind::kPeerLost) return Blame::kPeer;
  return ours->kind() == ErrorKind::kTimeout ? Blame::kTimeout : Blame::kSelf;
}

std::string class_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours == nullptr ? "" : std::string(name_of(ours->kind())) + ": ";
}

// What the ranks of one process need from outside.
struct Process {
  Board& board;
  const Body& body;
  const Case& kase;
  std::string address;
  std::function<void()> wake_starter;
};

void run_rank(const Process& process, uint32_t rank, std::shared_ptr<Communicator> communicator) {
  RankContext context{rank, process.board, std::move(communicator), process.wake_starter};
  try {
    context.begin("setting up");
    if (!context.communicator) {
      context.communicator =
          Communicator::tcp(process.address, rank, process.kase.num_ranks, process.kase.timeout_s);
    }
    process.body(context);
    context.notes().is_done = true;
  } catch (const std::exception& error) {
    context.fail(error);
  }
}

void run_threads(const Process& process) {
  auto communicators = Communicator::threads(process.kase.num_ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < process.kase.num_ranks; ++rank) {
    threads.emplace_back([&process, rank, communicator = std::move(communicators[rank])]() mutable {
      run_rank(process, rank, std::move(communicator));
    });
  }
  for (std::thread& thread : threads)
    thread.join();
}

// Runs `ranks` and ends the process, without the destructors and buffers it has from its parent.
[[noreturn]] void run_process(const Process& process, const Ranks& ranks, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above
  if (process.kase.processes) {
    run_rank(process, ranks.first, nullptr);
  } else {
    run_threads(process);
  }
  bool all_done = true;
  for (uint32_t rank = ranks.first; rank < ranks.end; ++rank) {
    all_done = all_done && process.board.notes(rank).is_done;
  }
  _exit(all_done ? 0 : 1);
}

}  // namespace

void RankContext::begin(const char* what, int32_t round) const {
  notes().doing.store(what, std::memory_order_relaxed);
  notes().round.store(round, std::memory_order_relaxed);
  notes().progress_ns.store(now_ns(), std::memory_order_relaxed);
}

void RankContext::wait_for_all() const {
  notes().is_waiting = true;
  board.barrier().wait();
  notes().is_waiting = false;
}

int64_t RankContext::align() const {
  notes().is_waiting = true;
  const int64_t start_ns = board.barrier().align();
  notes().is_waiting = false;
  return start_ns;
}

void RankContext::fail(const std::exception& error) const {
  notes().fail(blame_of(error), str(class_of(error), error.what()));
  board.barrier().stop();
  wake_starter();
}

void run_ranks(const Case& kase, Board& board, const Body& body) {
  const ReservedPort port;
  Supervisor supervisor(board, kase.timeout_s);
  const pid_t parent = getpid();
  const uint32_t ranks_each = kase.processes ? 1 : kase.num_ranks;
  for (uint32_t first = 0; first < kase.num_ranks; first += ranks_each) {
    const Ranks ranks{first, first + ranks_each};
    supervisor.start(ranks, [&](std::function<void()> wake_starter) {
      run_process({board, body, kase, port.address(), std::move(wake_starter)}, ranks, parent);
    });
  }
  supervisor.wait();
}

}  // namespace ep::bench
