// What a buffer's kernels need, in one object that outlives them: settings, windows, arena, device state.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "buffer/arena.hpp"
#include "buffer/settings.hpp"
#include "device/device.hpp"
#include "fabric/fabric.hpp"
#include "kernels/state.hpp"

namespace ep::buffer {

// Shared by the buffer and by every operation in flight.
struct Core {
  Settings settings;
  uint64_t buffer_id = 0;
  std::shared_ptr<device::Device> device;
  std::shared_ptr<fabric::Fabric> fabric;
  std::shared_ptr<Arena> arena;

  kernels::DeviceState state{};
  std::vector<std::byte*> windows;
  std::unique_ptr<std::byte[]> scratch;

  std::atomic<bool> needs_resync{false};
  // Of Stats.
  std::atomic<uint64_t> num_dispatches{0}, num_combines{0}, num_window_outputs{0},
      num_caller_outputs{0}, num_faults{0};

  layout::WindowHeader& header(uint32_t rank) const {
    return *reinterpret_cast<layout::WindowHeader*>(windows[rank]);
  }
  const PoolAllocator<std::byte>& allocator() const { return arena->allocator(); }
  uint32_t num_local_experts() const { return settings.num_local_experts(); }
  void log(LogLevel level, const std::string& text) const {
    if (settings.config.log) settings.config.log(level, text);
  }
};

// Fills in the device state.  `first_sequence` is the number of the first call.
void init_state(Core& core, uint64_t first_sequence, uint64_t timeout_ns);

// Memory from the configuration's allocator or the library's pool, aligned to 256 bytes.
// Throws CapacityError naming the bytes.
std::shared_ptr<void> allocate(const Core& core, uint64_t num_bytes);

// What a buffer runs on.  The library's own is the host; tests and a simulator bring theirs.
struct Environment {
  std::shared_ptr<device::Device> device;
  std::function<std::unique_ptr<fabric::Fabric>(
      Communicator&, uint64_t num_bytes, double timeout_s)>
      connect;
  uint64_t first_sequence = 1;  // number of the first call; 0 stands for "none"
};
Environment host_environment();

// Collective: agreement of all ranks and the windows.  Throws the same error on every rank.
std::shared_ptr<Core> connect(Communicator& group,
                              const BufferConfig& config,
                              const Environment& environment,
                              double timeout_s);

}  // namespace ep::buffer
