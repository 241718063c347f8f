// What a buffer's kernels keep between calls and what a call leaves for the host.
#pragma once

#include "common/target.hpp"
#include "layout/output_layout.hpp"
#include "layout/plan.hpp"
#include "layout/record.hpp"
#include "layout/tag.hpp"
#include "layout/window_layout.hpp"

namespace ep::kernels {

// Where an operation is; in the window header while it runs, in faults afterwards.
enum class Phase : uint32_t {
  kIdle = 0,
  kDrain,     // waiting for the records of an operation that ended early
  kRecords,   // waiting for the peers' entry records
  kRows,      // dispatch: waiting for rows
  kReady,     // combine: waiting for an owner's rows
  kReadDone,  // combine: waiting for the readers of this rank's rows
};

// The first thing that ended an operation on this rank.
struct FaultRecord {
  layout::Cause cause;
  Phase phase;
  uint32_t peer;                 // whose record or poison, or whom the numbers are about
  uint32_t from_peer;            // 1: `peer` reported it; 0: found here
  uint32_t poisons;              // 1: the others learn of it by poison, not from a record
  uint32_t needs_resync;         // 1: others may have completed the operation
  uint32_t field, mine, theirs;  // kMismatch: a RecordWord and both values
  uint64_t needed, available;    // rows, bytes or tokens
  uint64_t bad_slot;             // ids: token * 2^32 + slot
  int64_t bad_id;
  uint32_t mask[layout::kMaxRanks / 32];  // ranks that did not come, or are lost
};

// One call's answer.  State: plain fields, then a flag.  Writers: the kernel; `counts_ready` with release
// once the counts are known, `done` with release at the end.  Readers: the host, acquiring the flag.
struct alignas(64) Ticket {
  Doorbell doorbell;
  uint32_t counts_ready;
  uint32_t done;
  uint64_t sequence;
  uint64_t num_rows, rows_needed;
  FaultRecord fault;
  FaultRecord bad_ids;  // cause kBadIds when exact = false met bad ids
};

// Where a destination's rows go: filled by one worker per operation, read by all.
struct Destination {
  uint64_t extent_offset;  // in its window
  layout::OutputLayout layout;
  uint64_t row_limit;  // rows at or past it are dropped
};

// Where an owner's rows are: as above, for combine.
struct Owner {
  const std::byte* rows;
  uint64_t pitch;
  const std::byte* row_weights;
  uint64_t num_rows;          // bound of a valid row number
  uint32_t rows_per_channel;  // 0: in place
};

// Memory of the launch's workers, private to the rank.  Sized by csrc/buffer for the most workers.
struct Scratch {
  uint32_t*
      counts;  // [workers][R + E] by a worker's tokens; later its exclusive prefix over workers
  uint32_t* row_base;         // [R + E] first row of this rank's segment, by rank or by expert
  uint32_t* expert_total;     // [E] over all sources
  uint32_t* rows_sent;        // [blocks][R]
  layout::Segment* segments;  // [blocks][E]
  Destination* destinations;  // [R]
  Owner* owners;              // [R]
  std::byte* worker_bytes;    // [workers][worker_pitch]
  uint64_t worker_pitch;
};

// One per buffer.  Nothing that changes from call to call is a kernel argument.
//
// State:    plain fields are written by the last block of an operation, or by the host while no kernel runs.
// Shared:   the words under "of the operation" are set up by the last block of the operation before;
//           `abort`, `lost*`, `timeout_ns` are stored by host threads at any time.
struct DeviceState {
  uint64_t sequence;        // of the next operation
  uint64_t first_sequence;  // no operation before it can have left poison behind
  uint64_t drain;  // sequence + 1 of an operation whose records have not all been seen; 0: none
  layout::Cause broken;  // not kNone: resync() must come first

  uint64_t timeout_ns;  // atomically
  uint32_t abort;  // atomically: Cause kAborted or kInterrupted; taken by the operation it ends
  uint32_t lost;   // atomically: 1 once any rank is lost; the mask is stored before
  uint32_t lost_mask[layout::kMaxRanks / 32];

  // Of the operation.
  uint64_t deadline_ns;  // 0 until the first block arrives
  uint32_t arrived[2];   // blocks, at each grid phase
  uint64_t placed;       // tag of the operation whose placement is ready
  uint32_t fault_claimed, fault_set;
  uint64_t bad_slot;      // least token * 2^32 + slot with a bad id; ~0: none
  int64_t bad_id;         // the id there
  uint64_t routing_hash;  // of this rank, summed by its workers
  FaultRecord fault;

  // Constant.
  uint32_t rank, num_ranks, num_experts, max_local_experts;
  layout::WindowLayout window_layout;
  const uint32_t* expert_offsets;  // [R + 1]
  const uint32_t* expert_rank;     // [E]
  std::byte* const* windows;       // [R]
  Scratch scratch;
};

}  // namespace ep::kernels
