#include "buffer/buffer_impl.hpp"

#include <algorithm>
#include <cmath>

#include "common/math.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/group_interrupt.hpp"
#include "kernels/params.hpp"

namespace ep {

using buffer::Call;
using device::WaitResult;
using layout::Cause;
using layout::OpKind;

namespace {

constexpr double kDefaultTimeout = 600.0;
constexpr uint64_t kStopPeriodNs = 10'000'000;

double bound_of(double configured, const Communicator& group) {
  if (configured > 0 && std::isfinite(configured)) return configured;  // connect() refuses others
  return group.timeout_s() >= 0 ? group.timeout_s() : kDefaultTimeout;
}

uint64_t nanoseconds(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) {
    throw InvalidArgument(str("timeout_s=", seconds, " is not a positive number of seconds"));
  }
  return static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9);
}

}  // namespace

BufferImpl::BufferImpl(std::shared_ptr<Communicator> group,
                       const BufferConfig& config,
                       const buffer::Environment& environment)
    : group_(std::move(group)), next_sequence_(environment.first_sequence) {
  if (group_ == nullptr) throw InvalidArgument("group is null: Communicator::single() is one rank");
  const double timeout = bound_of(config.timeout_s, *group_);
  const fabric::GroupInterrupt asking(*group_, config.interrupt);
  core_ = buffer::connect(*group_, config, environment, timeout);
  buffer::init_state(*core_, environment.first_sequence, nanoseconds(timeout));
  timeout_s_ = timeout;
  num_sms_ = core_->settings.num_sms;
  turns_ = std::make_unique<buffer::Turns>(*core_->device, config.wait_policy);
  comm_stream_ = Stream(core_->device->create_stream());
  if (config.interrupt)
    interrupt_ = std::make_shared<const std::function<bool()>>(config.interrupt);
  const std::weak_ptr<buffer::Core> weak = core_;
  core_->fabric->watch([weak](uint32_t rank) {
    const std::shared_ptr<buffer::Core> core = weak.lock();
    if (!core) return;
    if (std::atomic_ref(core->header(rank).closed).load(std::memory_order_acquire) != 0)
      return;  // it said goodbye
    kernels::DeviceState& state = core->state;
    std::atomic_ref(state.lost_mask[rank / 32])
        .fetch_or(1u << (rank % 32), std::memory_order_relaxed);
    std::atomic_ref(state.lost).store(1u, std::memory_order_release);
    device::ring(core->header(state.rank).doorbell);
  });
  core_->log(LogLevel::kInfo,
             str("buffer of ", group_->num_ranks(), " ranks on cpu, ",
                 core_->settings.window.num_bytes, " bytes of window, num_sms=", num_sms_.load()));
}

BufferImpl::~BufferImpl() {
  close();
}

void BufferImpl::set_num_sms(uint32_t num_sms) {
  if (num_sms < 1 || num_sms > layout::kMaxChannels) {
    throw InvalidArgument(str("num_sms=", num_sms, " is outside [1, ", layout::kMaxChannels, "]"));
  }
  num_sms_ = num_sms;
}

void BufferImpl::set_timeout_s(double seconds) {
  const uint64_t ns = nanoseconds(seconds);
  timeout_s_ = seconds;
  std::atomic_ref(core_->state.timeout_ns).store(ns, std::memory_order_relaxed);
}

Stats BufferImpl::stats() const {
  const buffer::Core& c = *core_;
  return {c.num_dispatches.load(), c.num_combines.load(), c.num_window_outputs.load(),
          c.num_caller_outputs.load(), c.num_faults.load()};
}

void BufferImpl::raise_deferred() {
  // Looked at in call order; what is good and done is forgotten.
  while (!unfinished_.empty()) {
    const CallPtr call = unfinished_.front();
    if (!call->done()) break;
    unfinished_.erase(unfinished_.begin());
    call->raise();
  }
}

void BufferImpl::require_open() const {
  if (getpid() != pid_) {
    throw Error("this buffer was made before fork(): a child's buffers are inert, make a new one");
  }
  if (closed_) throw Error("the buffer is closed");
}

buffer::Turns::Turn BufferImpl::enter() {
  require_open();
  auto turn = turns_->take(settings().config.interrupt);
  if (closed_) throw Error("the buffer is closed");
  raise_deferred();
  if (core_->needs_resync)
    throw Error("an earlier call failed on the way: resync() must come first");
  count_unseen_turns();
  return turn;
}

void BufferImpl::count_unseen_turns() {
  if (last_event_.query()) next_sequence_ = core_->state.sequence;
}

void BufferImpl::check() {
  if (closed_ || getpid() != pid_) return;
  // Whoever has the turn looks at the faults before and behind it; waiting is not for check().
  const auto turn = turns_->try_take();
  if (turn) raise_deferred();
}

BufferImpl::CallPtr BufferImpl::make_call(OpKind kind) const {
  return make_pooled<Call>(core_->allocator(), core_, kind);
}

BufferImpl::Launch BufferImpl::launch_on(const Stream& stream) const {
  return {stream, 1, decltype(Launch::waits)(core_->allocator())};
}

kernels::EntryParams BufferImpl::entry_params(const CallPtr& call) {
  kernels::EntryParams entry{};
  entry.state = &core_->state;
  entry.ticket = &call->ticket;
  return entry;
}

BufferImpl::Launch BufferImpl::where(const Stream& stream,
                                     const std::vector<Event>& wait_for,
                                     uint32_t num_sms) const {
  if (num_sms > layout::kMaxChannels) {
    throw InvalidArgument(str("num_sms=", num_sms, " is outside [1, ", layout::kMaxChannels, "]"));
  }
  Launch launch = launch_on(stream.defined() ? stream : comm_stream_);
  launch.num_blocks = num_sms != 0 ? num_sms : num_sms_.load();
  for (const Event& event : wait_for) {
    if (event.impl()) launch.waits.push_back(event.impl());
  }
  return launch;
}

buffer::Grant BufferImpl::take(const buffer::Request& request) const {
  const auto grant = core_->arena->take(request);
  if (grant) return *grant;
  const uint64_t needed =
      align_up(request.num_bytes, layout::kArenaAlignBytes);  // what the peers are told
  const uint64_t available = core_->arena->largest_free();
  throw buffer::NoExtent(
      str("rank ", settings().rank, " needs ", needed, " bytes in one piece of its ",
          "arena, the largest free extent has ", available,
          ": drop outputs, or raise arena_bytes from ", settings().arena_bytes, " to ",
          settings().arena_bytes + needed - available),
      settings().rank, needed, available);
}

buffer::Grant BufferImpl::take_for(Launch& launch, uint64_t num_bytes, bool largest) const {
  buffer::Grant grant = take({num_bytes, largest, next_sequence_, launch.stream.impl().get()});
  launch.waits.insert(launch.waits.end(), grant.wait_for.begin(), grant.wait_for.end());
  return grant;
}

Event BufferImpl::queue_end(const Launch& launch, const CallPtr& call) {
  detail::StreamImpl& stream = *launch.stream.impl();
  call->queue_finish(stream, call);
  const std::shared_ptr<detail::EventImpl> event = stream.record();
  event->deferred = call;
  event->interrupt = interrupt_;
  last_event_ = Event(event);
  last_stream_ = launch.stream;
  ++next_sequence_;
  unfinished_.push_back(call);
  return last_event_;
}

void BufferImpl::refuse(OpKind kind, Cause cause, uint64_t needed, uint64_t available) {
  const CallPtr call = make_call(OpKind::kNone);
  kernels::RefuseParams params{};
  params.entry = entry_params(call);
  params.entry.agreed[layout::kStatus] = static_cast<uint32_t>(cause);
  params.entry.agreed[layout::kKind] = static_cast<uint32_t>(kind);
  params.entry.needed = static_cast<uint32_t>(std::min<uint64_t>(needed, ~0u));
  params.entry.available = static_cast<uint32_t>(std::min<uint64_t>(available, ~0u));
  const Launch launch = launch_on(comm_stream_);
  queue_kernel(launch, {.op = kernels::KernelOp::kRefuse}, params);
  queue_end(launch, call);
  call->set_own_refusal(cause);  // the caller hears of it at once
}

bool BufferImpl::wait_counts(const CallPtr& call) {
  const auto ready = [&] { return call->counts_known(); };
  const WaitResult result =
      core_->device->wait(call->ticket.doorbell, ready, device::kNoDeadline,
                          settings().config.interrupt, settings().config.wait_policy);
  if (result == WaitResult::kInterrupted) stop(call);
  return result != WaitResult::kInterrupted;
}

bool BufferImpl::wait_event(const CallPtr& call, const Event& event) {
  const WaitResult result = event.impl()->wait(device::kNoDeadline, settings().config.interrupt);
  if (result != WaitResult::kInterrupted) return true;
  stop(call);
  event.impl()->wait(device::kNoDeadline, {});
  return false;
}

// An abort ends one operation, and those queued before the call come first: it is set anew for each that took it.
void BufferImpl::stop(const CallPtr& call) {
  const auto count_taken = [&] {
    return std::count_if(unfinished_.begin(), unfinished_.end(), [](const CallPtr& c) {
      return c->done() && c->cause() == Cause::kInterrupted && c->ticket.fault.from_peer == 0;
    });
  };
  auto num_taken = count_taken();
  set_abort(Cause::kInterrupted);
  const auto is_done = [&] { return call->done(); };
  while (core_->device->wait(call->ticket.doorbell, is_done,
                             core_->device->now_ns() + kStopPeriodNs, {},
                             settings().config.wait_policy) != WaitResult::kReady) {
    const auto now_taken = count_taken();
    if (now_taken != num_taken) set_abort(Cause::kInterrupted);
    num_taken = now_taken;
  }
}

void BufferImpl::throw_interrupted(const CallPtr& call) {
  if (call->cause() != Cause::kNone && call->ticket.fault.needs_resync != 0)
    core_->needs_resync = true;
  call->mark_raised();
  const CallPtr turn = core_->needs_resync ? nullptr : spend_abort();
  if (turn) turn->mark_raised();
  throw Interrupted(str("call ", call->ticket.sequence, " was interrupted"));
}

void BufferImpl::complete(const CallPtr& call, const Event& event) {
  if (!wait_event(call, event)) throw_interrupted(call);
  call->raise_now();
}

}  // namespace ep
