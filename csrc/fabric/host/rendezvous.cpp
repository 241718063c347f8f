#include "fabric/host/rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kMaxStrangers = 1024;
constexpr double kDialS =
    5.0;  // of one try, so that an address that swallows packets is not the only one

struct Hello {
  uint32_t version, rank, num_ranks;
};

// Rank 0's side.
class Reception {
 public:
  explicit Reception(const Meeting& meeting)
      : meeting_(meeting), listeners_(listen_at(meeting.at)), peers_(meeting.place.num_ranks) {}

  std::vector<std::unique_ptr<Connection>> run() {
    for (;;) {
      hear_peers();
      if (missing().empty()) break;
      if (meeting_.deadline.passed()) fail({Cause::kTimeout, 0, missing()});
      try {
        wait();
      } catch (...) {  // Interrupted, or what the interrupt itself threw
        tell({Cause::kInterrupted, 0, {0}});
        throw;
      }
      accept_strangers();
      hear_strangers();
    }
    for (const auto& peer : peers_) {
      if (peer) peer->send(FrameKind::kWelcome, 0);
    }
    return std::move(peers_);
  }

 private:
  std::vector<uint32_t> missing() const {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 1; rank < peers_.size(); ++rank) {
      if (!peers_[rank]) ranks.push_back(rank);
    }
    return ranks;
  }

  void wait() {
    std::vector<pollfd> fds;
    for (const Fd& listener : listeners_)
      fds.push_back({listener.get(), POLLIN, 0});
    for (const auto& stranger : strangers_)
      fds.push_back({stranger->fd(), POLLIN, 0});
    for (const auto& peer : peers_) {
      if (peer) fds.push_back({peer->fd(), peer->poll_events(), 0});
    }
    wait_ready(fds, meeting_.deadline);
  }

  void accept_strangers() {
    for (const Fd& listener : listeners_) {
      while (Fd fd = accept_from(listener.get(), 0)) {
        // The longest waiting is the likeliest never to speak; a rank dropped so tries again.
        if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
        strangers_.push_back(std::make_unique<Connection>(std::move(fd)));
        strangers_.back()->set_max_payload(sizeof(Hello));
      }
    }
  }

  void hear_strangers() {
    for (auto& stranger : strangers_) {
      std::optional<Hello> hello;
      bool is_nonsense = false;
      stranger->receive([&](Frame&& frame) {
        is_nonsense = frame.kind != FrameKind::kHello || frame.payload.size() != sizeof(Hello);
        if (is_nonsense) return false;
        hello.emplace();
        std::memcpy(&*hello, frame.payload.data(), sizeof(Hello));
        return false;
      });
      if (is_nonsense || stranger->is_closed()) {
        stranger.reset();
      } else if (hello) {
        admit(std::move(stranger), *hello);
      }
    }
    std::erase(strangers_, nullptr);
  }

  void admit(std::unique_ptr<Connection> peer, const Hello& hello) {
    const uint32_t num_ranks = meeting_.place.num_ranks;
    std::string text;
    if (hello.version != kVersion) {
      text = str("protocol version differs: rank 0 has ", kVersion, ", rank ", hello.rank, " has ",
                 hello.version);
    } else if (hello.num_ranks != num_ranks) {
      text = str("num_ranks differs: rank 0 was given ", num_ranks, ", rank ", hello.rank,
                 " was given ", hello.num_ranks);
    } else if (hello.rank >= num_ranks) {
      return;
    } else if (hello.rank == 0 || peers_[hello.rank]) {
      text = str("rank ", hello.rank, " was given to two processes (num_ranks=", num_ranks, ")");
    }
    if (!text.empty()) {
      strangers_.push_back(std::move(peer));
      fail({Cause::kInvalid, 0, {}, text});
    }
    // Frames of calls that come later may follow at once.
    peer->set_max_payload(kMaxContributionBytes);
    peer->send(FrameKind::kAdmitted, 0);
    peers_[hello.rank] = std::move(peer);
  }

  void hear_peers() {
    std::vector<uint32_t> lost, interrupted;
    bool is_abandoned = false;
    for (uint32_t rank = 1; rank < peers_.size(); ++rank) {
      if (!peers_[rank]) continue;
      peers_[rank]->flush();
      peers_[rank]->receive([&](Frame&& frame) {
        if (frame.kind == FrameKind::kInterrupt) interrupted.push_back(rank);
        return is_abandoned = true;  // nothing else to say yet
      });
      if (peers_[rank]->is_closed()) lost.push_back(rank);
    }
    if (!interrupted.empty()) fail({Cause::kInterrupted, 0, std::move(interrupted)});
    if (!lost.empty()) fail({Cause::kLost, 0, std::move(lost)});
    // With everybody here the meeting still fails: that rank has raised its Timeout or is about to.
    if (is_abandoned) {
      std::vector<uint32_t> late = missing();
      if (late.empty()) late.push_back(0);
      fail({Cause::kTimeout, 0, std::move(late)});
    }
  }

  // Everybody who has come.
  void tell(const Verdict& verdict) {
    const auto payload = std::make_shared<const Communicator::Bytes>(encode(verdict));
    for (const auto& peer : peers_) {
      if (peer) peer->send(FrameKind::kVerdict, 0, payload);
    }
    for (const auto& stranger : strangers_) {
      if (stranger) stranger->send(FrameKind::kVerdict, 0, payload);
    }
  }

  [[noreturn]] void fail(const Verdict& verdict) {
    tell(verdict);
    raise(verdict, meeting_.place);
  }

  const Meeting& meeting_;
  std::vector<Fd> listeners_;
  std::vector<std::unique_ptr<Connection>> strangers_;
  std::vector<std::unique_ptr<Connection>> peers_;
};

// Another rank's side.
class Guest {
 public:
  explicit Guest(const Meeting& meeting) : meeting_(meeting) {}

  std::unique_ptr<Connection> run() {
    double pause_s = 0.01;
    for (;;) {
      if (Fd fd = dial_rank_0()) {
        auto connection = std::make_unique<Connection>(std::move(fd));
        if (is_welcome(*connection)) return connection;
        why_ = "what answers there closed the connection or speaks something else";
      }
      if (meeting_.deadline.passed()) raise({Cause::kTimeout, 0, {0}, why()}, meeting_.place);
      wait_ready({}, meeting_.deadline, pause_s);
      pause_s = std::min(2 * pause_s, 0.2);
    }
  }

 private:
  Fd dial_rank_0() {
    const std::vector<SocketAddress> addresses = resolve(meeting_.at);
    if (addresses.empty()) why_ = "the host name cannot be resolved for now";
    for (const SocketAddress& address : addresses) {
      int error = 0;
      const double bound_s = std::min(kDialS, meeting_.deadline.remaining_s());
      Fd fd = dial(address, meeting_.deadline.with(bound_s), error);
      if (fd) return fd;
      why_ = errno_text(error);
      if (error == EMFILE || error == ENFILE) throw descriptor_shortage(meeting_.place.rank, error);
    }
    return Fd();
  }

  // False when the connection closes before rank 0 has admitted this rank.
  bool is_welcome(Connection& connection) const {
    const uint32_t num_ranks = meeting_.place.num_ranks;
    connection.set_max_payload(num_ranks * (kMaxContributionBytes + sizeof(uint64_t)));
    const Hello hello{kVersion, meeting_.place.rank, num_ranks};
    Communicator::Bytes payload(sizeof hello);
    std::memcpy(payload.data(), &hello, sizeof hello);
    connection.send(FrameKind::kHello, 0, std::make_shared<const Communicator::Bytes>(payload));

    bool is_admitted = false, is_welcome = false;
    std::optional<Verdict> verdict;
    Deadline deadline = meeting_.deadline;
    bool has_abandoned = false;
    for (;;) {
      connection.flush();
      connection.receive([&](Frame&& frame) {
        if (frame.kind == FrameKind::kAdmitted) is_admitted = true;
        if (frame.kind == FrameKind::kWelcome) is_welcome = true;
        if (frame.kind == FrameKind::kVerdict) verdict = decode(frame.payload, 0, num_ranks);
        return !is_welcome && !verdict;  // what follows belongs to the calls
      });
      if (verdict) raise(*verdict, meeting_.place);
      if (is_welcome) return true;
      if (connection.is_closed() && !is_admitted) return false;
      if (connection.is_closed()) raise({Cause::kLost, 0, {0}}, meeting_.place);
      if (deadline.passed()) {
        if (has_abandoned || !is_admitted) raise({Cause::kTimeout, 0, {0}, why()}, meeting_.place);
        has_abandoned = true;
        connection.send(FrameKind::kAbandon, 0);
        deadline = deadline.with(kVerdictGraceS);
      }
      pollfd waiting{connection.fd(), connection.poll_events(), 0};
      try {
        wait_ready({&waiting, 1}, deadline);
      } catch (...) {  // Interrupted, or what the interrupt itself threw
        connection.send(FrameKind::kInterrupt, 0);
        throw;
      }
    }
  }

  std::string why() const { return why_.empty() ? why_ : str("; the last try: ", why_); }

  const Meeting& meeting_;
  std::string why_;
};

}  // namespace

std::vector<std::unique_ptr<Connection>> receive_ranks(const Meeting& meeting) {
  return Reception(meeting).run();
}

std::unique_ptr<Connection> join_rank_0(const Meeting& meeting) {
  return Guest(meeting).run();
}

}  // namespace ep::fabric
