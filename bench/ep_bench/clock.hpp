// The one clock of the benchmark; processes of a machine share it.
#pragma once

#include <chrono>
#include <cstdint>

namespace ep::bench {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace ep::bench
