// Construction is collective: one rank's mistake is everybody's, with the numbers, and costs nobody
// a timeout.
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "buffer/buffer_impl.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

BufferConfig good_config() {
  BufferConfig config;
  config.num_experts = 8;
  config.num_topk = 2;
  config.hidden = 64;
  config.max_tokens_per_rank = 16;
  config.timeout_s = 30.0;
  return config;
}

// Constructs with each rank's configuration and hands the rank's error to `look`.
template <class E>
void expect_all_fail(uint32_t num_ranks,
                     const std::function<BufferConfig(uint32_t)>& config,
                     const std::function<void(uint32_t, const E&)>& look) {
  const Watchdog watchdog;
  const Stopwatch watch;
  run_threads(num_ranks, [&](std::shared_ptr<Communicator> group) {
    look(group->rank(), caught<E>([&] { EPBuffer(group, config(group->rank())); }));
  });
  EXPECT_LT(watch.seconds(), 15.0);  // nobody waits for its timeout
}

TEST(Agreement, DifferentValuesAreNamedOnEveryRank) {  // user report D3
  struct Case {
    const char* name;
    std::function<void(BufferConfig&)> change;
    const char* first;
    const char* other;
  };
  const std::vector<Case> cases = {
      {"num_experts", [](BufferConfig& c) { c.num_experts = 9; }, "8", "9"},
      {"num_topk", [](BufferConfig& c) { c.num_topk = 3; }, "2", "3"},
      {"hidden", [](BufferConfig& c) { c.hidden = 128; }, "64", "128"},
      {"max_tokens_per_rank", [](BufferConfig& c) { c.max_tokens_per_rank = 8; }, "16", "8"},
      {"token_bytes", [](BufferConfig& c) { c.token_bytes = 512; }, "320", "512"},
      {"output_bytes", [](BufferConfig& c) { c.output_bytes = 512; }, "256", "512"},
      {"num_regions", [](BufferConfig& c) { c.num_regions = 4; }, "2", "4"},
      {"ranks_per_node", [](BufferConfig& c) { c.ranks_per_node = 3; }, "0", "3"},
      {"expert_offsets[1]",
       [](BufferConfig& c) {
         c.expert_offsets = {0, 4, 6, 8};
       },
       "3", "4"},
      {"arena_bytes", [](BufferConfig& c) { c.arena_bytes = 1 << 20; }, "", "1048576"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_all_fail<InvalidArgument>(
        3,
        [&](uint32_t rank) {
          BufferConfig config = good_config();
          if (rank == 2) c.change(config);
          return config;
        },
        [&](uint32_t, const InvalidArgument& error) {
          expect_text(error,
                      {std::string(c.name) + " differs", std::string("rank 0 has ") + c.first,
                       std::string("rank 2 has ") + c.other});
        });
  }
}

TEST(Agreement, OneRanksBadArgumentRaisesOnAll) {
  const std::vector<std::pair<std::string, std::function<void(BufferConfig&)>>> cases = {
      {"num_topk=40", [](BufferConfig& c) { c.num_topk = 40; }},
      {"hidden=0", [](BufferConfig& c) { c.hidden = 0; }},
      {"timeout_s=0", [](BufferConfig& c) { c.timeout_s = 0.0; }},
      {"num_sms=65", [](BufferConfig& c) { c.num_sms = 65; }},
      {"expert_offsets",
       [](BufferConfig& c) {
         c.expert_offsets = {0, 8};
       }},
      {"device=\"gpu\"", [](BufferConfig& c) { c.device = "gpu"; }},
  };
  for (const auto& [text, spoil] : cases) {
    SCOPED_TRACE(text);
    expect_all_fail<InvalidArgument>(
        3,
        [&, &change = spoil](uint32_t rank) {
          BufferConfig config = good_config();
          if (rank == 1) change(config);
          return config;
        },
        [&, &part = text](uint32_t rank, const InvalidArgument& error) {
          expect_text(error, {part});
          if (rank != 1) expect_text(error, {"rank 1"});
        });
  }
}

TEST(Agreement, SeveralNodesAreUnsupported) {
  expect_all_fail<Unsupported>(
      2,
      [](uint32_t) {
        BufferConfig config = good_config();
        config.ranks_per_node = 1;
        return config;
      },
      [](uint32_t, const Unsupported& error) {
        expect_text(error, {"ranks_per_node=1", "2 ranks", "one node"});
      });
}

TEST(Agreement, CudaIsUnsupported) {
  expect_all_fail<Unsupported>(
      2,
      [](uint32_t) {
        BufferConfig config = good_config();
        config.device = "cuda";
        return config;
      },
      [](uint32_t, const Unsupported& error) {
        expect_text(error, {"cuda", "cpu"});
      });
}

TEST(Agreement, AFailedConstructionLeavesTheGroupUsable) {
  const Watchdog watchdog;
  run_threads(2, [](std::shared_ptr<Communicator> group) {
    BufferConfig config = good_config();
    if (group->rank() == 1) config.num_experts = 9;
    caught<InvalidArgument>([&] { EPBuffer(group, config); });
    config.num_experts = 8;
    EXPECT_NO_THROW(EPBuffer(group, config));
  });
}

TEST(Agreement, WhatIsARanksOwnChoiceMayDiffer) {
  const Trip trip = plain_trip(3);
  with_buffers(
      trip, [&](EPBuffer& buffer) { round_trip(buffer, trip); },
      [](BufferConfig& config, uint32_t rank) {
        config.num_sms = 1 + rank;
        config.timeout_s = 20.0 + rank;
        config.outputs = rank == 0 ? Outputs::kCaller : Outputs::kWindow;
        config.wait_policy = {.spin_us = rank, .yield_us = 10 * rank};
      });
}

TEST(Agreement, ANullGroup) {
  expect_text(caught<InvalidArgument>([] { EPBuffer(nullptr, good_config()); }), {"group"});
}

TEST(Agreement, ARankThatDoesNotComeIsNamed) {  // user report L7
  const Watchdog watchdog;
  const auto group = Communicator::threads(2);
  BufferConfig config = good_config();
  config.timeout_s = kShortS;
  const Stopwatch watch;
  EXPECT_EQ(caught<Timeout>([&] { EPBuffer(group[0], config); }).peers, std::vector<uint32_t>{1});
  EXPECT_LT(watch.seconds(), kShortS + kSlackS);
}

// user reports N1, D7: bytes_needed is what is registered, to the byte.
TEST(Agreement, BytesNeededIsWhatIsRegistered) {
  const Watchdog watchdog;
  run_threads(3, [](std::shared_ptr<Communicator> group) {
    BufferConfig config = good_config();
    config.arena_bytes = 100000;
    const Memory needed = EPBuffer::bytes_needed(config, 3);
    EPBuffer buffer(group, config);
    const buffer::Settings& s = BufferAccess::impl(buffer).settings();
    EXPECT_EQ(s.window.num_bytes, needed.total);
    EXPECT_EQ(s.window.arena_offset, needed.control + needed.staging);
    EXPECT_EQ(needed.arena % 4096, 0u);
    EXPECT_GE(needed.arena, 100000u);
    EXPECT_EQ(buffer.memory().largest_free, needed.arena);
    EXPECT_EQ(needed.staging, 0u);
    EXPECT_LE(needed.control, uint64_t{1} << 20);
  });
}

TEST(Agreement, EveryBufferHasAnIdentityThatItsRanksShare) {  // what tells another buffer's handle
  const Watchdog watchdog;
  const Trip trip = plain_trip(2);
  std::vector<uint64_t> ids(4);
  run_threads(2, [&](std::shared_ptr<Communicator> group) {
    for (uint32_t i = 0; i < 2; ++i) {
      EPBuffer buffer(group, config_for({&trip, 1}));
      ids[i * 2 + group->rank()] = BufferAccess::impl(buffer).core().buffer_id;
    }
  });
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_EQ(ids[2], ids[3]);
  EXPECT_NE(ids[0], ids[2]);
}

TEST(Agreement, RunTimeSettings) {  // user report B2, G9
  const Trip trip = plain_trip(1);
  with_buffers(trip, [&](EPBuffer& buffer) {
    for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()})
      expect_text(caught<InvalidArgument>([&] { buffer.set_timeout_s(bad); }), {"timeout_s="});
    for (const uint32_t bad : {0u, 65u})
      expect_text(caught<InvalidArgument>([&] { buffer.set_num_sms(bad); }),
                  {"num_sms=" + std::to_string(bad), "64"});
    EXPECT_EQ(buffer.timeout_s(), 30.0);
    buffer.set_timeout_s(5.0);
    buffer.set_num_sms(3);
    EXPECT_EQ(buffer.timeout_s(), 5.0);
    EXPECT_EQ(buffer.num_sms(), 3u);
    round_trip(buffer, trip);
  });
}

}  // namespace
}  // namespace ep::test
