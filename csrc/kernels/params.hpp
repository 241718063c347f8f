// The kernels' arguments: one struct per kernel.  Everything pointed to outlives the launch.
#pragma once

#include "kernels/config.hpp"
#include "kernels/state.hpp"

namespace ep::kernels {

// A matrix of rows; columns contiguous.
struct Rows {
  const std::byte* data;
  int64_t row_stride;  // bytes
  uint32_t row_bytes;
};

// A matrix of small elements with any strides.
struct Strided {
  const std::byte* data;              // null: not given
  int64_t row_stride, column_stride;  // bytes
  uint32_t num_columns, element_bytes;
};

struct EntryParams {
  DeviceState* state;
  Ticket* ticket;
  uint32_t agreed[layout::kAgreedEnd];  // by RecordWord; [kStatus] is this rank's own status
  const uint32_t* routing_hash;         // [2] in a handle's plan; null: the operation has no handle
  uint32_t needed, available;           // of a refusal
};

struct DispatchParams {
  EntryParams entry;
  layout::OutputShape shape;
  Rows x;
  Strided scales;  // the caller's
  Rows extras[layout::kMaxExtras];
  Strided idx, weights;  // new routing, new weights
  Element weights_element;
  // The handle.  Written where `idx` (`weights`) is given, else read.
  std::byte* handle_idx;  // [T,K], idx_element_bytes each
  float* handle_weights;  // [T,K]
  layout::Route* routes;  // [T,K]
  uint32_t* plan;         // PlanLayout
  uint32_t num_tokens, num_topk, num_columns, idx_element_bytes;
  uint32_t expert_alignment, max_tokens, max_rows;  // max_rows 0: none
  bool replay, exact, drop, global_ids, has_weights;
  uint32_t gap_scale;                    // 32-bit pattern of scales in gap rows
  uint64_t extent_offset, extent_bytes;  // in this rank's window
};

struct Bias {
  Rows rows;
  Element element;
};

// What one output row is the sum of.  Written by one thread of the worker, read by all.
struct Terms {
  uint32_t num_terms;
  const std::byte* rows[layout::kMaxTopk];
  float weights[layout::kMaxTopk];
};

struct CombineParams {
  EntryParams entry;
  Rows x;                // this rank's [N,H'], copied into the extent where `copy` is set
  uint64_t rows_offset;  // in the window: of x, or of the extent that takes its copy
  uint64_t rows_pitch;
  Strided row_weights;          // this rank's [N,K] or [N,1] fp32
  uint64_t row_weights_offset;  // in the window
  bool copy, wants_read_done, has_row_weights;
  const layout::Route* routes;
  const uint32_t* plan;
  Strided weights;  // [T,K] of this rank's tokens
  Element weights_element;
  Bias bias[2];
  uint32_t num_bias;
  std::byte* out;      // [T,H']
  int64_t out_stride;  // bytes
  float* out_weights;  // [T,K]
  int32_t* status;     // [1]
  uint32_t num_tokens, num_topk, num_columns;
};

// A turn that this rank spends without taking part.
struct RefuseParams {
  EntryParams entry;
  bool only_if_aborted;  // nothing happens if an operation has taken the abort already
};

// The end of a buffer: peers' waits end at once; then waits, bounded, for peers that still read this window.
struct CloseParams {
  DeviceState* state;
  Ticket* ticket;
  uint64_t patience_ns;
};

// Copies out of an extent into the caller's memory, behind a dispatch in the same stream.
inline constexpr uint32_t kMaxCopies = 12 + layout::kMaxExtras;
struct CopyOutParams {
  struct Item {
    std::byte* to;
    const std::byte* from;
    uint64_t num_bytes;  // where num_rows is null, else bytes from row to row
    uint64_t padding;    // of these behind a row; what follows the last row is not ours to write
    const uint32_t* num_rows;  // device memory
  } items[kMaxCopies];
  uint32_t num_items;
};

}  // namespace ep::kernels
