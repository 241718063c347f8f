#include "bench/ep_bench/rank_data.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "bench/ep_bench/memory.hpp"

namespace ep::bench {
namespace {

Tensor private_matrix(DType dtype, uint64_t num_rows, uint64_t num_columns) {
  std::shared_ptr<void> memory = private_memory(num_rows * num_columns * num_bytes(dtype));
  void* const data = memory.get();
  return Tensor::contiguous(data, dtype,
                            {static_cast<int64_t>(num_rows), static_cast<int64_t>(num_columns)},
                            std::move(memory));
}

}  // namespace

RankData::RankData(const Case& kase_, uint32_t rank_) : kase(kase_), rank(rank_) {
  for (uint32_t r = 0; r < kase.num_ranks; ++r)
    routing.push_back(make_routing(kase, r));
  rows = map_rows(kase, routing, rank);
  x = private_matrix(kase.dtype, kase.num_tokens, kase.hidden);
  for (uint32_t t = 0; t < kase.num_tokens; ++t)
    write_token(kase, rank, t, row_of(x, t));
  topk_idx = Tensor::contiguous(routing[rank].data(), DType::kInt64,
                                {int64_t{kase.num_tokens}, int64_t{kase.num_topk}});
  topk_weights = private_matrix(DType::kFloat32, kase.num_tokens, kase.num_topk);
  const std::vector<float> weights = make_weights(kase, rank);
  std::copy(weights.begin(), weights.end(), static_cast<float*>(topk_weights.data));
  combined = private_matrix(kase.dtype, kase.num_tokens, kase.hidden);
  std::memset(combined.data, 0, kase.num_tokens * kase.combine_row_bytes());
}

void RankData::make_answers(uint64_t num_rows) {
  answers = private_matrix(kase.dtype, num_rows, kase.hidden);
  for (uint64_t i = 0; i < rows.rows.size(); ++i) {
    const Origin& from = rows.rows[i];
    write_answer(kase, from.rank, from.token, from.part, row_of(answers, i));
  }
}

void RankData::copy_answers_to(const Tensor& target) const {
  for (uint64_t i = 0; i < rows.rows.size(); ++i) {
    std::memcpy(row_of(target, i), row_of(answers, i), kase.combine_row_bytes());
  }
}

}  // namespace ep::bench
