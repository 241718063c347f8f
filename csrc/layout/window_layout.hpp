// The window of a rank: the memory that other ranks reach, byte for byte.  Equal on all ranks.
//
//   0        progress, doorbell, abort text    [kHeaderBytes]                      written by its owner
//            alarm                             u64                                 peers: + 1 per poison
//            poison      [2 banks][R source]   [poison_words] u64                  peers
//            records     [2 banks][R source]   [record_words] u64                  peers
//            channels    [R source][64]        u64 {rows | tag}                    peers
//            segments    [R source][64][Lmax]  {first row, rows} u32               peers ("expert")
//            ready       [2 banks][R owner][64] u64                                peers (combine)
//            read_done   [R reader]            u64                                 peers (combine)
//   control  ------------------------------------------------------------------------------
//            staging     0 bytes on one node
//   arena    ------------------------------------------------------------------------------
//            extents of dispatch outputs and combine inputs
//   total    ------------------------------------------------------------------------------
#pragma once

#include "common/doorbell.hpp"
#include "common/math.hpp"
#include "layout/limits.hpp"
#include "layout/record.hpp"

namespace ep::layout {

// Owner writes with release, peers read for close() and for the text of a Timeout.
struct WindowHeader {
  uint64_t entered;    // sequence number of the last operation entered; 0: none
  uint64_t completed;  // sequence number of the last operation completed; 0: none
  uint32_t phase;      // Phase of the operation in progress
  uint32_t closed;     // 1 after close()
  uint32_t reason_bytes;
  char reason[228];  // abort's text; written before the word that announces it
  alignas(64) Doorbell doorbell;
  alignas(64) uint64_t alarm;
};
inline constexpr uint64_t kMaxReasonBytes = sizeof(WindowHeader::reason);
inline constexpr uint64_t kHeaderBytes = 512;
static_assert(sizeof(WindowHeader) <= kHeaderBytes && sizeof(uint64_t) == 8);

// Poison: why an operation ended on the way.  State: tagged words; [0] {cause | tag} last, with release.
enum PoisonWord : uint32_t {
  kPoisonCause = 0,
  kPoisonPhase,  // Phase; kPoisonNeedsResync is set where other ranks may have completed the operation
  kPoisonMask,  // [ceil(R/32)] ranks that did not come
};
inline constexpr uint32_t kPoisonNeedsResync = 0x80000000u;
EP_HOST_DEVICE constexpr uint32_t mask_words(uint32_t num_ranks) {
  return (num_ranks + 31) / 32;
}
EP_HOST_DEVICE constexpr uint32_t poison_words(uint32_t num_ranks) {
  return kPoisonMask + mask_words(num_ranks);
}

// Rows of one (channel, local expert): [first, first + rows).
struct Segment {
  uint32_t first, rows;
};

struct WindowShape {
  uint32_t num_ranks, num_experts, max_local_experts;
  uint64_t staging_bytes, arena_bytes;
};

struct WindowLayout {
  WindowShape shape;
  uint64_t poison_offset, records_offset, channels_offset, segments_offset, ready_offset,
      read_done_offset;
  uint64_t staging_offset, arena_offset, num_bytes;

  static EP_HOST_DEVICE constexpr WindowLayout make(const WindowShape& s) {
    WindowLayout l{};
    l.shape = s;
    uint64_t cursor = kHeaderBytes;
    const auto take = [&cursor](uint64_t bytes,
                                uint64_t alignment) {  // the order of the lines is the layout
      const uint64_t at = cursor;
      cursor = align_up(cursor + bytes, alignment);
      return at;
    };
    const uint64_t ranks = s.num_ranks, word = sizeof(uint64_t);
    l.poison_offset = take(2 * ranks * poison_words(s.num_ranks) * word, kLineBytes);
    l.records_offset =
        take(2 * ranks * record_words(s.num_ranks, s.num_experts) * word, kLineBytes);
    l.channels_offset = take(ranks * kMaxChannels * word, kLineBytes);
    l.segments_offset =
        take(ranks * kMaxChannels * s.max_local_experts * sizeof(Segment), kLineBytes);
    l.ready_offset = take(2 * ranks * kMaxChannels * word, kLineBytes);
    l.read_done_offset = take(ranks * word, kPageBytes);
    l.staging_offset = take(s.staging_bytes, kPageBytes);
    l.arena_offset = take(s.arena_bytes, kPageBytes);
    l.num_bytes = cursor;
    return l;
  }

  EP_HOST_DEVICE constexpr uint64_t poison(uint32_t bank, uint32_t source) const {
    return poison_offset +
           (uint64_t{bank} * shape.num_ranks + source) * poison_words(shape.num_ranks) * 8;
  }
  EP_HOST_DEVICE constexpr uint64_t record(uint32_t bank, uint32_t source) const {
    return records_offset + (uint64_t{bank} * shape.num_ranks + source) *
                                record_words(shape.num_ranks, shape.num_experts) * 8;
  }
  EP_HOST_DEVICE constexpr uint64_t channel(uint32_t source, uint32_t block) const {
    return channels_offset + (uint64_t{source} * kMaxChannels + block) * 8;
  }
  EP_HOST_DEVICE constexpr uint64_t segment(uint32_t source,
                                            uint32_t block,
                                            uint32_t local_expert) const {
    return segments_offset +
           ((uint64_t{source} * kMaxChannels + block) * shape.max_local_experts + local_expert) *
               sizeof(Segment);
  }
  EP_HOST_DEVICE constexpr uint64_t ready(uint32_t bank, uint32_t owner, uint32_t block) const {
    return ready_offset + ((uint64_t{bank} * shape.num_ranks + owner) * kMaxChannels + block) * 8;
  }
  EP_HOST_DEVICE constexpr uint64_t read_done(uint32_t reader) const {
    return read_done_offset + reader * uint64_t{8};
  }

  static constexpr uint64_t kLineBytes = 128;  // no two regions share a cache line or its neighbour
  static constexpr uint64_t kPageBytes = 4096;
};

static_assert(WindowLayout::make({8, 256, 32, 0, 4096}).poison_offset == 512);
static_assert(WindowLayout::make({8, 256, 32, 0, 4096}).arena_offset % WindowLayout::kPageBytes ==
              0);
static_assert(WindowLayout::make({8, 256, 32, 0, 4096}).num_bytes ==
              WindowLayout::make({8, 256, 32, 0, 0}).num_bytes + 4096);

}  // namespace ep::layout
