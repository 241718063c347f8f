// What the ranks of one case leave for the process that started them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "bench/ep_bench/barrier.hpp"

namespace ep::bench {

// Whom a failure speaks of, least telling first: who only noticed another's failure is told last.
enum class Blame : uint32_t { kNone, kStopped, kPeer, kTimeout, kSelf, kDied };

// One rank's notes.  It alone writes them; the starting process reads them at any time.
struct alignas(64) RankNotes {
  std::atomic<int64_t> progress_ns{0};         // when it last began something
  std::atomic<const char*> doing{"starting"};  // a literal: forked processes share its address
  std::atomic<int32_t> round{-1};              // negative: none
  std::atomic<bool> is_waiting{false};         // at the benchmark's barrier, for other ranks
  std::atomic<bool> is_done{false};
  std::atomic<Blame> blame{Blame::kNone};  // written after `failure`
  std::array<char, 2048> failure{};

  uint64_t num_rows = 0;  // received per dispatch
  uint64_t verified_rows = 0, verified_values = 0;
  uint32_t num_sms = 0;
  std::array<uint64_t, 2> resident_bytes{};

  // The first failure stays.
  void fail(Blame why, const std::string& what);
};

// REQUIRES: made before the ranks are forked.
class Board {
 public:
  Board(uint32_t num_ranks, uint64_t samples_per_rank);
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  uint32_t num_ranks() const { return num_ranks_; }
  Barrier& barrier() { return *barrier_; }
  RankNotes& notes(uint32_t rank) { return notes_[rank]; }
  std::span<double> samples(uint32_t rank) {
    return {samples_ + rank * samples_per_rank_, samples_per_rank_};
  }

 private:
  const uint32_t num_ranks_;
  const uint64_t samples_per_rank_;
  std::shared_ptr<void> memory_;
  Barrier* barrier_;
  RankNotes* notes_;
  double* samples_;
};

}  // namespace ep::bench
