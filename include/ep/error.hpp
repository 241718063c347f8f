// The errors of the library.  All derive from ep::Error; each carries the numbers behind its text.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ep/version.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

// The class of an error, for code that must not catch by type (bindings, statuses).
enum class ErrorKind : uint8_t {
  kNone,  // no error
  kError,
  kInvalidArgument,
  kCapacity,
  kTimeout,
  kPeer,
  kPeerLost,
  kDesync,
  kUnsupported,
  kInterrupted,
};

// The name of its exception class.
constexpr const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone:
      return "none";
    case ErrorKind::kError:
      return "Error";
    case ErrorKind::kInvalidArgument:
      return "InvalidArgument";
    case ErrorKind::kCapacity:
      return "CapacityError";
    case ErrorKind::kTimeout:
      return "Timeout";
    case ErrorKind::kPeer:
      return "PeerError";
    case ErrorKind::kPeerLost:
      return "PeerLost";
    case ErrorKind::kDesync:
      return "Desync";
    case ErrorKind::kUnsupported:
      return "Unsupported";
    case ErrorKind::kInterrupted:
      return "Interrupted";
  }
  return "unknown";
}

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, ErrorKind kind = ErrorKind::kError)
      : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// An argument is wrong; the text names it, its value and the limit.
class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& what) : Error(what, ErrorKind::kInvalidArgument) {}
};

// More was needed than there is: tokens, rows or bytes of `rank`.
class CapacityError : public Error {
 public:
  CapacityError(const std::string& what, uint32_t rank_, uint64_t needed_, uint64_t available_)
      : Error(what, ErrorKind::kCapacity), rank(rank_), needed(needed_), available(available_) {}
  uint32_t rank;
  uint64_t needed, available;
};

// A wait ran out of time.  `peers` did not come; `phase` is where this rank waited.
// The buffer needs resync() before its next call.
class Timeout : public Error {
 public:
  Timeout(const std::string& what, std::vector<uint32_t> peers_, std::string phase_)
      : Error(what, ErrorKind::kTimeout), peers(std::move(peers_)), phase(std::move(phase_)) {}
  std::vector<uint32_t> peers;
  std::string phase;
};

// Another rank ended the call: it refused its arguments, was aborted, gave up or closed its buffer.
class PeerError : public Error {
 public:
  PeerError(const std::string& what, std::vector<uint32_t> peers_, std::string reason_)
      : Error(what, ErrorKind::kPeer), peers(std::move(peers_)), reason(std::move(reason_)) {}
  std::vector<uint32_t> peers;
  std::string reason;
};

// The processes of `peers` are gone or cannot be reached.
class PeerLost : public Error {
 public:
  PeerLost(const std::string& what, std::vector<uint32_t> peers_)
      : Error(what, ErrorKind::kPeerLost), peers(std::move(peers_)) {}
  std::vector<uint32_t> peers;
};

// Ranks made different calls: `field` differs, here `mine`, on rank `peer` `theirs`.
class Desync : public Error {
 public:
  Desync(
      const std::string& what, std::string field_, uint32_t peer_, uint32_t mine_, uint32_t theirs_)
      : Error(what, ErrorKind::kDesync),
        field(std::move(field_)),
        peer(peer_),
        mine(mine_),
        theirs(theirs_) {}
  std::string field;
  uint32_t peer, mine, theirs;
};

// The name is reserved, or the machine lacks what it needs; the text says what would do.
class Unsupported : public Error {
 public:
  explicit Unsupported(const std::string& what) : Error(what, ErrorKind::kUnsupported) {}
};

// The caller's `interrupt` callback asked to leave a wait (a signal, Ctrl-C).
class Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& what) : Error(what, ErrorKind::kInterrupted) {}
};

}  // namespace ep::inline EP_ABI_NAMESPACE
