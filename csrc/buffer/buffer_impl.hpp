// EPBuffer's inside.  One file per concern: dispatch.cpp, combine.cpp, lifecycle.cpp (abort, refuse, resync, close,
// abandon), buffer_impl.cpp (what they share).
#pragma once

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "buffer/call.hpp"
#include "buffer/core.hpp"
#include "buffer/dispatch_options.hpp"
#include "buffer/refusal.hpp"
#include "buffer/turn.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

class BufferImpl {
 public:
  BufferImpl(std::shared_ptr<Communicator> group,
             const BufferConfig& config,
             const buffer::Environment& environment);
  ~BufferImpl();

  void dispatch(const DispatchArgs& args, DispatchResult& result);
  void combine(const CombineArgs& args, CombineResult& result);
  DispatchTensors output_spec(const DispatchArgs& args) const;
  Tensor expert_output(const Handle& handle, uint32_t hidden, DType dtype);

  void check();
  void abort(std::string_view reason);
  uint64_t resync();
  void refuse(Operation operation);
  void close() noexcept;
  void abandon() noexcept;

  buffer::Core& core() const { return *core_; }
  const buffer::Settings& settings() const { return core_->settings; }
  Stream comm_stream() const { return comm_stream_; }
  uint32_t num_sms() const { return num_sms_.load(); }
  void set_num_sms(uint32_t num_sms);
  double timeout_s() const { return timeout_s_.load(); }
  void set_timeout_s(double seconds);
  Stats stats() const;

 private:
  using CallPtr = std::shared_ptr<buffer::Call>;

  // How a call is queued.
  struct Launch {
    Stream stream;
    uint32_t num_blocks = 1;
    PoolVector<std::shared_ptr<detail::EventImpl>> waits{};
  };

  // Throws Error when the buffer is closed, or is another process's.
  void require_open() const;
  // The entry of every call: open, deferred faults raised, resync() not needed.
  buffer::Turns::Turn enter();
  void raise_deferred();
  // A second abort may have spent a turn that the host has not counted.
  void count_unseen_turns();

  // Runs `prepare`; when it throws, the peers hear of it in this turn, and the error goes on.
  template <typename Prepare>
  void prepare_or_refuse(layout::OpKind kind, Prepare prepare);
  // `needed` and `available`: tokens, or units of kArenaAlignBytes.
  void refuse(layout::OpKind kind, layout::Cause cause, uint64_t needed, uint64_t available);

  CallPtr make_call(layout::OpKind kind) const;
  Launch launch_on(const Stream& stream) const;
  Launch where(const Stream& stream, const std::vector<Event>& wait_for, uint32_t num_sms) const;
  // Throws NoExtent.
  buffer::Grant take(const buffer::Request& request) const;
  // For the operation that `launch` describes.
  buffer::Grant take_for(Launch& launch, uint64_t num_bytes, bool largest) const;
  kernels::EntryParams entry_params(const CallPtr& call);
  template <typename Params>
  void queue_kernel(const Launch& launch, const kernels::KernelKey& kernel, const Params& params);
  // Queues the call's end behind its kernels.
  Event queue_end(const Launch& launch, const CallPtr& call);

  // False: the user left the wait; the call has been stopped on all ranks, or was complete.
  bool wait_counts(const CallPtr& call);
  bool wait_event(const CallPtr& call, const Event& event);
  void stop(const CallPtr& call);
  // Behind a stop(): spends the next turn if the call did not take the interrupt; throws Interrupted.
  [[noreturn]] void throw_interrupted(const CallPtr& call);
  // Waits for a synchronous call and raises what it must.
  void complete(const CallPtr& call, const Event& event);
  void set_abort(layout::Cause cause);
  // Nothing of these is taken down while the process lives.
  void keep_for_ever(const Stream& also) noexcept;
  // Spends a turn on the abort word unless an operation in flight has taken it; null: it has.
  CallPtr spend_abort();

  struct Dispatching;
  void make_handle(Dispatching& d) const;
  kernels::DispatchParams dispatch_params(const Dispatching& d);
  void give_up_extent(const Dispatching& d);
  void take_memory(Dispatching& d) const;
  void choose_place(Dispatching& d) const;
  bool wants_window(const buffer::DispatchOptions& options) const;
  void learn_size(Dispatching& d);
  void split_extent(Dispatching& d) const;
  void place_by_policy(const Dispatching& d,
                       kernels::CopyOutParams& copies,
                       DispatchResult& out) const;
  void place_outputs(Dispatching& d, DispatchResult& out);
  void tell_counts(const Dispatching& d, DispatchResult& out) const;
  void end_without_room(const Dispatching& d);

  struct CombineMemory;
  void check_combine(const CombineArgs& args, CombineMemory& memory) const;
  void place_rows(const CombineArgs& args, Launch& launch, CombineMemory& memory);
  void make_result(const CombineArgs& args, CombineMemory& memory) const;
  kernels::CombineParams combine_params(const CombineArgs& args,
                                        const CombineMemory& memory,
                                        const CallPtr& call);

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<buffer::Core> core_;
  Stream comm_stream_;
  std::shared_ptr<const std::function<bool()>> interrupt_;  // the configuration's, for events
  const pid_t pid_ = getpid();
  std::atomic<uint32_t> num_sms_{1};
  std::atomic<double> timeout_s_{0};
  std::atomic<bool> closed_{false};
  std::unique_ptr<buffer::Turns> turns_;

  // Under a turn.
  Event last_event_;  // of the last operation: the next one starts behind it
  Stream last_stream_;
  uint64_t next_sequence_;           // of the next operation
  std::vector<CallPtr> unfinished_;  // calls whose faults nobody has raised yet
};

// For tests: buffers on a device of their own, or whose first call has a given number.
class BufferAccess {
 public:
  static EPBuffer create(std::shared_ptr<Communicator> group,
                         const BufferConfig& config,
                         const buffer::Environment& environment);
  static EPBuffer create(std::shared_ptr<Communicator> group,
                         const BufferConfig& config,
                         uint64_t first_sequence);
  static BufferImpl& impl(EPBuffer& buffer) { return *buffer.impl_; }
};

// What builds and changes handles.
class HandleAccess {
 public:
  static Handle make(const Handle::Header& header,
                     const std::array<Tensor, Handle::kNumTensors>& tensors) {
    Handle handle;
    handle.header_ = header;
    handle.tensors_ = tensors;
    return handle;
  }
  static Handle::Header& header(Handle& handle) { return handle.header_; }
};

template <typename Prepare>
void BufferImpl::prepare_or_refuse(layout::OpKind kind, Prepare prepare) {
  using layout::Cause;
  try {
    prepare();
  } catch (const buffer::TooManyTokens& error) {
    refuse(kind, Cause::kTooManyTokens, error.needed, error.available);
    throw;
  } catch (const buffer::NoHostMemory&) {
    refuse(kind, Cause::kNoHostMemory, 0, 0);
    throw;
  } catch (const buffer::NoExtent& error) {
    refuse(kind, Cause::kNoExtent, error.needed / layout::kArenaAlignBytes,
           error.available / layout::kArenaAlignBytes);
    throw;
  } catch (...) {
    refuse(kind, Cause::kArguments, 0, 0);
    throw;
  }
}

template <typename Params>
void BufferImpl::queue_kernel(const Launch& launch,
                              const kernels::KernelKey& kernel,
                              const Params& params) {
  detail::StreamImpl& stream = *launch.stream.impl();
  if (last_stream_.defined() && !(last_stream_ == launch.stream)) stream.wait(last_event_.impl());
  for (const auto& event : launch.waits)
    stream.wait(event);
  detail::StreamImpl::Launch queued;
  queued.kernel = kernel;
  queued.params = std::as_bytes(std::span(&params, 1));
  queued.num_blocks = launch.num_blocks;
  queued.doorbell = &core_->header(settings().rank).doorbell;
  queued.wait_policy = settings().config.wait_policy;
  stream.launch(queued);
}

}  // namespace ep::inline EP_ABI_NAMESPACE
