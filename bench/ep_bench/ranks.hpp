// Runs one function in every rank, as processes or as threads, and never hangs.
//
// In both forms the ranks live in forked processes (one each, or one for all threads), so that the
// starting process has no threads, and outlives and can end whatever happens in a rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "bench/ep_bench/board.hpp"
#include "bench/ep_bench/case.hpp"

namespace ep::bench {

// At least one rank failed or died; the text has a line per rank, the most telling first.
class RanksFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A rank, seen by the code it runs.
struct RankContext {
  uint32_t rank;
  Board& board;
  std::shared_ptr<Communicator> communicator;
  std::function<void()> wake_starter;

  RankNotes& notes() const { return board.notes(rank); }
  // What the rank begins now; a literal.
  void begin(const char* what, int32_t round = -1) const;
  // Board's barrier: wait() or align().
  void wait_for_all() const;
  int64_t align() const;
  // Tells the starting process and all ranks that this one cannot go on because of `error`.
  void fail(const std::exception& error) const;
};

// REQUIRES: this process has no threads.  Throws RanksFailed.
void run_ranks(const Case& kase, Board& board, const std::function<void(const RankContext&)>& body);

}  // namespace ep::bench
