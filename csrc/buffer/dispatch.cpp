// EPBuffer::dispatch: arguments, memory, launch, and the outputs' place.
#include <algorithm>

#include "buffer/buffer_impl.hpp"
#include "buffer/checks.hpp"
#include "buffer/output_views.hpp"
#include "common/math.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "layout/plan.hpp"

namespace ep {

using buffer::Block;
using buffer::BlockUse;
using buffer::Call;
using buffer::DispatchOptions;
using buffer::Extent;
using layout::Cause;
using layout::OpKind;
using layout::OutputLayout;

// Everything a dispatch owns between its launch and its result.
struct BufferImpl::DispatchMemory {
  Extent extent{};
  Handle handle{};
  std::shared_ptr<void> caller_payload{}, caller_metadata{};
  std::shared_ptr<void> payload{},
      metadata{};  // what keeps the outputs alive: blocks, or the caller's memory
  std::byte* payload_base = nullptr;  // of OutputLayout's offsets, in that memory
  std::byte* metadata_base = nullptr;
  uint64_t num_rows = 0;                        // N
  std::array<std::weak_ptr<void>, 2> blocks{};  // the extent's, where the outputs are views of it
};

namespace {

OutputLayout worst_layout(const buffer::Settings& s, const DispatchOptions& o) {
  return OutputLayout::make(o.shape, buffer::fixed_rows(s, o, s.rank));
}

}  // namespace

void BufferImpl::make_handle(const DispatchArgs& args,
                             const DispatchOptions& o,
                             DispatchMemory& memory) const {
  const auto plan = layout::PlanLayout::make(settings().num_ranks, settings().max_local_experts);
  const uint64_t slots = uint64_t{o.num_tokens} * o.num_topk;
  const uint64_t idx_bytes = align_up(slots * num_bytes(o.idx_dtype), 64);
  const uint64_t weights_bytes = align_up(o.has_weights ? slots * 4 : 0, 64);
  const uint64_t routes_bytes = align_up(slots * sizeof(layout::Route), 64);
  const int64_t tokens = o.num_tokens, topk = o.num_topk;
  Handle::Header header;
  std::array<Tensor, Handle::kNumTensors> tensors;
  const auto weights_in = [&](std::byte* at, std::shared_ptr<void> owner) {
    if (o.has_weights)
      tensors[Handle::kWeights] =
          Tensor::contiguous(at, DType::kFloat32, {tokens, topk}, std::move(owner));
  };
  if (o.replay) {
    header = args.handle->header();
    std::copy_n(args.handle->tensors().begin(), tensors.size(), tensors.begin());
    if (o.new_weights) {  // a snapshot of their own: the old handle keeps its weights
      const std::shared_ptr<void> owner = buffer::allocate(*core_, weights_bytes);
      weights_in(static_cast<std::byte*>(owner.get()), owner);
    }
  } else {
    const std::shared_ptr<void> owner = buffer::allocate(
        *core_, idx_bytes + weights_bytes + routes_bytes + uint64_t{plan.num_words} * 4);
    std::byte* at = static_cast<std::byte*>(owner.get());
    tensors[Handle::kIdx] = Tensor::contiguous(at, o.idx_dtype, {tokens, topk}, owner);
    weights_in(at += idx_bytes, owner);
    tensors[Handle::kRoutes] =
        Tensor::contiguous(at += weights_bytes, DType::kUInt32, {tokens, topk, 2}, owner);
    tensors[Handle::kPlan] =
        Tensor::contiguous(at + routes_bytes, DType::kUInt32, {int64_t{plan.num_words}}, owner);
    static_cast<uint32_t*>(tensors[Handle::kPlan].data)[layout::PlanLayout::kNumRows] =
        0;  // until the kernel says
  }
  header.buffer_id = core_->buffer_id;
  header.rank = static_cast<uint16_t>(settings().rank);
  header.num_tokens = o.num_tokens;
  header.num_topk = o.num_topk;
  header.expert_alignment = o.expert_alignment;
  header.max_tokens = o.max_tokens;
  header.max_rows = o.max_rows;
  header.layout = o.layout;
  header.exact = o.exact;
  header.drop = o.drop;
  header.idx_is_64 = o.idx_dtype == DType::kInt64;
  header.has_weights = o.has_weights;
  header.global_ids = o.global_ids;
  memory.handle = HandleAccess::make(header, tensors);
}

kernels::DispatchParams BufferImpl::dispatch_params(const DispatchArgs& args,
                                                    const DispatchOptions& o,
                                                    const DispatchMemory& memory,
                                                    const CallPtr& call) {
  const std::span<const Tensor> handle = memory.handle.tensors();
  kernels::DispatchParams p{};
  p.entry = entry_params(call);
  buffer::fill_agreed(o, args, p.entry.agreed);
  p.plan = static_cast<uint32_t*>(handle[Handle::kPlan].data);
  if (o.replay) p.entry.routing_hash = p.plan + layout::PlanLayout::kHashLow;
  p.shape = o.shape;
  p.x = buffer::rows_view(args.x);
  if (args.scales.defined()) p.scales = buffer::strided_view(args.scales);
  for (uint32_t i = 0; i < args.extras.size(); ++i)
    p.extras[i] = buffer::rows_view(args.extras[i]);
  if (!o.replay) p.idx = buffer::strided_view(args.topk_idx);
  if (o.new_weights) {
    p.weights = buffer::strided_view(args.topk_weights);
    p.weights_element = buffer::element_of(args.topk_weights.dtype, "topk_weights");
  }
  p.handle_idx = static_cast<std::byte*>(handle[Handle::kIdx].data);
  p.handle_weights = static_cast<float*>(handle[Handle::kWeights].data);
  p.routes = static_cast<layout::Route*>(handle[Handle::kRoutes].data);
  p.num_tokens = o.num_tokens;
  p.num_topk = o.num_topk;
  p.num_columns = o.num_columns;
  p.idx_element_bytes = num_bytes(o.idx_dtype);
  p.expert_alignment = o.expert_alignment;
  p.max_tokens = o.max_tokens;
  p.max_rows = o.max_rows;
  p.replay = o.replay;
  p.exact = o.exact;
  p.drop = o.drop;
  p.global_ids = o.global_ids;
  p.has_weights = o.has_weights;
  if (o.quant == Quant::kFp8Block128Ue8m0)
    p.gap_scale = 0x7F7F7F7Fu;
  else if (o.quant != Quant::kNone)
    p.gap_scale = 0x3F800000u;  // 1.0f
  p.extent_offset = memory.extent.offset;
  p.extent_bytes = memory.extent.num_bytes;
  return p;
}

bool BufferImpl::wants_window(const DispatchOptions& o) const {
  if (o.outputs != Outputs::kAuto) return o.outputs == Outputs::kWindow;
  // One more dispatch of this shape at 1.5x balanced load: B * K routes per rank.
  const uint64_t rows = uint64_t{o.max_tokens} * o.num_topk * 3 / 2;
  return core_->arena->largest_free() >= OutputLayout::make(o.shape, rows).num_bytes;
}

// The call has failed with its extent in hand.  Rows may be on their way into it unless it ended at entry.
void BufferImpl::give_up_extent(const DispatchOptions& o,
                                const DispatchMemory& memory,
                                const Launch& launch,
                                const CallPtr& call) {
  if (call->cause() != Cause::kNone && call->ticket.fault.poisons == 0) {
    core_->arena->give_back(memory.extent);
    return;
  }
  const Extent kept = core_->arena->trim(memory.extent, worst_layout(settings(), o).num_bytes);
  const std::shared_ptr<Block> block = core_->arena->make_block(kept, BlockUse::kOther);
  block->record_stream(launch.stream.impl());
  block->set_usable_from(call->ticket.sequence + 2);
}

// Splits the extent into its two blocks, and copies them to the caller's memory where the policy says so.
void BufferImpl::place_outputs(const DispatchOptions& o,
                               DispatchMemory& memory,
                               const Launch& launch,
                               const CallPtr& call) {
  const OutputLayout at = OutputLayout::make(o.shape, memory.num_rows);
  const Extent extent = core_->arena->trim(memory.extent, at.num_bytes);
  const uint64_t split = std::min(at.metadata_offset, extent.num_bytes);
  const auto payload = core_->arena->make_block({extent.offset, split}, BlockUse::kRows);
  const auto metadata =
      core_->arena->make_block({extent.offset + split, extent.num_bytes - split}, BlockUse::kOther);
  for (const auto& block : {payload, metadata}) {
    block->record_stream(launch.stream.impl());
    call->blocks.push_back(block);
  }
  memory.blocks = {payload, metadata};
  memory.payload_base = memory.metadata_base = core_->arena->window_base() + extent.offset;
  memory.payload = payload;
  memory.metadata = metadata;
  if (!memory.caller_payload && wants_window(o)) {
    core_->num_window_outputs.fetch_add(1);
    return;
  }
  copy_outputs(o, memory, launch, call);
  core_->num_caller_outputs.fetch_add(1);
}

void BufferImpl::reserve_caller_memory(const DispatchOptions& o, DispatchMemory& memory) const {
  const OutputLayout at = OutputLayout::make(o.shape, memory.num_rows);
  memory.caller_payload = buffer::allocate(*core_, at.metadata_offset);
  memory.caller_metadata = buffer::allocate(*core_, at.num_bytes - at.metadata_offset);
}

void BufferImpl::copy_outputs(const DispatchOptions& o,
                              DispatchMemory& memory,
                              const Launch& launch,
                              const CallPtr& call) {
  const OutputLayout at = OutputLayout::make(o.shape, memory.num_rows);
  if (!memory.caller_payload) reserve_caller_memory(o, memory);
  const std::shared_ptr<void> payload = memory.caller_payload, metadata = memory.caller_metadata;
  std::byte* const to_payload = static_cast<std::byte*>(payload.get());
  std::byte* const to_metadata = static_cast<std::byte*>(metadata.get()) - at.metadata_offset;
  const std::byte* const from = memory.payload_base;
  const auto* num_rows = static_cast<const uint32_t*>(memory.handle.tensors()[Handle::kPlan].data) +
                         layout::PlanLayout::kNumRows;
  kernels::CopyOutParams p{};
  const auto add_rows = [&](uint64_t offset,
                            uint32_t row_bytes) {  // the used rows: dead ones are unspecified
    if (row_bytes != 0)
      p.items[p.num_items++] = {to_payload + offset, from + offset, layout::row_pitch(row_bytes),
                                num_rows};
  };
  add_rows(at.x_offset, o.shape.x_bytes);
  add_rows(at.scales_offset, o.shape.scales_bytes);
  for (uint32_t i = 0; i < o.shape.num_extras; ++i)
    add_rows(at.extra_offset[i], o.shape.extra_bytes[i]);
  p.items[p.num_items++] = {to_metadata + at.metadata_offset, from + at.metadata_offset,
                            at.num_bytes - at.metadata_offset, nullptr};
  Launch copy{launch.stream, launch.num_blocks};
  queue_kernel(copy, {.op = kernels::KernelOp::kCopyOut}, p);
  call->keep.push_back(payload);
  call->keep.push_back(metadata);
  memory.payload = payload;
  memory.metadata = metadata;
  memory.payload_base = to_payload;
  memory.metadata_base = to_metadata;
  memory.blocks = {};
}

// The extent, and where sizes and the policy allow to know it, the caller's memory.
void BufferImpl::take_memory(const DispatchArgs& args,
                             const DispatchOptions& o,
                             Launch& launch,
                             DispatchMemory& memory) const {
  if (o.learns_size()) {
    memory.extent = take_for(launch, worst_layout(settings(), o).num_bytes, true).extent;
    return;
  }
  memory.num_rows = o.exact ? args.handle->header().num_rows_total
                            : buffer::fixed_rows(settings(), o, settings().rank);
  memory.extent =
      take_for(launch, OutputLayout::make(o.shape, memory.num_rows).num_bytes, false).extent;
  if (wants_window(o)) return;
  try {
    reserve_caller_memory(o, memory);
  } catch (...) {
    core_->arena->give_back(memory.extent);
    throw;
  }
}

DispatchResult BufferImpl::dispatch(const DispatchArgs& args) {
  const auto turn = enter();
  DispatchOptions options;
  DispatchMemory memory;
  Launch launch;
  prepare_or_refuse(OpKind::kDispatch, [&] {
    options = buffer::resolve_dispatch(settings(), core_->buffer_id, args);
    launch = where(args.stream, args.wait_for, args.num_sms);
    make_handle(args, options, memory);
    take_memory(args, options, launch, memory);
  });
  const CallPtr call = std::make_shared<Call>(core_, OpKind::kDispatch);
  call->defers_capacity = !options.exact;
  for (const Tensor* t : {&args.x, &args.topk_idx, &args.topk_weights, &args.scales})
    call->keep.push_back(t->owner);
  for (const Tensor& t : args.extras)
    call->keep.push_back(t.owner);
  for (const Tensor& t : memory.handle.tensors())
    call->keep.push_back(t.owner);
  queue_kernel(launch, {.op = kernels::KernelOp::kDispatch, .dispatch = options.config},
               dispatch_params(args, options, memory, call));
  DispatchResult out;
  out.inputs_done = Event(launch.stream.impl()->record());
  if (options.learns_size()) {
    const bool interrupted = !wait_counts(call);
    if (interrupted || (call->done() && call->cause() != Cause::kNone)) {
      give_up_extent(options, memory, launch, call);
      const Event event = queue_end(launch, call);
      if (interrupted) throw_interrupted(call);
      complete(call, event);
    }
    memory.num_rows = call->ticket.num_rows;
  }
  if (options.exact) {
    out.num_rows = memory.num_rows;
    const auto plan = layout::PlanLayout::make(settings().num_ranks, settings().max_local_experts);
    const auto* counts = static_cast<const uint32_t*>(memory.handle.tensors()[Handle::kPlan].data) +
                         plan.tokens_per_expert;
    out.tokens_per_expert.emplace(counts, counts + settings().num_local_experts());
  }
  try {
    place_outputs(options, memory, launch, call);
  } catch (const buffer::
               NoHostMemory&) {  // the peers are past their records: their next call ends instead
    queue_end(launch, call)
        .impl()
        ->wait(device::kNoDeadline, {});  // or this one, on its way, would take the abort
    call->mark_raised();
    if (core_->needs_resync) throw;
    set_abort(Cause::kNoHostMemory);
    if (const CallPtr spent = spend_abort()) spent->mark_raised();
    throw;
  }
  HandleAccess::header(memory.handle).num_rows_total = memory.num_rows;
  out.handle = memory.handle;
  out.window_blocks = memory.blocks;
  buffer::OutputViews(options, memory.num_rows, memory.payload_base, memory.metadata_base,
                      memory.payload, memory.metadata)
      .fill(settings(), args, out);
  out.event = queue_end(launch, call);
  if (!args.async_op) complete(call, out.event);
  return out;
}

void DispatchResult::record_stream(const Stream& stream) const {
  if (!stream.defined()) return;
  for (const std::weak_ptr<void>& weak : window_blocks) {
    if (const auto block = std::static_pointer_cast<Block>(weak.lock()))
      block->record_stream(stream.impl());
  }
}

}  // namespace ep
