// The limits of the protocol.
#pragma once

#include "common/target.hpp"

namespace ep::layout {

inline constexpr uint32_t kMaxRanks = 1024;
inline constexpr uint32_t kMaxExperts = 4096;
inline constexpr uint32_t kMaxTopk = 32;
inline constexpr uint32_t kMaxChannels =
    64;  // blocks of a launch; one channel word per (source, block)
inline constexpr uint32_t kMaxExtras = 8;
inline constexpr uint64_t kMaxRows = (uint64_t{1} << 31) - 1;

inline constexpr uint64_t kRowAlignBytes = 16;     // row pitches
inline constexpr uint64_t kArenaAlignBytes = 256;  // extents, and the unit of published bases
inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;    // "no row": not routed, or dropped

}  // namespace ep::layout
