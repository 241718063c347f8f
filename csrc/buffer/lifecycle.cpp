// abort, refuse, resync, close, abandon.
#include <algorithm>
#include <cstring>

#include "buffer/buffer_impl.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/group_interrupt.hpp"
#include "kernels/params.hpp"

namespace ep {

using buffer::Call;
using layout::Cause;
using layout::OpKind;

namespace {

constexpr uint64_t kAbortPeriodNs = 10'000'000;
constexpr double kClosePatience =
    2.0;  // seconds; the windows stay mapped beyond it, so it bounds nothing but manners

// Peers may read while a second abort writes: byte by byte, so that it is no data race.
void write_reason(layout::WindowHeader& header, std::string_view reason) {
  const auto size = static_cast<uint32_t>(std::min<size_t>(reason.size(), layout::kMaxReasonBytes));
  for (uint32_t i = 0; i < size; ++i)
    std::atomic_ref(header.reason[i]).store(reason[i], std::memory_order_relaxed);
  std::atomic_ref(header.reason_bytes).store(size, std::memory_order_release);
}

}  // namespace

// Ends the waits of a call in flight, and with it its turn.
void BufferImpl::set_abort(Cause cause) {
  std::atomic_ref(core_->state.abort)
      .store(static_cast<uint32_t>(cause), std::memory_order_release);
  device::ring(core_->header(settings().rank).doorbell);
}

BufferImpl::CallPtr BufferImpl::spend_abort() {
  const auto is_taken = [&] {
    return std::atomic_ref(core_->state.abort).load(std::memory_order_acquire) == 0;
  };
  if (is_taken()) return nullptr;
  const Event before = last_event_;
  const CallPtr call = make_call(OpKind::kNone);
  kernels::RefuseParams params{};
  params.entry = entry_params(call);
  params.only_if_aborted = true;
  const Launch launch = launch_on(comm_stream_);
  queue_kernel(launch, {.op = kernels::KernelOp::kRefuse}, params);
  const Event event = queue_end(launch, call);
  // The turn waits for nobody but a drain, within the timeout.  Operations before it may wait for peers that
  // never come; if one of them has taken the abort, the turn will find nothing to do.
  const auto by_another = [&] { return is_taken() && !before.query(); };
  while (!by_another() && event.impl()->wait(core_->device->now_ns() + kAbortPeriodNs, {}) !=
                              device::WaitResult::kReady) {
  }
  if (call->done() && call->ticket.sequence != 0) return call;
  --next_sequence_;
  return nullptr;
}

void BufferImpl::abort(std::string_view reason) {
  if (closed_ || getpid() != pid_) return;
  write_reason(core_->header(settings().rank), reason);
  set_abort(Cause::kAborted);
  if (turns_->is_mine())
    return;  // in a signal handler: the call that it interrupted takes the abort
  const auto turn = turns_->take({});
  if (!core_->needs_resync) spend_abort();
}

void BufferImpl::refuse(Operation operation) {
  if (closed_ || getpid() != pid_) return;
  const auto turn = turns_->take({});
  if (closed_ || core_->needs_resync) return;
  count_unseen_turns();
  refuse(operation == Operation::kDispatch ? OpKind::kDispatch : OpKind::kCombine,
         Cause::kArguments, 0, 0);
}

uint64_t BufferImpl::resync() {
  require_open();
  const std::function<bool()>& interrupt = settings().config.interrupt;
  const auto turn = turns_->take(interrupt);
  const fabric::GroupInterrupt asking(*group_, interrupt);
  if (last_event_.impl()) {  // bounded by its operations' deadlines
    const auto drained = last_event_.impl()->wait(device::kNoDeadline, group_->interrupt);
    if (drained == device::WaitResult::kInterrupted) throw Interrupted("resync was interrupted");
  }
  kernels::DeviceState& state = core_->state;
  std::vector<uint32_t> lost;
  for (uint32_t r = 0; r < settings().num_ranks; ++r) {
    const uint32_t word = std::atomic_ref(state.lost_mask[r / 32]).load(std::memory_order_acquire);
    if ((word >> (r % 32) & 1) != 0) lost.push_back(r);
  }
  if (!lost.empty())
    throw PeerLost(str("resync: rank ", lost.front(), " is gone; make a new buffer without it"),
                   lost);
  // Whoever takes part has left its kernels: after the exchange no late store can reach reused memory.
  struct Progress {
    uint64_t next, completed;
  } const mine{state.sequence, core_->header(settings().rank).completed};
  const auto all = group_->all_gather(std::as_bytes(std::span(&mine, 1)), timeout_s());
  uint64_t next = 0, completed = ~uint64_t{0};
  for (const auto& bytes : all) {
    Progress theirs{};
    if (bytes.size() != sizeof theirs)
      throw Desync("resync: a peer is in another collective", "kind of operation", 0, 0, 0);
    std::memcpy(&theirs, bytes.data(), sizeof theirs);
    next = std::max(next, theirs.next);
    completed = std::min(completed, theirs.completed);
  }
  state.sequence = state.first_sequence = next_sequence_ = next;
  state.drain = 0;
  state.broken = Cause::kNone;
  std::atomic_ref(state.abort).store(0, std::memory_order_relaxed);
  core_->arena->forget_operations();
  core_->needs_resync = false;
  for (const CallPtr& call : unfinished_)
    call->mark_raised();  // a late look must not ask for another resync()
  unfinished_.clear();
  return completed;
}

void BufferImpl::close() noexcept {
  if (core_ && turns_->is_mine()) {
    core_->log(LogLevel::kWarning, "close() in the middle of a call of the same thread: ignored");
    return;
  }
  if (closed_.exchange(true) || !core_) return;
  if (getpid() != pid_) return keep_for_ever({});  // the parent's threads do not exist here
  try {
    const auto turn = turns_->take({});
    const CallPtr call = make_call(OpKind::kNone);
    kernels::CloseParams params{};
    params.state = &core_->state;
    params.ticket = &call->ticket;
    params.patience_ns = static_cast<uint64_t>(std::min(timeout_s(), kClosePatience) * 1e9);
    const Launch launch = launch_on(comm_stream_);
    queue_kernel(launch, {.op = kernels::KernelOp::kClose}, params);
    queue_end(launch, call).impl()->wait(device::kNoDeadline, {});
    core_->fabric->stop_watching();
  } catch (const std::exception& error) {
    core_->log(LogLevel::kWarning, str("closing: ", error.what()));
  }
}

void BufferImpl::abandon() noexcept {
  if (closed_.exchange(true) || !core_) return;
  if (getpid() != pid_) return keep_for_ever({});
  const auto turn =
      turns_->try_take();  // without it another thread is in a call, and holds the stream
  keep_for_ever(turn ? last_stream_ : Stream());
}

void BufferImpl::keep_for_ever(const Stream& also) noexcept {
  struct Kept {
    std::shared_ptr<buffer::Core> core;
    Stream streams[2];
    Kept* next;
  };
  static std::atomic<Kept*> all{nullptr};  // reachable: leak checkers see that it is meant
  auto* kept = new Kept{core_, {comm_stream_, also}, all.load(std::memory_order_relaxed)};
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace ep
