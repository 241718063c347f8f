// A TCP connection that carries frames, and what the frames are.
//
//   0       4       8               16              24
//   +-------+-------+---------------+---------------+------------------------+
//   | magic | kind  | round         | num_bytes     | payload, num_bytes     |
//   +-------+-------+---------------+---------------+------------------------+
// Native byte order: a peer of the other order fails at the magic.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "common/function_ref.hpp"
#include "ep/communicator.hpp"
#include "fabric/host/fd.hpp"

namespace ep::fabric {

//                          from   to      payload
enum class FrameKind : uint32_t {
  kHello = 1,         //    r      0       Hello
  kAdmitted = 2,      //    0      r       -: rank 0 knows who this is
  kWelcome = 3,       //    0      r       -: everybody is here
  kContribution = 4,  //    r      0       this rank's bytes of the round
  kAbandon = 5,       //    r      0       -: this rank's time is up in the round
  kResult = 6,        //    0      r       everybody's bytes of the round
  kVerdict = 7,  //    0      r       Verdict: every round up to this one that has no result failed
  kInterrupt = 8,  //    r      0       -: this rank's user has left the round
};

struct FrameHeader {
  uint32_t magic;
  uint32_t kind;
  uint64_t round;
  uint64_t num_bytes;
};
static_assert(sizeof(FrameHeader) == 24);

struct Frame {
  FrameKind kind{};
  uint64_t round = 0;
  Communicator::Bytes payload{};
};

// Never blocks.  What a socket does not take at once waits here, so a frame is never cut off by a
// caller who runs out of time.  Thread safety: one call at a time.
class Connection {
 public:
  // `fd` is connected and non-blocking.
  explicit Connection(Fd fd);
  // Hangs up, in the process that made it; in a forked child it only closes the child's copy.
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Longest payload taken from the peer; a longer one closes the connection.  0 at first.
  void set_max_payload(uint64_t num_bytes) { max_payload_ = num_bytes; }

  // Queues a frame and sends what the socket takes.  A null payload is an empty one.
  void send(FrameKind kind,
            uint64_t round,
            std::shared_ptr<const Communicator::Bytes> payload = nullptr);
  void flush();
  // Forgets verdicts of which no byte has left: a later one covers them.
  void drop_unsent_verdicts();

  // Hands over the frames that have come, in order, until there are no more or `on_frame` returns
  // false; the rest is for the next call.
  void receive(FunctionRef<bool(Frame&&)> on_frame);

  // The peer has hung up (and all it sent was received) or does not speak this protocol.
  bool is_closed() const { return is_closed_; }
  bool has_unsent() const { return !outbox_.empty(); }
  int fd() const { return fd_.get(); }
  short poll_events() const;

 private:
  struct Outgoing {
    FrameHeader header;
    std::shared_ptr<const Communicator::Bytes> payload;
    uint64_t num_sent = 0;
  };

  enum class Parse : uint8_t { kNeedsMore, kStopped, kNonsense };

  bool send_front();
  Parse parse(FunctionRef<bool(Frame&&)> on_frame);

  Fd fd_;
  int owner_pid_;
  uint64_t max_payload_ = 0;
  bool is_closed_ = false;
  std::deque<Outgoing> outbox_;
  std::vector<std::byte> inbox_;
};

}  // namespace ep::fabric
