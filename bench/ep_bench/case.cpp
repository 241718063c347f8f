#include "bench/ep_bench/case.hpp"

#include <algorithm>

namespace ep::bench {

uint64_t Case::scale_bytes() const {
  switch (format) {
    case Quant::kNone:
      return 0;
    case Quant::kFp8Block128:
    case Quant::kFp8Block128Pow2:
      return uint64_t{hidden} / 128 * sizeof(float);
    case Quant::kFp8Block128Ue8m0:
      return (uint64_t{hidden} + 511) / 512 * sizeof(int32_t);
    case Quant::kMxFp8:  // reserved: no option of this program names them
    case Quant::kNvFp4:
    case Quant::kInt8Row:
      break;
  }
  return 0;
}

uint64_t Case::dispatch_row_bytes() const {
  return is_quantised() ? hidden + scale_bytes() : combine_row_bytes();
}

uint32_t Case::first_expert(uint32_t rank) const {
  return num_experts / num_ranks * rank + std::min(rank, num_experts % num_ranks);
}

uint32_t Case::owner(uint32_t expert) const {
  const uint32_t fewer = num_experts / num_ranks, num_larger = num_experts % num_ranks;
  const uint32_t first_of_fewer = num_larger * (fewer + 1);
  if (expert < first_of_fewer) return expert / (fewer + 1);
  return num_larger + (expert - first_of_fewer) / fewer;
}

}  // namespace ep::bench
