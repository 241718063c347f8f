// The oracle against cases small enough to work out by hand.
#include "support/oracle.hpp"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace ep::test {
namespace {

using Ids = std::vector<std::vector<int64_t>>;
using Numbers = std::vector<std::vector<float>>;

Table table(DType dtype, const Numbers& values, uint64_t columns) {
  Table t(dtype, values.size(), columns);
  for (uint64_t r = 0; r < t.rows; ++r) {
    for (uint64_t c = 0; c < columns; ++c)
      t.set_value(r, c, values[r][c]);
  }
  return t;
}

// x[r,t,:] = 1 + 32 r + t, exact in bf16.
Tokens tokens(uint32_t rank, const Ids& ids, uint32_t num_topk) {
  Tokens t;
  t.num_tokens = ids.size();
  t.x = Table(DType::kBFloat16, ids.size(), 8);
  t.idx = Table(DType::kInt32, ids.size(), num_topk);
  for (uint64_t i = 0; i < ids.size(); ++i) {
    for (uint64_t c = 0; c < 8; ++c)
      t.x.set_value(i, c, 1.0f + 32.0f * static_cast<float>(rank) + static_cast<float>(i));
    for (uint32_t k = 0; k < num_topk; ++k)
      t.idx.set_id(i, k, ids[i][k]);
  }
  return t;
}

Rules rules(uint32_t num_experts, uint32_t num_ranks, uint32_t num_topk, Layout layout) {
  Rules r;
  r.expert_offsets = even_offsets(num_experts, num_ranks);
  r.num_topk = num_topk;
  r.layout = layout;
  r.max_tokens = 8;
  return r;
}

std::vector<float> first_column(const Table& t) {
  std::vector<float> values;
  for (uint64_t r = 0; r < t.rows; ++r)
    values.push_back(t.value(r, 0));
  return values;
}

std::vector<int64_t> ids_of(const Table& t) {
  std::vector<int64_t> ids;
  for (uint64_t r = 0; r < t.rows; ++r) {
    for (uint64_t c = 0; c < t.columns; ++c)
      ids.push_back(t.id(r, c));
  }
  return ids;
}

std::vector<Answer> identity(const Dispatched& sent) {
  std::vector<Answer> answers;
  for (const Received& r : sent.ranks)
    answers.push_back({.x = r.x});
  return answers;
}

TEST(Oracle, UnevenExpertsAreSplitAsArraySplitDoes) {  // user report A15
  EXPECT_EQ(even_offsets(10, 4), (std::vector<uint32_t>{0, 3, 6, 8, 10}));
  EXPECT_EQ(even_offsets(2, 4), (std::vector<uint32_t>{0, 1, 2, 2, 2}));
}

TEST(Oracle, RankRowsAreBySourceThenToken) {
  const std::vector<Tokens> ranks{tokens(0, {{3, 0}, {1, -1}, {-1, -1}}, 2),
                                  tokens(1, {{2, 3}, {0, 2}}, 2)};
  const Dispatched sent = dispatch(ranks, rules(4, 2, 2, Layout::kRank));
  EXPECT_EQ(first_column(sent.ranks[0].x), (std::vector<float>{1, 2, 34}));
  EXPECT_EQ(ids_of(sent.ranks[0].idx), (std::vector<int64_t>{-1, 0, 1, -1, 0, -1}));
  EXPECT_EQ(ids_of(sent.ranks[0].source), (std::vector<int64_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(sent.ranks[0].rank_offsets, (std::vector<uint32_t>{0, 2, 3}));
  EXPECT_EQ(first_column(sent.ranks[1].x), (std::vector<float>{1, 33, 34}));
  EXPECT_EQ(ids_of(sent.ranks[1].idx), (std::vector<int64_t>{1, -1, 0, 1, -1, 0}));
  EXPECT_EQ(sent.ranks[1].tokens_per_expert, (std::vector<uint32_t>{2, 2}));
  EXPECT_EQ(sent.ranks[1].rank_offsets, (std::vector<uint32_t>{0, 1, 3}));
}

TEST(Oracle, AlignedCountsAreNotTrueCounts) {  // user report H4
  const Ids ids{{0}, {1}, {1}, {1}, {3}, {3}, {3}, {3}, {3}};
  Rules r = rules(4, 1, 1, Layout::kExpert);
  r.alignment = 4;
  const Received got = dispatch({tokens(0, ids, 1)}, r).ranks[0];
  EXPECT_EQ(got.tokens_per_expert, (std::vector<uint32_t>{1, 3, 0, 5}));
  EXPECT_EQ(got.expert_offsets, (std::vector<uint32_t>{0, 4, 8, 8, 16}));
  EXPECT_EQ(got.num_rows, 16u);
  EXPECT_EQ(first_column(got.x),
            (std::vector<float>{1, 0, 0, 0, 2, 3, 4, 0, 5, 6, 7, 8, 9, 0, 0, 0}));
  EXPECT_EQ(ids_of(got.idx),
            (std::vector<int64_t>{0, -1, -1, -1, 1, 1, 1, -1, 3, 3, 3, 3, 3, -1, -1, -1}));
}

TEST(Oracle, DuplicatesCountTwice) {  // user report T1: row [3,3]
  for (const Layout layout : {Layout::kRank, Layout::kExpert}) {
    const Rules r = rules(4, 2, 2, layout);
    std::vector<Tokens> ranks{tokens(0, {{3, 3}}, 2), tokens(1, {}, 2)};
    const Dispatched sent = dispatch(ranks, r);
    EXPECT_EQ(sent.ranks[1].num_rows, layout == Layout::kRank ? 1u : 2u);
    EXPECT_EQ(sent.ranks[1].tokens_per_expert, (std::vector<uint32_t>{0, 2}));
    const Table y = combine(sent, r, ranks, identity(sent))[0].x;
    EXPECT_EQ(y.value(0, 0), layout == Layout::kRank ? 1.0f : 2.0f);
  }
}

TEST(Oracle, DropsInLayoutOrder) {  // user report D8: capacity 10, demand 14
  const Ids ids(14, {0});
  Rules r = rules(2, 2, 1, Layout::kRank);
  r.exact = false;
  r.max_tokens = 14;
  r.max_rows = 10;
  const std::vector<Tokens> ranks{tokens(0, ids, 1), tokens(1, {}, 1)};
  EXPECT_TRUE(dispatch(ranks, r).ranks[0].too_many);
  r.drop = true;
  const Dispatched sent = dispatch(ranks, r);
  EXPECT_FALSE(sent.ranks[0].too_many);
  EXPECT_EQ(sent.ranks[0].rows_needed, 14u);
  EXPECT_EQ(sent.ranks[0].num_rows, 10u);
  EXPECT_EQ(sent.ranks[0].tokens_per_expert, (std::vector<uint32_t>{10}));
  EXPECT_EQ(sent.ranks[0].rank_offsets, (std::vector<uint32_t>{0, 10, 10}));
  const std::vector<float> y = first_column(combine(sent, r, ranks, identity(sent))[0].x);
  EXPECT_EQ(y, (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0}));
}

TEST(Oracle, FixedSizesAreTheContracts) {
  Rules r = rules(8, 2, 3, Layout::kExpert);
  r.exact = false;
  r.max_tokens = 5;
  EXPECT_EQ(r.fixed_rows(0), 30u);  // a = 1: M
  r.alignment = 8;                  // M = 30, n = 4: 8 * (4 + 26 / 8)
  EXPECT_EQ(r.fixed_rows(0), 56u);
  const Received got = dispatch({tokens(0, {{0, -1, 1}}, 3), tokens(1, {}, 3)}, r).ranks[0];
  EXPECT_EQ(got.rows.size(), 56u);
  EXPECT_EQ(got.num_rows, 16u);
  EXPECT_TRUE(got.is_specified(15));
  EXPECT_FALSE(got.is_specified(16));
  EXPECT_EQ(got.source.id(16, 0), -1);
}

TEST(Oracle, WeightsMultiplyOnce) {  // user report H1: w = [.5, .25] gives .5 y0 + .25 y1
  const Rules r = rules(2, 2, 2, Layout::kExpert);
  std::vector<Tokens> ranks{tokens(0, {{0, 1}}, 2), tokens(1, {}, 2)};
  for (Tokens& t : ranks)
    t.weights = table(DType::kFloat32, Numbers(t.num_tokens, {0.5f, 0.25f}), 2);
  const Dispatched sent = dispatch(ranks, r);
  EXPECT_EQ(sent.ranks[1].weights.value(0, 0), 0.25f);
  std::vector<Answer> answers = identity(sent);
  answers[0].x.set_value(0, 0, 3.0f);
  answers[1].x.set_value(0, 0, 5.0f);
  EXPECT_EQ(combine(sent, r, ranks, answers)[0].x.value(0, 0), 8.0f);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    answers[rank].weights = ranks[rank].weights;
    answers[rank].row_weights = sent.ranks[rank].weights;
  }
  const Combined y = combine(sent, r, ranks, answers)[0];
  EXPECT_EQ(y.x.value(0, 0), 0.5f * 3.0f + 0.25f * 5.0f);
  EXPECT_EQ(y.topk_weights.value(0, 0), 0.5f);
  EXPECT_EQ(y.topk_weights.value(0, 1), 0.25f);
}

TEST(Oracle, SumsInSlotOrderAndRoundsOnce) {  // user report T4
  // 2^24 + 1 + 1 in fp32 depends on the order: slots say which comes first, not ranks.
  for (const bool big_first : {true, false}) {
    const Rules r = rules(3, 3, 3, Layout::kRank);
    const Ids ids{big_first ? std::vector<int64_t>{2, 1, 0} : std::vector<int64_t>{0, 1, 2}};
    const std::vector<Tokens> ranks{tokens(0, ids, 3), tokens(1, {}, 3), tokens(2, {}, 3)};
    const Dispatched sent = dispatch(ranks, r);
    std::vector<Answer> answers;
    for (const float v : {1.0f, 1.0f, 16777216.0f}) {
      answers.push_back({.x = table(DType::kFloat32, {{v}}, 1)});
    }
    EXPECT_EQ(combine(sent, r, ranks, answers)[0].x.value(0, 0),
              big_first ? 16777216.0f : 16777218.0f);
  }
}

TEST(Oracle, NoRouteGivesTheBiasOrZero) {
  const Rules r = rules(2, 1, 1, Layout::kRank);
  const std::vector<Tokens> ranks{tokens(0, {{-1}}, 1)};
  const Dispatched sent = dispatch(ranks, r);
  std::vector<Answer> answers = identity(sent);
  EXPECT_EQ(combine(sent, r, ranks, answers)[0].x.get<uint16_t>(0, 0), 0u);
  answers[0].bias = {table(DType::kFloat32, Numbers(1, std::vector<float>(8, -0.0f)), 8)};
  EXPECT_EQ(combine(sent, r, ranks, answers)[0].x.get<uint16_t>(0, 0), 0x8000u);
}

TEST(Quantizer, KnownValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity(),
                  kNaN = std::numeric_limits<float>::quiet_NaN();
  Table x(DType::kFloat32, 1, 5 * 128);
  x.set_value(0, 0, 448.0f);  // group 0: scale 1
  x.set_value(0, 1, -0.0f);
  x.set_value(0, 2, 17.0f);             // halfway between 16 and 18, to the even code
  x.set_value(0, 3, 0.001953125f / 2);  // half of the least subnormal: to even, 0
  x.set_value(0, 128, kNaN);            // user report J6: only this element
  x.set_value(0, 129, 896.0f);
  x.set_value(0, 256, kInf);  // does not make the scale infinite
  x.set_value(0, 257, 3e38f);
  x.set_value(0, 384,
              500.0f);  // group 3: 500 / 448 rounds up to 2; group 4 stays zero, user report J5
  const Quantized plain = quantize(x, Quant::kFp8Block128);
  EXPECT_EQ(plain.scales.value(0, 0), 1.0f);
  const std::vector<uint8_t> first(plain.x.bytes.begin(), plain.x.bytes.begin() + 4);
  EXPECT_EQ(first, (std::vector<uint8_t>{0x7E, 0x80, 0x58, 0x00}));  // user report J7: 448 is 0x7E
  EXPECT_EQ(plain.x.bytes[128], 0x7F);
  EXPECT_EQ(plain.x.bytes[129], 0x7E);
  EXPECT_EQ(plain.scales.value(0, 1), 2.0f);
  EXPECT_EQ(plain.x.bytes[256], 0x7E);
  EXPECT_EQ(plain.scales.value(0, 4), 1e-4f / 448.0f);
  EXPECT_EQ(plain.x.bytes[512], 0x00);
  const Quantized pow2 = quantize(x, Quant::kFp8Block128Pow2);
  EXPECT_EQ(pow2.scales.value(0, 3), 2.0f);
  EXPECT_EQ(pow2.scales.value(0, 4), std::ldexp(1.0f, -22));
  const Quantized packed = quantize(x, Quant::kFp8Block128Ue8m0);
  EXPECT_EQ(packed.scales.columns, 2u);  // user report A3: 5 groups in two words
  const std::vector<uint8_t> exponents(packed.scales.bytes.begin(), packed.scales.bytes.end());
  EXPECT_EQ(exponents, (std::vector<uint8_t>{127, 128, 127 + 120, 128, 127 - 22, 127, 127, 127}));
  EXPECT_EQ(packed.x.bytes, pow2.x.bytes);
}

}  // namespace
}  // namespace ep::test
