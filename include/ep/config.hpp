// What a buffer is made of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ep/tensor.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// Where the rows of a dispatch end up.  They always land in an extent of the arena first.
enum class Outputs : uint8_t {
  kAuto,  // kWindow while the largest free extent holds one dispatch of this shape at 1.5x balanced load
  kWindow,  // tensors are views of the extent
  kCaller,  // the same operation copies them to the caller's allocator
};

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning };

// How long a wait keeps its core.  A wait spins `spin_us`, then yields `yield_us`, then sleeps on a futex.
struct WaitPolicy {
  uint32_t spin_us = 20;
  uint32_t yield_us = 50;
};

struct BufferConfig {
  // Required.  num_experts is exact; the others are maxima, a call may use less of each.
  uint32_t num_experts = 0;          // <= 4096
  uint32_t num_topk = 0;             // <= 32
  uint32_t hidden = 0;               // elements
  uint32_t max_tokens_per_rank = 0;  // equal on all ranks

  uint64_t token_bytes =
      0;  // most bytes per dispatched row: x + scales + extras.  0: 4 * hidden + 64
  uint64_t output_bytes = 0;  // most bytes per combined row.  0: 4 * hidden
  std::vector<uint32_t>
      expert_offsets{};         // R + 1; rank r owns [o[r], o[r+1]).  Empty: as evenly as can be,
                                // the first E % R ranks own one more
  std::string device = "auto";  // "auto" or "cpu"; "cuda" is Unsupported so far
  uint32_t num_sms = 0;         // worker threads per operation.  0: default_num_sms()
  uint32_t ranks_per_node = 0;  // 0: found out
  uint32_t num_qps = 0;         // queue pairs per operation; CPUs have none and ignore it
  // Reserved: anything but these values is Unsupported.
  std::vector<int32_t> expert_slot{};  // [E] expert -> slot, applied inside dispatch
  bool elastic = false;                // a rank that dies is masked instead of raising
  uint32_t max_latency_tokens = 128;   // bound of T in latency mode; not read
  uint32_t num_regions = 2;            // operations that may be in flight at once
  Outputs outputs = Outputs::kAuto;    // a rank's own choice
  uint64_t arena_bytes = 0;            // equal on all ranks.  0: num_regions worst-case pairs
  double timeout_s = -1.0;             // bound of every wait.  Negative: the group's, else 600

  // Memory for outputs that are not views of the window, and for handles: `bytes` > 0, aligned to 256.
  // Empty: the library's own.  May throw std::bad_alloc (raised as CapacityError).
  std::function<std::shared_ptr<void>(uint64_t bytes)> allocator{};
  std::function<void(LogLevel, std::string_view)> log{};  // empty: silent
  // Called about every 50 ms while the host waits; true leaves the wait with Interrupted.  Also asked, in
  // place of the group's, while ranks construct a buffer or resync() it.
  std::function<bool()> interrupt{};
  WaitPolicy wait_policy{};
};

// Bytes that a buffer registers.  `total` is exact.
struct Memory {
  uint64_t control = 0;  // flags, records, counts
  uint64_t staging = 0;  // rings towards other nodes; 0 on one node
  uint64_t arena = 0;    // rows
  uint64_t total = 0;
};

}  // namespace ep::inline EP_ABI_NAMESPACE
