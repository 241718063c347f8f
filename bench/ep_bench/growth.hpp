// Does resident memory grow with the number of calls?
#pragma once

#include <cstdint>
#include <vector>

#include "bench/ep_bench/case.hpp"

namespace ep::bench {

inline constexpr uint32_t kGrowthFirstRound = 1'000, kGrowthLastRound = 10'000;

struct GrowthResult {
  struct Process {
    uint64_t first_bytes, last_bytes;  // resident after the two rounds

    int64_t growth() const {
      return static_cast<int64_t>(last_bytes) - static_cast<int64_t>(first_bytes);
    }
  };

  Case kase;
  std::vector<Process> processes;
};

// Forks; throws RanksFailed.
GrowthResult measure_growth(const Case& kase);

}  // namespace ep::bench
