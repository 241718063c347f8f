// A dispatch's arguments, checked and completed: pure functions of the settings and the call.
#pragma once

#include "buffer/settings.hpp"
#include "ep/buffer.hpp"
#include "kernels/config.hpp"
#include "kernels/params.hpp"
#include "layout/output_layout.hpp"

namespace ep::buffer {

struct DispatchOptions {
  bool replay = false, opaque = false;
  bool exact = true, drop = false, global_ids = false;
  bool has_weights = false, new_weights = false;
  Layout layout = Layout::kRank;
  Quant quant = Quant::kNone;
  Outputs outputs = Outputs::kAuto;
  uint32_t expert_alignment = 1, max_tokens = 0, max_rows = 0;
  uint32_t num_tokens = 0, num_topk = 0, num_columns = 0;      // T, K, H
  DType idx_dtype = DType::kInt64, x_dtype{}, scales_dtype{};  // of the outputs
  kernels::DispatchConfig config{};
  layout::OutputShape shape{};

  // The host learns the output's size from the counts; else it knows it before.
  bool learns_size() const { return exact && !replay; }
  bool by_expert() const { return layout == Layout::kExpert; }
};

// Throws InvalidArgument, or CapacityError where T is more than was declared.
DispatchOptions resolve_dispatch(const Settings& settings,
                                 uint64_t buffer_id,
                                 const DispatchArgs& args);

// Rows of a fixed-size output on `rank`.
uint64_t fixed_rows(const Settings& settings, const DispatchOptions& options, uint32_t rank);

// N on this rank before the operation: its bound where only the operation will tell.
uint64_t rows_before(const Settings& settings,
                     const DispatchOptions& options,
                     const DispatchArgs& args);

// The agreed words of the entry record, but for kStatus and the routing hash.
void fill_agreed(const DispatchOptions& options,
                 const DispatchArgs& args,
                 uint32_t (&agreed)[layout::kAgreedEnd]);

// Is `handle` this buffer's, whole, and of the right shapes?
void check_handle(const Settings& settings, uint64_t buffer_id, const Handle& handle);

}  // namespace ep::buffer
