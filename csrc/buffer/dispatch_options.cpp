#include "buffer/dispatch_options.hpp"

#include "buffer/checks.hpp"
#include "buffer/refusal.hpp"
#include "buffer/reserved.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "layout/plan.hpp"
#include "layout/rows.hpp"

namespace ep::buffer {
namespace {

bool is_quantised(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kFloat4E2M1FNx2:
      return true;
    default:
      return false;
  }
}

// The call's value, the handle's, or the default; a value that contradicts the handle is an error.
template <typename T>
T choose(const char* name,
         const std::optional<T>& given,
         const std::optional<T>& recorded,
         T otherwise) {
  if (given && recorded && *given != *recorded) {
    throw InvalidArgument(
        str(name, " differs from the handle's: a replay uses what the handle recorded"));
  }
  return recorded ? *recorded : given.value_or(otherwise);
}

void resolve_sizes(const Settings& s, const DispatchArgs& args, DispatchOptions& o) {
  const Handle::Header* h = args.handle != nullptr ? &args.handle->header() : nullptr;
  const auto recorded = [&](auto value) {
    return h != nullptr ? std::optional(value(*h)) : std::nullopt;
  };
  using Header = Handle::Header;
  o.layout = choose("layout", args.layout, recorded([](const Header& x) { return x.layout; }),
                    Layout::kRank);
  o.expert_alignment = choose("expert_alignment", args.expert_alignment,
                              recorded([](const Header& x) { return x.expert_alignment; }), 1u);
  o.max_rows =
      choose("max_rows", args.max_rows, recorded([](const Header& x) { return x.max_rows; }), 0u);
  o.exact = choose("exact", args.exact, recorded([](const Header& x) { return x.exact; }),
                   o.max_rows == 0);
  o.outputs = args.outputs.value_or(s.config.outputs);
  o.max_tokens =
      choose("max_tokens", args.max_tokens, recorded([](const Header& x) { return x.max_tokens; }),
             s.config.max_tokens_per_rank);
  o.drop =
      choose("overflow", args.overflow,
             recorded([](const Header& x) { return x.drop ? Overflow::kDrop : Overflow::kRaise; }),
             Overflow::kRaise) == Overflow::kDrop;
  o.global_ids =
      choose("ids", args.ids,
             recorded([](const Header& x) { return x.global_ids ? Ids::kGlobal : Ids::kLocal; }),
             Ids::kLocal) == Ids::kGlobal;
  if (args.max_rows && *args.max_rows == 0)
    throw InvalidArgument("max_rows=0: at least one row is needed");
  if (o.exact && o.max_rows != 0) {
    throw InvalidArgument(
        str("max_rows=", o.max_rows, " with exact=true: max_rows fixes the size (exact=false)"));
  }
  if (o.drop && o.max_rows == 0) throw InvalidArgument("overflow=drop needs max_rows");
  if (o.expert_alignment == 0) throw InvalidArgument("expert_alignment=0: at least 1 is needed");
  if (!o.by_expert() && o.expert_alignment != 1) {
    throw InvalidArgument(str("expert_alignment=", o.expert_alignment, " needs layout \"expert\""));
  }
  if (o.max_tokens == 0 || o.max_tokens > s.config.max_tokens_per_rank) {
    throw InvalidArgument(str("max_tokens=", o.max_tokens, " is outside [1, max_tokens_per_rank=",
                              s.config.max_tokens_per_rank, "]"));
  }
}

void resolve_routing(const Settings& s, const DispatchArgs& args, DispatchOptions& o) {
  if (o.replay) {
    if (args.topk_idx.defined())
      throw InvalidArgument("topk_idx and handle are both given: a replay has its routing");
    const Handle::Header& h = args.handle->header();
    o.num_topk = h.num_topk;
    o.idx_dtype = h.idx_is_64 ? DType::kInt64 : DType::kInt32;
    if (o.num_tokens != h.num_tokens) {
      throw InvalidArgument(str("x has ", o.num_tokens, " rows, the handle ", h.num_tokens));
    }
  } else {
    check_dims(args.topk_idx, "topk_idx", 2);
    o.idx_dtype = args.topk_idx.dtype;
    if (o.idx_dtype != DType::kInt32 && o.idx_dtype != DType::kInt64) {
      throw InvalidArgument(
          str("topk_idx has dtype ", name_of(o.idx_dtype), "; int32 or int64 is needed"));
    }
    const int64_t topk = args.topk_idx.shape[1];
    if (topk < 1 || topk > s.config.num_topk) {
      throw InvalidArgument(
          str("topk_idx has K=", topk, "; it must be in [1, num_topk=", s.config.num_topk, "]"));
    }
    check_shape(args.topk_idx, "topk_idx", o.num_tokens, topk);
    o.num_topk = static_cast<uint32_t>(topk);
  }
  o.new_weights = args.topk_weights.defined();
  o.has_weights = o.new_weights || (o.replay && args.handle->header().has_weights);
  if (o.new_weights) {
    check_shape(args.topk_weights, "topk_weights", o.num_tokens, o.num_topk);
    element_of(args.topk_weights.dtype, "topk_weights");
  }
}

void resolve_payload(const DispatchArgs& args, DispatchOptions& o) {
  o.num_columns = static_cast<uint32_t>(args.x.shape[1]);
  o.quant = args.quant;
  o.opaque = args.scales.defined() || is_quantised(args.x.dtype);
  o.x_dtype = args.x.dtype;
  if (!o.opaque && !is_compute_dtype(args.x.dtype)) {
    throw InvalidArgument(str(
        "x has dtype ", name_of(args.x.dtype), "; bfloat16, float16 or float32, or a quantised ",
        "dtype (float8_e4m3fn, float8_e5m2, int8, uint8, float4_e2m1fn_x2) is needed"));
  }
  o.shape.x_bytes = o.num_columns * num_bytes(args.x.dtype);
  if (args.scales.defined()) {
    check_dims(args.scales, "scales", 2);
    o.scales_dtype = args.scales.dtype;
    if (args.scales.shape[0] != o.num_tokens || args.scales.shape[1] < 1 ||
        num_bytes(o.scales_dtype) > 4) {
      throw InvalidArgument(str("scales has shape ", shape_text(args.scales), " and dtype ",
                                name_of(o.scales_dtype), "; [", o.num_tokens,
                                ", S] of a 1-, 2- or 4-byte dtype is needed"));
    }
    o.shape.scales_bytes = static_cast<uint32_t>(args.scales.shape[1]) * num_bytes(o.scales_dtype);
  }
  if (o.quant == Quant::kNone) {
    if (o.num_columns == 0 || o.shape.x_bytes % layout::kRowAlignBytes != 0) {
      throw InvalidArgument(str("x has H=", o.num_columns, ", ", o.shape.x_bytes,
                                " bytes per row; H must be a ", "multiple of ",
                                layout::kRowAlignBytes / num_bytes(args.x.dtype), " (",
                                layout::kRowAlignBytes, " bytes)"));
    }
    return;
  }
  if (o.opaque)
    throw InvalidArgument("quant is given, but x is quantised already (or scales are given)");
  if (o.num_columns == 0 || o.num_columns % kernels::kGroupColumns != 0) {
    throw InvalidArgument(str("x has H=", o.num_columns, "; with quant H must be a multiple of ",
                              kernels::kGroupColumns));
  }
  o.config.format = static_cast<kernels::Format>(o.quant);
  o.config.in = element_of(args.x.dtype, "x");
  o.shape.x_bytes = o.num_columns;
  o.shape.scales_bytes = kernels::scale_bytes(o.config.format, o.num_columns);
  o.x_dtype = DType::kFloat8E4M3FN;
  o.scales_dtype = o.quant == Quant::kFp8Block128Ue8m0 ? DType::kInt32 : DType::kFloat32;
}
static_assert(static_cast<uint8_t>(Quant::kFp8Block128Ue8m0) ==
              static_cast<uint8_t>(kernels::Format::kFp8Block128Ue8m0));

void resolve_extras(const DispatchArgs& args, DispatchOptions& o) {
  if (args.extras.size() > kMaxExtras) {
    throw InvalidArgument(
        str(args.extras.size(), " extras; at most ", kMaxExtras, " are possible"));
  }
  o.shape.num_extras = static_cast<uint32_t>(args.extras.size());
  for (uint32_t i = 0; i < args.extras.size(); ++i) {
    const Tensor& extra = args.extras[i];
    const std::string name = str("extras[", i, "]");
    check_given(extra, name.c_str());
    if (extra.shape[0] != o.num_tokens) {
      throw InvalidArgument(
          str(name, " has shape ", shape_text(extra), "; x has ", o.num_tokens, " rows"));
    }
    int64_t row = 1;
    for (uint32_t d = extra.num_dims; d-- > 1;) {
      if (extra.shape[d] > 1 && extra.strides[d] != row && extra.num_elements() != 0) {
        throw InvalidArgument(str(name, " has stride ", extra.strides[d], " in dimension ", d,
                                  "; its rows must be contiguous: call .contiguous()"));
      }
      row *= extra.shape[d];
    }
    const uint64_t bytes = static_cast<uint64_t>(row) * num_bytes(extra.dtype);
    if (bytes == 0 || bytes > (uint64_t{1} << 28))
      throw InvalidArgument(str(name, " has ", bytes, " bytes per row"));
    o.shape.extra_bytes[i] = static_cast<uint32_t>(bytes);
  }
}

void check_limits(const Settings& s, const DispatchOptions& o) {
  uint64_t row = uint64_t{o.shape.x_bytes} + o.shape.scales_bytes;
  for (uint32_t i = 0; i < o.shape.num_extras; ++i)
    row += o.shape.extra_bytes[i];
  if (row > s.token_bytes) {
    throw InvalidArgument(str("a row of x, scales and extras takes ", row,
                              " bytes; the buffer was made with token_bytes=", s.token_bytes));
  }
  if (o.num_columns > s.config.hidden * (o.opaque ? 4u : 1u)) {
    throw InvalidArgument(
        str("x has H=", o.num_columns, "; the buffer was made with hidden=", s.config.hidden));
  }
  for (uint32_t rank = 0; rank < s.num_ranks; ++rank) {
    const uint64_t rows = fixed_rows(s, o, rank);
    if (rows > layout::kMaxRows) {
      throw InvalidArgument(str("rank ", rank, " may have to take ", rows, " rows; at most ",
                                layout::kMaxRows,
                                " are possible: lower max_tokens or expert_alignment"));
    }
  }
}

}  // namespace

uint64_t fixed_rows(const Settings& s, const DispatchOptions& o, uint32_t rank) {
  if (o.max_rows != 0) return o.max_rows;
  return layout::worst_case_rows({o.by_expert(), s.num_ranks, o.max_tokens, o.num_topk,
                                  s.expert_offsets[rank + 1] - s.expert_offsets[rank],
                                  o.expert_alignment});
}

uint64_t rows_before(const Settings& s, const DispatchOptions& o, const DispatchArgs& args) {
  return o.exact && o.replay ? args.handle->header().num_rows_total : fixed_rows(s, o, s.rank);
}

void check_handle(const Settings& s, uint64_t buffer_id, const Handle& handle) {
  const Handle::Header& h = handle.header();
  if (!handle.defined()) throw InvalidArgument("the handle is empty");
  if (h.buffer_id != buffer_id) throw InvalidArgument("the handle belongs to another buffer");
  if (h.rank != s.rank)
    throw InvalidArgument(str("the handle belongs to rank ", h.rank, ", this is rank ", s.rank));
  const auto plan = layout::PlanLayout::make(s.num_ranks, s.max_local_experts);
  const std::span<const Tensor> t = handle.tensors();
  const int64_t tokens = h.num_tokens, topk = h.num_topk;
  const auto whole = [](const Tensor& tensor, DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor want = Tensor::contiguous(nullptr, dtype, shape);
    return tensor.num_dims == want.num_dims && tensor.dtype == dtype &&
           tensor.shape == want.shape &&
           (tensor.strides == want.strides || tensor.num_elements() == 0) &&
           (tensor.data != nullptr || tensor.num_elements() == 0);
  };
  const bool good =
      h.num_topk >= 1 && h.num_topk <= s.config.num_topk && h.layout <= Layout::kExpert &&
      h.num_rows_total <= layout::kMaxRows &&
      whole(t[Handle::kIdx], h.idx_is_64 ? DType::kInt64 : DType::kInt32, {tokens, topk}) &&
      (!h.has_weights || whole(t[Handle::kWeights], DType::kFloat32, {tokens, topk})) &&
      whole(t[Handle::kRoutes], DType::kUInt32, {tokens, topk, 2}) &&
      whole(t[Handle::kPlan], DType::kUInt32, {int64_t{plan.num_words}});
  if (!good) throw InvalidArgument("the handle's tensors do not fit its header");
}

DispatchOptions resolve_dispatch(const Settings& s, uint64_t buffer_id, const DispatchArgs& args) {
  DispatchOptions o;
  check_reserved(args);
  check_dims(args.x, "x", 2);
  check_unit_column_stride(args.x, "x");
  if (args.x.shape[1] > (int64_t{1} << 26)) throw InvalidArgument(str("x has H=", args.x.shape[1]));
  o.replay = args.handle != nullptr;
  if (o.replay) check_handle(s, buffer_id, *args.handle);
  resolve_sizes(s, args, o);
  if (args.x.shape[0] > o.max_tokens) {
    throw TooManyTokens(str("x has ", args.x.shape[0], " tokens, more than ",
                            args.max_tokens ? "max_tokens=" : "max_tokens_per_rank=", o.max_tokens,
                            " on rank ", s.rank),
                        s.rank, static_cast<uint64_t>(args.x.shape[0]), o.max_tokens);
  }
  o.num_tokens = static_cast<uint32_t>(args.x.shape[0]);
  resolve_routing(s, args, o);
  resolve_payload(args, o);
  resolve_extras(args, o);
  o.config.layout = o.by_expert() ? kernels::LayoutKind::kExpert : kernels::LayoutKind::kRank;
  o.shape.num_ranks = s.num_ranks;
  o.shape.max_local_experts = s.max_local_experts;
  const uint32_t width = o.by_expert() ? 1 : o.num_topk;
  o.shape.idx_bytes = width * num_bytes(o.idx_dtype);
  o.shape.weights_bytes = o.has_weights ? width * 4 : 0;
  o.shape.is_expert = o.by_expert() ? 1 : 0;
  check_limits(s, o);
  return o;
}

void fill_agreed(const DispatchOptions& o,
                 const DispatchArgs& args,
                 uint32_t (&agreed)[layout::kAgreedEnd]) {
  const auto dtype = [](DType d) { return static_cast<uint32_t>(d) + 1; };  // 0: not given
  agreed[layout::kKind] = static_cast<uint32_t>(layout::OpKind::kDispatch);
  agreed[layout::kRowLayout] = static_cast<uint32_t>(o.layout);
  agreed[layout::kQuant] = static_cast<uint32_t>(o.quant);
  agreed[layout::kExact] = o.exact ? 1 : 0;
  agreed[layout::kOverflow] = o.drop ? 1 : 0;
  agreed[layout::kMaxTokens] = o.max_tokens;
  agreed[layout::kMaxRowsField] = o.max_rows;
  agreed[layout::kAlignment] = o.expert_alignment;
  agreed[layout::kTopk] = o.num_topk;
  agreed[layout::kReplay] = o.replay ? 1 : 0;
  agreed[layout::kXDType] = dtype(args.x.dtype);
  agreed[layout::kXBytes] = o.shape.x_bytes;
  agreed[layout::kScalesDType] = o.shape.scales_bytes != 0 ? dtype(o.scales_dtype) : 0;
  agreed[layout::kScalesBytes] = o.shape.scales_bytes;
  agreed[layout::kIdxDType] = dtype(o.idx_dtype);
  agreed[layout::kHasWeights] = o.has_weights ? 1 : 0;
  agreed[layout::kNumExtras] = o.shape.num_extras;
  for (uint32_t i = 0; i < o.shape.num_extras; ++i) {
    agreed[layout::kExtraDType + i] = dtype(args.extras[i].dtype);
    agreed[layout::kExtraBytes + i] = o.shape.extra_bytes[i];
  }
}

}  // namespace ep::buffer
