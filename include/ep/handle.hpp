// The routing of one dispatch, as a snapshot.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ep/tensor.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// How rows are laid out at the receiver.
enum class Layout : uint8_t {
  kRank,     // one row per (token, destination rank), by source rank, then token
  kExpert,   // one row per (token, slot), by expert, then source, then token, then slot
  kBatched,  // [L, M, H] with counts.  Reserved: Unsupported
};

// A small header and a fixed list of tensors: copying shares them, saving both saves the handle.
// Later edits of the tensors that were dispatched change nothing here.
class Handle {
 public:
  // What the host knows.  Plain data: its bytes may be stored and given to from_tensors of the same buffer.
  struct Header {
    uint64_t buffer_id = 0;  // which buffer made it, the same number on all its ranks
    uint64_t routing_hash =
        0;  // of all ranks' routing; 0 while only the device knows it (exact = false)
    uint64_t num_rows_total =
        0;                    // N: rows of the output tensors, the fixed size where exact is false
    uint32_t num_tokens = 0;  // T of this rank
    uint32_t num_topk = 0;    // K
    uint32_t expert_alignment = 1;
    uint32_t max_tokens = 0;
    uint32_t max_rows = 0;  // 0: none
    Layout layout = Layout::kRank;
    bool exact = true;
    bool drop = false;
    bool idx_is_64 = false;
    bool has_weights = false;
    bool global_ids = false;
    uint16_t rank = 0;  // whose tokens they are: a handle is good on its own rank only
  };

  enum TensorIndex : uint32_t {
    kIdx,      // [T,K] int32 or int64, as given
    kWeights,  // [T,K] fp32; undefined without weights
    kRoutes,   // [T,K,2] uint32: destination rank and flags, row there
    kPlan,     // [layout::plan_words] uint32: counts and offsets of this rank
    kNumTensors,
  };

  Handle() = default;

  bool defined() const { return header_.buffer_id != 0; }
  const Header& header() const { return header_; }
  std::span<const Tensor> tensors() const { return tensors_; }

  // The reverse of header() and tensors().  EPBuffer checks both when the handle is used.
  static Handle from_tensors(const Header& header, std::span<const Tensor> tensors);

 private:
  friend class HandleAccess;
  Header header_{};
  std::array<Tensor, kNumTensors> tensors_{};
};

}  // namespace ep::inline EP_ABI_NAMESPACE
