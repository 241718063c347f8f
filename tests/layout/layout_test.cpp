// Layouts are arithmetic: what they must never do, at sizes that no test machine holds.
#include <algorithm>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "layout/output_layout.hpp"
#include "layout/plan.hpp"
#include "layout/rows.hpp"
#include "layout/tag.hpp"
#include "layout/window_layout.hpp"

namespace ep::layout {
namespace {

using Range = std::pair<uint64_t, uint64_t>;  // offset, bytes

void expect_disjoint(std::vector<Range> ranges, uint64_t end) {
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const uint64_t next = i + 1 < ranges.size() ? ranges[i + 1].first : end;
    EXPECT_LE(ranges[i].first + ranges[i].second, next) << "range " << i;
  }
}

TEST(WindowLayout, RegionsDoNotOverlap) {  // user report D7: E > R^2, among others
  for (const uint32_t ranks : {1u, 2u, 3u, 8u, 129u, 1024u}) {
    for (const uint32_t experts : {1u, ranks, ranks * ranks % 4096 + 1, 4096u}) {
      const uint32_t local = (experts + ranks - 1) / ranks;
      const auto l = WindowLayout::make({ranks, experts, local, 0, 8192});
      std::vector<Range> ranges{{0, kHeaderBytes}, {l.arena_offset, 8192}};
      for (const uint32_t rank : {0u, ranks - 1}) {
        if (rank == 0 && ranks == 1 && ranges.size() > 2) continue;
        for (const uint32_t bank : {0u, 1u}) {
          ranges.push_back({l.poison(bank, rank), uint64_t{poison_words(ranks)} * 8});
          ranges.push_back({l.record(bank, rank), uint64_t{record_words(ranks, experts)} * 8});
          ranges.push_back({l.ready(bank, rank, 0), kMaxChannels * 8});
        }
        ranges.push_back({l.channel(rank, 0), kMaxChannels * 8});
        ranges.push_back({l.segment(rank, 0, 0), uint64_t{kMaxChannels} * local * sizeof(Segment)});
        ranges.push_back({l.read_done(rank), 8});
      }
      expect_disjoint(ranges, l.num_bytes);
    }
  }
}

TEST(OutputLayout, OffsetsPassFourGigabytes) {  // user reports M1, M3
  OutputShape shape{};
  shape.num_ranks = 4;
  shape.max_local_experts = 64;
  shape.x_bytes = 8192;
  shape.scales_bytes = 100;
  shape.num_extras = 1;
  shape.extra_bytes[0] = 3;
  shape.idx_bytes = 64;
  shape.weights_bytes = 32;
  shape.is_expert = 1;
  for (const uint64_t rows :
       {uint64_t{0}, uint64_t{1}, uint64_t{262144}, uint64_t{524292}, kMaxRows}) {
    const auto l = OutputLayout::make(shape, rows);
    expect_disjoint({{l.x_offset, rows * 8192},
                     {l.scales_offset, rows * 112},
                     {l.extra_offset[0], rows * 16},
                     {l.idx_offset, rows * 64},
                     {l.weights_offset, rows * 32},
                     {l.source_offset, rows * 8},
                     {l.dup_of_offset, rows * 4},
                     {l.small_offset, SmallLayout::make(4, 64).num_words * 4}},
                    l.num_bytes);
    EXPECT_GE(l.num_bytes, rows * (8192 + 112 + 16 + 64 + 32 + 8 + 4));
    EXPECT_EQ(l.metadata_offset % kArenaAlignBytes, 0u);
  }
}

TEST(Tag, IsNeverZeroAndGrowsAcrossTheWrap) {
  const uint64_t wrap = 0xFFFFFFFFull;
  for (uint64_t sequence = wrap - 4; sequence < wrap + 4; ++sequence) {
    const uint32_t tag = tag_of(sequence), next = tag_of(sequence + 1);
    EXPECT_NE(tag, 0u);
    EXPECT_NE(tag, next);
    EXPECT_GT(static_cast<int32_t>(next - tag), 0) << sequence;
    EXPECT_NE(bank_of(sequence), bank_of(sequence + 1));
  }
  const uint64_t word = tagged(0xFFFFFFFFu, 7);
  EXPECT_EQ(value_in(word), 0xFFFFFFFFu);
  EXPECT_EQ(tag_in(word), 7u);
}

TEST(WorstCaseRows, HoldsEveryRouting) {
  for (const uint32_t align : {1u, 2u, 3u, 8u}) {
    for (const uint32_t experts : {1u, 2u, 3u}) {
      for (const uint32_t routes : {1u, 2u, 5u}) {
        const uint64_t bound = worst_case_rows({true, 1, routes, 1, experts, align});
        uint64_t worst = 0;
        uint32_t ways = 1;
        for (uint32_t r = 0; r < routes; ++r)
          ways *= experts;
        for (uint32_t way = 0; way < ways; ++way) {  // every assignment of routes to experts
          std::vector<uint64_t> count(experts, 0);
          for (uint32_t r = 0, rest = way; r < routes; ++r, rest /= experts)
            ++count[rest % experts];
          uint64_t rows = 0;
          for (const uint64_t n : count)
            rows += align_up(n, align);
          worst = std::max(worst, rows);
        }
        EXPECT_EQ(bound, worst) << "align " << align << " experts " << experts << " routes "
                                << routes;
      }
    }
  }
  EXPECT_EQ(worst_case_rows({true, 64, 8192, 8, 0, 1}), 0u);
  EXPECT_EQ(worst_case_rows({true, 1024, 65536, 32, 4, 128}) % 128, 0u);  // past 2^31: 64-bit
}

TEST(PlanLayout, PartsFollowEachOther) {
  const auto l = PlanLayout::make(3, 5);
  EXPECT_EQ(l.rows_from, PlanLayout::kHeadWords);
  EXPECT_EQ(l.num_words, PlanLayout::kHeadWords + 3 + 3 + 5 + 6 + 4);
}

}  // namespace
}  // namespace ep::layout
