// A dispatch's outputs as tensors: views of an extent, or of the caller's memory, in the layout that the
// kernels used.
#pragma once

#include <memory>
#include <utility>

#include "buffer/dispatch_options.hpp"
#include "ep/buffer.hpp"
#include "layout/output_layout.hpp"

namespace ep::buffer {

// Where OutputLayout's offsets count from, and what keeps that alive; a null base gives tensors without data.
struct OutputBase {
  std::byte* base = nullptr;
  std::shared_ptr<void> owner{};

  std::byte* at(uint64_t offset) const { return base == nullptr ? nullptr : base + offset; }
};

class OutputViews {
 public:
  OutputViews(const DispatchOptions& options,
              uint64_t num_rows,
              OutputBase payload,
              OutputBase metadata)
      : options_(options),
        layout_(layout::OutputLayout::make(options.shape, num_rows)),
        num_rows_(static_cast<int64_t>(num_rows)),
        payload_(std::move(payload)),
        metadata_(std::move(metadata)) {}

  // [N, ...] with the row pitch of the layout; `like` gives the dimensions behind the first.
  Tensor rows(uint64_t offset, DType dtype, const Tensor& like, uint32_t row_bytes) const {
    Tensor t = like;
    t.data = payload_.at(offset);
    t.dtype = dtype;
    t.device = {};
    t.owner = payload_.owner;
    t.shape[0] = num_rows_;
    int64_t stride = 1;
    for (uint32_t d = t.num_dims; d-- > 1;) {
      t.strides[d] = stride;
      stride *= t.shape[d];
    }
    t.strides[0] = static_cast<int64_t>(layout::row_pitch(row_bytes) / num_bytes(dtype));
    return t;
  }

  Tensor matrix(uint64_t offset, DType dtype, uint32_t row_bytes) const {
    const Tensor like = Tensor::contiguous(nullptr, dtype, {0, row_bytes / num_bytes(dtype)});
    return rows(offset, dtype, like, row_bytes);
  }

  Tensor per_row(uint64_t offset, DType dtype, int64_t width, bool one_dimension) const {
    std::byte* const at = metadata_.at(offset);
    return one_dimension ? Tensor::contiguous(at, dtype, {num_rows_}, metadata_.owner)
                         : Tensor::contiguous(at, dtype, {num_rows_, width}, metadata_.owner);
  }

  Tensor small(uint32_t word, int64_t count) const {
    return Tensor::contiguous(metadata_.at(layout_.small_offset + uint64_t{word} * 4),
                              DType::kInt32, {count}, metadata_.owner);
  }

  Tensor extra(const DispatchArgs& args, uint32_t i) const {
    return rows(layout_.extra_offset[i], args.extras[i].dtype, args.extras[i],
                options_.shape.extra_bytes[i]);
  }

  void fill(const Settings& s, const DispatchArgs& args, DispatchTensors& out) const {
    using layout::SmallLayout;
    const bool flat = options_.by_expert();
    const SmallLayout at = SmallLayout::make(s.num_ranks, s.max_local_experts);
    out.x = matrix(layout_.x_offset, options_.x_dtype, options_.shape.x_bytes);
    out.scales =
        options_.shape.scales_bytes == 0
            ? Tensor{}
            : matrix(layout_.scales_offset, options_.scales_dtype, options_.shape.scales_bytes);
    out.extras.clear();
    for (uint32_t i = 0; i < options_.shape.num_extras; ++i)
      out.extras.push_back(extra(args, i));
    out.topk_idx = per_row(layout_.idx_offset, options_.idx_dtype, options_.num_topk, flat);
    out.topk_weights = !options_.has_weights ? Tensor{}
                                             : per_row(layout_.weights_offset, DType::kFloat32,
                                                       options_.num_topk, flat);
    out.source = per_row(layout_.source_offset, DType::kInt32, 2, false);
    out.num_rows_device = small(SmallLayout::kNumRows, 1);
    out.rows_needed_device = small(SmallLayout::kRowsNeeded, 1);
    out.status = small(SmallLayout::kOutputStatus, 1);
    out.tokens_per_expert_device = small(at.tokens_per_expert, s.num_local_experts());
    out.expert_offsets = small(at.expert_offsets, s.num_local_experts() + 1);
    out.rank_offsets = flat ? Tensor{} : small(at.rank_offsets, s.num_ranks + 1);
  }

 private:
  const DispatchOptions& options_;
  const layout::OutputLayout layout_;
  const int64_t num_rows_;
  const OutputBase payload_, metadata_;
};

}  // namespace ep::buffer
