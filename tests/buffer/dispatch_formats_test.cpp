// What travels: quantised rows, opaque bytes with scales, extras.
#include <vector>

#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "support/trip.hpp"

namespace ep::test {
namespace {

// user reports J1, J5, J6, J7: the inputs hold -0, subnormals, infinities, NaN and zero groups.
TEST(DispatchFormats, Fp8OfEveryDtype) {
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const Quant quant :
         {Quant::kFp8Block128, Quant::kFp8Block128Pow2, Quant::kFp8Block128Ue8m0}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        specs.push_back({.num_tokens = {5, 9},
                         .num_experts = 6,
                         .num_topk = 3,
                         .hidden = 640,
                         .routing = Routing::kMixed,
                         .x_dtype = dtype,
                         .layout = layout,
                         .alignment = layout == Layout::kExpert ? 4u : 1u,
                         .quant = quant,
                         .strided = dtype == DType::kFloat16});
      }
    }
  }
  run_specs(specs);
}

TEST(DispatchFormats, Fp8GroupCounts) {  // user report A3: 21 groups; 128 bytes is the least
  for (const uint32_t hidden : {128u, 384u, 512u, 2688u}) {
    for (const Quant quant : {Quant::kFp8Block128, Quant::kFp8Block128Ue8m0}) {
      run_spec({.num_tokens = {3, 4},
                .num_experts = 4,
                .num_topk = 2,
                .hidden = hidden,
                .layout = Layout::kExpert,
                .alignment = 2,
                .exact = hidden != 512,
                .quant = quant});
    }
  }
}

TEST(DispatchFormats, Fp8OfZeros) {  // user report J5
  Trip trip = make_trip({.num_tokens = {3, 4},
                         .num_experts = 4,
                         .num_topk = 2,
                         .hidden = 256,
                         .quant = Quant::kFp8Block128});
  for (Tokens& t : trip.tokens)
    std::fill(t.x.bytes.begin(), t.x.bytes.end(), uint8_t{0});
  trip.sent = dispatch(trip.tokens, trip.rules);
  make_answers(trip);
  run_trips({&trip, 1});
}

TEST(DispatchFormats, OpaqueRowsWithScales) {  // user report J8: padded and transposed scales
  std::vector<TripSpec> specs;
  for (const Layout layout : kBothLayouts) {
    for (const bool strided : {false, true}) {
      for (const DType dtype : {DType::kUInt8, DType::kBFloat16, DType::kFloat32, DType::kInt32,
                                DType::kFloat8E8M0FNU}) {
        for (const uint32_t columns : {1u, 3u, 56u}) {
          specs.push_back({.num_tokens = {6, 3},
                           .num_experts = 5,
                           .num_topk = 3,
                           .hidden = 112,
                           .routing = Routing::kMixed,
                           .x_dtype = DType::kFloat8E4M3FN,
                           .scales_dtype = dtype,
                           .scale_columns = columns,
                           .layout = layout,
                           .alignment = layout == Layout::kExpert ? 4u : 1u,
                           .strided = strided});
        }
      }
    }
  }
  run_specs(specs);
}

TEST(DispatchFormats, OpaqueRowsWithoutScales) {
  std::vector<TripSpec> specs;
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kInt8, DType::kUInt8,
                            DType::kFloat4E2M1FNx2}) {
    specs.push_back(
        {.num_tokens = {6, 3}, .num_experts = 5, .num_topk = 3, .hidden = 48, .x_dtype = dtype});
  }
  run_specs(specs);
}

TEST(DispatchFormats, FloatsWithScalesAreOpaqueToo) {  // NaN payloads pass
  run_spec({.num_tokens = {6, 3},
            .num_experts = 5,
            .num_topk = 3,
            .hidden = 48,
            .scales_dtype = DType::kUInt8,
            .scale_columns = 5});
}

TEST(DispatchFormats, Extras) {
  std::vector<TripSpec> specs;
  const std::vector<ExtraSpec> extras{{DType::kInt64, {}},
                                      {DType::kUInt8, {3}},
                                      {DType::kFloat64, {2, 3}},
                                      {DType::kBool, {1}},
                                      {DType::kBFloat16, {4, 1, 5}}};
  for (const Layout layout : kBothLayouts) {
    for (const bool exact : {true, false}) {
      specs.push_back({.num_tokens = {6, 0, 3},
                       .num_experts = 5,
                       .num_topk = 3,
                       .hidden = 16,
                       .routing = Routing::kMixed,
                       .extras = extras,
                       .layout = layout,
                       .alignment = layout == Layout::kExpert ? 8u : 1u,
                       .exact = exact});
    }
  }
  specs.push_back({.num_tokens = {2, 2, 2},
                   .num_experts = 5,
                   .num_topk = 3,
                   .hidden = 16,
                   .extras = std::vector<ExtraSpec>(kMaxExtras, {DType::kUInt16, {7}}),
                   .strided = true});
  run_specs(specs);
}

TEST(DispatchFormats, ExtrasWithQuant) {
  run_spec({.num_tokens = {6, 3},
            .num_experts = 5,
            .num_topk = 3,
            .hidden = 256,
            .extras = {{DType::kFloat32, {3}}},
            .layout = Layout::kExpert,
            .alignment = 4,
            .quant = Quant::kFp8Block128});
}

// user reports K1, D6: layers of different formats in turn
TEST(DispatchFormats, OneBufferManyShapes) {
  std::vector<TripSpec> specs;
  for (uint32_t round = 0; round < 12; ++round) {
    TripSpec s{.num_tokens = {5 + round, 9},
               .num_experts = 6,
               .num_topk = 1 + round % 4,
               .hidden = 128u << (round % 3),
               .seed = round,
               .layout = kBothLayouts[round % 2]};
    if (round % 3 == 0) s.quant = Quant::kFp8Block128;
    if (round % 4 == 1) s.x_dtype = DType::kFloat32;
    specs.push_back(s);
  }
  run_specs(specs);
}

}  // namespace
}  // namespace ep::test
