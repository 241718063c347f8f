#include "bench/ep_bench/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bench/ep_bench/text.hpp"

namespace ep::bench {

BufferConfig buffer_config(const Case& kase,
                           std::function<std::shared_ptr<void>(uint64_t)> allocator) {
  BufferConfig config;
  config.num_experts = kase.num_experts;
  config.num_topk = kase.num_topk;
  config.hidden = kase.hidden;
  config.max_tokens_per_rank = std::max(kase.num_tokens, 1u);
  config.device = "cpu";
  config.num_sms = kase.num_sms;
  config.outputs = kase.outputs;
  config.timeout_s = kase.timeout_s;
  config.allocator = std::move(allocator);
  return config;
}

Exchange::Exchange(EPBuffer& buffer, RankData& data) : buffer_(buffer), data_(data) {
  const DispatchResult first = dispatch(/*replays=*/false);
  handle_ = first.handle;
  const uint64_t got =
      first.num_rows ? *first.num_rows : *static_cast<const uint32_t*>(first.num_rows_device.data);
  if (got != num_rows()) {
    throw std::runtime_error(str("dispatch brought ", got, " rows; the routing says ", num_rows()));
  }
  data_.make_answers(handle_.header().num_rows_total);
}

DispatchResult Exchange::dispatch(bool replays, bool async_op) {
  const Case& c = data_.kase;
  DispatchArgs args{.x = data_.x};
  args.quant = c.format;
  args.async_op = async_op;
  if (replays) {
    args.handle = &handle_;
  } else {
    args.topk_idx = data_.topk_idx;
    args.topk_weights = data_.topk_weights;
    args.layout = c.layout;
    args.exact = c.exact;
  }
  return buffer_.dispatch(args);
}

CombineResult Exchange::combine(const Tensor& rows, const Handle& handle, bool async_op) {
  CombineArgs args{.x = rows, .handle = &handle};
  if (data_.kase.layout == Layout::kExpert) args.weights = data_.topk_weights;
  args.out = data_.combined;
  args.async_op = async_op;
  return buffer_.combine(args);
}

Tensor Exchange::filled_expert_output() {
  Tensor output = buffer_.expert_output(handle_, data_.kase.hidden, data_.kase.dtype);
  data_.copy_answers_to(output);
  return output;
}

void Exchange::prepare(Contender c) {
  if (c == Contender::kCombine || c == Contender::kPair) {
    expert_output_ = filled_expert_output();
  } else if (is_memcpy(c)) {
    expert_output_ = buffer_.expert_output(handle_, data_.kase.hidden, data_.kase.dtype);
  }
}

void Exchange::run(Contender c) {
  switch (c) {
    case Contender::kDispatch:
    case Contender::kReplay:
      dispatched_ = dispatch(c == Contender::kReplay);
      return;
    case Contender::kCombine:
      combined_ = combine(expert_output_, handle_);
      return;
    case Contender::kPair:
      dispatched_ = dispatch(/*replays=*/false);
      combined_ = combine(expert_output_, dispatched_.handle);
      return;
    case Contender::kCombineCopy:
      combined_ = combine(data_.answers, handle_);
      return;
    case Contender::kMemcpy:
    case Contender::kMemcpyOut:
      // Rows of both tensors lie back to back, and quantised rows are the smaller ones.
      std::memcpy(expert_output_.data, data_.answers.data, bytes_of(c, data_.kase, num_rows()));
      return;
  }
}

void Exchange::release() {
  expert_output_ = {};
  dispatched_ = {};
  combined_ = {};
}

}  // namespace ep::bench
