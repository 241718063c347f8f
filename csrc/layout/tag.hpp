// Sequence numbers, tags, and words that carry their tag.
//
// Every collective call on a buffer has a 64-bit sequence number.  What it writes to other ranks is tagged
// with 32 bits of it, so nothing is ever cleaned between calls.  Tags are compared for equality; 0 is never
// a tag, because fresh memory is 0.
//
//   63            32 31             0
//   +---------------+---------------+
//   |     value     |      tag      |     one 8-byte store: a reader sees both or neither
//   +---------------+---------------+
#pragma once

#include "common/target.hpp"

namespace ep::layout {

EP_HOST_DEVICE constexpr uint32_t tag_of(uint64_t sequence) {
  return static_cast<uint32_t>(sequence % 0xFFFFFFFFull) + 1u;
}

// Words that a rank writes without first holding the peer's record of the same operation exist twice.
EP_HOST_DEVICE constexpr uint32_t bank_of(uint64_t sequence) {
  return static_cast<uint32_t>(sequence & 1);
}

EP_HOST_DEVICE constexpr uint64_t tagged(uint32_t value, uint32_t tag) {
  return (uint64_t{value} << 32) | tag;
}
EP_HOST_DEVICE constexpr uint32_t value_in(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}
EP_HOST_DEVICE constexpr uint32_t tag_in(uint64_t word) {
  return static_cast<uint32_t>(word);
}

static_assert(tag_of(0) == 1 && tag_of(0xFFFFFFFEull) == 0xFFFFFFFFu && tag_of(0xFFFFFFFFull) == 1);

}  // namespace ep::layout
