#include "bench/ep_bench/memory.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace ep::bench {
namespace {

constexpr uint64_t kPoolGranule = 4096;

std::shared_ptr<void> map(uint64_t num_bytes, int flags) {
  const uint64_t size = std::max<uint64_t>(num_bytes, 1);
  void* const at =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return {at, [size](void* p) { munmap(p, size); }};
}

}  // namespace

std::shared_ptr<void> private_memory(uint64_t num_bytes) {
  return map(num_bytes, MAP_PRIVATE);
}

std::shared_ptr<void> shared_memory(uint64_t num_bytes) {
  return map(num_bytes, MAP_SHARED);
}

std::shared_ptr<void> BlockPool::take(uint64_t num_bytes) {
  const uint64_t size = (num_bytes + kPoolGranule - 1) / kPoolGranule * kPoolGranule;
  std::shared_ptr<void> block;
  {
    const std::lock_guard lock(free_->mutex);
    auto& blocks = free_->blocks[size];
    if (!blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
    }
  }
  if (!block) block = private_memory(size);
  void* const at = block.get();
  return {at, [free = free_, size, block = std::move(block)](void*) mutable {
            const std::lock_guard lock(free->mutex);
            free->blocks[size].push_back(std::move(block));
          }};
}

}  // namespace ep::bench
