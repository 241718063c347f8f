// The seeded half of trip.hpp: inputs and the oracle's answers.
#include <algorithm>
#include <array>
#include <limits>
#include <sstream>

#include "support/trip.hpp"

namespace ep::test {
namespace {

constexpr uint8_t kNaNByte = 0xFF;  // bf16, fp16 and fp32 of these bytes are NaN

// Numbers are picked from a pool: encoding each one anew would take longer than the tests.
constexpr uint64_t kTame = 509, kWild = 12;

Table make_pool(DType dtype) {
  using Limits = std::numeric_limits<float>;
  constexpr std::array<float, kWild> kSpecial = {-0.0f,
                                                 Limits::infinity(),
                                                 -Limits::infinity(),
                                                 Limits::quiet_NaN(),
                                                 3e38f,
                                                 -3e38f,
                                                 1e-40f,
                                                 6e-8f,
                                                 -6e-8f,
                                                 65519.0f,
                                                 447.9f,
                                                 0.0f};
  Random random(dtype == DType::kFloat32 ? 7 : 11);
  Table pool(dtype, 1, kTame + kWild);
  for (uint64_t i = 0; i < kTame; ++i) {
    const float mantissa =
        1.0f + static_cast<float>(below(random, 1u << 20)) / static_cast<float>(1u << 20);
    const float magnitude = std::ldexp(mantissa, static_cast<int>(below(random, 13)) - 6);
    pool.set_value(0, i, chance(random, 2) ? magnitude : -magnitude);
  }
  for (uint64_t i = 0; i < kWild; ++i)
    pool.set_value(0, kTame + i, kSpecial[i]);
  return pool;
}

bool is_number(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

Table make_bytes(DType dtype, uint64_t rows, uint64_t columns, Random& random) {
  Table t(dtype, rows, columns);
  for (uint8_t& b : t.bytes)
    b = static_cast<uint8_t>(random());
  return t;
}

Tokens make_tokens(const Trip& trip, uint32_t rank) {
  const TripSpec& s = trip.spec;
  Random random = stream_of(s.seed + 1000 * s.payload_seed, rank, 3),
         weights_random = stream_of(s.seed, rank, 5);
  Tokens t;
  t.num_tokens = s.num_tokens[rank];
  t.idx = make_ids({s.routing, s.seed, s.num_topk, trip.rules.expert_offsets, s.idx_dtype}, rank,
                   t.num_tokens);
  t.x = is_number(s.x_dtype) ? make_numbers(s.x_dtype, t.num_tokens, s.hidden, random, true)
                             : make_bytes(s.x_dtype, t.num_tokens, s.hidden, random);
  if (s.weights_dtype)
    t.weights = make_numbers(*s.weights_dtype, t.num_tokens, s.num_topk, weights_random, false);
  if (s.scale_columns != 0)
    t.scales = make_bytes(s.scales_dtype, t.num_tokens, s.scale_columns, random);
  for (const ExtraSpec& extra : s.extras) {
    uint64_t columns = 1;
    for (const int64_t n : extra.shape)
      columns *= static_cast<uint64_t>(n);
    t.extras.push_back(make_bytes(extra.dtype, t.num_tokens, columns, random));
  }
  for (uint64_t row = 0; row < t.num_tokens; ++row) {  // what nobody may see is NaN
    bool is_sent = false;
    for (uint32_t k = 0; k < s.num_topk; ++k) {
      const bool has_expert = t.idx.id(row, k) >= 0;
      is_sent |= has_expert;
      if (!has_expert && s.weights_dtype)
        std::fill_n(t.weights.at(row, k), num_bytes(*s.weights_dtype), kNaNByte);
    }
    if (!is_sent) std::fill_n(t.x.row(row), t.x.row_bytes(), kNaNByte);
  }
  return t;
}

uint32_t most_tokens(const TripSpec& spec) {
  return *std::max_element(spec.num_tokens.begin(), spec.num_tokens.end());
}

}  // namespace

std::string TripSpec::name() const {
  std::ostringstream out;
  out << "R " << num_tokens.size() << ", T";
  for (const uint32_t t : num_tokens)
    out << ' ' << t;
  out << ", E " << num_experts << ", K " << num_topk << ", H " << hidden << ", routing "
      << int(routing) << ", seed " << seed << ", " << name_of(x_dtype)
      << (layout == Layout::kRank ? ", rank" : ", expert") << ", alignment " << alignment
      << (exact ? ", exact" : ", fixed") << (drop ? ", drop" : "") << ", quant " << int(quant);
  return out.str();
}

Table make_numbers(DType dtype, uint64_t rows, uint64_t columns, Random& random, bool wild) {
  static const Table kBF16 = make_pool(DType::kBFloat16), kFP16 = make_pool(DType::kFloat16),
                     kFP32 = make_pool(DType::kFloat32);
  const Table& pool =
      dtype == DType::kBFloat16 ? kBF16 : (dtype == DType::kFloat16 ? kFP16 : kFP32);
  Table t(dtype, rows, columns);
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t c = 0; c < columns; ++c) {
      // Specials are rare, else every sum is NaN and every scale the greatest.
      const uint64_t pick =
          wild && chance(random, 512) ? kTame + below(random, kWild) : below(random, kTame);
      std::copy_n(pool.at(0, pick), num_bytes(dtype), t.at(r, c));
    }
  }
  return t;
}

void make_answers(Trip& trip) {
  const TripSpec& s = trip.spec;
  const uint32_t hidden = s.answer_hidden == 0 ? s.hidden : s.answer_hidden;
  trip.answers.clear();
  for (uint32_t rank = 0; rank < trip.num_ranks(); ++rank) {
    Random random = stream_of(s.seed + 1000 * s.payload_seed, rank, 4);
    const Received& received = trip.sent.ranks[rank];
    Answer a;
    a.x = make_numbers(s.answer_dtype, received.rows.size(), hidden, random, true);
    a.out_dtype = s.out_dtype;
    if (s.row_weights)
      a.row_weights = make_numbers(DType::kFloat32, a.x.rows, received.idx.columns, random, false);
    for (uint64_t r = 0; r < a.x.rows; ++r) {
      if (received.rows[r].kind != RowKind::kToken)
        std::fill_n(a.x.row(r), a.x.row_bytes(), kNaNByte);
      for (uint64_t c = 0; c < a.row_weights.columns; ++c) {
        if (received.idx.id(r, c) < 0) std::fill_n(a.row_weights.at(r, c), 4, kNaNByte);
      }
    }
    const uint64_t num_tokens = trip.tokens[rank].num_tokens;
    if (s.combine_weights) {
      a.weights = make_numbers(s.weights_dtype.value_or(DType::kFloat32), num_tokens, s.num_topk,
                               random, false);
      for (uint64_t slot = 0; slot < num_tokens * s.num_topk; ++slot) {
        if (trip.sent.places[rank][slot]) continue;
        std::fill_n(a.weights.at(slot / s.num_topk, slot % s.num_topk), num_bytes(a.weights.dtype),
                    kNaNByte);
      }
    }
    for (const DType dtype : s.bias)
      a.bias.push_back(make_numbers(dtype, num_tokens, hidden, random, true));
    trip.answers.push_back(std::move(a));
  }
  trip.back = combine(trip.sent, trip.rules, trip.tokens, trip.answers);
}

Trip make_trip(const TripSpec& spec) {
  Trip trip;
  trip.spec = spec;
  Rules& r = trip.rules;
  r.expert_offsets = spec.expert_offsets;
  if (r.expert_offsets.empty()) {
    r.expert_offsets =
        even_offsets(spec.num_experts, static_cast<uint32_t>(spec.num_tokens.size()));
  }
  r.num_topk = spec.num_topk;
  r.layout = spec.layout;
  r.alignment = spec.alignment;
  r.exact = spec.exact && !spec.max_rows;
  r.max_tokens =
      spec.max_tokens != 0 ? spec.max_tokens : std::max(spec.buffer_tokens, most_tokens(spec));
  r.max_rows = spec.max_rows;
  r.drop = spec.drop;
  r.quant = spec.quant;
  r.global_ids = spec.global_ids;
  for (uint32_t rank = 0; rank < spec.num_tokens.size(); ++rank)
    trip.tokens.push_back(make_tokens(trip, rank));
  trip.sent = dispatch(trip.tokens, r);
  make_answers(trip);
  return trip;
}

std::vector<Trip> make_trips(std::vector<TripSpec> specs) {
  uint32_t most = 0;
  for (const TripSpec& spec : specs)
    most = std::max({most, spec.max_tokens, most_tokens(spec)});
  std::vector<Trip> trips;
  for (TripSpec& spec : specs) {
    spec.buffer_tokens = most;
    trips.push_back(make_trip(spec));
  }
  return trips;
}

}  // namespace ep::test
