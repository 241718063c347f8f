// How ranks find each other: set-up, agreement and recovery.  No payload goes through a Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ep/version.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// Thread safety: one call at a time per object.
class Communicator {
 public:
  using Bytes = std::vector<std::byte>;

  virtual ~Communicator() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t num_ranks() const = 0;

  // Collective.  Every rank gives some bytes (lengths may differ) and gets everybody's, by rank.
  // Throws Timeout naming the missing ranks after `timeout_s`, PeerLost where a peer's connection broke.
  virtual std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) = 0;

  // The bound of waits that the user gave this group, or a negative number for "none given".
  virtual double timeout_s() const { return -1.0; }

  // Asked about every 50 ms while a call waits; true leaves the call with Interrupted, and the others with
  // PeerError.  A callbacks() group does not ask: its callback does the waiting.
  std::function<bool()> interrupt{};

  // One rank on its own.
  static std::shared_ptr<Communicator> single();

  // `num_ranks` ranks as threads of this process; element r belongs to rank r.
  static std::vector<std::shared_ptr<Communicator>> threads(uint32_t num_ranks);

  // Ranks as processes that meet at `address`, "host:port" or "[ipv6]:port", where rank 0 listens.
  // Port 0 is refused: every rank must know the port.  Throws Timeout when somebody does not come.
  // `interrupt` is asked while they meet, and becomes the group's.
  static std::shared_ptr<Communicator> tcp(const std::string& address,
                                           uint32_t rank,
                                           uint32_t num_ranks,
                                           double timeout_s = 60.0,
                                           std::function<bool()> interrupt = {});

  // Bring your own: `all_gather` gets this rank's bytes and returns everybody's (MPI_Allgatherv, a
  // key-value store...).
  using AllGather =
      std::function<std::vector<Bytes>(std::span<const std::byte> mine, double timeout_s)>;
  static std::shared_ptr<Communicator> callbacks(uint32_t rank,
                                                 uint32_t num_ranks,
                                                 AllGather all_gather);

  // Reserved: adopts an ncclComm_t (given as void*).  Throws Unsupported: this version has no GPU path.
  static std::shared_ptr<Communicator> from_nccl(void* nccl_comm);
};

}  // namespace ep::inline EP_ABI_NAMESPACE
