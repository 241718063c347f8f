#include <numeric>
#include <vector>

#include "bench/ep_bench/difference.hpp"
#include "bench/ep_bench/numbers.hpp"
#include "bench/ep_bench/verify.hpp"

namespace ep::bench {
namespace {

// One dispatch's result and what it should be.
class Check {
 public:
  Check(const RankData& data, const DispatchResult& result, const char* what)
      : data_(data), case_(data.kase), got_(result), what_(what) {
    for (uint32_t r = 0; r < case_.num_ranks; ++r)
      weights_.push_back(make_weights(case_, r));
    const uint32_t first = case_.first_expert(data.rank);
    is_here_ = [first, end = case_.first_expert(data.rank + 1)](int64_t expert) {
      return expert >= first && expert < end;
    };
  }

  Verified run() {
    check_counts();
    check_shapes();
    std::vector<std::byte> row(case_.combine_row_bytes());
    for (uint64_t i = 0; i < num_rows(); ++i) {
      const Origin& from = data_.rows.rows[i];
      expect_equal(element<int32_t>(got_.source, i, 0), static_cast<int32_t>(from.rank),
                   at("source", i, 0));
      expect_equal(element<int32_t>(got_.source, i, 1), static_cast<int32_t>(from.token),
                   at("source", i, 1));
      check_routes(i, from);
      write_token(case_, from.rank, from.token, row.data());
      check_payload(i, from, row.data());
    }
    check_tail();
    return {num_rows(), num_rows() * case_.hidden};
  }

 private:
  uint64_t num_rows() const { return data_.rows.rows.size(); }
  uint64_t num_rows_total() const { return got_.handle.header().num_rows_total; }
  bool has_slots() const { return case_.layout == Layout::kRank; }
  uint32_t num_id_columns() const { return has_slots() ? case_.num_topk : 1; }

  std::string at(const char* name, uint64_t i) const { return str(what_, ": ", name, "[", i, "]"); }
  std::string at(const char* name, uint64_t i, uint64_t j) const {
    return str(at(name, i), "[", j, "]");
  }

  void check_counts() const {
    const auto rows = static_cast<int32_t>(num_rows());
    expect_equal(element<int32_t>(got_.status, 0), 0, at("status", 0));
    expect_equal(element<int32_t>(got_.num_rows_device, 0), rows, at("num_rows_device", 0));
    expect_equal(element<int32_t>(got_.rows_needed_device, 0), rows, at("rows_needed_device", 0));
    if (case_.exact && got_.num_rows != num_rows()) {
      throw Difference(
          str("verify: ", what_, ": num_rows is ", got_.num_rows.value_or(0), ", expected ", rows));
    }
    const std::vector<uint32_t>& routes = data_.rows.routes_per_expert;
    int32_t offset = 0;
    for (uint64_t e = 0; e < routes.size(); ++e) {
      expect_equal(element<int32_t>(got_.tokens_per_expert_device, e),
                   static_cast<int32_t>(routes[e]), at("tokens_per_expert_device", e));
      if (has_slots()) continue;
      expect_equal(element<int32_t>(got_.expert_offsets, e), offset, at("expert_offsets", e));
      offset += static_cast<int32_t>(routes[e]);
    }
    if (case_.exact && got_.tokens_per_expert != routes) {
      throw Difference(str("verify: ", what_, ": tokens_per_expert is not the routing's"));
    }
    if (!has_slots()) return;
    for (uint64_t r = 0; r < case_.num_ranks; ++r) {
      expect_equal(element<int32_t>(got_.rank_offsets, r), offset, at("rank_offsets", r));
      offset += static_cast<int32_t>(data_.rows.rows_per_source[r]);
    }
    expect_equal(element<int32_t>(got_.rank_offsets, case_.num_ranks), offset,
                 at("rank_offsets", case_.num_ranks));
  }

  void check_shapes() const {
    const DType scales = case_.format == Quant::kFp8Block128Ue8m0 ? DType::kInt32 : DType::kFloat32;
    const uint64_t n = num_rows_total();
    expect_dtype(got_.x, case_.is_quantised() ? DType::kFloat8E4M3FN : case_.dtype, what_, "x");
    expect_dtype(got_.topk_idx, DType::kInt64, what_, "topk_idx");
    expect_dtype(got_.topk_weights, DType::kFloat32, what_, "topk_weights");
    expect_shape(got_.x, n, case_.hidden, what_, "x");
    expect_shape(got_.source, n, 2, what_, "source");
    if (has_slots()) {
      expect_shape(got_.topk_idx, n, case_.num_topk, what_, "topk_idx");
      expect_shape(got_.topk_weights, n, case_.num_topk, what_, "topk_weights");
    }
    if (!case_.is_quantised()) return;
    expect_dtype(got_.scales, scales, what_, "scales");
    expect_shape(got_.scales, n, case_.scale_bytes() / num_bytes(scales), what_, "scales");
  }

  // Layout "rank": all slots, dead where another rank owns the expert.  "expert": the row's own
  // slot.
  void check_routes(uint64_t i, const Origin& from) const {
    const int64_t first = case_.first_expert(data_.rank);
    const uint64_t slots_at = uint64_t{from.token} * case_.num_topk;
    for (uint32_t j = 0; j < num_id_columns(); ++j) {
      const uint64_t slot = slots_at + (has_slots() ? j : from.part);
      const int64_t expert = data_.routing[from.rank][slot];
      const bool lives = is_here_(expert);
      expect_equal(element<int64_t>(got_.topk_idx, i, j), lives ? expert - first : int64_t{-1},
                   at("topk_idx", i, j));
      expect_equal(element<float>(got_.topk_weights, i, j),
                   lives ? weights_[from.rank][slot] : 0.0f, at("topk_weights", i, j));
    }
  }

  void check_payload(uint64_t i, const Origin& from, const std::byte* row) {
    if (!case_.is_quantised()) {
      expect_row(got_.x, i, row, what_, "x", from);
      return;
    }
    values_.resize(case_.hidden);
    q_.resize(case_.hidden);
    scales_.resize(case_.scale_bytes());
    decode_row(case_.dtype, row, case_.hidden, values_.data());
    quantise_row(case_.format, values_.data(), case_.hidden, q_.data(), scales_.data());
    expect_row(got_.scales, i, scales_.data(), what_, "scales", from);
    expect_row(got_.x, i, reinterpret_cast<const std::byte*>(q_.data()), what_, "x", from);
  }

  // Rows past the received ones, in outputs of fixed size.
  void check_tail() const {
    for (uint64_t i = num_rows(); i < num_rows_total(); ++i) {
      expect_equal(element<int32_t>(got_.source, i, 0), -1, at("source", i, 0));
      expect_equal(element<int32_t>(got_.source, i, 1), -1, at("source", i, 1));
      for (uint32_t j = 0; j < num_id_columns(); ++j) {
        expect_equal(element<int64_t>(got_.topk_idx, i, j), int64_t{-1}, at("topk_idx", i, j));
        expect_equal(element<float>(got_.topk_weights, i, j), 0.0f, at("topk_weights", i, j));
      }
    }
  }

  const RankData& data_;
  const Case& case_;
  const DispatchResult& got_;
  const char* const what_;
  std::function<bool(int64_t)> is_here_;
  std::vector<std::vector<float>> weights_;  // of every rank
  std::vector<float> values_;
  std::vector<uint8_t> q_;
  std::vector<std::byte> scales_;
};

}  // namespace

Verified verify_dispatch(const RankData& data, const DispatchResult& result, const char* what) {
  return Check(data, result, what).run();
}

}  // namespace ep::bench
