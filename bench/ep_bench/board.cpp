#include "bench/ep_bench/board.hpp"

#include <algorithm>
#include <new>

#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/memory.hpp"

namespace ep::bench {

static_assert(sizeof(Barrier) % alignof(RankNotes) == 0 &&
              std::is_trivially_destructible_v<Barrier>);

void RankNotes::fail(Blame why, const std::string& what) {
  if (blame.load(std::memory_order_relaxed) != Blame::kNone) return;
  const size_t length = std::min(what.size(), failure.size() - 1);
  std::copy_n(what.data(), length, failure.data());
  failure[length] = '\0';
  blame.store(why, std::memory_order_release);
}

Board::Board(uint32_t num_ranks, uint64_t samples_per_rank)
    : num_ranks_(num_ranks), samples_per_rank_(samples_per_rank) {
  const uint64_t notes_at = sizeof(Barrier), samples_at = notes_at + num_ranks * sizeof(RankNotes);
  memory_ = shared_memory(samples_at + num_ranks * samples_per_rank * sizeof(double));
  auto* const base = static_cast<std::byte*>(memory_.get());
  barrier_ = new (base) Barrier(num_ranks);
  notes_ = reinterpret_cast<RankNotes*>(base + notes_at);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    new (&notes_[rank]) RankNotes();
    notes_[rank].progress_ns = now_ns();
  }
  samples_ = reinterpret_cast<double*>(base + samples_at);
}

}  // namespace ep::bench
