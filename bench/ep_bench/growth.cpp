#include "bench/ep_bench/growth.hpp"

#include <fstream>
#include <stdexcept>
#include <string>

#include "bench/ep_bench/board.hpp"
#include "bench/ep_bench/exchange.hpp"
#include "bench/ep_bench/rank_data.hpp"
#include "bench/ep_bench/ranks.hpp"

namespace ep::bench {
namespace {

constexpr Contender kCalls[] = {Contender::kDispatch, Contender::kCombine, Contender::kPair,
                                Contender::kReplay, Contender::kCombineCopy};

// smaps_rollup counts pages; the cheaper files lag behind by some per core.
uint64_t resident_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    uint64_t kilobytes = 0;
    if (word == "Rss:" && file >> kilobytes) return kilobytes * 1024;
  }
  throw std::runtime_error("cannot read Rss from /proc/self/smaps_rollup");
}

// Without a barrier between the calls, and with the library's own allocator.
void run_rank(const Case& kase, const RankContext& context) {
  RankData data(kase, context.rank);
  EPBuffer buffer(context.communicator, buffer_config(kase));
  try {
    Exchange exchange(buffer, data);
    for (uint32_t round = 1; round <= kGrowthLastRound; ++round) {
      context.begin("calls", static_cast<int32_t>(round));
      for (const Contender call : kCalls) {
        exchange.prepare(call);
        exchange.run(call);
        exchange.release();
      }
      if (round == kGrowthFirstRound) context.notes().resident_bytes[0] = resident_bytes();
    }
    context.notes().resident_bytes[1] = resident_bytes();
    context.wait_for_all();  // nobody closes its buffer while others still call
  } catch (const std::exception& error) {
    context.fail(error);
    buffer.abort(error.what());
    throw;
  }
}

}  // namespace

GrowthResult measure_growth(const Case& kase) {
  GrowthResult result{.kase = kase, .processes = {}};
  Board board(kase.num_ranks, 0);
  run_ranks(kase, board, [&](const RankContext& context) { run_rank(kase, context); });
  for (uint32_t rank = 0; rank < (kase.processes ? kase.num_ranks : 1); ++rank) {
    const auto& bytes = board.notes(rank).resident_bytes;
    result.processes.push_back({bytes[0], bytes[1]});
  }
  return result;
}

}  // namespace ep::bench
