// Communicator::threads: the ranks share a room in which one call at a time is open.
//
// State:    room: the open call and the ranks that left for good; call: who has contributed, and
//           how it ended.
// Writers:  a rank adds its bytes to the open call.  The last to come, or the first whose time is
//           up or whose user leaves, or a rank that leaves, ends the call for all and opens the
//           next.
// Readers:  the ranks that contributed to the call; they hold it, so its result stays until the
//           last has it.
// Pairing:  everything under the room's mutex, except that the bytes of a call that has ended are
//           read without.  A rank that finds a later call open than it expects was too late: it
//           raises PeerError once, however many calls it missed, and its next call is the open one.
// A rank that has left is final: this call and all later ones raise PeerLost.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>

#include <unistd.h>

#include "ep/communicator.hpp"
#include "fabric/host/deadline.hpp"
#include "fabric/host/verdict.hpp"

namespace ep {
namespace {

using fabric::Cause;
using fabric::Verdict;
using Bytes = Communicator::Bytes;

struct Call {
  Call(uint64_t number_, uint32_t num_ranks)
      : number(number_), has_come(num_ranks), bytes(num_ranks) {}

  std::vector<uint32_t> missing() const {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < has_come.size(); ++rank) {
      if (!has_come[rank]) ranks.push_back(rank);
    }
    return ranks;
  }

  uint64_t number;
  std::vector<bool> has_come;
  std::vector<Bytes> bytes;
  bool has_ended = false;
  std::optional<Verdict> verdict;  // when it failed
};

struct Room {
  explicit Room(uint32_t num_ranks_)
      : num_ranks(num_ranks_), open(std::make_shared<Call>(1, num_ranks_)) {}

  // REQUIRES: `mutex` is held.
  void end_open_call(std::optional<Verdict> verdict) {
    if (verdict) last_failure = verdict;
    open->verdict = std::move(verdict);
    open->has_ended = true;
    open = std::make_shared<Call>(open->number + 1, num_ranks);
    changed.notify_all();
  }

  const uint32_t num_ranks;
  const pid_t owner_pid = ::getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Call> open;
  std::optional<Verdict> last_failure;
  std::vector<uint32_t> left;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Room> room, uint32_t rank)
      : room_(std::move(room)), rank_(rank) {}

  ~ThreadCommunicator() override {
    if (::getpid() != room_->owner_pid) return;  // a forked child leaves nobody
    const std::lock_guard lock(room_->mutex);
    room_->left.push_back(rank_);
    const std::vector<bool>& has_come = room_->open->has_come;
    if (std::find(has_come.begin(), has_come.end(), true) == has_come.end()) return;
    room_->end_open_call(Verdict{Cause::kLost, room_->open->number, room_->left});
  }

  uint32_t rank() const override { return rank_; }
  uint32_t num_ranks() const override { return room_->num_ranks; }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    fabric::check_contribution(mine);
    const fabric::Deadline deadline(timeout_s, interrupt);
    const fabric::Place place{rank_, room_->num_ranks, timeout_s, "all_gather"};
    std::unique_lock lock(room_->mutex);
    if (!room_->left.empty()) raise(Verdict{Cause::kLost, room_->open->number, room_->left}, place);
    const uint64_t expected = next_;
    next_ = room_->open->number;
    if (next_ != expected) raise(Verdict(*room_->last_failure), place);
    ++next_;

    const std::shared_ptr<Call> call = room_->open;
    call->bytes[rank_].assign(mine.begin(), mine.end());
    call->has_come[rank_] = true;
    if (call->missing().empty()) room_->end_open_call(std::nullopt);
    await_end(lock, *call, deadline);
    if (!call->has_ended) {
      room_->end_open_call(Verdict{Cause::kTimeout, call->number, call->missing()});
    }
    lock.unlock();
    if (call->verdict) raise(*call->verdict, place);
    return call->bytes;
  }

 private:
  // REQUIRES: `lock` holds the room's mutex; it does again at the end, also when this throws.
  void await_end(std::unique_lock<std::mutex>& lock,
                 const Call& call,
                 const fabric::Deadline& deadline) {
    while (!call.has_ended && !deadline.passed()) {
      room_->changed.wait_until(lock, deadline.next_look(), [&] { return call.has_ended; });
      if (call.has_ended) return;
      // Without the mutex: it is the user's code, which may need a lock that another rank's thread has.
      lock.unlock();
      try {
        deadline.ask();
      } catch (...) {  // Interrupted, or what the interrupt itself threw
        lock.lock();
        if (!call.has_ended) {
          room_->end_open_call(Verdict{Cause::kInterrupted, call.number, {rank_}});
        }
        throw;
      }
      lock.lock();
    }
  }

  std::shared_ptr<Room> room_;
  uint32_t rank_;
  uint64_t next_ = 1;  // the call it takes part in next
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> Communicator::threads(uint32_t num_ranks) {
  fabric::check_ranks(0, num_ranks);
  const auto room = std::make_shared<Room>(num_ranks);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_shared<ThreadCommunicator>(room, rank));
  }
  return ranks;
}

}  // namespace ep
