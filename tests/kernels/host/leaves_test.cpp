// Holds every table this CPU can run to the formulas of leaves.hpp, bit for bit.
#include "kernels/host/leaves.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/host/leaves_testing.hpp"
#include "support/number_reference.hpp"

namespace ep::kernels::host {
namespace {

class LeavesTest : public testing::TestWithParam<uint32_t> {
 protected:
  const Leaves& table() const { return leaf_table(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Isa,
                         LeavesTest,
                         testing::Range(0u, num_leaf_tables()),
                         [](const auto& instance) { return leaf_table(instance.param).isa; });

TEST(Leaves, TheLastTableIsTheChoice) {
  EXPECT_STREQ(leaf_table(0).isa, "baseline");
  EXPECT_EQ(&leaves(), &leaf_table(num_leaf_tables() - 1));
}

// ---- copy_row -------------------------------------------------------------------------------

TEST_P(LeavesTest, CopiesAnyNumberOfBytes) {
  std::vector<uint64_t> sizes;
  for (uint64_t n = 0; n < 200; ++n)
    sizes.push_back(n);
  for (uint64_t n = 1000; n < 1200; ++n)
    sizes.push_back(n);
  for (const uint64_t n : {7168, 7392, 14336, 32768, 32769})
    sizes.push_back(n);
  std::mt19937 random(1);
  for (const uint64_t n : sizes) {
    for (const uint64_t to : {0, 16, 32, 48}) {
      for (const uint64_t from : {0, 1, 16, 31}) {
        Guarded source(n, from), target(n, to);
        std::generate_n(source.data(), n, [&] { return static_cast<std::byte>(random()); });
        table().copy_row(target.data(), source.data(), n);
        table().stream_fence();
        ASSERT_EQ(difference(target.bytes(), source.bytes()), "") << n << " " << to << " " << from;
        ASSERT_TRUE(target.are_canaries_alive()) << n << " " << to << " " << from;
      }
    }
  }
}

// ---- quantize_row ---------------------------------------------------------------------------

struct Quantized {
  std::vector<std::byte> bytes, scales;
};

Quantized quantize_reference(Element e, Format format, const std::vector<uint32_t>& codes) {
  Quantized q;
  for (uint32_t begin = 0; begin < codes.size(); begin += 128) {
    float amax = 0;
    for (uint32_t c = begin; c < begin + 128; ++c) {
      const float x = std::abs(to_float(e, codes[c]));
      if (!std::isnan(x)) amax = std::max(amax, x);
    }
    float scale = std::max(std::min(amax, std::numeric_limits<float>::max()), 1e-4f) / 448.0f;
    if (format != Format::kFp8Block128) {
      int exponent = -126;
      while (std::ldexp(1.0f, exponent) < scale)
        ++exponent;
      scale = std::ldexp(1.0f, exponent);
      if (format == Format::kFp8Block128Ue8m0)
        append(q.scales, static_cast<uint8_t>(exponent + 127));
    }
    if (format != Format::kFp8Block128Ue8m0) append(q.scales, scale);
    for (uint32_t c = begin; c < begin + 128; ++c) {
      float x = to_float(e, codes[c]) * (1.0f / scale);
      if (!std::isnan(x)) x = std::clamp(x, -448.0f, 448.0f);
      append(q.bytes, static_cast<uint8_t>(NumberFormat::e4m3fn().encode(x)));
    }
  }
  while (q.scales.size() % 4 != 0)
    append<uint8_t>(q.scales, 127);
  return q;
}

void check_quantize(const Leaves& table,
                    Element e,
                    Format format,
                    const std::vector<uint32_t>& codes,
                    uint64_t misalignment) {
  SCOPED_TRACE(testing::Message() << "element " << static_cast<int>(e) << " format "
                                  << static_cast<int>(format) << " columns " << codes.size()
                                  << " misalignment " << misalignment);
  const Quantized want = quantize_reference(e, format, codes);
  Row in(e, codes, misalignment);
  Guarded out(codes.size(), misalignment * 16 % 64), scales(want.scales.size(), 4);
  const int index = static_cast<int>(format) - static_cast<int>(Format::kFp8Block128);
  table.quantize_row[static_cast<int>(e)][index](
      {in.memory.data(), out.data(), scales.data(), static_cast<uint32_t>(codes.size())});
  ASSERT_EQ(difference(scales.bytes(), want.scales), "") << "scales";
  ASSERT_EQ(difference(out.bytes(), want.bytes), "") << "values";
  ASSERT_TRUE(out.are_canaries_alive());
  ASSERT_TRUE(scales.are_canaries_alive());
}

TEST_P(LeavesTest, QuantizesByTheFormula) {
  for (const Element e : kElements) {
    for (const Format format : kFormats) {
      for (const uint32_t columns : {128, 256, 384, 512, 640, 1024, 7168, 8192}) {
        const uint64_t misalignment = columns / 128 % 4 * num_bytes(e);
        check_quantize(table(), e, format, ordinary_codes(e, columns, columns), misalignment);
        check_quantize(table(), e, format, any_codes(e, columns, columns), misalignment);
      }
    }
  }
}

TEST_P(LeavesTest, QuantizesEvery16BitCode) {
  std::vector<uint32_t> codes(0x10000);
  for (uint32_t c = 0; c < codes.size(); ++c)
    codes[c] = c;
  for (const Element e : {Element::kBF16, Element::kFP16}) {
    for (const Format format : kFormats)
      check_quantize(table(), e, format, codes, 0);
  }
}

// Each group begins with 448, so the scale is 1 and the rest is rounded as it is.
TEST_P(LeavesTest, RoundsToTheNearestE4m3fn) {
  std::vector<uint32_t> codes;
  for (const float v : NumberFormat::e4m3fn().edges()) {
    if (std::abs(v) > 448.0f) continue;
    if (codes.size() % 128 == 0) codes.push_back(test::fp32_bits(448.0f));
    codes.push_back(test::fp32_bits(v));
  }
  codes.resize((codes.size() + 127) / 128 * 128);
  for (const Format format : kFormats)
    check_quantize(table(), Element::kFP32, format, codes, 4);
}

TEST_P(LeavesTest, QuantizesSpecialGroups) {
  for (const Element e : kElements) {
    // Group 0: zeros and -0.  1: NaNs of both signs.  2: an infinity.  3: only NaNs.  4: the
    // greatest number.  5: subnormals.
    std::vector<uint32_t> codes = ordinary_codes(e, 6 * 128, 1);
    const uint32_t sign = e == Element::kFP32 ? 0x80000000u : 0x8000u;
    const uint32_t inf = to_bits(e, INFINITY), nan = to_bits(e, NAN);
    for (uint32_t c = 0; c < 128; ++c) {
      codes[c] = c % 2 == 0 ? 0 : sign;
      codes[3 * 128 + c] = c % 2 == 0 ? nan : nan | sign;
      codes[5 * 128 + c] = c % 2 == 0 ? c : c | sign;
    }
    codes[128 + 5] = nan | sign;
    codes[128 + 77] = nan;
    codes[2 * 128 + 127] = inf | sign;
    codes[4 * 128 + 64] = inf - 1;
    for (const Format format : kFormats)
      check_quantize(table(), e, format, codes, 0);
  }
}

// The values that api.md promises by name, so that the reference is not the only witness.
TEST_P(LeavesTest, QuantizesToTheDocumentedBytes) {
  std::vector<uint32_t> codes(256, 0);
  codes[1] = 0x80000000u;
  codes[128] = test::fp32_bits(INFINITY);
  codes[129] = test::fp32_bits(-INFINITY);
  codes[130] = 0xFFC00001u;
  Row in(Element::kFP32, codes, 0);
  Guarded out(256, 0), scales(8, 0);
  table().quantize_row[2][0]({in.memory.data(), out.data(), scales.data(), 256});
  float scale[2];
  std::memcpy(scale, scales.data(), sizeof(scale));
  EXPECT_EQ(scale[0], 1e-4f / 448.0f);
  EXPECT_EQ(scale[1], std::numeric_limits<float>::max() / 448.0f);
  const auto byte = [&](uint32_t c) { return static_cast<int>(out.data()[c]); };
  EXPECT_EQ(byte(0), 0x00);
  EXPECT_EQ(byte(1), 0x80);
  EXPECT_EQ(byte(128), 0x7E);
  EXPECT_EQ(byte(129), 0xFE);
  EXPECT_EQ(byte(130), 0x7F);
  EXPECT_EQ(byte(131), 0x00);
}

// ---- reduce_row -----------------------------------------------------------------------------

struct Sum {
  Element in, out;
  std::vector<std::vector<uint32_t>> terms;
  std::vector<float> weights;  // empty: unweighted
  std::vector<std::vector<uint32_t>> biases;
  std::vector<Element> bias_elements;
  uint32_t columns;
};

std::vector<std::byte> sum_reference(const Sum& s) {
  std::vector<std::byte> out;
  for (uint32_t c = 0; c < s.columns; ++c) {
    std::vector<float> addends;
    for (uint32_t t = 0; t < s.terms.size(); ++t) {
      const float x = to_float(s.in, s.terms[t][c]);
      addends.push_back(s.weights.empty() ? x : s.weights[t] * x);
    }
    for (uint32_t b = 0; b < s.biases.size(); ++b) {
      addends.push_back(to_float(s.bias_elements[b], s.biases[b][c]));
    }
    float sum = addends.empty() ? 0.0f : addends[0];
    for (uint32_t i = 1; i < addends.size(); ++i)
      sum = sum + addends[i];
    append(out, to_bits(s.out, sum), num_bytes(s.out));
  }
  return out;
}

void check_reduce(const Leaves& table, const Sum& s, uint64_t misalignment) {
  SCOPED_TRACE(testing::Message() << "in " << static_cast<int>(s.in) << " out "
                                  << static_cast<int>(s.out) << " terms " << s.terms.size()
                                  << " weighted " << !s.weights.empty() << " biases "
                                  << s.biases.size() << " columns " << s.columns << " misalignment "
                                  << misalignment);
  std::vector<Row> rows, bias_rows;
  std::vector<const std::byte*> terms;
  ReduceRow row{};
  for (const auto& codes : s.terms)
    rows.emplace_back(s.in, codes, rows.size() * 2 % 32);
  for (Row& r : rows)
    terms.push_back(r.memory.data());
  for (uint32_t b = 0; b < s.biases.size(); ++b) {
    bias_rows.emplace_back(s.bias_elements[b], s.biases[b], 4 * b);
    row.bias_element[b] = s.bias_elements[b];
  }
  for (uint32_t b = 0; b < s.biases.size(); ++b)
    row.bias[b] = bias_rows[b].memory.data();
  Guarded out(uint64_t{s.columns} * num_bytes(s.out), misalignment);
  row.terms = terms.data();
  row.weights = s.weights.empty() ? nullptr : s.weights.data();
  row.num_terms = static_cast<uint32_t>(terms.size());
  row.num_bias = static_cast<uint32_t>(s.biases.size());
  row.out = out.data();
  row.columns = s.columns;
  table.reduce_row[static_cast<int>(s.in)][static_cast<int>(s.out)](row);
  table.stream_fence();
  ASSERT_EQ(difference(out.bytes(), sum_reference(s)), "");
  ASSERT_TRUE(out.are_canaries_alive());
}

Sum make_sum(Element in, Element out, uint32_t num_terms, uint32_t columns, bool is_any) {
  Sum s{in, out, {}, {}, {}, {}, columns};
  for (uint32_t t = 0; t < num_terms; ++t) {
    s.terms.push_back(is_any ? any_codes(in, columns, t) : ordinary_codes(in, columns, t));
  }
  return s;
}

void add_weights(Sum& s) {
  for (uint32_t t = 0; t < s.terms.size(); ++t) {
    s.weights.push_back(1.0f / static_cast<float>(3 + t) * (t % 3 == 2 ? -1.0f : 1.0f));
  }
}

TEST_P(LeavesTest, SumsInOrderAndRoundsOnce) {
  for (const Element in : kElements) {
    for (const Element out : kElements) {
      for (const uint32_t num_terms : {1, 2, 8, 32}) {
        for (const uint32_t columns : {128, 7168}) {
          if (columns == 7168 && num_terms != 8) continue;
          for (const bool is_any : {false, true}) {
            Sum s = make_sum(in, out, num_terms, columns, is_any);
            check_reduce(table(), s, 0);
            add_weights(s);
            check_reduce(table(), s, 0);
          }
        }
      }
    }
  }
}

TEST_P(LeavesTest, SumsAnyNumberOfColumnsToAnyAddress) {
  for (const Element e : kElements) {
    for (uint32_t columns = 0; columns < 300; columns += columns < 80 ? 1 : 43) {
      for (const uint64_t misalignment : {0, 2, 16, 48}) {
        check_reduce(table(), make_sum(e, e, 3, columns, true), misalignment);
      }
    }
  }
}

TEST_P(LeavesTest, AddsBiasesAfterTheTerms) {
  for (const uint32_t num_terms : {0, 1, 4}) {
    for (const Element in : kElements) {
      for (const Element first : kElements) {
        Sum s = make_sum(in, Element::kFP32, num_terms, 328, true);
        check_reduce(table(), s, 16);
        add_weights(s);
        s.biases.push_back(any_codes(first, s.columns, 50));
        s.bias_elements.push_back(first);
        check_reduce(table(), s, 0);
        s.biases.push_back(any_codes(Element::kBF16, s.columns, 51));
        s.bias_elements.push_back(Element::kBF16);
        check_reduce(table(), s, 0);
      }
    }
  }
}

TEST_P(LeavesTest, ConvertsEvery16BitCode) {
  for (const Element in : {Element::kBF16, Element::kFP16}) {
    Sum s{in, in, {std::vector<uint32_t>(0x10000)}, {}, {}, {}, 0x10000};
    for (uint32_t c = 0; c < s.columns; ++c)
      s.terms[0][c] = c;
    for (const Element out : kElements) {
      s.out = out;
      check_reduce(table(), s, 0);
    }
  }
}

TEST_P(LeavesTest, RoundsFp32ToTheNearest) {
  for (const Element out : {Element::kBF16, Element::kFP16}) {
    Sum s{Element::kFP32, out, {{}}, {}, {}, {}, 0};
    const NumberFormat& format =
        out == Element::kBF16 ? NumberFormat::bf16() : NumberFormat::fp16();
    for (const float v : format.edges())
      s.terms[0].push_back(test::fp32_bits(v));
    s.columns = static_cast<uint32_t>(s.terms[0].size());
    check_reduce(table(), s, 0);
  }
}

// A fused multiply-add would keep the 2^-24 that the product's rounding drops.
TEST_P(LeavesTest, RoundsTheProductBeforeTheSum) {
  const float x = 1.0f + 0x1p-12f;
  Sum s{Element::kFP32, Element::kFP32, {}, {-1.0f, x}, {}, {}, 256};
  for (const float v : {1.0f + 0x1p-11f, x}) {
    s.terms.emplace_back(s.columns, test::fp32_bits(v));
  }
  ASSERT_EQ(x * x - (1.0f + 0x1p-11f), 0.0f);
  check_reduce(table(), s, 0);
}

}  // namespace
}  // namespace ep::kernels::host
