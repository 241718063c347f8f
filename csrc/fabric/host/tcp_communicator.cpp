// Communicator::tcp: a star around rank 0, which decides how every call ends.
//
// Calls are numbered from 1 ("round"); call 0 is the meeting (rendezvous.hpp).
//
// State:    rank 0: the number of its call, and of every other rank the last call it contributed
//           to, with the bytes, whether it abandoned that call, and the last call that its user
//           left.  Rank r: the number of its call.
// Writers:  rank r sends Contribution(k) when it enters call k; Abandon(k) when its time is up, and
//           then waits kVerdictGraceS more; or Interrupt(k) when its user leaves, and waits no
//           more.  Rank 0 sends Result(k) when all contributions of call k are there, or
//           Verdict(f), f >= k, which ends every call up to f that has no result.
// Readers:  rank 0 ignores what is older than its call and keeps what is newer for the call it
//           belongs to.  Rank r ignores results and verdicts of calls older than its own.
// Pairing:  a result is sent only while nobody has abandoned the call, so either all ranks get it
//           or none does (except for a rank that rank 0's answer does not reach in time, or before
//           its user leaves).  Whoever's time is up, or user leaves, first ends the call for all.
//           A rank that comes too late for call k finds Verdict(f), raises PeerError once, however
//           many calls it missed, and goes on at f + 1, where the others are.  If rank 0 is the late one, it finds the others' Abandon,
//           sends the verdict for all calls they have given up, and goes on behind them.
//           Contributions are therefore never paired across different calls.
// Invariant: one contribution per rank is kept, and at most one result and one verdict wait to be
//           sent to a rank, so memory is bounded however late a rank is.
// A lost connection is final: this call and all later ones raise PeerLost.
#include <algorithm>
#include <cstring>
#include <optional>

#include "common/text.hpp"
#include "ep/communicator.hpp"
#include "ep/error.hpp"
#include "fabric/host/rendezvous.hpp"

namespace ep::fabric {
namespace {

using Bytes = Communicator::Bytes;

constexpr char kPhase[] = "all_gather";

// Result's payload: the number of bytes of every rank (u64), then the bytes, by rank.
Bytes pack(const std::vector<Bytes>& by_rank) {
  Bytes packed(by_rank.size() * sizeof(uint64_t));
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const uint64_t num_bytes = by_rank[rank].size();
    std::memcpy(packed.data() + rank * sizeof num_bytes, &num_bytes, sizeof num_bytes);
    packed.insert(packed.end(), by_rank[rank].begin(), by_rank[rank].end());
  }
  return packed;
}

std::optional<std::vector<Bytes>> unpack(const Bytes& packed, uint32_t num_ranks) {
  uint64_t at = num_ranks * sizeof(uint64_t);
  if (packed.size() < at) return std::nullopt;
  std::vector<Bytes> by_rank(num_ranks);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    uint64_t num_bytes = 0;
    std::memcpy(&num_bytes, packed.data() + rank * sizeof num_bytes, sizeof num_bytes);
    if (num_bytes > packed.size() - at) return std::nullopt;
    const auto begin = packed.begin() + static_cast<ptrdiff_t>(at);
    by_rank[rank].assign(begin, begin + static_cast<ptrdiff_t>(num_bytes));
    at += num_bytes;
  }
  return by_rank;
}

// Rank 0.
class Hub final : public Communicator {
 public:
  explicit Hub(std::vector<std::unique_ptr<Connection>> connections) : peers_(connections.size()) {
    for (size_t rank = 1; rank < peers_.size(); ++rank) {
      peers_[rank].connection = std::move(connections[rank]);
    }
  }

  uint32_t rank() const override { return 0; }
  uint32_t num_ranks() const override { return static_cast<uint32_t>(peers_.size()); }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    check_contribution(mine);
    const Deadline deadline(timeout_s, interrupt);
    timeout_s_ = timeout_s;
    if (!lost_.empty()) raise({Cause::kLost, round_, lost_}, place());
    ++round_;
    await_contributions(deadline);
    std::vector<Bytes> by_rank(peers_.size());
    by_rank[0].assign(mine.begin(), mine.end());
    for (size_t rank = 1; rank < peers_.size(); ++rank)
      by_rank[rank] = std::move(peers_[rank].bytes);
    send_result(std::make_shared<const Bytes>(pack(by_rank)), deadline);
    return by_rank;
  }

 private:
  struct Peer {
    std::unique_ptr<Connection> connection{};
    uint64_t round = 0;           // of its last contribution
    bool has_abandoned = false;   // that round
    uint64_t interrupted_in = 0;  // the last round that its user left
    Bytes bytes{};

    bool gave_up_on(uint64_t k) const { return round > k || (round == k && has_abandoned); }
  };

  Place place() const { return {0, num_ranks(), timeout_s_, kPhase}; }

  void await_contributions(const Deadline& deadline) {
    std::vector<uint32_t> ready = ranks_where([](const Peer&) { return true; });
    for (bool is_first_look = true;; is_first_look = false) {
      hear(ready);
      if (!lost_.empty()) fail({Cause::kLost, round_, lost_});
      std::vector<uint32_t> missing =
          ranks_where([&](const Peer& peer) { return peer.round < round_; });
      const bool gave_up =
          !ranks_where([&](const Peer& peer) { return peer.gave_up_on(round_); }).empty();
      if (missing.empty() && !gave_up) return;
      std::vector<uint32_t> interrupted =
          ranks_where([&](const Peer& peer) { return peer.interrupted_in >= round_; });
      if (!interrupted.empty()) fail({Cause::kInterrupted, round_, std::move(interrupted)});
      if (gave_up || deadline.passed()) {
        // Who finds the call given up when it enters is late itself.
        const bool is_late = gave_up && (is_first_look || missing.empty());
        if (is_late) missing.insert(missing.begin(), 0);
        fail({Cause::kTimeout, round_, std::move(missing)});
      }
      try {
        ready = wait(deadline);
      } catch (...) {  // Interrupted, or what the interrupt itself threw
        end_round({Cause::kInterrupted, round_, {0}});
        throw;
      }
    }
  }

  void send_result(std::shared_ptr<const Bytes> packed, const Deadline& deadline) {
    for (Peer& peer : peers_) {
      if (peer.connection) peer.connection->send(FrameKind::kResult, round_, packed);
    }
    const Deadline bound = deadline.with(std::max(deadline.remaining_s(), kVerdictGraceS));
    for (;;) {
      const std::vector<uint32_t> unsent = ranks_where([](Peer& peer) {
        peer.connection->flush();
        return peer.connection->has_unsent() && !peer.connection->is_closed();
      });
      if (unsent.empty()) return;
      if (bound.passed()) raise({Cause::kTimeout, round_, unsent}, place());
      hear(wait(bound));  // a peer that hung up takes nothing any more; the next call raises it
    }
  }

  void hear(const std::vector<uint32_t>& ranks) {
    for (const uint32_t rank : ranks) {
      Peer& peer = peers_[rank];
      peer.connection->flush();
      peer.connection->receive([&](Frame&& frame) {
        if (frame.kind == FrameKind::kContribution) {
          peer.round = frame.round;
          peer.has_abandoned = false;
          peer.bytes = std::move(frame.payload);
        } else if (frame.round == peer.round && is_farewell(frame.kind)) {
          peer.has_abandoned = true;
          if (frame.kind == FrameKind::kInterrupt) peer.interrupted_in = frame.round;
        }
        return true;
      });
      const bool is_known = std::find(lost_.begin(), lost_.end(), rank) != lost_.end();
      if (peer.connection->is_closed() && !is_known) lost_.push_back(rank);
    }
  }

  static bool is_farewell(FrameKind kind) {
    return kind == FrameKind::kAbandon || kind == FrameKind::kInterrupt;
  }

  template <typename Predicate>
  std::vector<uint32_t> ranks_where(Predicate&& holds) {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 1; rank < peers_.size(); ++rank) {
      if (holds(peers_[rank])) ranks.push_back(rank);
    }
    return ranks;
  }

  // The ranks that have something to hear, or take what waits for them.
  std::vector<uint32_t> wait(const Deadline& deadline) {
    std::vector<pollfd> fds{{-1, 0, 0}};  // poll() skips rank 0
    for (size_t rank = 1; rank < peers_.size(); ++rank) {
      const Connection& connection = *peers_[rank].connection;
      // A closed one would wake poll() again and again.
      fds.push_back({connection.is_closed() ? -1 : connection.fd(), connection.poll_events(), 0});
    }
    wait_ready(fds, deadline);
    std::vector<uint32_t> ready;
    for (uint32_t rank = 1; rank < fds.size(); ++rank) {
      if (fds[rank].revents != 0) ready.push_back(rank);
    }
    return ready;
  }

  // Ends this call, and those that peers have given up since, for everybody.
  void end_round(Verdict verdict) {
    for (const Peer& peer : peers_) {
      if (peer.gave_up_on(round_)) {
        verdict.round = std::max(verdict.round, peer.has_abandoned ? peer.round : peer.round - 1);
      }
    }
    round_ = verdict.round;
    const auto payload = std::make_shared<const Bytes>(encode(verdict));
    for (Peer& peer : peers_) {
      if (!peer.connection || peer.connection->is_closed()) continue;
      peer.connection->drop_unsent_verdicts();
      peer.connection->send(FrameKind::kVerdict, verdict.round, payload);
    }
  }

  [[noreturn]] void fail(const Verdict& verdict) {
    end_round(verdict);
    raise(verdict, place());
  }

  std::vector<Peer> peers_;  // element 0 is empty
  uint64_t round_ = 0;
  std::vector<uint32_t> lost_;
  double timeout_s_ = 0.0;
};

// Every other rank.
class Spoke final : public Communicator {
 public:
  Spoke(std::unique_ptr<Connection> hub, uint32_t rank, uint32_t num_ranks)
      : hub_(std::move(hub)), rank_(rank), num_ranks_(num_ranks) {}

  uint32_t rank() const override { return rank_; }
  uint32_t num_ranks() const override { return num_ranks_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    check_contribution(mine);
    Deadline deadline(timeout_s, interrupt);
    const Place place{rank_, num_ranks_, timeout_s, kPhase};
    if (!lost_.empty()) raise({Cause::kLost, round_, lost_}, place);
    hub_->send(FrameKind::kContribution, ++round_,
               std::make_shared<const Bytes>(mine.begin(), mine.end()));
    for (bool has_abandoned = false;;) {
      hub_->flush();
      Answer answer = hear();
      if (answer.result) return std::move(*answer.result);
      if (answer.verdict) fail(*answer.verdict, place);
      if (hub_->is_closed()) fail({Cause::kLost, round_, {0}}, place);
      if (deadline.passed()) {
        if (has_abandoned) fail({Cause::kTimeout, round_, {0}}, place);
        has_abandoned = true;
        hub_->send(FrameKind::kAbandon, round_);
        deadline = deadline.with(kVerdictGraceS);
      }
      pollfd waiting{hub_->fd(), hub_->poll_events(), 0};
      try {
        wait_ready({&waiting, 1}, deadline);
      } catch (...) {  // Interrupted, or what the interrupt itself threw
        hub_->send(FrameKind::kInterrupt, round_);
        throw;
      }
    }
  }

 private:
  struct Answer {
    std::optional<std::vector<Bytes>> result{};
    std::optional<Verdict> verdict{};
  };

  // The answer to this call, if it has come; older ones are dropped.  Of several verdicts the last
  // counts: this rank goes on behind it.
  Answer hear() {
    Answer answer;
    bool is_nonsense = false;
    hub_->receive([&](Frame&& frame) {
      if (frame.round < round_) return true;
      if (frame.kind == FrameKind::kVerdict) {
        answer.verdict = decode(frame.payload, frame.round, num_ranks_);
      } else if (frame.kind == FrameKind::kResult && frame.round == round_) {
        answer.result = unpack(frame.payload, num_ranks_);
      }
      is_nonsense = !answer.verdict && !answer.result;
      return answer.verdict.has_value();
    });
    if (is_nonsense) fail({Cause::kLost, round_, {0}}, {rank_, num_ranks_, 0.0, kPhase});
    return answer;
  }

  [[noreturn]] void fail(const Verdict& verdict, const Place& place) {
    round_ = verdict.round;
    if (verdict.cause == Cause::kLost) lost_ = verdict.ranks;
    raise(verdict, place);
  }

  std::unique_ptr<Connection> hub_;
  uint32_t rank_, num_ranks_;
  uint64_t round_ = 0;
  std::vector<uint32_t> lost_;
};

}  // namespace
}  // namespace ep::fabric

namespace ep {

std::shared_ptr<Communicator> Communicator::tcp(const std::string& address,
                                                uint32_t rank,
                                                uint32_t num_ranks,
                                                double timeout_s,
                                                std::function<bool()> interrupt) {
  fabric::check_ranks(rank, num_ranks);
  const fabric::Meeting meeting{fabric::parse_address(address),
                                {rank, num_ranks, timeout_s, "connect"},
                                fabric::Deadline(timeout_s, interrupt)};
  std::shared_ptr<Communicator> group;
  if (num_ranks == 1) {
    group = single();
  } else if (rank == 0) {
    group = std::make_shared<fabric::Hub>(fabric::receive_ranks(meeting));
  } else {
    group = std::make_shared<fabric::Spoke>(fabric::join_rank_0(meeting), rank, num_ranks);
  }
  group->interrupt = std::move(interrupt);
  return group;
}

}  // namespace ep
