// What dispatch takes and gives.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ep/config.hpp"
#include "ep/handle.hpp"
#include "ep/stream.hpp"
#include "ep/tensor.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

enum class Quant : uint8_t {
  kNone,
  kFp8Block128,       // e4m3fn, fp32 scale per 128 columns
  kFp8Block128Pow2,   // the scale rounded up to a power of two
  kFp8Block128Ue8m0,  // as kFp8Block128Pow2, four exponent bytes per int32
  kMxFp8,             // reserved, as the two below: Unsupported
  kNvFp4,
  kInt8Row,
};

// Reserved: kLatency is Unsupported.
enum class Mode : uint8_t {
  kThroughput,  // exact counts, no staging
  kLatency,     // fixed slots, no count exchange
};
// How a quantised dispatch stores scales.  Reserved: all but kRow are Unsupported.
enum class ScaleLayout : uint8_t { kRow, kCol, kColUe8m0x4, kSwizzle128x4 };
enum class Overflow : uint8_t { kRaise, kDrop };
enum class Ids : uint8_t { kLocal, kGlobal };

inline constexpr uint32_t kMaxExtras = 8;

// The tensors of a dispatch's result; N rows, L local experts.
struct DispatchTensors {
  Tensor x{};                         // [N,H]
  Tensor scales{};                    // [N,S']; undefined without scales
  std::vector<Tensor> extras{};       // [N,...]
  Tensor topk_idx{};                  // "rank": [N,K]; "expert": [N], the local expert
  Tensor topk_weights{};              // fp32, as topk_idx; undefined when none were given
  Tensor source{};                    // [N,2] int32: source rank, source token
  Tensor num_rows_device{};           // [1] int32
  Tensor rows_needed_device{};        // [1] int32
  Tensor tokens_per_expert_device{};  // [L] int32
  Tensor expert_offsets{};            // [L+1] int32, aligned
  Tensor rank_offsets{};              // [R+1] int32; undefined for "expert"
  Tensor status{};                    // [1] int32, 0 = good
};

struct DispatchArgs {
  Tensor x;               // [T,H] bf16, fp16, fp32; or opaque bytes; unit column stride, T may be 0
  Tensor topk_idx{};      // [T,K] int32 or int64; -1 = no expert.  Not given: `handle` is
  Tensor topk_weights{};  // [T,K] fp32, bf16 or fp16
  Tensor scales{};        // [T,S] of any 1-, 2- or 4-byte dtype, any strides; makes x opaque
  Quant quant = Quant::kNone;
  ScaleLayout scale_layout = ScaleLayout::kRow;
  Mode mode = Mode::kThroughput;
  bool split = false;  // reserved: the receiving half at a call of its own; Unsupported
  // Unset: the handle's value, else the default named here.  Another value than the handle's throws.
  std::optional<Layout> layout{};              // Layout::kRank
  std::optional<uint32_t> expert_alignment{};  // 1
  std::optional<bool> exact{};                 // true; false with max_rows
  std::optional<uint32_t> max_tokens{};        // max_tokens_per_rank of the buffer
  std::optional<uint32_t> max_rows{};          // none
  std::optional<Overflow> overflow{};          // Overflow::kRaise
  std::vector<Tensor> extras{};                // at most kMaxExtras, [T,...], rows contiguous
  std::optional<Ids> ids{};                    // Ids::kLocal
  std::optional<Outputs> outputs{};            // the buffer's policy; a rank's own choice per call
  // The caller's own memory for any of the results; the others are placed by `outputs`.  Dtype and strides
  // are those of output_spec(), rows at least as many, `data` aligned to 16 bytes.  The result's tensor is
  // the view of the first N rows.  A rank's own choice; must live until the call's event.
  DispatchTensors out{};
  const Handle* handle = nullptr;  // replay
  std::vector<Event> wait_for{};
  Stream stream{};  // undefined: the buffer's own
  bool async_op = false;
  uint32_t num_sms = 0;  // 0: the buffer's
};

struct DispatchResult : DispatchTensors {
  std::optional<uint64_t> num_rows{};                        // exact only
  std::optional<std::vector<uint32_t>> tokens_per_expert{};  // [L], exact only
  Handle handle;
  Event event, inputs_done;

  // Another stream reads these tensors: their memory is handed out again only after its work so far at
  // the time the last of them is dropped.
  void record_stream(const Stream& stream) const;

  std::array<std::weak_ptr<void>, 2>
      window_blocks{};  // what record_stream() marks; none for the caller's memory
};

}  // namespace ep::inline EP_ABI_NAMESPACE
