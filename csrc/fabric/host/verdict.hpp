// Why a collective call failed, decided once and told to every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ep/communicator.hpp"

namespace ep::fabric {

enum class Cause : uint32_t {
  kTimeout = 1,      // `ranks` did not come in time
  kLost = 2,         // the connections to `ranks` broke
  kInvalid = 3,      // arguments differ; `text` is the error
  kInterrupted = 4,  // the users of `ranks` left the call
};

struct Verdict {
  Cause cause{};
  uint64_t round = 0;
  std::vector<uint32_t> ranks{};
  std::string text{};
};

// Who raises it, and what this rank was doing.
struct Place {
  uint32_t rank, num_ranks;
  double timeout_s;
  const char* phase;
};

// Timeout, PeerLost, InvalidArgument or (others were interrupted) PeerError; PeerError too for a rank that
// is itself one of the missing.
[[noreturn]] void raise(const Verdict& verdict, const Place& place);

// The payload of a kVerdict frame.  decode() gives nothing for bytes that are not one.
Communicator::Bytes encode(const Verdict& verdict);
std::optional<Verdict> decode(std::span<const std::byte> bytes, uint64_t round, uint32_t num_ranks);

// "rank 2" or "ranks 2, 5"; a long list is cut off.
std::string rank_list(std::span<const uint32_t> ranks);

// Throws InvalidArgument when there are no such ranks.
void check_ranks(uint32_t rank, uint32_t num_ranks);

// Throws InvalidArgument when this rank's bytes are more than a collective call takes.
inline constexpr uint64_t kMaxContributionBytes = uint64_t{16} << 20;
void check_contribution(std::span<const std::byte> mine);

}  // namespace ep::fabric
