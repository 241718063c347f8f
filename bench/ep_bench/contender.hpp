// What runs against what in a round.
#pragma once

#include <cstdint>

#include "bench/ep_bench/case.hpp"

namespace ep::bench {

enum class Contender : uint8_t {
  kDispatch,
  kCombine,      // of rows in expert_output memory, which travel without a copy
  kPair,         // dispatch, then combine with its handle
  kReplay,       // dispatch with the handle of an earlier one
  kCombineCopy,  // combine of rows in ordinary memory
  kMemcpy,       // private memory to the window, as many bytes as dispatch brought
  kMemcpyOut,    // as many bytes as combine takes away; only where that is another number
};

inline constexpr Choice<Contender> kContenders[] = {{"dispatch", Contender::kDispatch},
                                                    {"combine", Contender::kCombine},
                                                    {"pair", Contender::kPair},
                                                    {"replay", Contender::kReplay},
                                                    {"combine_copy", Contender::kCombineCopy},
                                                    {"memcpy", Contender::kMemcpy},
                                                    {"memcpy_out", Contender::kMemcpyOut}};

inline const char* name_of(Contender c) {
  return choice_name<Contender>(kContenders, c);
}

// Which halves of the exchange a contender moves, or stands for.
constexpr bool moves_dispatch_rows(Contender c) {
  return c == Contender::kDispatch || c == Contender::kReplay || c == Contender::kPair ||
         c == Contender::kMemcpy;
}
constexpr bool moves_combine_rows(Contender c) {
  return c == Contender::kCombine || c == Contender::kCombineCopy || c == Contender::kPair ||
         c == Contender::kMemcpyOut;
}
constexpr bool is_memcpy(Contender c) {
  return c == Contender::kMemcpy || c == Contender::kMemcpyOut;
}

// Bytes of a contender on a rank that receives `num_rows` rows.
inline uint64_t bytes_of(Contender c, const Case& kase, uint64_t num_rows) {
  return num_rows * ((moves_dispatch_rows(c) ? kase.dispatch_row_bytes() : 0) +
                     (moves_combine_rows(c) ? kase.combine_row_bytes() : 0));
}

}  // namespace ep::bench
