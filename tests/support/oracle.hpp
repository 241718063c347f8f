// What dispatch and combine must give, for all ranks at once, from the public contract alone: plain
// loops over lists of rows, no line shared with csrc/.
//
// Bitwise: comparisons with these tables are exact, dead rows included, except for the rows and
// tensors that the contract leaves unspecified (the tail's x, scales and extras).
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "ep/buffer.hpp"

namespace ep::test {

// A matrix in row-major order without padding, as bytes.
struct Table {
  DType dtype = DType::kUInt8;
  uint64_t rows = 0, columns = 0;
  std::vector<uint8_t> bytes;

  Table() = default;
  Table(DType dtype_, uint64_t rows_, uint64_t columns_, uint8_t fill = 0)
      : dtype(dtype_),
        rows(rows_),
        columns(columns_),
        bytes(rows_ * columns_ * num_bytes(dtype_), fill) {}

  bool defined() const { return columns != 0; }
  uint64_t row_bytes() const { return columns * num_bytes(dtype); }
  uint8_t* row(uint64_t r) { return bytes.data() + r * row_bytes(); }
  const uint8_t* row(uint64_t r) const { return bytes.data() + r * row_bytes(); }
  uint8_t* at(uint64_t r, uint64_t c) { return row(r) + c * num_bytes(dtype); }
  const uint8_t* at(uint64_t r, uint64_t c) const { return row(r) + c * num_bytes(dtype); }

  template <class T>
  void set(uint64_t r, uint64_t c, T value) {
    std::memcpy(at(r, c), &value, sizeof value);
  }
  template <class T>
  T get(uint64_t r, uint64_t c) const {
    T value;
    std::memcpy(&value, at(r, c), sizeof value);
    return value;
  }

  // Elements as numbers: bf16, fp16, fp32.
  float value(uint64_t r, uint64_t c) const;
  void set_value(uint64_t r, uint64_t c, float v);  // rounded to nearest even; NaN is the quiet one
  // An id: int32 or int64.
  int64_t id(uint64_t r, uint64_t c) const;
  void set_id(uint64_t r, uint64_t c, int64_t id);
};

// What one rank gives to dispatch.  Tables that are not defined were not given.
struct Tokens {
  uint64_t num_tokens = 0;
  Table x, idx, weights, scales;
  std::vector<Table> extras;
};

// What is equal on all ranks.
struct Rules {
  std::vector<uint32_t> expert_offsets;  // [R+1]
  uint32_t num_topk = 0;
  Layout layout = Layout::kRank;
  uint32_t alignment = 1;
  bool exact = true;
  uint32_t max_tokens = 0;  // B
  std::optional<uint32_t> max_rows{};
  bool drop = false;
  Quant quant = Quant::kNone;
  bool global_ids = false;

  uint32_t num_ranks() const { return static_cast<uint32_t>(expert_offsets.size() - 1); }
  uint32_t num_experts() const { return expert_offsets.back(); }
  uint32_t num_local(uint32_t rank) const {
    return expert_offsets[rank + 1] - expert_offsets[rank];
  }
  // R * B, or a * (n + (M - n) / a).
  uint64_t fixed_rows(uint32_t rank) const;
};

// The first E % R ranks own one more.
std::vector<uint32_t> even_offsets(uint32_t num_experts, uint32_t num_ranks);

enum class RowKind : uint8_t { kToken, kGap, kTail };

struct Row {
  RowKind kind = RowKind::kTail;
  int32_t source = -1, token = -1, slot = -1;  // "rank": the first slot of this rank
};

// What one rank gets from dispatch.
struct Received {
  std::vector<Row> rows;  // N
  uint64_t num_rows = 0, rows_needed = 0;
  bool too_many = false;  // nothing is sent
  Table x, scales, idx, weights, source;
  std::vector<Table> extras;
  std::vector<uint32_t> tokens_per_expert, expert_offsets, rank_offsets;

  // Bytes of x, scales and extras in this row are promised; those of idx, weights and source always
  // are.
  bool is_specified(uint64_t row) const { return rows[row].kind != RowKind::kTail; }
};

// Where (token, slot) went.
struct Place {
  uint32_t rank = 0;
  uint64_t row = 0;
};

struct Dispatched {
  std::vector<Received> ranks;
  std::vector<std::vector<std::optional<Place>>> places;  // [R][T*K]; none: -1 or dropped
};

Dispatched dispatch(const std::vector<Tokens>& ranks, const Rules& rules);

struct Quantized {
  Table x, scales;
};
Quantized quantize(const Table& x, Quant quant);

// What one rank gives to combine: rows of its experts, and what concerns its own tokens.
struct Answer {
  Table x;                    // [N,H']
  Table row_weights{};        // fp32 [N,K] or [N,1]; not defined: not given
  Table weights{};            // [T,K]
  std::vector<Table> bias{};  // [T,H']
  std::optional<DType> out_dtype{};
};

struct Combined {
  Table x;             // [T,H']
  Table topk_weights;  // fp32 [T,K]; not defined without row_weights
};

std::vector<Combined> combine(const Dispatched& sent,
                              const Rules& rules,
                              const std::vector<Tokens>& tokens,
                              const std::vector<Answer>& answers);

}  // namespace ep::test
