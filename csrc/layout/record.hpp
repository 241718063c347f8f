// The entry record: what a rank tells every peer at the start of every operation.
//
//   0        1 ................ kAgreedEnd ............ kFixedWords      +R              +R+E
//   +--------+-------------------+----------------------+----------------+----------------+
//   | status | agreed fields     | this rank's own      | rows per rank  | expert counts  |
//   +--------+-------------------+----------------------+----------------+----------------+
//
// State:    record[bank][source], tagged 8-byte words in the receiver's window, bank = parity of the sequence.
// Writers:  the source, at entry; `status` last, with release.
// Readers:  the receiver; polls `status` with acquire, then reads the rest.
// Pairing:  the release of `status` orders the source's earlier reads of anybody's window before it: who
//           holds a peer's record of operation s knows that the peer has finished every operation before s.
// Invariant: a peer is at most one operation ahead, so the two banks suffice.
#pragma once

#include "common/target.hpp"
#include "layout/limits.hpp"

namespace ep::layout {

enum RecordWord : uint32_t {
  kStatus = 0,  // Cause: why this rank refuses the operation; 0 = good

  // Equal on all ranks; compared word by word.
  kKind,
  kRowLayout,
  kQuant,
  kExact,
  kOverflow,
  kMaxTokens,
  kMaxRowsField,
  kAlignment,
  kTopk,
  kReplay,
  kXDType,
  kXBytes,
  kScalesDType,
  kScalesBytes,
  kIdxDType,
  kHasWeights,
  kHasRowWeights,
  kNumExtras,
  kExtraDType,                             // [kMaxExtras]
  kExtraBytes = kExtraDType + kMaxExtras,  // [kMaxExtras]
  kRoutingLow = kExtraBytes + kMaxExtras,  // hash of all ranks' routing, where a handle is used
  kRoutingHigh,
  kAgreedEnd,

  // This rank's own.
  kBase =
      kAgreedEnd,  // of the extent, or of combine's rows: offset in the window / kArenaAlignBytes
  kCapacity,       // of the extent / kArenaAlignBytes
  kNumTokens,
  kNumChannels,  // blocks of this rank's launch
  kHashLow,      // of this rank's routing
  kHashHigh,
  kPitch,           // combine: bytes from row to row
  kNumRows,         // combine: rows that this rank holds
  kRowsPerChannel,  // combine: rows that each channel copies into the extent; 0: rows are in place
  kRowWeightsBase,  // combine: as kBase
  kWantsReadDone,   // combine: this rank waits for its readers
  kNeeded,          // refusals for want of memory, bytes / kArenaAlignBytes, or tokens; of an abort
                    // that this rank learned from another: 1 + that rank
  kAvailable,
  kFixedWords,
};

enum class OpKind : uint32_t { kNone, kDispatch, kCombine };

// Why an operation ended: in record status, poison words, faults and `status` tensors.
enum class Cause : uint32_t {
  kNone = 0,
  // A rank refuses at entry; everybody sees it in its record.
  kArguments,      // its arguments, handle or ids are wrong
  kTooManyTokens,  // T > max_tokens: kNeeded, kAvailable tokens
  kNoHostMemory,   // the caller's allocator has no room
  kNoExtent,       // combine has no extent for its rows: kNeeded, kAvailable
  kAborted,        // abort(reason)
  kInterrupted,    // the user left the call
  // Found alike by all ranks from the records.
  kMismatch,        // agreed fields differ
  kTooManyRows,     // rows > max_rows
  kExtentTooSmall,  // bytes > extent
  // Found on the way; poison words tell the others.
  kTimeout,
  kLost,
  kClosed,
  kPeerAhead,  // a word of a later operation where this one's was awaited
  kBadRow,     // a handle names a row outside the receiver's output
  // Local.
  kBadIds,  // exact = false: ids outside [-1, E) counted as -1
  kBroken,  // an earlier operation failed on the way; resync() has not been called
};

// Entry-time causes end the operation in the same call on every rank, before any row moves.  The others
// need resync().
EP_HOST_DEVICE constexpr bool needs_resync(Cause cause) {
  return cause == Cause::kTimeout || cause == Cause::kLost || cause == Cause::kClosed ||
         cause == Cause::kPeerAhead || cause == Cause::kBadRow;
}

EP_HOST_DEVICE constexpr uint32_t record_words(uint32_t num_ranks, uint32_t num_experts) {
  return kFixedWords + num_ranks + num_experts;
}

}  // namespace ep::layout
