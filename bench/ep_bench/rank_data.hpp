// The tensors of one rank, in private memory that has been written to.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/ep_bench/case.hpp"
#include "bench/ep_bench/workload.hpp"
#include "ep/ep.hpp"

namespace ep::bench {

struct RankData {
  RankData(const Case& kase, uint32_t rank);

  // Makes `answers`, with `num_rows` rows of which the first are what this rank receives.
  void make_answers(uint64_t num_rows);
  // Copies the answers into `target`, a tensor of the same shape.
  void copy_answers_to(const Tensor& target) const;

  Case kase;
  uint32_t rank;
  std::vector<std::vector<int64_t>> routing;  // of every rank
  RowMap rows;                                // that this rank receives
  Tensor x;                                   // [T,H]
  Tensor topk_idx;                            // [T,K] int64, a view of routing[rank]
  Tensor topk_weights;                        // [T,K] fp32
  Tensor answers{};                           // [N,H]
  Tensor combined;                            // [T,H], what combine writes to
};

// Row `i` of a tensor of at least one dimension.
inline std::byte* row_of(const Tensor& t, uint64_t i) {
  return static_cast<std::byte*>(t.data) +
         i * static_cast<uint64_t>(t.strides[0]) * num_bytes(t.dtype);
}

}  // namespace ep::bench
