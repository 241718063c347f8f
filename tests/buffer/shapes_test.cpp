// A matrix of shapes: every limit that some library had, and seeded mixtures of everything.
#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/ranks.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

TEST(Shapes, Hidden) {  // user reports A1, A2, A3, A4
  for (const uint32_t hidden :
       {8u, 64u, 96u, 200u, 1536u, 2688u, 2880u, 2888u, 3072u, 5120u, 7168u, 8192u}) {
    for (const Layout layout : kBothLayouts) {
      run_spec({.num_tokens = {3, 2},
                .num_experts = 4,
                .num_topk = 2,
                .hidden = hidden,
                .layout = layout});
    }
  }
}

TEST(Shapes, Topk) {  // user reports A5, A6, A7: K > E is legal, slots repeat experts or hold -1
  for (const uint32_t num_topk : {1u, 9u, 10u, 16u, 32u}) {
    for (const Layout layout : kBothLayouts) {
      for (const uint32_t num_experts : {64u, 4u}) {
        run_spec({.num_tokens = {5, 4},
                  .num_experts = num_experts,
                  .num_topk = num_topk,
                  .hidden = 16,
                  .routing = num_topk == 10 ? Routing::kMixed : Routing::kUniform,
                  .layout = layout});
      }
    }
  }
}

TEST(Shapes, Ranks) {  // user report A8; C2: one of 16 ranks has a token
  for (const uint32_t num_ranks : {1u, 2u, 3u, 5u, 6u, 7u, 8u, 12u, 16u}) {
    for (const Layout layout : kBothLayouts) {
      std::vector<uint32_t> num_tokens(num_ranks, 4), one(num_ranks, 0);
      for (uint32_t r = 0; r < num_ranks; ++r)
        num_tokens[r] = (r * 5) % 7;
      one[0] = 1;
      const uint32_t num_topk = std::min(8u, num_ranks * 2);
      run_specs({{.num_tokens = num_tokens,
                  .num_experts = num_ranks * 2,
                  .num_topk = num_topk,
                  .hidden = 16,
                  .layout = layout},
                 {.num_tokens = one,
                  .num_experts = num_ranks * 2,
                  .num_topk = num_topk,
                  .hidden = 16,
                  .layout = layout}});
    }
  }
}

// user reports A15, H9: E that R does not divide, fewer experts than ranks, many
TEST(Shapes, Experts) {
  for (const Layout layout : kBothLayouts) {
    run_spec({.num_tokens = {5, 6, 7, 8},
              .num_experts = 10,
              .num_topk = 3,
              .hidden = 16,
              .layout = layout});
    run_spec({.num_tokens = {5, 6, 7, 8},
              .num_experts = 3,
              .num_topk = 2,
              .hidden = 16,
              .layout = layout});
    run_spec({.num_tokens = {2, 2, 2},
              .num_experts = 256,
              .num_topk = 8,
              .hidden = 16,
              .layout = layout});
    run_spec(
        {.num_tokens = {2, 1}, .num_experts = 4096, .num_topk = 2, .hidden = 16, .layout = layout});
    run_spec({.num_tokens = {5, 6, 7, 8},
              .num_experts = 9,
              .num_topk = 3,
              .hidden = 16,
              .expert_offsets = {0, 0, 8, 8, 9},
              .layout = layout});
  }
}

// R + 1 offsets of E experts; some ranks own none.
std::vector<uint32_t> random_offsets(Random& random, uint32_t num_experts, uint32_t num_ranks) {
  std::vector<uint32_t> offsets{0, num_experts};
  for (uint32_t r = 1; r < num_ranks; ++r)
    offsets.push_back(below(random, num_experts + 1));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

TripSpec random_spec(Random& random, uint32_t num_ranks, const std::vector<uint32_t>& offsets) {
  constexpr DType kFloats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  TripSpec s;
  s.seed = random();
  s.payload_seed = 1;
  s.num_experts = offsets.back();
  s.expert_offsets = offsets;
  s.num_topk = 1 + below(random, chance(random, 4) ? 32 : 8);
  for (uint32_t r = 0; r < num_ranks; ++r)
    s.num_tokens.push_back(chance(random, 4) ? 0 : below(random, 14));
  s.hidden = chance(random, 3) ? 128 * (1 + below(random, 6)) : 8 * (1 + below(random, 60));
  s.routing = kAllRoutings[below(random, std::size(kAllRoutings))];
  s.x_dtype = kFloats[below(random, 3)];
  s.idx_dtype = chance(random, 2) ? DType::kInt32 : DType::kInt64;
  s.weights_dtype = kFloats[below(random, 3)];
  if (chance(random, 5)) s.weights_dtype.reset();
  if (chance(random, 4)) s.extras = {{DType::kUInt8, {1 + below(random, 20)}}};
  if (s.hidden % 128 == 0) s.quant = static_cast<Quant>(below(random, 4));
  if (s.quant == Quant::kNone && chance(random, 4)) s.scale_columns = 1 + below(random, 9);
  s.layout = kBothLayouts[below(random, 2)];
  const bool by_expert = s.layout == Layout::kExpert;
  if (by_expert && chance(random, 2)) s.alignment = 1u << below(random, 5);
  s.exact = !chance(random, 3);
  if (chance(random, 4)) {
    s.drop = true;
    s.max_rows = 1 + below(random, 40);
  }
  s.global_ids = chance(random, 4);
  s.answer_dtype = kFloats[below(random, 3)];
  if (chance(random, 2)) s.out_dtype = kFloats[below(random, 3)];
  if (chance(random, 3)) s.answer_hidden = 8 * (1 + below(random, 40));
  s.combine_weights = by_expert && chance(random, 2);
  s.row_weights = chance(random, 2);
  for (uint32_t b = below(random, 3); b > 0; --b)
    s.bias.push_back(kFloats[below(random, 3)]);
  s.strided = chance(random, 3);
  return s;
}

// Each buffer sees a sequence of unlike calls: user reports K1, D5, D6.
TEST(Shapes, Mixtures) {
  for (uint32_t buffer = 0; buffer < scaled(150); ++buffer) {
    Random random = stream_of(20, buffer, 0);
    const uint32_t num_ranks = 1 + below(random, 6), num_experts = 1 + below(random, 24);
    const std::vector<uint32_t> offsets = random_offsets(random, num_experts, num_ranks);
    std::vector<TripSpec> specs;
    for (uint32_t i = 0; i < 6; ++i)
      specs.push_back(random_spec(random, num_ranks, offsets));
    const uint32_t num_sms = 1 + below(random, 3);
    run_specs(specs,
              {.adapt = [&](BufferConfig& config) { config.num_sms = num_sms; },
               .answer_in = chance(random, 2) ? AnswerIn::kOrdinary : AnswerIn::kExpertOutput});
    if (HasFailure()) break;  // the first is told best on its own
  }
}

}  // namespace
}  // namespace ep::test
