// EPBuffer::combine and expert_output.
#include <algorithm>

#include "buffer/buffer_impl.hpp"
#include "buffer/checks.hpp"
#include "buffer/reserved.hpp"
#include "common/math.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "layout/plan.hpp"

namespace ep {

using buffer::Block;
using buffer::BlockUse;
using buffer::Call;
using layout::OpKind;

// What a combine owns, and where this rank's rows are for its peers.
struct BufferImpl::CombineMemory {
  uint64_t num_rows = 0;  // N
  uint32_t row_bytes = 0;
  bool by_expert = false;
  DType out_dtype{};
  bool copy = false, wants_read_done = false;
  uint64_t rows_offset = 0, rows_pitch = 0, row_weights_offset = 0;  // in the window
  std::shared_ptr<Block> block{};  // the copy of rows and row_weights
  CombineResult result{};
};

namespace {

void check_output_row(const buffer::Settings& s, const char* name, uint64_t columns, DType dtype) {
  const uint64_t bytes = columns * num_bytes(dtype);
  if (columns == 0 || bytes % layout::kRowAlignBytes != 0) {
    throw InvalidArgument(
        str(name, " has H'=", columns, ", ", bytes, " bytes per row; H' must be a multiple of ",
            layout::kRowAlignBytes / num_bytes(dtype), " (", layout::kRowAlignBytes, " bytes)"));
  }
  if (bytes > s.output_bytes) {
    throw InvalidArgument(str("a row of ", name, " takes ", bytes,
                              " bytes; the buffer was made with output_bytes=", s.output_bytes));
  }
}

}  // namespace

void BufferImpl::check_combine(const CombineArgs& args, CombineMemory& memory) const {
  buffer::check_reserved(args);
  if (args.handle == nullptr) throw InvalidArgument("handle is required");
  buffer::check_handle(settings(), core_->buffer_id, *args.handle);
  const Handle::Header& h = args.handle->header();
  memory.num_rows = h.num_rows_total;
  memory.by_expert = h.layout == Layout::kExpert;
  const auto num_rows = static_cast<int64_t>(h.num_rows_total);
  buffer::check_dims(args.x, "x", 2);
  buffer::element_of(args.x.dtype, "x");
  if (args.x.shape[0] != num_rows) {
    throw InvalidArgument(
        str("x has ", args.x.shape[0], " rows; the handle's dispatch gave ", num_rows));
  }
  buffer::check_unit_column_stride(args.x, "x");
  check_output_row(settings(), "x", static_cast<uint64_t>(args.x.shape[1]), args.x.dtype);
  memory.row_bytes = static_cast<uint32_t>(args.x.shape[1]) * num_bytes(args.x.dtype);
  if (args.weights.defined()) {
    if (!memory.by_expert) {
      throw InvalidArgument(
          "weights: with layout \"rank\" the expert code multiplies (a row sums its local "
          "experts); "
          "combine takes weights with layout \"expert\" only");
    }
    buffer::check_shape(args.weights, "weights", h.num_tokens, h.num_topk);
    buffer::element_of(args.weights.dtype, "weights");
  }
  if (args.row_weights.defined()) {
    buffer::check_given(args.row_weights, "row_weights");
    if (args.row_weights.dtype != DType::kFloat32) {
      throw InvalidArgument(
          str("row_weights has dtype ", name_of(args.row_weights.dtype), "; float32 is needed"));
    }
    if (!memory.by_expert)
      buffer::check_shape(args.row_weights, "row_weights", num_rows, h.num_topk);
    else if (args.row_weights.num_dims != 1 || args.row_weights.shape[0] != num_rows) {
      throw InvalidArgument(str("row_weights has shape ", buffer::shape_text(args.row_weights),
                                "; [", num_rows, "] is needed"));
    }
  }
  if (args.bias.size() > 2)
    throw InvalidArgument(str(args.bias.size(), " biases; at most 2 are possible"));
  for (const Tensor& bias : args.bias) {
    buffer::check_shape(bias, "bias", h.num_tokens, args.x.shape[1]);
    buffer::check_unit_column_stride(bias, "bias");
    buffer::element_of(bias.dtype, "bias");
  }
  memory.out_dtype = args.out_dtype.value_or(args.out.defined() ? args.out.dtype : args.x.dtype);
  buffer::element_of(memory.out_dtype, "out_dtype");
  if (args.out.defined()) {
    buffer::check_shape(args.out, "out", h.num_tokens, args.x.shape[1]);
    buffer::check_unit_column_stride(args.out, "out");
    if (args.out.dtype != memory.out_dtype) {
      throw InvalidArgument(str("out has dtype ", name_of(args.out.dtype), ", out_dtype is ",
                                name_of(memory.out_dtype)));
    }
  }
}

// In place where x is the window's own, else into an extent.
void BufferImpl::place_rows(const CombineArgs& args, Launch& launch, CombineMemory& memory) {
  const uint64_t pitch = static_cast<uint64_t>(args.x.strides[0]) * num_bytes(args.x.dtype);
  const std::shared_ptr<Block> home = core_->arena->find(args.x.data);
  const bool in_place = home && home->use() != BlockUse::kOther && args.x.strides[0] > 0 &&
                        pitch % layout::kRowAlignBytes == 0 && pitch >= memory.row_bytes &&
                        pitch < (uint64_t{1} << 32) && memory.num_rows != 0 &&
                        (memory.num_rows - 1) * pitch + memory.row_bytes <= home->num_bytes();
  memory.copy = !in_place && memory.num_rows != 0;
  memory.rows_pitch = in_place ? pitch : layout::row_pitch(memory.row_bytes);
  if (in_place) {
    memory.rows_offset = home->offset();
    memory.wants_read_done = home->use() == BlockUse::kRows;
    if (home->use() == BlockUse::kExpertOutput) home->set_usable_from(next_sequence_ + 2);
  }
  const uint64_t rows_bytes =
      memory.copy ? align_up(memory.num_rows * memory.rows_pitch, layout::kArenaAlignBytes) : 0;
  const uint64_t weight_bytes =
      args.row_weights.defined() ? static_cast<uint64_t>(args.row_weights.num_elements()) * 4 : 0;
  if (rows_bytes + weight_bytes == 0) return;
  const buffer::Grant grant = take_for(launch, rows_bytes + weight_bytes, false);
  memory.block = core_->arena->make_block(grant.extent, BlockUse::kOther);
  memory.block->record_stream(launch.stream.impl());
  memory.block->set_usable_from(next_sequence_ + 2);
  if (memory.copy) memory.rows_offset = grant.extent.offset;
  memory.row_weights_offset = grant.extent.offset + rows_bytes;
}

void BufferImpl::make_result(const CombineArgs& args, CombineMemory& memory) const {
  const Handle::Header& h = args.handle->header();
  const int64_t tokens = h.num_tokens, columns = args.x.shape[1];
  const uint64_t out_bytes =
      args.out.defined()
          ? 0
          : align_up(static_cast<uint64_t>(tokens * columns) * num_bytes(memory.out_dtype), 64);
  const uint64_t weight_bytes =
      args.row_weights.defined() ? align_up(uint64_t{h.num_tokens} * h.num_topk * 4, 64) : 0;
  const std::shared_ptr<void> owner =
      buffer::allocate(*core_, out_bytes + weight_bytes + sizeof(int32_t));
  std::byte* at = static_cast<std::byte*>(owner.get());
  memory.result.x = args.out.defined()
                        ? args.out
                        : Tensor::contiguous(at, memory.out_dtype, {tokens, columns}, owner);
  at += out_bytes;
  if (args.row_weights.defined()) {
    memory.result.topk_weights =
        Tensor::contiguous(at, DType::kFloat32, {tokens, h.num_topk}, owner);
  }
  memory.result.status = Tensor::contiguous(at + weight_bytes, DType::kInt32, {1}, owner);
}

kernels::CombineParams BufferImpl::combine_params(const CombineArgs& args,
                                                  const CombineMemory& memory,
                                                  const CallPtr& call) {
  const Handle::Header& h = args.handle->header();
  const std::span<const Tensor> handle = args.handle->tensors();
  kernels::CombineParams p{};
  p.entry = entry_params(call);
  p.plan = static_cast<const uint32_t*>(handle[Handle::kPlan].data);
  p.entry.routing_hash = p.plan + layout::PlanLayout::kHashLow;
  p.entry.agreed[layout::kKind] = static_cast<uint32_t>(OpKind::kCombine);
  p.entry.agreed[layout::kRowLayout] = static_cast<uint32_t>(h.layout);
  p.entry.agreed[layout::kTopk] = h.num_topk;
  p.entry.agreed[layout::kXDType] = static_cast<uint32_t>(args.x.dtype) + 1;
  p.entry.agreed[layout::kXBytes] = memory.row_bytes;
  p.entry.agreed[layout::kHasRowWeights] = args.row_weights.defined() ? 1 : 0;
  p.x = buffer::rows_view(args.x);
  p.rows_offset = memory.rows_offset;
  p.rows_pitch = memory.rows_pitch;
  p.copy = memory.copy;
  p.wants_read_done = memory.wants_read_done;
  p.has_row_weights = args.row_weights.defined();
  if (p.has_row_weights) {
    p.row_weights = buffer::strided_view(args.row_weights);
    p.row_weights_offset = memory.row_weights_offset;
    p.out_weights = static_cast<float*>(memory.result.topk_weights.data);
  }
  p.routes = static_cast<const layout::Route*>(handle[Handle::kRoutes].data);
  if (args.weights.defined()) {
    p.weights = buffer::strided_view(args.weights);
    p.weights_element = buffer::element_of(args.weights.dtype, "weights");
  }
  for (const Tensor& bias : args.bias) {
    p.bias[p.num_bias++] = {buffer::rows_view(bias), buffer::element_of(bias.dtype, "bias")};
  }
  const Tensor& out = memory.result.x;
  p.out = static_cast<std::byte*>(out.data);
  p.out_stride = out.strides[0] * num_bytes(out.dtype);
  p.status = static_cast<int32_t*>(memory.result.status.data);
  p.num_tokens = h.num_tokens;
  p.num_topk = h.num_topk;
  p.num_columns = static_cast<uint32_t>(args.x.shape[1]);
  return p;
}

void BufferImpl::combine(const CombineArgs& args, CombineResult& result) {
  const auto turn = enter();
  CombineMemory memory;
  Launch launch;
  prepare_or_refuse(OpKind::kCombine, [&] {
    check_combine(args, memory);
    launch = where(args.stream, args.wait_for, args.num_sms);
    make_result(args, memory);
    place_rows(args, launch, memory);
  });
  const CallPtr call = make_call(OpKind::kCombine);
  const kernels::KernelKey kernel{
      .op = kernels::KernelOp::kCombine,
      .combine = {memory.by_expert ? kernels::LayoutKind::kExpert : kernels::LayoutKind::kRank,
                  buffer::element_of(args.x.dtype, "x"),
                  buffer::element_of(memory.out_dtype, "out_dtype")}};
  for (const Tensor* t : {&args.x, &args.weights, &args.row_weights})
    call->keep(*t);
  for (const Tensor* t : {&memory.result.x, &memory.result.status})
    call->keep(*t);
  for (const Tensor& t : args.bias)
    call->keep(t);
  for (const Tensor& t : args.handle->tensors())
    call->keep(t);
  if (memory.block) call->blocks.push_back(memory.block);
  queue_kernel(launch, kernel, combine_params(args, memory, call));
  memory.block.reset();
  memory.result.event = queue_end(launch, call);
  result = std::move(memory.result);
  if (!args.async_op) complete(call, result.event);
}

Tensor BufferImpl::expert_output(const Handle& handle, uint32_t hidden, DType dtype) {
  require_open();
  const auto turn = turns_->take(settings().config.interrupt);
  buffer::check_handle(settings(), core_->buffer_id, handle);
  buffer::element_of(dtype, "dtype");
  const uint64_t columns = hidden != 0 ? hidden : settings().config.hidden;
  check_output_row(settings(), "expert_output", columns, dtype);
  const uint64_t num_rows = handle.header().num_rows_total;
  // The caller writes at once, not behind a stream: what is free in the order of the streams is free for it
  // only when the operations before it have ended, here and so, by rule 6, on all readers.
  if (last_event_.impl() &&
      last_event_.impl()->wait(device::kNoDeadline, settings().config.interrupt) ==
          device::WaitResult::kInterrupted) {
    throw Interrupted("interrupted while earlier operations still use the arena");
  }
  const buffer::Grant grant =
      take({num_rows * columns * num_bytes(dtype), false, next_sequence_, /*stream=*/nullptr});
  for (const auto& event : grant.wait_for)
    event->wait(device::kNoDeadline, {});
  const auto block = core_->arena->make_block(grant.extent, BlockUse::kExpertOutput);
  return Tensor::contiguous(block->data(), dtype,
                            {static_cast<int64_t>(num_rows), static_cast<int64_t>(columns)}, block);
}

}  // namespace ep
