// A dispatch's outputs as tensors: views of an extent, or of the caller's memory, in the layout that the
// kernels used.
#pragma once

#include <memory>
#include <utility>

#include "buffer/dispatch_options.hpp"
#include "ep/buffer.hpp"
#include "layout/output_layout.hpp"

namespace ep::buffer {

// `payload` and `metadata` are where OutputLayout's offsets count from; the owners keep them alive.
class OutputViews {
 public:
  OutputViews(const DispatchOptions& options,
              uint64_t num_rows,
              std::byte* payload,
              std::byte* metadata,
              std::shared_ptr<void> payload_owner,
              std::shared_ptr<void> metadata_owner)
      : options_(options),
        layout_(layout::OutputLayout::make(options.shape, num_rows)),
        num_rows_(static_cast<int64_t>(num_rows)),
        payload_(payload),
        metadata_(metadata),
        payload_owner_(std::move(payload_owner)),
        metadata_owner_(std::move(metadata_owner)) {}

  // [N, ...] with the row pitch of the layout; `like` gives the dimensions behind the first.
  Tensor rows(uint64_t offset, DType dtype, const Tensor& like, uint32_t row_bytes) const {
    Tensor t = like;
    t.data = payload_ + offset;
    t.dtype = dtype;
    t.device = {};
    t.owner = payload_owner_;
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
    return one_dimension
               ? Tensor::contiguous(metadata_ + offset, dtype, {num_rows_}, metadata_owner_)
               : Tensor::contiguous(metadata_ + offset, dtype, {num_rows_, width}, metadata_owner_);
  }

  Tensor small(uint32_t word, int64_t count) const {
    return Tensor::contiguous(metadata_ + layout_.small_offset + uint64_t{word} * 4, DType::kInt32,
                              {count}, metadata_owner_);
  }

  void fill(const Settings& s, const DispatchArgs& args, DispatchResult& out) const {
    using layout::SmallLayout;
    const bool flat = options_.by_expert();
    const SmallLayout at = SmallLayout::make(s.num_ranks, s.max_local_experts);
    out.x = matrix(layout_.x_offset, options_.x_dtype, options_.shape.x_bytes);
    if (options_.shape.scales_bytes != 0) {
      out.scales =
          matrix(layout_.scales_offset, options_.scales_dtype, options_.shape.scales_bytes);
    }
    for (uint32_t i = 0; i < options_.shape.num_extras; ++i) {
      out.extras.push_back(rows(layout_.extra_offset[i], args.extras[i].dtype, args.extras[i],
                                options_.shape.extra_bytes[i]));
    }
    out.topk_idx = per_row(layout_.idx_offset, options_.idx_dtype, options_.num_topk, flat);
    if (options_.has_weights)
      out.topk_weights = per_row(layout_.weights_offset, DType::kFloat32, options_.num_topk, flat);
    out.source = per_row(layout_.source_offset, DType::kInt32, 2, false);
    out.num_rows_device = small(SmallLayout::kNumRows, 1);
    out.rows_needed_device = small(SmallLayout::kRowsNeeded, 1);
    out.status = small(SmallLayout::kOutputStatus, 1);
    out.tokens_per_expert_device = small(at.tokens_per_expert, s.num_local_experts());
    out.expert_offsets = small(at.expert_offsets, s.num_local_experts() + 1);
    if (!flat) out.rank_offsets = small(at.rank_offsets, s.num_ranks + 1);
  }

 private:
  const DispatchOptions& options_;
  const layout::OutputLayout layout_;
  const int64_t num_rows_;
  std::byte* const payload_;
  std::byte* const metadata_;
  const std::shared_ptr<void> payload_owner_, metadata_owner_;
};

}  // namespace ep::buffer
