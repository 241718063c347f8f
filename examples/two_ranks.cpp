// Two ranks as threads: every token goes to two experts, each of which doubles it; the sum comes home.
#include <cstdio>
#include <thread>
#include <vector>

#include "ep/ep.hpp"

void run_rank(std::shared_ptr<ep::Communicator> group) {
  ep::EPBuffer buffer(group,
                      {.num_experts = 4, .num_topk = 2, .hidden = 8, .max_tokens_per_rank = 16});
  std::vector<float> tokens(2 * 8, 1.0f + static_cast<float>(buffer.rank()));  // T = 2, H = 8
  std::vector<int32_t> experts = {0, 3, 2, -1};  // [T, K]: token 1 has one expert only

  ep::DispatchArgs args;
  args.x = ep::Tensor::contiguous(tokens.data(), ep::DType::kFloat32, {2, 8});
  args.topk_idx = ep::Tensor::contiguous(experts.data(), ep::DType::kInt32, {2, 2});
  args.layout = ep::Layout::kExpert;  // one row per token and expert, grouped by expert
  ep::DispatchResult rows = buffer.dispatch(args);

  ep::Tensor output = buffer.expert_output(rows.handle, 8, ep::DType::kFloat32);
  const auto* in = static_cast<const float*>(rows.x.data);
  auto* out = static_cast<float*>(output.data);
  for (uint64_t i = 0; i < *rows.num_rows * 8; ++i)
    out[i] = 2.0f * in[i];

  ep::CombineResult result = buffer.combine({.x = output, .handle = &rows.handle});
  const auto* y = static_cast<const float*>(result.x.data);
  std::printf("rank %u: %d rows for its experts; tokens of %g came back as %g and %g\n",
              buffer.rank(), static_cast<int>(*rows.num_rows), tokens[0], y[0], y[8]);
}

int main() {
  std::vector<std::thread> ranks;
  for (const auto& group : ep::Communicator::threads(2))
    ranks.emplace_back(run_rank, group);
  for (std::thread& rank : ranks)
    rank.join();
}
