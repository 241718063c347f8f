// Memory from the kernel, zeroed, committed where it is first written.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace ep::bench {

// Private to the process.  Throws std::bad_alloc.  0 bytes: some.
std::shared_ptr<void> private_memory(uint64_t num_bytes);

// The same memory in every process that is forked afterwards.
std::shared_ptr<void> shared_memory(uint64_t num_bytes);

// What an engine's allocator is to the library: freed blocks are kept and handed out again, so that
// measured calls write to memory that has been touched.
// Thread safety: any thread may take; blocks may be dropped on any thread, also after the pool.
class BlockPool {
 public:
  std::shared_ptr<void> take(uint64_t num_bytes);

 private:
  struct Free {
    std::mutex mutex;
    std::map<uint64_t, std::vector<std::shared_ptr<void>>> blocks;  // by size
  };
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace ep::bench
