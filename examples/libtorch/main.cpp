// A MoE layer of an engine that is built with libtorch: at::Tensor in and out, no Python.
//
//   moe_libtorch R      R ranks as threads; every result is compared with torch alone in one rank
//
// Exit status: 0 all is equal to the bit, 1 something is not or failed, 2 bad usage.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ep/ep.hpp"
#include "ep/torch.hpp"

namespace {

constexpr int64_t kExperts = 6, kTopk = 2, kHidden = 16, kInner = 32;

// Small whole numbers: products and sums of them are exact, in whatever order torch adds.
at::Tensor whole_numbers(at::IntArrayRef sizes, int64_t seed) {
  int64_t count = 1;
  for (const int64_t size : sizes)
    count *= size;
  const at::Tensor i = at::arange(count, at::kLong);
  return (at::remainder(i * i * 7 + i * 13 + seed * 31, 5) - 2).to(at::kFloat).view(sizes);
}

struct Model {
  at::Tensor router = whole_numbers({kHidden, kExperts}, 1) / 8;
  at::Tensor up = whole_numbers({kExperts, kHidden, kInner}, 2);
  at::Tensor down = whole_numbers({kExperts, kInner, kHidden}, 3);

  at::Tensor expert(int64_t e, const at::Tensor& rows) const {
    return at::matmul(at::relu(at::matmul(rows, up[e])), down[e]);
  }
  // [T, K] weights and experts
  std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& x) const {
    return at::topk(at::softmax(at::matmul(x, router), -1), kTopk);
  }
  // What the layer must give, by torch alone; terms in the order of a token's slots.
  at::Tensor evaluate(const at::Tensor& x) const {
    const auto [weights, experts] = route(x);
    at::Tensor y;
    for (int64_t k = 0; k < kTopk; ++k) {
      at::Tensor rows = at::zeros_like(x);
      for (int64_t t = 0; t < x.size(0); ++t)
        rows[t].copy_(expert(experts[t][k].item<int64_t>(), x[t]));
      const at::Tensor term = weights.select(1, k).unsqueeze(1) * rows;
      y = k == 0 ? term : y + term;
    }
    return y;
  }
};

class MoeLayer {
 public:
  MoeLayer(std::shared_ptr<ep::Communicator> group, const Model& model)
      : model_(model), buffer_(std::move(group), config()) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto [weights, experts] = model_.route(x);
    ep::DispatchArgs args;
    args.x = ep::from_torch(x, "x");
    args.topk_idx = ep::from_torch(experts, "experts");  // int64, as torch's topk gives them
    args.topk_weights = ep::from_torch(weights, "weights");
    args.layout = ep::Layout::kExpert;
    const ep::DispatchResult received = buffer_.dispatch(args);

    // Both are views of the window: the experts read rows where they came in, and write where
    // combine reads.
    const at::Tensor rows = ep::to_torch(received.x);
    const ep::Tensor window = buffer_.expert_output(received.handle, kHidden, ep::DType::kFloat32);
    const at::Tensor out = ep::to_torch(window);
    const at::Tensor offsets = ep::to_torch(received.expert_offsets);  // [L + 1]
    const uint32_t first = buffer_.expert_offsets()[buffer_.rank()];
    for (int64_t e = 0; e + 1 < offsets.size(0); ++e) {
      const auto begin = offsets[e].item<int64_t>(), end = offsets[e + 1].item<int64_t>();
      if (begin != end)
        out.slice(0, begin, end).copy_(model_.expert(first + e, rows.slice(0, begin, end)));
    }

    ep::CombineArgs back{.x = window, .handle = &received.handle};
    back.weights = args.topk_weights;  // combine multiplies
    return ep::to_torch(buffer_.combine(back).x);
  }

 private:
  static ep::BufferConfig config() {
    return {.num_experts = kExperts,
            .num_topk = kTopk,
            .hidden = kHidden,
            .max_tokens_per_rank = 64,
            .timeout_s = 30.0,
            .allocator = ep::torch_allocator()};
  }

  const Model& model_;
  ep::EPBuffer buffer_;
};

bool serve(std::shared_ptr<ep::Communicator> group) {
  const at::NoGradGuard no_grad;
  const Model model;
  const uint32_t rank = group->rank();
  const at::Tensor x = whole_numbers({rank == 2 ? 0 : 5 + 3 * rank, kHidden}, 100 + rank);
  at::Tensor y;
  {
    MoeLayer layer(group, model);
    layer.forward(x);
    y = layer.forward(x);
  }  // y outlives the layer and its buffer
  const bool is_equal = at::equal(y, model.evaluate(x));
  std::printf("rank %u of %u: %d tokens; forward %s\n", rank, group->num_ranks(),
              static_cast<int>(x.size(0)), is_equal ? "equal" : "DIFFERS");
  return is_equal;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_ranks = argc == 2 ? std::atoi(argv[1]) : 0;
  if (num_ranks < 1 || num_ranks > 64) {
    std::fputs("usage: moe_libtorch R\n", stderr);
    return 2;
  }
  at::set_num_threads(1);  // every rank is a thread already
  std::vector<char> good(static_cast<size_t>(num_ranks), 0);
  std::vector<std::thread> ranks;
  for (const auto& group : ep::Communicator::threads(static_cast<uint32_t>(num_ranks)))
    ranks.emplace_back([&good, group] {
      try {
        good[group->rank()] = serve(group);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", group->rank(), error.what());
      }
    });
  for (std::thread& rank : ranks)
    rank.join();
  bool all_good = true;
  for (const char each : good)
    all_good &= each != 0;
  std::puts(all_good ? "moe_libtorch: all equal to torch in one rank" : "moe_libtorch: FAILED");
  return all_good ? 0 : 1;
}
