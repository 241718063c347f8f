// One dispatch and one combine for all ranks: seeded inputs, the oracle's answers, and the calls of
// a rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/routing.hpp"

namespace ep::test {

inline constexpr Layout kBothLayouts[] = {Layout::kRank, Layout::kExpert};

struct ExtraSpec {
  DType dtype = DType::kInt32;
  std::vector<int64_t> shape{};  // of one token
};

struct TripSpec {
  std::vector<uint32_t> num_tokens{};  // by rank
  uint32_t num_experts = 0, num_topk = 0, hidden = 0;
  std::vector<uint32_t> expert_offsets{};  // empty: even
  Routing routing = Routing::kUniform;
  uint64_t seed = 1;          // of routing and weights
  uint64_t payload_seed = 0;  // of everything else: the same routing with other rows
  // What is sent.
  DType x_dtype = DType::kBFloat16, idx_dtype = DType::kInt64;
  std::optional<DType> weights_dtype = DType::kFloat32;
  DType scales_dtype = DType::kFloat32;
  uint32_t scale_columns = 0;  // 0: no scales
  std::vector<ExtraSpec> extras{};
  // How.
  Layout layout = Layout::kRank;
  uint32_t alignment = 1;
  bool exact = true, drop = false, global_ids = false;
  uint32_t max_tokens = 0;     // 0: not said in the call, so buffer_tokens
  uint32_t buffer_tokens = 0;  // max_tokens_per_rank of the buffer; 0: the most tokens of any rank
  std::optional<uint32_t> max_rows{};
  Quant quant = Quant::kNone;
  // What comes back.
  uint32_t answer_hidden = 0;  // 0: hidden
  DType answer_dtype = DType::kBFloat16;
  std::optional<DType> out_dtype{};
  bool combine_weights = false, row_weights = false;
  std::vector<DType> bias{};
  bool strided = false;  // every tensor as a view with gaps between rows

  std::string name() const;  // for SCOPED_TRACE
};

struct Trip {
  TripSpec spec;
  Rules rules;
  std::vector<Tokens> tokens;  // by rank
  Dispatched sent;
  std::vector<Answer> answers;  // dead rows, and weights that nobody may read, are NaN
  std::vector<Combined> back;

  uint32_t num_ranks() const { return static_cast<uint32_t>(tokens.size()); }
};

Trip make_trip(const TripSpec& spec);
// For one buffer that can run all of them.
std::vector<Trip> make_trips(std::vector<TripSpec> specs);
// Seeded numbers in [rows, columns], among them -0, subnormals, infinities and NaN where `wild`.
Table make_numbers(DType dtype, uint64_t rows, uint64_t columns, Random& random, bool wild);
// What the experts answer to `sent`; fills `back` too.
void make_answers(Trip& trip);

// A configuration in which all of these can run.
BufferConfig config_for(std::span<const Trip> trips);

// An owned copy.  Strided: one element between rows that belongs to nobody, so rows are not
// aligned.
Tensor to_tensor(const Table& table, bool strided = false);
// As column-major memory: unit stride along rows.
Tensor to_transposed_tensor(const Table& table);
// Owned memory with the shape [rows, ...].
Tensor to_shaped_tensor(const Table& table, const std::vector<int64_t>& row_shape);
void fill(const Tensor& to, const Table& from);

enum class AnswerIn : uint8_t { kOrdinary, kExpertOutput };

DispatchArgs dispatch_args(const Trip& trip, uint32_t rank);
CombineArgs combine_args(const Trip& trip, uint32_t rank, const Handle& handle);
// As combine_args, with x computed into the buffer's window.
CombineArgs window_combine_args(EPBuffer& buffer,
                                const Trip& trip,
                                uint32_t rank,
                                const Handle& handle);

// Waits for the results and compares everything that is specified; failures name rank and
// coordinates.
void expect_received(const Received& want,
                     const Rules& rules,
                     uint32_t rank,
                     const DispatchResult& got);
void expect_combined(const Combined& want, uint32_t rank, const CombineResult& got);

// dispatch, expect_received, combine, expect_combined.
void round_trip(EPBuffer& buffer, const Trip& trip, AnswerIn answer_in = AnswerIn::kOrdinary);

using RunRanks = void (*)(uint32_t num_ranks, const RankFunction& function);
struct RunOptions {
  std::function<void(BufferConfig&)> adapt{};
  AnswerIn answer_in = AnswerIn::kOrdinary;
  RunRanks run = run_threads;
};

// In every rank: one buffer, all trips in order.
void run_trips(std::span<const Trip> trips, const RunOptions& options = {});
void run_specs(const std::vector<TripSpec>& specs, const RunOptions& options = {});
inline void run_spec(const TripSpec& spec, const RunOptions& options = {}) {
  run_specs({spec}, options);
}

}  // namespace ep::test
