// The public face: EPBuffer and Handle forward, and what needs no communication is answered here.
#include <algorithm>
#include <vector>

#include "buffer/buffer_impl.hpp"
#include "buffer/checks.hpp"
#include "buffer/reserved.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "layout/rows.hpp"

namespace ep {

#define EP_TEXT(number) #number
#define EP_VERSION_TEXT(major, minor, patch) EP_TEXT(major) "." EP_TEXT(minor) "." EP_TEXT(patch)
const char* EP_ABI_NAMESPACE::version() noexcept {
  return EP_VERSION_TEXT(EP_VERSION_MAJOR, EP_VERSION_MINOR, EP_VERSION_PATCH);
}

EPBuffer::EPBuffer(std::shared_ptr<Communicator> group, const BufferConfig& config)
    : impl_(std::make_shared<BufferImpl>(std::move(group), config, buffer::host_environment())) {}
EPBuffer::~EPBuffer() = default;
EPBuffer::EPBuffer(EPBuffer&&) noexcept = default;
EPBuffer& EPBuffer::operator=(EPBuffer&&) noexcept = default;

EPBuffer BufferAccess::create(std::shared_ptr<Communicator> group,
                              const BufferConfig& config,
                              const buffer::Environment& environment) {
  return EPBuffer(std::make_shared<BufferImpl>(std::move(group), config, environment));
}

EPBuffer BufferAccess::create(std::shared_ptr<Communicator> group,
                              const BufferConfig& config,
                              uint64_t first_sequence) {
  buffer::Environment environment = buffer::host_environment();
  environment.first_sequence = first_sequence;
  return create(std::move(group), config, environment);
}

DispatchResult EPBuffer::dispatch(const DispatchArgs& args) {
  DispatchResult result;
  impl_->dispatch(args, result);
  return result;
}
void EPBuffer::dispatch(const DispatchArgs& args, DispatchResult& result) {
  impl_->dispatch(args, result);
}
CombineResult EPBuffer::combine(const CombineArgs& args) {
  CombineResult result;
  impl_->combine(args, result);
  return result;
}
void EPBuffer::combine(const CombineArgs& args, CombineResult& result) {
  impl_->combine(args, result);
}
DispatchTensors EPBuffer::output_spec(const DispatchArgs& args) const {
  return impl_->output_spec(args);
}
void EPBuffer::warm(const DispatchArgs& args) {
  buffer::check_reserved(args);
}
void EPBuffer::warm(const CombineArgs& args) {
  buffer::check_reserved(args);
}
Tensor EPBuffer::expert_output(const Handle& handle, uint32_t hidden, DType dtype) {
  return impl_->expert_output(handle, hidden, dtype);
}

uint32_t EPBuffer::rank() const {
  return impl_->settings().rank;
}
uint32_t EPBuffer::num_ranks() const {
  return impl_->settings().num_ranks;
}
uint32_t EPBuffer::num_nodes() const {
  return impl_->core().fabric->num_nodes();
}
uint32_t EPBuffer::num_sms() const {
  return impl_->num_sms();
}
void EPBuffer::set_num_sms(uint32_t num_sms) {
  impl_->set_num_sms(num_sms);
}
double EPBuffer::timeout_s() const {
  return impl_->timeout_s();
}
void EPBuffer::set_timeout_s(double seconds) {
  impl_->set_timeout_s(seconds);
}
const std::vector<uint32_t>& EPBuffer::expert_offsets() const {
  return impl_->settings().expert_offsets;
}
Stream EPBuffer::comm_stream() const {
  return impl_->comm_stream();
}
MemoryUse EPBuffer::memory() const {
  return impl_->core().arena->use();
}
Stats EPBuffer::stats() const {
  return impl_->stats();
}
void EPBuffer::check() {
  impl_->check();
}
void EPBuffer::abort(std::string_view reason) {
  impl_->abort(reason);
}
uint64_t EPBuffer::resync() {
  return impl_->resync();
}
void EPBuffer::refuse(Operation operation) noexcept {
  try {
    impl_->refuse(operation);
  } catch (const std::exception& error) {  // no thread or memory left
    impl_->core().log(LogLevel::kWarning, str("refusing a call: ", error.what()));
  }
}
void EPBuffer::close() noexcept {
  if (impl_) impl_->close();
}
void EPBuffer::abandon() noexcept {
  if (impl_) impl_->abandon();
}

Memory EPBuffer::bytes_needed(const BufferConfig& config, uint32_t num_ranks) {
  return buffer::memory_of(buffer::make_settings(config, 0, num_ranks));
}

uint64_t EPBuffer::max_rows(Layout layout,
                            std::optional<uint32_t> max_tokens,
                            uint32_t expert_alignment) const {
  const buffer::Settings& s = impl_->settings();
  if (layout == Layout::kBatched)
    throw Unsupported(
        "layout \"batched\" is not supported by this version; \"rank\" and \"expert\" are");
  if (max_tokens && *max_tokens > s.config.max_tokens_per_rank) {
    throw InvalidArgument(str("max_tokens=", *max_tokens,
                              " is above max_tokens_per_rank=", s.config.max_tokens_per_rank));
  }
  if (expert_alignment == 0) throw InvalidArgument("expert_alignment=0: at least 1 is needed");
  return layout::worst_case_rows({layout == Layout::kExpert, s.num_ranks,
                                  max_tokens.value_or(s.config.max_tokens_per_rank),
                                  s.config.num_topk, s.num_local_experts(), expert_alignment});
}

RoutingLayout EPBuffer::routing_layout(const Tensor& topk_idx) const {
  const buffer::Core& core = impl_->core();
  const buffer::Settings& s = core.settings;
  buffer::check_dims(topk_idx, "topk_idx", 2);
  if (topk_idx.dtype != DType::kInt32 && topk_idx.dtype != DType::kInt64) {
    throw InvalidArgument(
        str("topk_idx has dtype ", name_of(topk_idx.dtype), "; int32 or int64 is needed"));
  }
  const int64_t tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
  const int64_t ranks = s.num_ranks, experts = s.config.num_experts;
  const auto zeros = [&](DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = Tensor::contiguous(nullptr, dtype, shape);
    const uint64_t bytes = static_cast<uint64_t>(t.num_elements()) * num_bytes(dtype);
    t.owner = buffer::allocate(core, bytes);
    t.data = t.owner.get();
    std::fill_n(static_cast<std::byte*>(t.data), bytes, std::byte{0});
    return t;
  };
  RoutingLayout out{zeros(DType::kInt32, {ranks}), zeros(DType::kInt32, {experts}),
                    zeros(DType::kBool, {tokens, ranks}), zeros(DType::kInt32, {1})};
  auto* per_rank = static_cast<int32_t*>(out.tokens_per_rank.data);
  auto* per_expert = static_cast<int32_t*>(out.tokens_per_expert.data);
  auto* per_node = static_cast<int32_t*>(out.tokens_per_node.data);
  auto* in_rank = static_cast<uint8_t*>(out.is_token_in_rank.data);
  const auto* base = static_cast<const std::byte*>(topk_idx.data);
  const int64_t size = num_bytes(topk_idx.dtype);
  for (int64_t t = 0; t < tokens; ++t) {
    bool routed = false;
    for (int64_t k = 0; k < topk; ++k) {
      const std::byte* at = base + (t * topk_idx.strides[0] + k * topk_idx.strides[1]) * size;
      const int64_t id =
          size == 8 ? *reinterpret_cast<const int64_t*>(at) : *reinterpret_cast<const int32_t*>(at);
      if (id == -1) continue;
      if (id < 0 || id >= experts) {
        throw InvalidArgument(str("topk_idx[", t, ", ", k, "] = ", id,
                                  " is neither -1 nor in [0, num_experts=", experts, ")"));
      }
      const uint32_t rank = s.expert_rank[static_cast<size_t>(id)];
      ++per_expert[id];
      if (in_rank[t * ranks + rank] == 0) ++per_rank[rank];
      in_rank[t * ranks + rank] = 1;
      routed = true;
    }
    per_node[0] += routed ? 1 : 0;
  }
  return out;
}

Handle Handle::from_tensors(const Header& header, std::span<const Tensor> tensors) {
  if (tensors.size() != kNumTensors) {
    throw InvalidArgument(
        str("a handle has ", static_cast<uint32_t>(kNumTensors), " tensors, not ", tensors.size()));
  }
  std::array<Tensor, kNumTensors> copy;
  std::copy(tensors.begin(), tensors.end(), copy.begin());
  return HandleAccess::make(header, copy);
}

}  // namespace ep
