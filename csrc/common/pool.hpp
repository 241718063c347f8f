// Memory for what comes and goes with every call: what is freed is kept and handed out again, so that
// steady calls ask the system for nothing.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include <unistd.h>

namespace ep {

// Sizes are rounded up to powers of two; each has a list of free blocks, as long as there ever were blocks of
// that size in use at once.  Blocks above kMaxBytes are the system's, each time.
// Thread safety: any thread may call; the mutex is held for moments.  In a forked child, where another thread
// of the parent may have held it, a block may be lost instead of freed.
class Pool {
 public:
  static constexpr size_t kMinBytes = 64, kMaxBytes = size_t{4} << 20, kMaxAlign = 256;

  Pool() = default;
  ~Pool() {
    for (size_t i = 0; i < free_.size(); ++i) {
      while (Free* block = free_[i]) {
        free_[i] = block->next;
        release(block, kMinBytes << i);
      }
    }
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Aligned to the size rounded up to a power of two, at most to kMaxAlign.  Throws std::bad_alloc.
  void* allocate(size_t num_bytes) {
    const size_t size = size_of(num_bytes);
    if (size <= kMaxBytes) {
      const std::lock_guard lock(mutex_);
      Free*& first = free_[index_of(size)];
      if (first != nullptr) return std::exchange(first, first->next);
    }
    return ::operator new(size, align_of(size));
  }

  void deallocate(void* memory, size_t num_bytes) noexcept {
    const size_t size = size_of(num_bytes);
    if (size > kMaxBytes) return release(memory, size);
    if (!mutex_.try_lock()) {
      if (::getpid() != pid_) return;
      mutex_.lock();
    }
    const std::lock_guard lock(mutex_, std::adopt_lock);
    Free*& first = free_[index_of(size)];
    first = new (memory) Free{first};
  }

 private:
  struct Free {
    Free* next;
  };

  static size_t size_of(size_t num_bytes) {
    if (num_bytes > kMaxBytes) return num_bytes;
    return std::max(std::bit_ceil(num_bytes), kMinBytes);
  }
  static size_t index_of(size_t size) {
    return static_cast<size_t>(std::countr_zero(size) - std::countr_zero(kMinBytes));
  }
  static std::align_val_t align_of(size_t size) {
    return std::align_val_t{std::min(size, kMaxAlign)};
  }
  static void release(void* memory, size_t size) noexcept {
    ::operator delete(memory, align_of(size));
  }

  const pid_t pid_ = ::getpid();
  std::mutex mutex_;
  std::array<Free*, std::countr_zero(kMaxBytes) - std::countr_zero(kMinBytes) + 1> free_{};
};

// A pool for standard containers and std::allocate_shared; what they hold keeps the pool.  Without a pool:
// the system's memory.
template <typename T>
class PoolAllocator {
 public:
  using value_type = T;
  using propagate_on_container_move_assignment = std::true_type;
  static_assert(alignof(T) <= Pool::kMinBytes);

  PoolAllocator() = default;
  explicit PoolAllocator(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  template <typename U>
  PoolAllocator(const PoolAllocator<U>& other)  // NOLINT: implicit, as allocators must be
      : pool_(other.pool()) {}

  T* allocate(size_t count) {
    if (pool_ == nullptr) return std::allocator<T>().allocate(count);
    return static_cast<T*>(pool_->allocate(count * sizeof(T)));
  }
  void deallocate(T* memory, size_t count) noexcept {
    if (pool_ == nullptr) return std::allocator<T>().deallocate(memory, count);
    pool_->deallocate(memory, count * sizeof(T));
  }

  const std::shared_ptr<Pool>& pool() const { return pool_; }
  template <typename U>
  friend bool operator==(const PoolAllocator& a, const PoolAllocator<U>& b) {
    return a.pool_ == b.pool();
  }

 private:
  std::shared_ptr<Pool> pool_;
};

template <typename T>
using PoolVector = std::vector<T, PoolAllocator<T>>;

template <typename T, typename... Args>
std::shared_ptr<T> make_pooled(const PoolAllocator<std::byte>& allocator, Args&&... args) {
  return std::allocate_shared<T>(PoolAllocator<T>(allocator), std::forward<Args>(args)...);
}

}  // namespace ep
