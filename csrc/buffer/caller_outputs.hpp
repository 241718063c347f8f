// Results in memory that the caller brings: DispatchArgs::out.
#pragma once

#include "buffer/dispatch_options.hpp"
#include "common/function_ref.hpp"
#include "ep/buffer.hpp"
#include "kernels/params.hpp"

namespace ep::buffer {

// What of a dispatch's result the caller has memory for.
struct GivenOutputs {
  bool payload = false;   // all of x, scales, extras
  bool metadata = false;  // all of the others
};

// Throws InvalidArgument where a tensor of args.out is not what the dispatch would make (its rows are too
// few, its dtype or strides others).
GivenOutputs check_caller_outputs(const Settings& s,
                                  const DispatchOptions& options,
                                  const DispatchArgs& args);

void for_each_defined(const DispatchTensors& tensors, FunctionRef<void(const Tensor&)> f);

// Queues into `copies` what `out` defines: from where `result` has it, a view of the N rows; `result` then
// views `out`.  `num_rows` is what the device knows to be used: rows of the payload behind it are not copied.
void take_caller_outputs(const DispatchTensors& out,
                         const uint32_t* num_rows,
                         kernels::CopyOutParams& copies,
                         DispatchTensors& result);

// The rest, to `made` in the allocator's memory: the payload is queued; the metadata is one copy of the
// caller's, since its small arrays do not begin where kernels can copy to.
void take_policy_outputs(const DispatchTensors& made,
                         const DispatchTensors& out,
                         const uint32_t* num_rows,
                         kernels::CopyOutParams& copies,
                         DispatchTensors& result);

}  // namespace ep::buffer
