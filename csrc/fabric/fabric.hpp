// Who can reach whom: every rank's window, mapped here, and whether its owner still lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep/communicator.hpp"

namespace ep::fabric {

// The windows of one buffer.  Construction is collective.  Destruction is not: a rank's memory stays
// mapped where somebody still maps it.
class Fabric {
 public:
  virtual ~Fabric() = default;

  virtual uint32_t num_nodes() const = 0;

  // Base of `rank`'s window in this address space; page aligned, all zero before the first write.
  virtual std::byte* window(uint32_t rank) const = 0;

  // Keeps this rank's own window mapped, beyond the Fabric's life.
  virtual std::shared_ptr<void> own_window() const = 0;

  // Starts watching peers.  `on_lost(rank)` is called at most once per peer, from another thread, within
  // 2 s of its process ending or its Fabric being destroyed (a hang-up).  No call after stop_watching()
  // returns.
  virtual void watch(std::function<void(uint32_t rank)> on_lost) = 0;
  virtual void stop_watching() noexcept = 0;
};

// Collective over `group`: windows of `num_bytes` (the same on all ranks) between processes of this machine
// (a memfd, passed by descriptor) and between threads of one process (the same mapping).  Nothing is named
// in a file system and nothing outlives the processes.  Pages are committed when first touched.
// Throws Unsupported on every rank when the ranks are not all on one node (same kernel and network namespace),
// CapacityError when the window cannot be made, Timeout or PeerLost when somebody does not come,
// Interrupted when the group's interrupt says so (PeerError on the others).
std::unique_ptr<Fabric> connect_host(Communicator& group, uint64_t num_bytes, double timeout_s);

}  // namespace ep::fabric
