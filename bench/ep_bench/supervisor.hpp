// The starting process's side: watches the processes it forked, ends them when one fails.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "bench/ep_bench/board.hpp"

namespace ep::bench {

struct Ranks {
  uint32_t first, end;
};

class Supervisor {
 public:
  Supervisor(Board& board, double timeout_s) : board_(board), timeout_s_(timeout_s) {}
  ~Supervisor();  // ends what still runs
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Forks a process that runs `main`, which does not return, for `ranks`.
  void start(Ranks ranks, const std::function<void(std::function<void()> wake_starter)>& main);

  // Until all processes have ended.  When one fails the others get a moment to end by themselves
  // (they know more about it); when nothing moves for the timeout and some more, no moment.  Throws
  // RanksFailed.
  void wait();

 private:
  struct Child {
    pid_t pid;
    int pipe;  // a byte says "a rank failed", the end says that the process is gone
    Ranks ranks;
  };

  int64_t deadline_ns() const;
  void hear(Child& child);
  void reap(Child& child);
  void note_who_is_stuck();
  void kill_all();
  std::string failures() const;

  Board& board_;
  const double timeout_s_;
  std::vector<Child> children_;  // that are alive
  int64_t failed_ns_ = 0;        // 0: nobody has
};

}  // namespace ep::bench
