// The arena: extents of a window, handed out and taken back.
//
// State:    free and pending ranges, live blocks; under `mutex_`, held for moments only.
// A range that comes back is pending until nobody can touch it any more:
//   events      work that was queued on the streams the block was handed to when it was dropped
//   usable_from the issue number of the first operation whose kernel may publish it: 0 at once, and n + 2 for
//               what combine n read or operation n left half written, since every rank has then left n
// Thread safety: any thread may drop a block; blocks are taken by one call at a time.
// In a forked child, which has no part in its parent's arena, dropping a block changes nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <unistd.h>

#include "common/pool.hpp"
#include "device/device.hpp"
#include "ep/buffer.hpp"

namespace ep::buffer {

class Arena;

// What a block holds; combine reads the first two in place.
enum class BlockUse : uint8_t { kRows, kExpertOutput, kOther };

// A live range of the window.  Its last owner gives it back.
class Block : public std::enable_shared_from_this<Block> {
 public:
  Block(std::shared_ptr<Arena> arena, uint64_t offset, uint64_t num_bytes, BlockUse use);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  uint64_t offset() const { return offset_; }
  uint64_t num_bytes() const { return num_bytes_; }
  BlockUse use() const { return use_; }
  std::byte* data() const;
  std::weak_ptr<Block> weak_self() { return weak_from_this(); }

  // The streams whose work must be done before the range is free.
  void record_stream(std::shared_ptr<detail::StreamImpl> stream);
  // Not before operation `issue`.
  void set_usable_from(uint64_t issue);

 private:
  friend class Arena;
  std::shared_ptr<Arena> arena_;
  uint64_t offset_, num_bytes_;
  BlockUse use_;
  std::mutex mutex_;  // of the two below
  PoolVector<std::shared_ptr<detail::StreamImpl>> streams_;
  uint64_t usable_from_ = 0;
};

// A range on its way to becoming blocks.
struct Extent {
  uint64_t offset = 0, num_bytes = 0;  // multiples of kArenaAlignBytes
};

// What an operation asks for, and what it must wait for before it may publish the answer.
struct Request {
  uint64_t num_bytes;                // exactly so many; with `largest`, enough for any outcome
  bool largest;                      // take the whole largest range
  uint64_t issue;                    // of the operation
  const detail::StreamImpl* stream;  // it runs on
};
struct Grant {
  Extent extent;
  PoolVector<std::shared_ptr<detail::EventImpl>> wait_for;
};

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // `window` keeps the memory mapped; the arena is [base, base + num_bytes) at `window_offset` of it.
  Arena(std::shared_ptr<void> window,
        std::byte* window_base,
        uint64_t window_offset,
        uint64_t num_bytes);

  // For what lives as long as a call or a block.
  const PoolAllocator<std::byte>& allocator() const { return allocator_; }

  // Empty: no free range holds it.  A `largest` request with no free range gives an extent of 0 bytes.
  std::optional<Grant> take(const Request& request);
  // Gives back what lies behind the first `num_bytes` of an extent that nobody has seen.
  Extent trim(const Extent& extent, uint64_t num_bytes);
  void give_back(const Extent& extent);
  std::shared_ptr<Block> make_block(const Extent& extent, BlockUse use);

  // The live block that begins at `data`, or null.
  std::shared_ptr<Block> find(const void* data) const;

  // Every rank has left its kernels: no operation touches pending ranges any more.
  void forget_operations();

  uint64_t largest_free() const;  // for operations from now on, pending ranges not counted
  MemoryUse use() const;
  std::byte* window_base() const { return window_base_; }

 private:
  friend class Block;
  struct Use {
    std::shared_ptr<detail::StreamImpl> stream;
    std::shared_ptr<detail::EventImpl> event;
  };
  struct Pending {
    Extent extent;
    PoolVector<Use> uses;
    uint64_t usable_from;
  };

  void drop(Block& block);
  void insert_free(const Extent& extent);
  void reclaim(const Request& request,
               bool even_unfinished,
               PoolVector<std::shared_ptr<detail::EventImpl>>& waits);
  std::optional<Extent> pick(const Request& request);

  const pid_t pid_ = ::getpid();
  const PoolAllocator<std::byte> allocator_{std::make_shared<Pool>()};
  const std::shared_ptr<void> window_;
  std::byte* const window_base_;
  const uint64_t num_bytes_;

  mutable std::mutex mutex_;
  template <typename T>
  using ByOffset = std::map<uint64_t, T, std::less<>, PoolAllocator<std::pair<const uint64_t, T>>>;
  ByOffset<uint64_t> free_{allocator_};  // bytes, never adjacent
  std::vector<Pending> pending_;
  ByOffset<Block*> live_{allocator_};
  uint64_t used_ = 0, peak_ = 0;
};

}  // namespace ep::buffer
