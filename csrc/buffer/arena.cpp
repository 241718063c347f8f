#include "buffer/arena.hpp"

#include <algorithm>
#include <utility>

#include "common/math.hpp"
#include "layout/limits.hpp"

namespace ep::buffer {

Block::Block(std::shared_ptr<Arena> arena, uint64_t offset, uint64_t num_bytes, BlockUse use)
    : arena_(std::move(arena)),
      offset_(offset),
      num_bytes_(num_bytes),
      use_(use),
      streams_(arena_->allocator()) {}

Block::~Block() {
  arena_->drop(*this);
}

std::byte* Block::data() const {
  return arena_->window_base() + offset_;
}

void Block::record_stream(std::shared_ptr<detail::StreamImpl> stream) {
  const std::lock_guard lock(mutex_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
    streams_.push_back(std::move(stream));
}

void Block::set_usable_from(uint64_t issue) {
  const std::lock_guard lock(mutex_);
  usable_from_ = std::max(usable_from_, issue);
}

Arena::Arena(std::shared_ptr<void> window,
             std::byte* window_base,
             uint64_t window_offset,
             uint64_t num_bytes)
    : window_(std::move(window)), window_base_(window_base), num_bytes_(num_bytes) {
  if (num_bytes != 0) free_[window_offset] = num_bytes;
}

void Arena::insert_free(const Extent& extent) {
  if (extent.num_bytes == 0) return;
  auto next = free_.lower_bound(extent.offset);
  uint64_t offset = extent.offset, num_bytes = extent.num_bytes;
  if (next != free_.end() && next->first == offset + num_bytes) {
    num_bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += num_bytes;
      return;
    }
  }
  free_[offset] = num_bytes;
}

// Moves pending ranges that `request` may use to the free ones.  `even_unfinished`: also those that it would
// have to wait for.
void Arena::reclaim(const Request& request,
                    bool even_unfinished,
                    PoolVector<std::shared_ptr<detail::EventImpl>>& waits) {
  std::erase_if(pending_, [&](Pending& pending) {
    if (request.issue < pending.usable_from) return false;
    std::erase_if(pending.uses,
                  [&](const Use& use) {  // its own stream runs the operation behind them
                    return use.stream.get() == request.stream || use.event->query();
                  });
    if (!pending.uses.empty() && !even_unfinished) return false;
    for (const Use& use : pending.uses)
      waits.push_back(use.event);
    insert_free(pending.extent);
    return true;
  });
}

// The lowest range that is large enough: low addresses are the ones already committed and warm.
std::optional<Extent> Arena::pick(const Request& request) {
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (request.largest) {
      if (best == free_.end() || range->second > best->second) best = range;
    } else if (range->second >= request.num_bytes) {
      best = range;
      break;
    }
  }
  if (best == free_.end()) return std::nullopt;
  const Extent extent{best->first, request.largest ? best->second : request.num_bytes};
  const uint64_t left = best->second - extent.num_bytes;
  free_.erase(best);
  if (left != 0) free_[extent.offset + extent.num_bytes] = left;
  return extent;
}

std::optional<Grant> Arena::take(const Request& asked) {
  Request request = asked;
  request.num_bytes = align_up(request.num_bytes, layout::kArenaAlignBytes);
  const std::lock_guard lock(mutex_);
  Grant grant{{}, decltype(Grant::wait_for)(allocator_)};
  reclaim(request, false, grant.wait_for);
  const auto fits = [&] {
    return std::any_of(free_.begin(), free_.end(),
                       [&](const auto& r) { return r.second >= request.num_bytes; });
  };
  if (!fits()) reclaim(request, true, grant.wait_for);
  const std::optional<Extent> extent = pick(request);
  if (!extent && !request.largest) return std::nullopt;
  grant.extent = extent.value_or(Extent{});
  used_ += grant.extent.num_bytes;
  if (!request.largest) peak_ = std::max(peak_, used_);
  return grant;
}

Extent Arena::trim(const Extent& extent, uint64_t num_bytes) {
  num_bytes = std::min(align_up(num_bytes, layout::kArenaAlignBytes), extent.num_bytes);
  give_back({extent.offset + num_bytes, extent.num_bytes - num_bytes});
  const std::lock_guard lock(mutex_);
  peak_ = std::max(peak_, used_);
  return {extent.offset, num_bytes};
}

void Arena::give_back(const Extent& extent) {
  const std::lock_guard lock(mutex_);
  used_ -= extent.num_bytes;
  insert_free(extent);
}

std::shared_ptr<Block> Arena::make_block(const Extent& extent, BlockUse use) {
  auto block =
      make_pooled<Block>(allocator_, shared_from_this(), extent.offset, extent.num_bytes, use);
  const std::lock_guard lock(mutex_);
  if (extent.num_bytes != 0) live_[extent.offset] = block.get();
  return block;
}

void Arena::drop(Block& block) {
  if (block.num_bytes() == 0 || ::getpid() != pid_) return;
  Pending pending{
      {block.offset(), block.num_bytes()}, PoolVector<Use>(allocator_), block.usable_from_};
  for (const auto& stream : block.streams_)
    pending.uses.push_back({stream, stream->record()});
  const std::lock_guard lock(mutex_);
  live_.erase(block.offset());
  used_ -= block.num_bytes();
  pending_.push_back(std::move(pending));
}

std::shared_ptr<Block> Arena::find(const void* data) const {
  const auto* at = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  if (at < window_base_) return nullptr;
  const auto found = live_.find(static_cast<uint64_t>(at - window_base_));
  return found == live_.end() ? nullptr : found->second->weak_self().lock();
}

void Arena::forget_operations() {
  const std::lock_guard lock(mutex_);
  for (Pending& pending : pending_)
    pending.usable_from = 0;
}

uint64_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  uint64_t largest = 0;
  for (const auto& range : free_)
    largest = std::max(largest, range.second);
  return largest;
}

MemoryUse Arena::use() const {
  MemoryUse use;
  use.largest_free = largest_free();
  const std::lock_guard lock(mutex_);
  use.used = used_;
  use.peak = peak_;
  return use;
}

}  // namespace ep::buffer
