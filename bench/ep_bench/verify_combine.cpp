#include <vector>

#include "bench/ep_bench/difference.hpp"
#include "bench/ep_bench/numbers.hpp"
#include "bench/ep_bench/verify.hpp"

namespace ep::bench {
namespace {

struct Term {
  uint32_t part;  // write_answer's
  float weight;   // 1: multiplying by it changes nothing
};

// The rows of a token, in the order in which they are added: layout "rank" has one per rank, where
// the token's first expert of that rank is.
std::vector<Term> terms_of(const RankData& data, uint32_t token) {
  std::vector<Term> terms;
  std::vector<bool> has_row(data.kase.num_ranks, false);
  for (uint32_t slot = 0; slot < data.kase.num_topk; ++slot) {
    const uint64_t at = uint64_t{token} * data.kase.num_topk + slot;
    if (data.kase.layout == Layout::kExpert) {
      terms.push_back({slot, static_cast<const float*>(data.topk_weights.data)[at]});
      continue;
    }
    const uint32_t owner = data.kase.owner(static_cast<uint32_t>(data.routing[data.rank][at]));
    if (!has_row[owner]) terms.push_back({owner, 1.0f});
    has_row[owner] = true;
  }
  return terms;
}

}  // namespace

Verified verify_combine(const RankData& data, const CombineResult& result, const char* what) {
  const Case& c = data.kase;
  expect_equal(element<int32_t>(result.status, 0), 0, str(what, ": status[0]"));
  expect_dtype(result.x, c.dtype, what, "x");
  expect_shape(result.x, c.num_tokens, c.hidden, what, "x");
  std::vector<std::byte> row(c.combine_row_bytes());
  std::vector<float> answer(c.hidden), sum(c.hidden);
  for (uint32_t token = 0; token < c.num_tokens; ++token) {
    bool is_first = true;
    for (const Term& term : terms_of(data, token)) {
      write_answer(c, data.rank, token, term.part, row.data());
      decode_row(c.dtype, row.data(), c.hidden, answer.data());
      for (uint32_t i = 0; i < c.hidden; ++i) {
        const float product = term.weight * answer[i];
        sum[i] = is_first ? product : sum[i] + product;
      }
      is_first = false;
    }
    encode_row(c.dtype, sum.data(), c.hidden, row.data());
    expect_row(result.x, token, row.data(), what, "x", {data.rank, token, 0});
  }
  return {0, uint64_t{c.num_tokens} * c.hidden};
}

Verified verify(const RankData& data, const Exchange& exchange, Contender contender) {
  Verified verified;
  if (is_memcpy(contender)) return verified;
  if (moves_dispatch_rows(contender)) {
    verified = verify_dispatch(data, exchange.dispatched(), name_of(contender));
  }
  if (moves_combine_rows(contender)) {
    verified.values += verify_combine(data, exchange.combined(), name_of(contender)).values;
  }
  return verified;
}

}  // namespace ep::bench
