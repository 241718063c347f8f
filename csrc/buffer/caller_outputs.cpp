#include "buffer/caller_outputs.hpp"

#include <string>

#include "buffer/checks.hpp"
#include "buffer/output_views.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::buffer {
namespace {

constexpr uintptr_t kAlignBytes = 16;  // of what kernels copy to

struct Member {
  const char* name;
  Tensor DispatchTensors::*tensor;
  bool is_payload;
};
constexpr Member kMembers[] = {
    {"out.x", &DispatchTensors::x, true},
    {"out.scales", &DispatchTensors::scales, true},
    {"out.topk_idx", &DispatchTensors::topk_idx, false},
    {"out.topk_weights", &DispatchTensors::topk_weights, false},
    {"out.source", &DispatchTensors::source, false},
    {"out.num_rows_device", &DispatchTensors::num_rows_device, false},
    {"out.rows_needed_device", &DispatchTensors::rows_needed_device, false},
    {"out.tokens_per_expert_device", &DispatchTensors::tokens_per_expert_device, false},
    {"out.expert_offsets", &DispatchTensors::expert_offsets, false},
    {"out.rank_offsets", &DispatchTensors::rank_offsets, false},
    {"out.status", &DispatchTensors::status, false},
};
// And the metadata that the policy "caller" places, as one.
static_assert(std::size(kMembers) + layout::kMaxExtras + 1 <= kernels::kMaxCopies);

void check_output(const char* name, const Tensor& out, const Tensor& spec) {
  if (!spec.defined())
    throw InvalidArgument(str(name, " is given; this dispatch has no such result"));
  check_given(out, name);
  const auto differs = [&](const auto& what, const auto& given, const auto& wanted) {
    throw InvalidArgument(
        str(name, " has ", what, " ", given, "; ", wanted, " is needed, see output_spec()"));
  };
  if (out.dtype != spec.dtype) differs("dtype", name_of(out.dtype), name_of(spec.dtype));
  bool fits = out.num_dims == spec.num_dims && out.shape[0] >= spec.shape[0];
  for (uint32_t d = 1; fits && d < spec.num_dims; ++d)
    fits = out.shape[d] == spec.shape[d];
  if (!fits) differs("shape", shape_text(out), shape_text(spec));
  for (uint32_t d = 0; d < spec.num_dims; ++d) {
    if (out.shape[d] > 1 && out.strides[d] != spec.strides[d] && out.num_elements() != 0)
      differs(str("in dimension ", d, " stride"), out.strides[d], spec.strides[d]);
  }
  if (reinterpret_cast<uintptr_t>(out.data) % kAlignBytes != 0)
    throw InvalidArgument(str(name, " does not begin at a multiple of ", kAlignBytes, " bytes"));
}

// A view of the first rows.
Tensor first_rows(const Tensor& given, const Tensor& like) {
  Tensor view = given;
  view.shape[0] = like.shape[0];
  return view;
}

void copy_tensor(const Tensor& from,
                 const Tensor& to,
                 const uint32_t* num_rows,
                 kernels::CopyOutParams& copies) {
  if (from.num_elements() == 0) return;
  const uint64_t element = num_bytes(from.dtype);
  const uint64_t pitch = static_cast<uint64_t>(from.strides[0]) * element;
  const uint64_t row = static_cast<uint64_t>(from.num_elements() / from.shape[0]) * element;
  const uint64_t rows = num_rows == nullptr ? static_cast<uint64_t>(from.shape[0]) : 1;
  copies.items[copies.num_items++] = {static_cast<std::byte*>(to.data),
                                      static_cast<const std::byte*>(from.data), rows * pitch,
                                      pitch - row, num_rows};
}

bool any_defined(const DispatchTensors& out) {
  bool any = false;
  for_each_defined(out, [&](const Tensor&) { any = true; });
  return any;
}

}  // namespace

GivenOutputs check_caller_outputs(const Settings& s,
                                  const DispatchOptions& options,
                                  const DispatchArgs& args) {
  const DispatchTensors& out = args.out;
  if (!any_defined(out)) return {};
  DispatchTensors spec;
  OutputViews(options, rows_before(s, options, args), {}, {}).fill(s, args, spec);
  GivenOutputs given{true, true};
  for (const Member& m : kMembers) {
    const Tensor &tensor = out.*m.tensor, &wanted = spec.*m.tensor;
    if (tensor.defined()) check_output(m.name, tensor, wanted);
    if (wanted.defined()) (m.is_payload ? given.payload : given.metadata) &= tensor.defined();
  }
  if (!out.extras.empty() && out.extras.size() != spec.extras.size()) {
    throw InvalidArgument(str("out.extras has ", out.extras.size(), " tensors; extras has ",
                              spec.extras.size(), ", see output_spec()"));
  }
  for (size_t i = 0; i < out.extras.size(); ++i)
    check_output(str("out.extras[", i, "]").c_str(), out.extras[i], spec.extras[i]);
  given.payload &= out.extras.size() == spec.extras.size();
  return given;
}

void for_each_defined(const DispatchTensors& tensors, FunctionRef<void(const Tensor&)> f) {
  for (const Member& m : kMembers) {
    if ((tensors.*m.tensor).defined()) f(tensors.*m.tensor);
  }
  for (const Tensor& extra : tensors.extras)
    f(extra);
}

void take_caller_outputs(const DispatchTensors& out,
                         const uint32_t* num_rows,
                         kernels::CopyOutParams& copies,
                         DispatchTensors& result) {
  const auto take = [&](const Tensor& given, bool is_payload, Tensor& made) {
    if (!given.defined()) return;
    copy_tensor(made, given, is_payload ? num_rows : nullptr, copies);
    made = first_rows(given, made);
  };
  for (const Member& m : kMembers)
    take(out.*m.tensor, m.is_payload, result.*m.tensor);
  for (size_t i = 0; i < out.extras.size(); ++i)
    take(out.extras[i], true, result.extras[i]);
}

void take_policy_outputs(const DispatchTensors& made,
                         const DispatchTensors& out,
                         const uint32_t* num_rows,
                         kernels::CopyOutParams& copies,
                         DispatchTensors& result) {
  const auto take = [&](const Tensor& to, bool is_payload, Tensor& from) {
    if (is_payload && to.defined()) copy_tensor(from, to, num_rows, copies);
    from = to;
  };
  for (const Member& m : kMembers) {
    if (!(out.*m.tensor).defined()) take(made.*m.tensor, m.is_payload, result.*m.tensor);
  }
  for (size_t i = 0; out.extras.empty() && i < made.extras.size(); ++i)
    take(made.extras[i], true, result.extras[i]);
}

}  // namespace ep::buffer
