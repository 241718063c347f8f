// Notices that peers' processes are gone.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "fabric/host/fd.hpp"

namespace ep::fabric {

// Sleeps in poll() on the peers' sockets and processes: no work while all is well.
// Thread safety: one start() or stop() at a time.
class Watcher {
 public:
  struct Peer {
    uint32_t rank;
    int socket;
    int process;  // a pidfd or -1
  };

  // The descriptors stay the caller's and outlive this.
  explicit Watcher(std::vector<Peer> peers) : peers_(std::move(peers)) {}
  ~Watcher() { stop(); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // REQUIRES: not started.  `on_lost` is called from a thread of this object, must not throw, and
  // once per peer over all starts.  Without peers there is no thread.  Throws CapacityError of
  // `rank`, who watches.
  void start(uint32_t rank, std::function<void(uint32_t rank)> on_lost);

  // No call after it returns, except to an `on_lost` that calls it.  In a forked child, which has
  // no such thread, it does nothing but forget it.
  void stop() noexcept;

 private:
  void run();
  bool is_gone(const Peer& peer, short socket_events, short process_events) const;

  std::vector<Peer> peers_;  // not yet reported
  std::function<void(uint32_t)> on_lost_;
  Fd wake_;
  std::thread thread_;
  int owner_pid_ = 0;
};

}  // namespace ep::fabric
