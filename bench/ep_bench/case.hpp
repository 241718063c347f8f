// One point of a sweep: what every rank does, and the sizes that follow from it.
#pragma once

#include <cstdint>
#include <string>

#include "bench/ep_bench/text.hpp"
#include "ep/ep.hpp"

namespace ep::bench {

inline constexpr Choice<Quant> kFormats[] = {{"none", Quant::kNone},
                                             {"fp8_block128", Quant::kFp8Block128},
                                             {"fp8_block128_pow2", Quant::kFp8Block128Pow2},
                                             {"fp8_block128_ue8m0", Quant::kFp8Block128Ue8m0}};
inline constexpr Choice<DType> kDTypes[] = {
    {"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}, {"fp32", DType::kFloat32}};
inline constexpr Choice<Layout> kLayouts[] = {{"rank", Layout::kRank}, {"expert", Layout::kExpert}};
inline constexpr Choice<Outputs> kOutputs[] = {
    {"window", Outputs::kWindow}, {"caller", Outputs::kCaller}, {"auto", Outputs::kAuto}};

// How unevenly tokens choose experts.
struct Skew {
  double sigma = 0.0;     // of the logarithm of an expert's popularity; 0: all alike
  bool one_rank = false;  // every token goes to experts of rank 0

  std::string text() const { return one_rank ? "one-rank" : str(sigma); }
};

struct Case {
  uint32_t num_ranks = 2;
  bool processes = true;  // else threads of one process
  uint32_t num_tokens = 2048;
  uint32_t hidden = 7168;
  uint32_t num_topk = 8;
  uint32_t num_experts = 64;
  Quant format = Quant::kNone;
  DType dtype = DType::kBFloat16;
  Layout layout = Layout::kRank;
  Skew skew{};
  bool exact = true;
  Outputs outputs = Outputs::kWindow;
  uint32_t num_sms = 1;
  uint64_t seed = 1;
  double timeout_s = 60.0;

  bool is_quantised() const { return format != Quant::kNone; }
  // Bytes of one row that travels to an expert's rank, and of one that comes home.
  uint64_t scale_bytes() const;
  uint64_t dispatch_row_bytes() const;
  uint64_t combine_row_bytes() const { return uint64_t{hidden} * num_bytes(dtype); }

  // The first `num_experts % num_ranks` ranks own one expert more.  `rank` may be num_ranks.
  uint32_t first_expert(uint32_t rank) const;
  uint32_t owner(uint32_t expert) const;
};

}  // namespace ep::bench
