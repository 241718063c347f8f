// A replay holds the records of all ranks before it moves a row.
//
//   rank 0   replay 3: holds rank 1's record | ................................ its rows?
//   rank 1   replay 3:                       | hears rank 2, ends | replay 4, same memory |
//   rank 2   replay 3: ..................... | refuses            | replay 4              |
//   rank 3   replay 3:                       | hears rank 2, ends | replay 4: rows to 1   |
//
// Were rank 0 to start towards rank 1 on its record alone, its rows of call 3 could land on rank 3's rows of
// call 4.  Rank 0's kernel stands still there, before its first row, until those have landed; with the rule
// it never comes to that point.
#include <atomic>
#include <vector>

#include <gtest/gtest.h>

#include "device/host/host_device.hpp"
#include "device/host/worker.hpp"
#include "kernels/dispatch.cuh"
#include "support/faults.hpp"

namespace ep::test {
namespace {

using device::host::HostWorker;
using kernels::DispatchParams;
using kernels::Order;
using kernels::Scope;

constexpr uint32_t kSender = 0, kReceiver = 1, kRefuser = 2, kNext = 3, kRanks = 4;
constexpr uint32_t kTokens = 16;

struct Scene {
  std::atomic<bool> sender_is_in_call_3{false}, next_is_in_call_4{false};
  Gate holds_record;      // the sender has seen the receiver's record of call 3
  Gate has_later_rows;    // the next one's rows of call 4 are in the receiver's memory
  bool was_late = false;  // the sender came to its first row of call 3
};
std::atomic<Scene*> scene{nullptr};

// The library's worker, watched at three points.
class WatchedWorker : public HostWorker {
 public:
  WatchedWorker(const HostWorker& worker, const DispatchParams& params)
      : HostWorker(worker), state_(params.entry.state) {}

  template <Order kOrder, Scope kScope, typename T>
  T load(const T* word) const {
    const T value = HostWorker::load<kOrder, kScope>(word);
    if constexpr (sizeof(T) == 8) {
      const uint64_t sequence = state_->sequence;
      const uint64_t* record =
          kernels::record_from(*state_, layout::bank_of(sequence), kReceiver) + layout::kStatus;
      const bool is_here = word == record && layout::tag_in(value) == layout::tag_of(sequence);
      if (is_here && is_sender_in_call_3()) scene.load()->holds_record.open();
    }
    return value;
  }

  template <Order kOrder, Scope kScope, typename T>
  void store(T* word, std::type_identity_t<T> value) const {
    HostWorker::store<kOrder, kScope>(word, value);
    if (state_->rank != kNext || !scene.load()->next_is_in_call_4) return;
    const uint64_t channel = state_->window_layout.channel(kNext, 0);
    const void* landed = kernels::words_at(*state_, kReceiver, channel);
    if (word == landed) scene.load()->has_later_rows.open();
  }

  template <typename T>
  void write(T* at, std::type_identity_t<T> value) const {
    HostWorker::write(at, value);
    const void* first_of_sending = state_->scratch.rows_sent;
    if (at != first_of_sending || !is_sender_in_call_3()) return;
    scene.load()->was_late = true;
    scene.load()->has_later_rows.wait();
  }

 private:
  bool is_sender_in_call_3() const {
    return state_->rank == kSender && scene.load()->sender_is_in_call_3;
  }

  const kernels::DeviceState* state_;
};

constexpr kernels::DispatchConfig kConfig{};  // "rank", bytes

void run_watched(HostWorker& worker, const void* params) {
  const auto& dispatch = *static_cast<const DispatchParams*>(params);
  kernels::dispatch<kConfig>(WatchedWorker(worker, dispatch), dispatch);
}

device::host::HostKernel find_watched(const kernels::KernelKey& key) {
  return key.op == kernels::KernelOp::kDispatch ? &run_watched : device::host::find_kernel(key);
}

// All tokens are of `source` and go to the receiver, which owns most experts.
Trip trip_from(uint32_t source, uint64_t seed) {
  std::vector<uint32_t> num_tokens(kRanks, 0);
  num_tokens[source] = kTokens;
  return make_trip({.num_tokens = num_tokens,
                    .num_experts = 6,
                    .num_topk = 1,
                    .hidden = 64,
                    .expert_offsets = {0, 1, 4, 5, 6},
                    .routing = Routing::kOneRank,
                    .seed = seed});
}

TEST(LateRows, ARefusedReplayLeavesTheNextCallsRowsAlone) {
  const Watchdog watchdog;
  const Trip before = trip_from(kSender, 1), after = trip_from(kNext, 2);
  Scene here;
  scene = &here;
  run_threads(kRanks, [&](std::shared_ptr<Communicator> group) {
    buffer::Environment environment = buffer::host_environment();
    environment.device = std::make_shared<device::host::HostDevice>(&find_watched);
    EPBuffer buffer = BufferAccess::create(group, config_for({&before, 1}), environment);
    const uint32_t rank = buffer.rank();
    std::vector<Handle> handles;
    std::vector<const void*> places;
    for (const Trip* trip : {&before, &after}) {  // calls 1 and 2
      const DispatchResult sent = buffer.dispatch(dispatch_args(*trip, rank));
      expect_received(trip->sent.ranks[rank], trip->rules, rank, sent);
      handles.push_back(sent.handle);
      places.push_back(sent.x.data);
    }
    const auto replay = [&](const Trip& trip, const Handle& handle) {
      DispatchArgs args{.x = to_tensor(trip.tokens[rank].x)};
      args.handle = &handle;
      return buffer.dispatch(args);
    };
    if (rank == kRefuser) {  // call 3
      here.holds_record.wait();
      buffer.refuse(Operation::kDispatch);
    } else {
      if (rank == kSender) here.sender_is_in_call_3 = true;
      const PeerError error = caught<PeerError>([&] { replay(before, handles[0]); });
      EXPECT_EQ(error.peers, std::vector<uint32_t>{kRefuser});
      if (rank == kSender) here.sender_is_in_call_3 = false;
    }
    if (rank == kNext) here.next_is_in_call_4 = true;
    const DispatchResult sent = replay(after, handles[1]);  // call 4
    expect_received(after.sent.ranks[rank], after.rules, rank, sent);
    if (rank == kReceiver) {  // else late rows could do no harm
      EXPECT_EQ(sent.num_rows, kTokens);
      EXPECT_EQ(sent.x.data, places[0]);
      EXPECT_EQ(sent.x.data, places[1]);
    }
    group->all_gather({}, 30.0);
  });
  EXPECT_FALSE(here.was_late);
  scene = nullptr;
}

}  // namespace
}  // namespace ep::test
