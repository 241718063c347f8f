#include "support/oracle.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <stdexcept>

#include "support/number_reference.hpp"

// Every operation below is rounded on its own, as the contract says: compile with
// -ffp-contract=off.

namespace ep::test {
namespace {

const NumberFormat& format_of(DType dtype) {
  if (dtype == DType::kBFloat16) return NumberFormat::bf16();
  if (dtype == DType::kFloat16) return NumberFormat::fp16();
  throw std::logic_error("the oracle cannot compute in this dtype");
}

bool is_local(const Rules& rules, uint32_t rank, int64_t expert) {
  return expert >= 0 && expert >= rules.expert_offsets[rank] &&
         expert < rules.expert_offsets[rank + 1];
}

// One row per token that has a slot here, by source, then token.
std::vector<Row> rows_by_rank(const std::vector<Tokens>& ranks,
                              const Rules& rules,
                              uint32_t here,
                              std::vector<uint32_t>& rank_offsets) {
  std::vector<Row> rows;
  for (uint32_t source = 0; source < ranks.size(); ++source) {
    rank_offsets.push_back(static_cast<uint32_t>(rows.size()));
    for (uint64_t t = 0; t < ranks[source].num_tokens; ++t) {
      for (uint32_t k = 0; k < rules.num_topk; ++k) {
        if (!is_local(rules, here, ranks[source].idx.id(t, k))) continue;
        rows.push_back({RowKind::kToken, static_cast<int32_t>(source), static_cast<int32_t>(t),
                        static_cast<int32_t>(k)});
        break;
      }
    }
  }
  rank_offsets.push_back(static_cast<uint32_t>(rows.size()));
  return rows;
}

// One row per route, by expert, source, token, slot; then gaps up to a multiple of the alignment.
std::vector<Row> rows_by_expert(const std::vector<Tokens>& ranks,
                                const Rules& rules,
                                uint32_t here,
                                std::vector<uint32_t>& expert_offsets) {
  std::vector<Row> rows;
  for (int64_t expert = rules.expert_offsets[here]; expert < rules.expert_offsets[here + 1];
       ++expert) {
    expert_offsets.push_back(static_cast<uint32_t>(rows.size()));
    for (uint32_t source = 0; source < ranks.size(); ++source) {
      for (uint64_t t = 0; t < ranks[source].num_tokens; ++t) {
        for (uint32_t k = 0; k < rules.num_topk; ++k) {
          if (ranks[source].idx.id(t, k) != expert) continue;
          rows.push_back({RowKind::kToken, static_cast<int32_t>(source), static_cast<int32_t>(t),
                          static_cast<int32_t>(k)});
        }
      }
    }
    while (rows.size() % rules.alignment != 0)
      rows.push_back({RowKind::kGap, -1, -1, -1});
  }
  expert_offsets.push_back(static_cast<uint32_t>(rows.size()));
  return rows;
}

// Kept routes by local expert.
std::vector<uint32_t> count_routes(const std::vector<Row>& rows,
                                   const std::vector<Tokens>& ranks,
                                   const Rules& rules,
                                   uint32_t here) {
  std::vector<uint32_t> counts(rules.num_local(here));
  for (const Row& row : rows) {
    if (row.kind != RowKind::kToken) continue;
    for (uint32_t k = 0; k < rules.num_topk; ++k) {
      const int64_t expert =
          ranks[static_cast<uint32_t>(row.source)].idx.id(static_cast<uint64_t>(row.token), k);
      const bool counts_here = rules.layout == Layout::kRank ? is_local(rules, here, expert)
                                                             : static_cast<int32_t>(k) == row.slot;
      if (counts_here) ++counts[static_cast<uint64_t>(expert - rules.expert_offsets[here])];
    }
  }
  return counts;
}

// The rows of this rank, clipped to what there is room for, and the numbers about them.
Received place_rows(const std::vector<Tokens>& ranks, const Rules& rules, uint32_t here) {
  Received out;
  const bool by_rank = rules.layout == Layout::kRank;
  out.rows = by_rank ? rows_by_rank(ranks, rules, here, out.rank_offsets)
                     : rows_by_expert(ranks, rules, here, out.expert_offsets);
  out.rows_needed = out.rows.size();
  const uint64_t limit =
      rules.exact ? out.rows_needed : rules.max_rows.value_or(rules.fixed_rows(here));
  out.too_many = out.rows_needed > limit && !rules.drop;
  out.num_rows = std::min(out.rows_needed, limit);
  out.rows.resize(out.num_rows);
  out.tokens_per_expert = count_routes(out.rows, ranks, rules, here);
  out.rows.resize(limit);  // the tail
  if (by_rank) {
    uint32_t start = 0;
    for (const uint32_t n : out.tokens_per_expert) {
      out.expert_offsets.push_back(start);
      start += n;
    }
    out.expert_offsets.push_back(start);
  }
  for (auto* offsets : {&out.rank_offsets, &out.expert_offsets}) {
    if (offsets == &out.expert_offsets && by_rank) continue;  // those count routes, not rows
    for (uint32_t& offset : *offsets)
      offset = std::min(offset, static_cast<uint32_t>(limit));
  }
  return out;
}

Table gather(const Table& like,
             const std::vector<Row>& rows,
             const std::vector<const Table*>& from,
             const Table& gap) {
  Table out(like.dtype, rows.size(), like.columns);
  for (uint64_t r = 0; r < rows.size(); ++r) {
    if (rows[r].kind == RowKind::kTail) continue;
    const uint8_t* source = rows[r].kind == RowKind::kGap
                                ? gap.row(0)
                                : from[static_cast<uint32_t>(rows[r].source)]->row(
                                      static_cast<uint64_t>(rows[r].token));
    std::copy_n(source, like.row_bytes(), out.row(r));
  }
  return out;
}

// Bytes of the gap rows of our own scales: 1.0, or exponents of 1.0.
Table gap_scales(const Table& scales, Quant quant) {
  Table gap(scales.dtype, 1, scales.columns);
  for (uint64_t c = 0; c < gap.columns; ++c) {
    if (quant == Quant::kFp8Block128Ue8m0)
      gap.set<uint32_t>(0, c, 0x7F7F7F7Fu);
    else if (quant != Quant::kNone)
      gap.set<float>(0, c, 1.0f);
  }
  return gap;
}

void gather_payload(Received& out,
                    const std::vector<Tokens>& ranks,
                    const std::vector<Quantized>& quantized,
                    const Rules& rules) {
  const bool ours = rules.quant != Quant::kNone;
  std::vector<const Table*> from(ranks.size());
  const auto gather_all = [&](auto get, Quant quant) {
    for (uint32_t r = 0; r < ranks.size(); ++r)
      from[r] = get(r);
    return from[0]->defined() ? gather(*from[0], out.rows, from, gap_scales(*from[0], quant))
                              : Table{};
  };
  out.x =
      gather_all([&](uint32_t r) { return ours ? &quantized[r].x : &ranks[r].x; }, Quant::kNone);
  out.scales = gather_all(
      [&](uint32_t r) { return ours ? &quantized[r].scales : &ranks[r].scales; }, rules.quant);
  for (uint32_t i = 0; i < ranks[0].extras.size(); ++i) {
    out.extras.push_back(gather_all([&](uint32_t r) { return &ranks[r].extras[i]; }, Quant::kNone));
  }
}

void gather_metadata(Received& out,
                     const std::vector<Tokens>& ranks,
                     const Rules& rules,
                     uint32_t here) {
  const bool by_rank = rules.layout == Layout::kRank;
  const uint32_t width = by_rank ? rules.num_topk : 1;
  const uint64_t num_rows = out.rows.size();
  out.idx = Table(ranks[0].idx.dtype, num_rows, width);
  if (ranks[0].weights.defined()) out.weights = Table(DType::kFloat32, num_rows, width);
  out.source = Table(DType::kInt32, num_rows, 2);
  for (uint64_t r = 0; r < num_rows; ++r) {
    const Row& row = out.rows[r];
    out.source.set<int32_t>(r, 0, row.source);
    out.source.set<int32_t>(r, 1, row.token);
    for (uint32_t c = 0; c < width; ++c) {
      out.idx.set_id(r, c, -1);
      if (row.kind != RowKind::kToken) continue;
      const Tokens& source = ranks[static_cast<uint32_t>(row.source)];
      const uint64_t token = static_cast<uint64_t>(row.token),
                     slot = by_rank ? c : static_cast<uint32_t>(row.slot);
      const int64_t expert = source.idx.id(token, slot);
      if (!is_local(rules, here, expert)) continue;
      out.idx.set_id(r, c, rules.global_ids ? expert : expert - rules.expert_offsets[here]);
      if (out.weights.defined()) out.weights.set<float>(r, c, source.weights.value(token, slot));
    }
  }
}

}  // namespace

float Table::value(uint64_t r, uint64_t c) const {
  if (dtype == DType::kFloat32) return get<float>(r, c);
  return static_cast<float>(format_of(dtype).decode(get<uint16_t>(r, c)));
}

void Table::set_value(uint64_t r, uint64_t c, float v) {
  if (dtype == DType::kFloat32) return set<uint32_t>(r, c, fp32_bits(v));
  set<uint16_t>(r, c, static_cast<uint16_t>(format_of(dtype).encode(v)));
}

int64_t Table::id(uint64_t r, uint64_t c) const {
  return dtype == DType::kInt64 ? get<int64_t>(r, c) : get<int32_t>(r, c);
}

void Table::set_id(uint64_t r, uint64_t c, int64_t id) {
  if (dtype == DType::kInt64) return set<int64_t>(r, c, id);
  set<int32_t>(r, c, static_cast<int32_t>(id));
}

uint64_t Rules::fixed_rows(uint32_t rank) const {
  const uint64_t tokens = uint64_t{num_ranks()} * max_tokens;
  if (layout == Layout::kRank) return tokens;
  const uint64_t routes = tokens * num_topk, groups = std::min<uint64_t>(num_local(rank), routes);
  return num_local(rank) == 0 ? 0 : alignment * (groups + (routes - groups) / alignment);
}

std::vector<uint32_t> even_offsets(uint32_t num_experts, uint32_t num_ranks) {
  std::vector<uint32_t> offsets{0};
  for (uint32_t r = 0; r < num_ranks; ++r) {
    offsets.push_back(offsets.back() + num_experts / num_ranks +
                      (r < num_experts % num_ranks ? 1 : 0));
  }
  return offsets;
}

Dispatched dispatch(const std::vector<Tokens>& ranks, const Rules& rules) {
  Dispatched out;
  std::vector<Quantized> quantized;
  if (rules.quant != Quant::kNone) {
    for (const Tokens& tokens : ranks)
      quantized.push_back(quantize(tokens.x, rules.quant));
  }
  for (const Tokens& tokens : ranks)
    out.places.emplace_back(tokens.num_tokens * rules.num_topk);
  for (uint32_t here = 0; here < ranks.size(); ++here) {
    Received received = place_rows(ranks, rules, here);
    gather_payload(received, ranks, quantized, rules);
    gather_metadata(received, ranks, rules, here);
    for (uint64_t r = 0; r < received.num_rows; ++r) {
      const Row& row = received.rows[r];
      if (row.kind != RowKind::kToken) continue;
      const uint32_t source = static_cast<uint32_t>(row.source);
      const uint64_t token = static_cast<uint64_t>(row.token);
      for (uint32_t k = 0; k < rules.num_topk; ++k) {
        const bool here_too = rules.layout == Layout::kRank
                                  ? is_local(rules, here, ranks[source].idx.id(token, k))
                                  : static_cast<int32_t>(k) == row.slot;
        if (here_too) out.places[source][token * rules.num_topk + k] = Place{here, r};
      }
    }
    out.ranks.push_back(std::move(received));
  }
  return out;
}

Quantized quantize(const Table& x, Quant quant) {
  constexpr uint64_t kGroup = 128;
  const bool packed = quant == Quant::kFp8Block128Ue8m0;
  const uint64_t groups = x.columns / kGroup;
  Quantized out{Table(DType::kFloat8E4M3FN, x.rows, x.columns),
                packed ? Table(DType::kInt32, x.rows, (groups + 3) / 4, 127)
                       : Table(DType::kFloat32, x.rows, groups)};
  for (uint64_t r = 0; r < x.rows; ++r) {
    for (uint64_t g = 0; g < groups; ++g) {
      float amax = 0.0f;
      for (uint64_t c = g * kGroup; c < (g + 1) * kGroup; ++c) {
        const float v = x.value(r, c);
        if (!std::isnan(v)) amax = std::max(amax, std::fabs(v));
      }
      amax = std::min(amax, FLT_MAX);
      float scale = std::max(amax, 1e-4f) / 448.0f;
      int exponent = -126;
      if (quant != Quant::kFp8Block128) {
        while (std::ldexp(1.0f, exponent) < scale)
          ++exponent;
        scale = std::ldexp(1.0f, exponent);
      }
      // Little-endian: byte g % 4 of word g / 4 is byte g.
      if (packed)
        out.scales.row(r)[g] = static_cast<uint8_t>(exponent + 127);
      else
        out.scales.set<float>(r, g, scale);
      const float inverse = 1.0f / scale;
      for (uint64_t c = g * kGroup; c < (g + 1) * kGroup; ++c) {
        float q = x.value(r, c) * inverse;
        if (q > 448.0f) q = 448.0f;
        if (q < -448.0f) q = -448.0f;
        out.x.row(r)[c] = static_cast<uint8_t>(NumberFormat::e4m3fn().encode(q));
      }
    }
  }
  return out;
}

namespace {

// The rows that (token) is the sum of, by slot: "rank": at the first slot of each rank.
struct Term {
  Place place;
  uint32_t slot;
};

std::vector<Term> terms_of(const Dispatched& sent,
                           const Rules& rules,
                           uint32_t source,
                           uint64_t token) {
  std::vector<Term> terms;
  for (uint32_t k = 0; k < rules.num_topk; ++k) {
    const std::optional<Place>& place = sent.places[source][token * rules.num_topk + k];
    if (!place) continue;
    const bool seen = std::any_of(terms.begin(), terms.end(),
                                  [&](const Term& term) { return term.place.rank == place->rank; });
    if (rules.layout == Layout::kExpert || !seen) terms.push_back({*place, k});
  }
  return terms;
}

float sum_column(const std::vector<Term>& terms,
                 const std::vector<Answer>& answers,
                 const Answer& mine,
                 uint64_t token,
                 uint64_t column) {
  std::optional<float> acc;
  const auto add = [&acc](float term) { acc = acc ? *acc + term : term; };
  for (const Term& term : terms) {
    const float row = answers[term.place.rank].x.value(term.place.row, column);
    if (mine.weights.defined()) {
      const float product = mine.weights.value(token, term.slot) * row;
      add(product);
    } else {
      add(row);
    }
  }
  for (const Table& bias : mine.bias)
    add(bias.value(token, column));
  return acc.value_or(0.0f);
}

}  // namespace

std::vector<Combined> combine(const Dispatched& sent,
                              const Rules& rules,
                              const std::vector<Tokens>& tokens,
                              const std::vector<Answer>& answers) {
  std::vector<Combined> out;
  for (uint32_t source = 0; source < tokens.size(); ++source) {
    const Answer& mine = answers[source];
    const uint64_t num_tokens = tokens[source].num_tokens;
    Combined y;
    y.x = Table(mine.out_dtype.value_or(mine.x.dtype), num_tokens, mine.x.columns);
    if (mine.row_weights.defined())
      y.topk_weights = Table(DType::kFloat32, num_tokens, rules.num_topk);
    for (uint64_t t = 0; t < num_tokens; ++t) {
      const std::vector<Term> terms = terms_of(sent, rules, source, t);
      for (uint64_t c = 0; c < y.x.columns; ++c)
        y.x.set_value(t, c, sum_column(terms, answers, mine, t, c));
      for (uint32_t k = 0; k < rules.num_topk && y.topk_weights.defined(); ++k) {
        const std::optional<Place>& place = sent.places[source][t * rules.num_topk + k];
        if (!place) continue;
        const uint32_t column = rules.layout == Layout::kRank ? k : 0;
        y.topk_weights.set<uint32_t>(
            t, k, answers[place->rank].row_weights.get<uint32_t>(place->row, column));
      }
    }
    out.push_back(std::move(y));
  }
  return out;
}

}  // namespace ep::test
