// EPBuffer::dispatch: arguments, memory, launch, and the outputs' place.
#include <algorithm>

#include "buffer/buffer_impl.hpp"
#include "buffer/caller_outputs.hpp"
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

// One dispatch, from its arguments to its result.
struct BufferImpl::Dispatching {
  const DispatchArgs& args;
  DispatchOptions options{};
  Launch launch{};
  CallPtr call{};
  Extent extent{};
  std::shared_ptr<Block> payload{}, metadata{};  // the extent, once its size is known
  Handle handle{};
  uint64_t num_rows = 0;            // N
  buffer::GivenOutputs given{};     // of args.out
  std::optional<bool> in_window{};  // the policy for what is not given
  std::shared_ptr<void> caller_payload{},
      caller_metadata{};  // from the allocator; null: not needed

  const uint32_t* plan() const {
    return static_cast<const uint32_t*>(handle.tensors()[Handle::kPlan].data);
  }
  OutputLayout layout() const { return OutputLayout::make(options.shape, num_rows); }
};

namespace {

OutputLayout worst_layout(const buffer::Settings& s, const DispatchOptions& o) {
  return OutputLayout::make(o.shape, buffer::fixed_rows(s, o, s.rank));
}

}  // namespace

void BufferImpl::make_handle(Dispatching& d) const {
  const DispatchOptions& o = d.options;
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
    header = d.args.handle->header();
    std::copy_n(d.args.handle->tensors().begin(), tensors.size(), tensors.begin());
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
  d.handle = HandleAccess::make(header, tensors);
}

kernels::DispatchParams BufferImpl::dispatch_params(const Dispatching& d) {
  const DispatchArgs& args = d.args;
  const DispatchOptions& o = d.options;
  const std::span<const Tensor> handle = d.handle.tensors();
  kernels::DispatchParams p{};
  p.entry = entry_params(d.call);
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
  p.extent_offset = d.extent.offset;
  p.extent_bytes = d.extent.num_bytes;
  return p;
}

bool BufferImpl::wants_window(const DispatchOptions& o) const {
  if (o.outputs != Outputs::kAuto) return o.outputs == Outputs::kWindow;
  // One more dispatch of this shape at 1.5x balanced load: B * K routes per rank.
  const uint64_t rows = uint64_t{o.max_tokens} * o.num_topk * 3 / 2;
  return core_->arena->largest_free() >= OutputLayout::make(o.shape, rows).num_bytes;
}

// The call has failed with its extent in hand.  Rows may be on their way into it unless it ended at entry.
void BufferImpl::give_up_extent(const Dispatching& d) {
  if (d.call->cause() != Cause::kNone && d.call->ticket.fault.poisons == 0) {
    core_->arena->give_back(d.extent);
    return;
  }
  const uint64_t worst = worst_layout(settings(), d.options).num_bytes;
  const Extent kept = core_->arena->trim(d.extent, worst);
  const std::shared_ptr<Block> block = core_->arena->make_block(kept, BlockUse::kOther);
  block->record_stream(d.launch.stream.impl());
  block->set_usable_from(d.call->ticket.sequence + 2);
}

void BufferImpl::choose_place(Dispatching& d) const {
  d.in_window = (d.given.payload && d.given.metadata) || wants_window(d.options);
  if (*d.in_window) return;
  const OutputLayout at = d.layout();
  if (!d.given.payload) d.caller_payload = buffer::allocate(*core_, at.metadata_offset);
  if (!d.given.metadata)
    d.caller_metadata = buffer::allocate(*core_, at.num_bytes - at.metadata_offset);
}

// The extent, and where the size is known what the allocator must give.
void BufferImpl::take_memory(Dispatching& d) const {
  d.given = buffer::check_caller_outputs(settings(), d.options, d.args);
  if (d.options.learns_size()) {
    d.extent = take_for(d.launch, worst_layout(settings(), d.options).num_bytes, true).extent;
    return;
  }
  d.num_rows = buffer::rows_before(settings(), d.options, d.args);
  d.extent = take_for(d.launch, d.layout().num_bytes, false).extent;
  try {
    choose_place(d);
  } catch (...) {
    core_->arena->give_back(d.extent);
    throw;
  }
}

// Splits the extent into its two blocks.
void BufferImpl::split_extent(Dispatching& d) const {
  const uint64_t split = std::min(d.layout().metadata_offset, d.extent.num_bytes);
  d.payload = core_->arena->make_block({d.extent.offset, split}, BlockUse::kRows);
  d.metadata = core_->arena->make_block({d.extent.offset + split, d.extent.num_bytes - split},
                                        BlockUse::kOther);
  for (const auto& block : {d.payload, d.metadata}) {
    block->record_stream(d.launch.stream.impl());
    d.call->blocks.push_back(block);
  }
}

// Places what is not given in the allocator's memory.
void BufferImpl::place_by_policy(const Dispatching& d,
                                 kernels::CopyOutParams& copies,
                                 DispatchResult& out) const {
  const OutputLayout at = d.layout();
  auto* const payload = static_cast<std::byte*>(d.caller_payload.get());
  auto* const metadata = static_cast<std::byte*>(d.caller_metadata.get());
  DispatchTensors made;
  buffer::OutputViews(
      d.options, d.num_rows, {payload, d.caller_payload},
      {metadata == nullptr ? nullptr : metadata - at.metadata_offset, d.caller_metadata})
      .fill(settings(), d.args, made);
  buffer::take_policy_outputs(made, d.args.out, d.plan() + layout::PlanLayout::kNumRows, copies,
                              out);
  if (metadata != nullptr) {
    copies.items[copies.num_items++] = {
        metadata, core_->arena->window_base() + d.extent.offset + at.metadata_offset,
        at.num_bytes - at.metadata_offset, 0, nullptr};
  }
  d.call->keep(d.caller_payload);
  d.call->keep(d.caller_metadata);
  out.window_blocks = {};
}

// Places what is given in the caller's tensors, and the rest where the policy says.
void BufferImpl::place_outputs(Dispatching& d, DispatchResult& out) {
  split_extent(d);
  if (!d.in_window) choose_place(d);  // before `out` is touched: it may throw
  std::byte* const base = core_->arena->window_base() + d.extent.offset;
  buffer::OutputViews(d.options, d.num_rows, {base, d.payload}, {base, d.metadata})
      .fill(settings(), d.args, out);
  out.window_blocks = {d.payload, d.metadata};
  kernels::CopyOutParams copies{};
  buffer::take_caller_outputs(d.args.out, d.plan() + layout::PlanLayout::kNumRows, copies, out);
  buffer::for_each_defined(d.args.out, [&](const Tensor& t) { d.call->keep(t); });
  if (!*d.in_window) place_by_policy(d, copies, out);
  (*d.in_window ? core_->num_window_outputs : core_->num_caller_outputs).fetch_add(1);
  if (copies.num_items == 0) return;
  Launch copy = launch_on(d.launch.stream);
  copy.num_blocks = d.launch.num_blocks;
  queue_kernel(copy, {.op = kernels::KernelOp::kCopyOut}, copies);
}

// What the exact operation has told the host by now.
void BufferImpl::tell_counts(const Dispatching& d, DispatchResult& out) const {
  if (!d.options.exact) {
    out.num_rows.reset();
    out.tokens_per_expert.reset();
    return;
  }
  out.num_rows = d.num_rows;
  const uint32_t* const counts =
      d.plan() + layout::PlanLayout::make(settings().num_ranks, settings().max_local_experts)
                     .tokens_per_expert;
  if (!out.tokens_per_expert) out.tokens_per_expert.emplace();
  out.tokens_per_expert->assign(counts, counts + settings().num_local_experts());
}

// The peers are past their records when the allocator turns out to have no room: their next call ends
// instead; this one, still on its way, would take the abort.
void BufferImpl::end_without_room(const Dispatching& d) {
  queue_end(d.launch, d.call).impl()->wait(device::kNoDeadline, {});
  d.call->mark_raised();
  if (core_->needs_resync) return;
  set_abort(Cause::kNoHostMemory);
  if (const CallPtr spent = spend_abort()) spent->mark_raised();
}

// Waits until the host knows N; throws where the operation has failed by then.
void BufferImpl::learn_size(Dispatching& d) {
  const bool interrupted = !wait_counts(d.call);
  if (interrupted || (d.call->done() && d.call->cause() != Cause::kNone)) {
    give_up_extent(d);
    const Event event = queue_end(d.launch, d.call);
    if (interrupted) throw_interrupted(d.call);
    complete(d.call, event);
  }
  d.num_rows = d.call->ticket.num_rows;
  d.extent = core_->arena->trim(d.extent, d.layout().num_bytes);
}

void BufferImpl::dispatch(const DispatchArgs& args, DispatchResult& out) {
  const auto turn = enter();
  Dispatching d{args};
  prepare_or_refuse(OpKind::kDispatch, [&] {
    d.options = buffer::resolve_dispatch(settings(), core_->buffer_id, args);
    d.launch = where(args.stream, args.wait_for, args.num_sms);
    make_handle(d);
    take_memory(d);
  });
  d.call = make_call(OpKind::kDispatch);
  d.call->defers_capacity = !d.options.exact;
  for (const Tensor* t : {&args.x, &args.topk_idx, &args.topk_weights, &args.scales})
    d.call->keep(*t);
  for (const Tensor& t : args.extras)
    d.call->keep(t);
  for (const Tensor& t : d.handle.tensors())
    d.call->keep(t);
  queue_kernel(d.launch, {.op = kernels::KernelOp::kDispatch, .dispatch = d.options.config},
               dispatch_params(d));
  const Event inputs_done(d.launch.stream.impl()->record());
  if (d.options.learns_size()) learn_size(d);
  try {
    place_outputs(d, out);
  } catch (...) {
    // Whatever a caller's allocator throws: the kernel still has the call.
    end_without_room(d);
    throw;
  }
  tell_counts(d, out);
  HandleAccess::header(d.handle).num_rows_total = d.num_rows;
  out.handle = std::move(d.handle);
  out.inputs_done = inputs_done;
  out.event = queue_end(d.launch, d.call);
  if (!args.async_op) complete(d.call, out.event);
}

DispatchTensors BufferImpl::output_spec(const DispatchArgs& args) const {
  require_open();
  DispatchArgs shapes = args;  // nothing is read: what has no data yet need not have any
  std::byte nothing{};
  const auto lend = [&](Tensor& t) {
    if (t.data == nullptr) t.data = &nothing;
  };
  for (Tensor* t : {&shapes.x, &shapes.topk_idx, &shapes.topk_weights, &shapes.scales})
    lend(*t);
  for (Tensor& t : shapes.extras)
    lend(t);
  const DispatchOptions o = buffer::resolve_dispatch(settings(), core_->buffer_id, shapes);
  DispatchTensors spec;
  buffer::OutputViews(o, buffer::rows_before(settings(), o, shapes), {}, {})
      .fill(settings(), shapes, spec);
  return spec;
}

void DispatchResult::record_stream(const Stream& stream) const {
  if (!stream.defined()) return;
  for (const std::weak_ptr<void>& weak : window_blocks) {
    if (const auto block = std::static_pointer_cast<Block>(weak.lock()))
      block->record_stream(stream.impl());
  }
}

}  // namespace ep
