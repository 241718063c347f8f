// The clock of the host target: CLOCK_MONOTONIC, so that processes of one machine can compare times.
#pragma once

#include <chrono>
#include <cstdint>

namespace ep::device::host {

inline constexpr uint64_t kNanosPerMicro = 1000;
inline constexpr uint64_t kNanosPerMilli = 1000 * 1000;

inline uint64_t now_ns() noexcept {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace ep::device::host
