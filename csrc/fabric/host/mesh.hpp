// One socket between every two ranks of different processes: it passes the windows, and later tells
// that a peer is gone.
//
// State:    every rank has a listener with a random abstract name, and a secret; the group knows
//           both.
// Writers:  rank i connects to every lower rank of another process and sends one message: a
//           greeting with both secrets, and its window's file.  Who accepts answers likewise.
// Readers:  each checks the peer's user and the greeting.  A stranger that connects is dropped.
// Pairing:  all sends and receives of a rank run in one loop that never blocks on one peer, so no
//           order of ranks can deadlock, nor can the kernel's bound of descriptors in flight.
// The name is no protection (/proc/net/unix shows it); the secret is.  The listener is closed when
// all are connected, or its rank fails, which the others then see.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "fabric/host/deadline.hpp"
#include "fabric/host/fd.hpp"

namespace ep::fabric {

using Token = std::array<uint8_t, 16>;

// From the kernel's generator.
Token random_token();

// What others need to know to connect to a rank.
struct Door {
  Token name, secret;
};

class MeshListener {
 public:
  explicit MeshListener(uint32_t rank);
  const Door& door() const { return door_; }
  int fd() const { return fd_.get(); }

 private:
  Door door_;
  Fd fd_;
};

// The connection to a peer.  Its end hangs up; in a forked child it only closes the child's copy.
class Link {
 public:
  Link(uint32_t rank, Fd socket);
  Link(Link&&) noexcept = default;
  Link& operator=(Link&&) noexcept = default;
  ~Link();

  uint32_t rank() const { return rank_; }
  int socket() const { return socket_.get(); }
  // A pidfd of the peer's process, or -1.  After the peer's end a child that it forked may keep the
  // socket open.
  int process() const { return process_.get(); }

 private:
  uint32_t rank_;
  int owner_pid_;
  Fd socket_, process_;
};

struct MeshPeer {
  Link link;
  Fd window_file;
};

struct MeshRequest {
  uint32_t rank;
  std::span<const uint32_t> remote;  // the ranks to connect to, ascending, without `rank`
  std::span<const Door> doors;       // by rank, of all ranks
  int window_file;
};

// Connects to all remote ranks and swaps window files; the result is in the order of `remote`.
// Throws Timeout, PeerLost, CapacityError, Interrupted.
std::vector<MeshPeer> connect_mesh(const MeshRequest& request,
                                   const MeshListener& listener,
                                   const Deadline& deadline);

}  // namespace ep::fabric
