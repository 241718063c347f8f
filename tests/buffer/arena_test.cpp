// The arena: which ranges it gives, and when a range that came back may be given again.
#include "buffer/arena.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ep/stream.hpp"
#include "support/faults.hpp"

namespace ep::test {
namespace {

using buffer::Arena;
using buffer::Block;
using buffer::BlockUse;
using buffer::Extent;
using buffer::Grant;

constexpr uint64_t kOffset = 4096;  // of the arena in its window
constexpr uint64_t kUnit = layout::kArenaAlignBytes;

std::shared_ptr<Arena> make_arena(uint64_t num_units, std::shared_ptr<void> window = {}) {
  static std::byte base[kOffset];  // addresses only: nobody writes to the arena here
  return std::make_shared<Arena>(std::move(window), base, kOffset, num_units * kUnit);
}

std::optional<Grant> take(Arena& arena, uint64_t units, uint64_t issue = 1, Stream on = {}) {
  return arena.take({units * kUnit, false, issue, on.impl().get()});
}

// A live block of so many units, which must fit without a wait.
std::shared_ptr<Block> make_block(Arena& arena, uint64_t units, uint64_t issue = 1) {
  const auto grant = take(arena, units, issue);
  if (!grant || !grant->wait_for.empty()) throw std::runtime_error("no free range");
  return arena.make_block(grant->extent, BlockUse::kRows);
}

uint64_t unit_of(const Extent& extent) {
  return (extent.offset - kOffset) / kUnit;
}

TEST(Arena, GivesTheLowestRangeThatFits) {
  const auto arena = make_arena(10);
  auto first = make_block(*arena, 2), second = make_block(*arena, 3);
  EXPECT_EQ(first->offset(), kOffset);
  EXPECT_EQ(second->offset(), kOffset + 2 * kUnit);
  first.reset();
  EXPECT_EQ(unit_of(take(*arena, 3)->extent), 5u);  // the hole of 2 is too small
  EXPECT_EQ(unit_of(take(*arena, 1)->extent), 0u);
  EXPECT_FALSE(take(*arena, 3));
}

TEST(Arena, RoundsUpToUnits) {
  const auto arena = make_arena(2);
  EXPECT_EQ(arena->take({1, false, 1, nullptr})->extent.num_bytes, kUnit);
  EXPECT_EQ(arena->take({kUnit, false, 1, nullptr})->extent.offset, kOffset + kUnit);
  EXPECT_FALSE(arena->take({1, false, 1, nullptr}));
}

TEST(Arena, NeighboursBecomeOneRangeInAnyOrder) {
  std::vector<uint32_t> order{0, 1, 2, 3};
  do {
    const auto arena = make_arena(8);
    std::vector<std::shared_ptr<Block>> blocks;
    for (uint32_t i = 0; i < 4; ++i)
      blocks.push_back(make_block(*arena, 2));
    for (const uint32_t i : order)
      blocks[i].reset();
    EXPECT_EQ(unit_of(take(*arena, 8)->extent), 0u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Arena, TheLargestRangeIsTakenWholeAndTrimmed) {
  const auto arena = make_arena(10);
  const auto low = make_block(*arena, 2);
  auto hole = make_block(*arena, 3);
  const auto high = make_block(*arena, 1);
  hole.reset();
  const Extent whole = arena->take({kUnit, true, 1, nullptr})->extent;
  EXPECT_EQ(unit_of(whole), 6u);  // 4 units behind `high`, not the hole of 3
  EXPECT_EQ(whole.num_bytes, 4 * kUnit);
  EXPECT_EQ(arena->trim(whole, kUnit + 1).num_bytes, 2 * kUnit);
  EXPECT_EQ(unit_of(take(*arena, 2)->extent), 2u);
  EXPECT_EQ(unit_of(take(*arena, 2)->extent), 8u);
}

TEST(Arena, AFullArenaGivesAnEmptyLargestRange) {
  const auto arena = make_arena(1);
  const auto block = make_block(*arena, 1);
  const auto grant = arena->take({kUnit, true, 1, nullptr});
  ASSERT_TRUE(grant);
  EXPECT_EQ(grant->extent.num_bytes, 0u);
  EXPECT_EQ(arena->make_block(arena->trim(grant->extent, 0), BlockUse::kRows)->num_bytes(), 0u);
}

// protocol rule 8: what combine n read is handed out again only by an operation behind n + 1.
TEST(Arena, ARangeIsNotUsedBeforeItsOperation) {
  const auto arena = make_arena(1);
  auto block = make_block(*arena, 1);
  block->set_usable_from(7);
  block->set_usable_from(5);  // an earlier number takes nothing back
  block.reset();
  EXPECT_FALSE(take(*arena, 1, 5));
  EXPECT_FALSE(take(*arena, 1, 6));
  EXPECT_TRUE(take(*arena, 1, 7));
}

TEST(Arena, ForgottenOperationsFreeTheirRanges) {  // protocol rule 22
  const auto arena = make_arena(1);
  auto block = make_block(*arena, 1);
  block->set_usable_from(1000);
  block.reset();
  EXPECT_FALSE(take(*arena, 1, 3));
  arena->forget_operations();
  EXPECT_TRUE(take(*arena, 1, 3));
}

// protocol rule 7: the base may be published only by work ordered after the streams' work at the
// drop.
TEST(Arena, ARangeWaitsForTheStreamsThatReadIt) {
  const Watchdog watchdog;
  const auto arena = make_arena(2);
  Gate gate;
  Stream reader = Stream::host(), other = Stream::host();
  auto block = make_block(*arena, 1);
  block->record_stream(reader.impl());
  reader.call([&] { gate.wait(); });
  block.reset();
  const auto elsewhere = take(*arena, 1, 1, other);  // a free range is preferred
  EXPECT_EQ(unit_of(elsewhere->extent), 1u);
  EXPECT_TRUE(elsewhere->wait_for.empty());
  const auto behind = take(*arena, 1, 1, other);
  ASSERT_TRUE(behind);
  EXPECT_EQ(unit_of(behind->extent), 0u);
  ASSERT_EQ(behind->wait_for.size(), 1u);
  EXPECT_FALSE(behind->wait_for[0]->query());
  gate.open();
  behind->wait_for[0]->wait(device::kNoDeadline, {});
}

TEST(Arena, TheReadersOwnStreamNeedsNoWait) {
  const Watchdog watchdog;
  const auto arena = make_arena(1);
  Gate gate;
  Stream reader = Stream::host();
  auto block = make_block(*arena, 1);
  block->record_stream(reader.impl());
  reader.call([&] { gate.wait(); });
  block.reset();
  const auto grant = take(*arena, 1, 1, reader);
  ASSERT_TRUE(grant);
  EXPECT_TRUE(grant->wait_for.empty());
  gate.open();
}

TEST(Arena, FinishedReadersAreNotWaitedFor) {
  const Watchdog watchdog;
  const auto arena = make_arena(1);
  Stream reader = Stream::host();
  auto block = make_block(*arena, 1);
  block->record_stream(reader.impl());
  reader.call([] {});
  block.reset();
  reader.synchronize();
  EXPECT_TRUE(take(*arena, 1)->wait_for.empty());
}

TEST(Arena, FindsLiveBlocksByTheirFirstByte) {
  const auto arena = make_arena(4);
  auto block = make_block(*arena, 2);
  const std::byte* data = block->data();
  EXPECT_EQ(arena->find(data), block);
  EXPECT_EQ(arena->find(data + 1), nullptr);
  EXPECT_EQ(arena->find(data + kUnit), nullptr);
  EXPECT_EQ(arena->find(nullptr), nullptr);
  block.reset();
  EXPECT_EQ(arena->find(data), nullptr);
}

TEST(Arena, CountsWhatIsUsed) {
  const auto arena = make_arena(8);
  auto first = make_block(*arena, 3), second = make_block(*arena, 2);
  EXPECT_EQ(arena->use().used, 5 * kUnit);
  EXPECT_EQ(arena->use().largest_free, 3 * kUnit);
  first.reset();
  second.reset();
  EXPECT_EQ(arena->use().used, 0u);
  EXPECT_EQ(arena->use().peak, 5 * kUnit);
  EXPECT_EQ(take(*arena, 8)->extent.num_bytes, 8 * kUnit);
}

TEST(Arena, TheLastBlockKeepsTheWindow) {  // user report Q5
  auto window = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = window;
  auto arena = make_arena(1, std::move(window));
  auto block = make_block(*arena, 1);
  arena.reset();
  EXPECT_FALSE(alive.expired());
  block.reset();
  EXPECT_TRUE(alive.expired());
}

TEST(Arena, LiveRangesNeverOverlap) {
  constexpr uint64_t kUnits = 64;
  const auto arena = make_arena(kUnits);
  Random random(3);
  std::map<uint64_t, std::shared_ptr<Block>> live;
  for (uint64_t issue = 1; issue <= 5000; ++issue) {
    if (!live.empty() && chance(random, 2)) {
      const auto block = std::next(live.begin(), below(random, live.size()));
      if (chance(random, 3)) block->second->set_usable_from(issue + below(random, 4));
      live.erase(block);
      continue;
    }
    const uint64_t units = 1 + below(random, 9);
    const bool largest = chance(random, 4);
    const auto grant = arena->take({units * kUnit, largest, issue, nullptr});
    if (!grant) continue;
    Extent extent = grant->extent;
    if (largest) extent = arena->trim(extent, units * kUnit);
    if (extent.num_bytes == 0) continue;
    ASSERT_LE(extent.offset + extent.num_bytes, kOffset + kUnits * kUnit);
    const auto next = live.lower_bound(extent.offset);
    ASSERT_TRUE(next == live.end() || extent.offset + extent.num_bytes <= next->first);
    if (next != live.begin()) {
      const Block& before = *std::prev(next)->second;
      ASSERT_LE(before.offset() + before.num_bytes(), extent.offset);
    }
    live[extent.offset] = arena->make_block(extent, BlockUse::kOther);
  }
  live.clear();
  arena->forget_operations();
  EXPECT_EQ(arena->use().used, 0u);
  EXPECT_EQ(take(*arena, kUnits, 1)->extent.num_bytes, kUnits * kUnit);
}

}  // namespace
}  // namespace ep::test
