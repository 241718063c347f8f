// Where ranks, threads or processes, meet between contenders.  It is not the library's: what is
// measured must not set the pace.
//
// State:    how many have arrived, and the generation: how often the barrier has opened.
// Writers:  arriving ranks add themselves; the last one zeroes the count, then advances the
//           generation.
// Readers:  those who wait for the generation to move.
// Pairing:  the last rank's release of the generation makes everything the ranks did before
//           visible.
// After stop() every present and future wait throws Stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace ep::bench {

// Another rank ended the run.
class Stopped : public std::runtime_error {
 public:
  Stopped() : std::runtime_error("stopped, because another rank failed") {}
};

// Lives in memory that all ranks share.
class Barrier {
 public:
  explicit Barrier(uint32_t num_ranks);

  void wait();

  // As wait(), but nobody has to be woken up afterwards.  Returns the time at which the last rank
  // arrived, the same on all ranks: the start of what they do next.  A rank's own time of waking up
  // would not do: with more ranks than cores, one that gets its core late would seem to take less.
  int64_t align();

  void stop();

 private:
  void wait_for_change(uint32_t generation);

  const uint32_t num_ranks_;
  const bool has_core_each_;
  alignas(64) std::atomic<uint32_t> arrived_ = 0;
  alignas(64) std::atomic<uint32_t> generation_ = 0;
  std::atomic<int64_t> opened_ns_ = 0;
  std::atomic<uint32_t> sleepers_ = 0;
  std::atomic<bool> stopped_ = false;
};

}  // namespace ep::bench
