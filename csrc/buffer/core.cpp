#include "buffer/core.hpp"

#include <new>

#include "buffer/refusal.hpp"
#include "common/math.hpp"
#include "common/text.hpp"
#include "kernels/params.hpp"

namespace ep::buffer {
namespace {

// Carves the scratch out of one allocation; the same walk sizes it and fills in the pointers.
struct Carver {
  std::byte* base;
  uint64_t used = 0;

  template <typename T>
  void take(T*& pointer, uint64_t count) {
    used = align_up(used, 64);
    if (base != nullptr) pointer = reinterpret_cast<T*>(base + used);
    used += count * sizeof(T);
  }
};

uint64_t carve(std::byte* base, const Settings& s, kernels::Scratch& scratch) {
  const uint64_t blocks = layout::kMaxChannels, ranks = s.num_ranks, experts = s.config.num_experts;
  // An encoded row with its scales, or gathered scales, or a token's terms.
  scratch.worker_pitch = align_up(s.token_bytes + 64, 256) + align_up(sizeof(kernels::Terms), 256);
  Carver carver{base};
  carver.take(scratch.counts, blocks * (ranks + experts));
  carver.take(scratch.row_base, ranks + experts);
  carver.take(scratch.expert_total, experts);
  carver.take(scratch.rows_sent, blocks * ranks);
  carver.take(scratch.segments, blocks * experts);
  carver.take(scratch.destinations, ranks);
  carver.take(scratch.owners, ranks);
  carver.take(scratch.worker_bytes, blocks * scratch.worker_pitch);
  return carver.used;
}

}  // namespace

void init_state(Core& core, uint64_t first_sequence, uint64_t timeout_ns) {
  const Settings& s = core.settings;
  kernels::DeviceState& state = core.state;
  const uint64_t num_bytes = carve(nullptr, s, state.scratch);
  core.scratch =
      std::make_unique_for_overwrite<std::byte[]>(num_bytes + 64);  // committed when first used
  auto at = reinterpret_cast<uintptr_t>(core.scratch.get());
  carve(core.scratch.get() + (align_up(at, 64) - at), s, state.scratch);
  state.sequence = state.first_sequence = first_sequence;
  state.timeout_ns = timeout_ns;
  state.bad_slot = ~uint64_t{0};
  state.rank = s.rank;
  state.num_ranks = s.num_ranks;
  state.num_experts = s.config.num_experts;
  state.max_local_experts = s.max_local_experts;
  state.window_layout = s.window;
  state.expert_offsets = core.settings.expert_offsets.data();
  state.expert_rank = core.settings.expert_rank.data();
  state.windows = core.windows.data();
}

std::shared_ptr<void> allocate(const Core& core, uint64_t num_bytes) {
  num_bytes = std::max<uint64_t>(num_bytes, Pool::kMaxAlign);  // so that it is aligned to as much
  try {
    if (core.settings.config.allocator) {
      std::shared_ptr<void> memory = core.settings.config.allocator(num_bytes);
      if (memory) return memory;
      throw std::bad_alloc();
    }
    const PoolAllocator<std::byte>& allocator = core.allocator();
    const auto give_back = [pool = allocator.pool(), num_bytes](void* memory) {
      pool->deallocate(memory, num_bytes);
    };
    return {allocator.pool()->allocate(num_bytes), give_back, allocator};
  } catch (const std::bad_alloc&) {
    throw NoHostMemory(str("out of memory: the allocator has no ", num_bytes, " bytes on rank ",
                           core.settings.rank),
                       core.settings.rank, num_bytes, 0);
  }
}

}  // namespace ep::buffer
