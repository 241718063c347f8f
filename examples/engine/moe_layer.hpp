// A mixture-of-experts layer as an inference engine has it: a router, experts, and ep between them.
// The engine's own part is plain loops over std::vector<float>; everything is row-major.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "ep/ep.hpp"

namespace engine {

constexpr uint32_t kExperts = 6, kTopk = 2, kHidden = 16, kInner = 32, kMaxTokens = 64;

// Numbers in [-1, 1) that every rank computes alike.
class Seeded {
 public:
  explicit Seeded(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::vector<float> numbers(size_t count) {
    std::vector<float> made(count);
    for (float& x : made) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
    }
    return made;
  }

 private:
  uint64_t state_;
};

// y = relu(x up) down
struct Expert {
  std::vector<float> up, down;  // [hidden, inner], [inner, hidden]

  void apply(const float* x, float* y) const {
    std::vector<float> inner(kInner, 0.0f);
    for (uint32_t h = 0; h < kHidden; ++h)
      for (uint32_t i = 0; i < kInner; ++i)
        inner[i] += x[h] * up[h * kInner + i];
    std::fill_n(y, kHidden, 0.0f);
    for (uint32_t i = 0; i < kInner; ++i)
      for (uint32_t h = 0; h < kHidden; ++h)
        y[h] += std::max(inner[i], 0.0f) * down[i * kHidden + h];
  }
};

struct Routes {
  std::vector<int32_t> experts;  // [T, K]
  std::vector<float> weights;    // [T, K]
};

struct Model {
  std::vector<float> router;  // [hidden, experts]
  std::vector<Expert> experts;

  // A real engine loads the experts that its rank owns; these are small, so every rank has all.
  static Model seeded() {
    Seeded seeded(7);
    Model model{.router = seeded.numbers(kHidden * kExperts), .experts = {}};
    for (uint32_t e = 0; e < kExperts; ++e)
      model.experts.push_back({seeded.numbers(kHidden * kInner), seeded.numbers(kInner * kHidden)});
    return model;
  }

  // The K experts with the largest logits, weighted by their softmax.
  Routes route(const std::vector<float>& tokens) const {
    Routes routes;
    for (size_t t = 0; t < tokens.size() / kHidden; ++t) {
      std::vector<float> logits(kExperts, 0.0f);
      for (uint32_t h = 0; h < kHidden; ++h)
        for (uint32_t e = 0; e < kExperts; ++e)
          logits[e] += tokens[t * kHidden + h] * router[h * kExperts + e];
      std::vector<int32_t> order(kExperts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      float sum = 0.0f;
      for (uint32_t k = 0; k < kTopk; ++k)
        sum += std::exp(logits[order[k]] - logits[order[0]]);
      for (uint32_t k = 0; k < kTopk; ++k) {
        routes.experts.push_back(order[k]);
        routes.weights.push_back(std::exp(logits[order[k]] - logits[order[0]]) / sum);
      }
    }
    return routes;
  }

  // What the layer must give: one rank, no ep.  Terms are added in the order of a token's slots.
  std::vector<float> evaluate(const std::vector<float>& tokens, const Routes& routes) const {
    std::vector<float> y(tokens.size());
    std::vector<float> row(kHidden);
    for (size_t slot = 0; slot < routes.experts.size(); ++slot) {
      const size_t t = slot / kTopk;
      experts[routes.experts[slot]].apply(&tokens[t * kHidden], row.data());
      for (uint32_t h = 0; h < kHidden; ++h) {
        const float term = routes.weights[slot] * row[h];
        y[t * kHidden + h] = slot % kTopk == 0 ? term : y[t * kHidden + h] + term;
      }
    }
    return y;
  }
};

// Bytes that ep asked the engine for: outputs that are no views of the window, and handles.
struct Heap {
  std::atomic<uint64_t> bytes{0};

  std::shared_ptr<void> allocate(uint64_t num_bytes) {
    constexpr std::align_val_t kAlign{256};
    bytes += num_bytes;
    return {::operator new(num_bytes, kAlign), [](void* p) { ::operator delete(p, kAlign); }};
  }
};

// The layer on one of the ranks.  All ranks make the same calls in the same order, also with no
// tokens at all.
class MoeLayer {
 public:
  MoeLayer(std::shared_ptr<ep::Communicator> group, const Model& model, Heap& heap)
      : model_(model), heap_(heap), buffer_(group, config(group->rank(), heap)) {}

  std::vector<float> forward(const std::vector<float>& tokens, const Routes& routes) {
    ep::DispatchArgs args = routed(tokens, routes);
    give_rows_a_place(args);
    buffer_.dispatch(args, received_);  // throws; the next call uses the result's memory again
    return answer(routes);
  }

  // Other tokens that go the way of the last forward(): nothing is counted, nobody waits for counts.
  std::vector<float> again(const std::vector<float>& tokens, const Routes& routes) {
    const ep::Handle handle = received_.handle;
    ep::DispatchArgs args;
    args.x = view(tokens, kHidden);
    args.handle = &handle;
    give_rows_a_place(args);
    buffer_.dispatch(args, received_);
    return answer(routes);
  }

  // For an engine that uses no exceptions.  A dispatch whose rows nobody brings home is legal.
  ep::Status try_send(const std::vector<float>& tokens, const Routes& routes) noexcept {
    ep::DispatchResult dropped;
    return buffer_.try_dispatch(routed(tokens, routes), dropped);
  }

  const ep::EPBuffer& buffer() const { return buffer_; }

 private:
  static ep::BufferConfig config(uint32_t rank, Heap& heap) {
    ep::BufferConfig config;
    config.num_experts = kExperts;
    config.num_topk = kTopk;
    config.hidden = kHidden;
    config.max_tokens_per_rank = kMaxTokens;
    config.timeout_s = 30.0;
    config.allocator = [&heap](uint64_t num_bytes) { return heap.allocate(num_bytes); };
    config.log = [rank](ep::LogLevel level, std::string_view text) {
      if (level != ep::LogLevel::kDebug)
        std::fprintf(stderr, "rank %u: %.*s\n", rank, static_cast<int>(text.size()), text.data());
    };
    config.wait_policy = {.spin_us = 5, .yield_us = 20};  // cores are few here: sleep early
    return config;
  }

  static int64_t rows(const std::vector<float>& tokens) {
    return static_cast<int64_t>(tokens.size() / kHidden);
  }

  static ep::Tensor view(const std::vector<float>& values, uint32_t columns) {
    return ep::Tensor::contiguous(const_cast<float*>(values.data()), ep::DType::kFloat32,
                                  {static_cast<int64_t>(values.size() / columns), columns});
  }

  static ep::DispatchArgs routed(const std::vector<float>& tokens, const Routes& routes) {
    ep::DispatchArgs args;
    args.x = view(tokens, kHidden);
    args.topk_idx = ep::Tensor::contiguous(const_cast<int32_t*>(routes.experts.data()),
                                           ep::DType::kInt32, {rows(tokens), kTopk});
    args.topk_weights = view(routes.weights, kTopk);
    args.layout = ep::Layout::kExpert;  // a row per token and expert, grouped by expert
    return args;
  }

  // Rows land in memory of the engine's own, made once for the most that can come.
  void give_rows_a_place(ep::DispatchArgs& args) {
    ep::Tensor place = buffer_.output_spec(args).x;  // shape, strides and dtype
    const auto bytes = static_cast<uint64_t>(place.size(0) * place.strides[0]) * sizeof(float);
    if (bytes > num_bytes_) rows_ = heap_.allocate(num_bytes_ = bytes);
    place.data = rows_.get();
    place.owner = rows_;
    args.out.x = place;
  }

  // Runs this rank's experts over the rows that came, and sends the answers home.
  std::vector<float> answer(const Routes& routes) {
    // Computing into the window spares combine a copy.
    const ep::Tensor out = buffer_.expert_output(received_.handle, kHidden, ep::DType::kFloat32);
    const auto* offsets = static_cast<const int32_t*>(received_.expert_offsets.data);  // [L + 1]
    const uint32_t first = buffer_.expert_offsets()[buffer_.rank()];
    const uint32_t last = buffer_.expert_offsets()[buffer_.rank() + 1];
    for (uint32_t e = first; e < last; ++e)
      for (int32_t row = offsets[e - first]; row < offsets[e - first + 1]; ++row)
        model_.experts[e].apply(at(received_.x, row), at(out, row));

    ep::CombineArgs args{.x = out, .handle = &received_.handle};
    args.weights = view(routes.weights, kTopk);  // combine multiplies: nobody else has
    const ep::CombineResult home = buffer_.combine(args);
    std::vector<float> y;
    for (int64_t t = 0; t < home.x.size(0); ++t)
      y.insert(y.end(), at(home.x, t), at(home.x, t) + kHidden);
    return y;
  }

  static float* at(const ep::Tensor& rows, int64_t row) {  // rows have a pitch of their own
    return static_cast<float*>(rows.data) + row * rows.strides[0];
  }

  const Model& model_;
  Heap& heap_;
  ep::EPBuffer buffer_;
  ep::DispatchResult received_;
  std::shared_ptr<void> rows_;
  uint64_t num_bytes_ = 0;  // of rows_
};

}  // namespace engine
