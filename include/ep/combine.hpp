// What combine takes and gives.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ep/dispatch.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// The dtype of a node's partial sum on the network; one node has none.
enum class Partial : uint8_t { kSame, kFloat32 };

struct CombineArgs {
  Tensor x;  // [N,H'] bf16, fp16, fp32: rows as dispatch laid them out
  const Handle* handle = nullptr;
  Tensor weights{};            // [T,K] of the source's tokens; layout "expert" only
  Tensor row_weights{};        // fp32 [N,K] ("rank") or [N] ("expert"): travel home unmultiplied
  std::vector<Tensor> bias{};  // up to two [T,H'], bf16, fp16 or fp32
  Tensor out{};                // [T,H'] to write into; undefined: the allocator's
  Partial partial = Partial::kSame;
  Quant quant = Quant::kNone;        // reserved: what travels is quantised; Unsupported
  bool split = false;                // reserved: Unsupported
  Tensor ready{};                    // reserved: flags of a producing GEMM; Unsupported
  std::optional<DType> out_dtype{};  // x's
  std::vector<Event> wait_for{};
  Stream stream{};
  bool async_op = false;
  uint32_t num_sms = 0;
};

struct CombineResult {
  Tensor x;             // [T,H']
  Tensor topk_weights;  // [T,K] fp32; undefined without row_weights
  Tensor status;        // [1] int32
  Event event;
};

}  // namespace ep::inline EP_ABI_NAMESPACE
