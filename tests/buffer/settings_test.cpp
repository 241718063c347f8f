// A buffer's configuration: what is refused, with which words, and how much memory it stands for.
#include "buffer/settings.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "layout/rows.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

using buffer::make_settings;

BufferConfig good_config() {
  BufferConfig config;
  config.num_experts = 8;
  config.num_topk = 2;
  config.hidden = 64;
  config.max_tokens_per_rank = 16;
  return config;
}

struct BadValue {
  std::function<void(BufferConfig&)> spoil;
  std::vector<std::string> parts;  // of the message: name, value, limit
};

template <class E>
void expect_bad(const std::vector<BadValue>& cases, uint32_t num_ranks) {
  for (const BadValue& bad : cases) {
    SCOPED_TRACE(bad.parts[0] + " " + bad.parts[1]);
    BufferConfig config = good_config();
    bad.spoil(config);
    const E error = caught<E>([&] { make_settings(config, 0, num_ranks); });
    for (const std::string& part : bad.parts)
      expect_text(error, {part});
    EXPECT_THROW(EPBuffer::bytes_needed(config, num_ranks), E);
  }
}

// user reports A5, A7, D1: the argument, its value and the limit are in the text.
TEST(Settings, NumbersOutsideTheirLimits) {
  constexpr auto kFew = [](uint32_t BufferConfig::*field, uint32_t value) {
    return [=](BufferConfig& c) { c.*field = value; };
  };
  expect_bad<InvalidArgument>(
      {
          {kFew(&BufferConfig::num_experts, 0), {"num_experts=0", "[1, 4096]"}},
          {kFew(&BufferConfig::num_experts, 4097), {"num_experts=4097", "4096"}},
          {kFew(&BufferConfig::num_topk, 0), {"num_topk=0", "[1, 32]"}},
          {kFew(&BufferConfig::num_topk, 33), {"num_topk=33", "32"}},
          {kFew(&BufferConfig::hidden, 0), {"hidden=0", "[4, "}},
          {kFew(&BufferConfig::hidden, 3), {"hidden=3", "[4, "}},
          {kFew(&BufferConfig::max_tokens_per_rank, 0), {"max_tokens_per_rank=0", "[1, "}},
          {kFew(&BufferConfig::max_tokens_per_rank, 1u << 30),
           {"max_tokens_per_rank=1073741824", "715827882"}},  // N < 2^31 rows of 3 ranks
          {kFew(&BufferConfig::num_regions, 0), {"num_regions=0", "[1, "}},
          {kFew(&BufferConfig::num_sms, 65), {"num_sms=65", "64"}},
          {[](BufferConfig& c) { c.token_bytes = 8; }, {"token_bytes=8", "16"}},
          {[](BufferConfig& c) { c.output_bytes = 8; }, {"output_bytes=8", "16"}},
          {[](BufferConfig& c) { c.timeout_s = 0.0; }, {"timeout_s=0", "positive"}},
          {[](BufferConfig& c) { c.timeout_s = std::numeric_limits<double>::quiet_NaN(); },
           {"timeout_s=nan", "positive"}},
          {[](BufferConfig& c) { c.timeout_s = std::numeric_limits<double>::infinity(); },
           {"timeout_s=inf", "positive"}},
      },
      3);
}

TEST(Settings, ExpertOffsetsThatAreNone) {
  const auto offsets = [](std::vector<uint32_t> values) {
    return [values](BufferConfig& c) { c.expert_offsets = values; };
  };
  expect_bad<InvalidArgument>(
      {{offsets({0, 4, 8}), {"expert_offsets has 3 entries", "need 4"}},
       {offsets({0, 5, 4, 8}), {"expert_offsets[2]=4", "expert_offsets[1]=5"}},
       {offsets({1, 4, 5, 8}), {"from 1 to 8", "num_experts=8"}},
       {offsets({0, 4, 5, 9}), {"from 0 to 9", "num_experts=8"}}},
      3);
}

TEST(Settings, Devices) {  // user report S4: a device asked for by name is never replaced
  const auto device = [](std::string name) { return [name](BufferConfig& c) { c.device = name; }; };
  expect_bad<Unsupported>({{device("cuda"), {"device=\"cuda\"", "cpu"}},
                           {device("cuda:1"), {"device=\"cuda:1\"", "cpu"}}},
                          2);
  expect_bad<InvalidArgument>(
      {{device("gpu"), {"device=\"gpu\"", "cpu"}}, {device(""), {"device=\"\"", "cpu"}}}, 2);
  for (const char* name : {"auto", "cpu", "cpu:0"}) {
    BufferConfig config = good_config();
    config.device = name;
    EXPECT_NO_THROW(make_settings(config, 0, 2));
  }
}

TEST(Settings, RanksOutsideTheGroup) {  // user report L6
  EXPECT_THROW(make_settings(good_config(), 0, 0), InvalidArgument);
  EXPECT_THROW(make_settings(good_config(), 2, 2), InvalidArgument);
  EXPECT_THROW(make_settings(good_config(), 0, 1025), InvalidArgument);
  EXPECT_NO_THROW(make_settings(good_config(), 1023, 1024));
}

TEST(Settings, ExpertsAreSplitAsArraySplitDoes) {  // user report A15
  BufferConfig config = good_config();
  config.num_experts = 10;
  EXPECT_EQ(make_settings(config, 0, 4).expert_offsets, (std::vector<uint32_t>{0, 3, 6, 8, 10}));
  config.num_experts = 2;
  EXPECT_EQ(make_settings(config, 0, 4).expert_offsets, (std::vector<uint32_t>{0, 1, 2, 2, 2}));
}

TEST(Settings, EmptyRangesOfExpertsAreLegal) {
  BufferConfig config = good_config();
  config.expert_offsets = {0, 0, 8, 8};
  const buffer::Settings s = make_settings(config, 2, 3);
  EXPECT_EQ(s.num_local_experts(), 0u);
  EXPECT_EQ(s.max_local_experts, 8u);
  for (const uint32_t rank : s.expert_rank)
    EXPECT_EQ(rank, 1u);
}

// user reports N2, M4, D7: a hint that grows with every argument, of 64 bits.
TEST(Settings, BytesNeededGrowsWithEveryArgument) {
  const auto total = [](BufferConfig config, uint32_t ranks = 4) {
    const Memory m = EPBuffer::bytes_needed(config, ranks);
    EXPECT_EQ(m.total, m.control + m.staging + m.arena);
    return m.total;
  };
  const BufferConfig base = good_config();
  const auto grown = [&](auto change) {
    BufferConfig config = base;
    change(config);
    return total(config);
  };
  EXPECT_LT(total(base), total(base, 5));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.num_experts = 64; }));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.hidden = 128; }));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.max_tokens_per_rank = 17; }));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.num_regions = 3; }));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.token_bytes = 1024; }));
  EXPECT_LT(total(base), grown([](BufferConfig& c) { c.output_bytes = 1024; }));
  EXPECT_LT(grown([](BufferConfig& c) { c.num_topk = 8; }),
            grown([](BufferConfig& c) { c.num_topk = 32; }));
  BufferConfig large = base;
  large.hidden = 7168;
  large.num_topk = 8;
  large.max_tokens_per_rank = 8192;
  EXPECT_GT(total(large, 8), uint64_t{1} << 32);
  EXPECT_EQ(grown([](BufferConfig& c) { c.arena_bytes = 5000; }) -
                grown([](BufferConfig& c) { c.arena_bytes = 4096; }),
            4096u);
}

// user report M4: past the limit a clean error with bytes and what to lower, also where 64 bits do
// not hold the product.
TEST(Settings, AnArenaTooLargeToAddress) {
  BufferConfig config = good_config();
  config.num_topk = 32;
  for (const uint32_t regions : {1u, 2u, 4u, 8u, 64u}) {
    for (const uint32_t hidden : {7168u, 1u << 20, 1u << 24}) {
      for (const uint32_t tokens : {1u << 20, (1u << 29) - 1, 1u << 29, (1u << 30) - 1}) {
        config.num_regions = regions;
        config.hidden = hidden;
        config.max_tokens_per_rank = tokens;
        const InvalidArgument error =
            caught<InvalidArgument>([&] { EPBuffer::bytes_needed(config, 2); });
        expect_text(error, {"arena", "bytes", "max_tokens_per_rank=" + std::to_string(tokens)});
      }
    }
  }
  config.arena_bytes = ~uint64_t{0} - 5;  // not rounded up to 0
  EXPECT_THROW(EPBuffer::bytes_needed(config, 2), InvalidArgument);
  config.arena_bytes = uint64_t{1} << 40;
  expect_text(caught<InvalidArgument>([&] { EPBuffer::bytes_needed(config, 2); }),
              {"1099511627776"});
}

// The default holds num_regions worst-case pairs.
TEST(Settings, TheDefaultArenaHoldsItsPairs) {
  const BufferConfig config = good_config();
  const buffer::Settings s = make_settings(config, 0, 4);
  const uint64_t rows = layout::worst_case_rows({true, 4, 16, 2, 2, 1});
  EXPECT_GE(s.arena_bytes, 2 * rows * (s.token_bytes + s.output_bytes));
}

}  // namespace
}  // namespace ep::test
