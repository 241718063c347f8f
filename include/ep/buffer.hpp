// EPBuffer: memory that other ranks can reach, and the two operations on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ep/combine.hpp"
#include "ep/communicator.hpp"
#include "ep/config.hpp"
#include "ep/dispatch.hpp"
#include "ep/handle.hpp"
#include "ep/status.hpp"
#include "ep/stream.hpp"
#include "ep/tensor.hpp"

namespace ep::inline EP_ABI_NAMESPACE {

enum class Operation : uint8_t { kDispatch, kCombine };

struct RoutingLayout {
  Tensor tokens_per_rank;    // [R] int32, a token counts once per rank
  Tensor tokens_per_expert;  // [E] int32
  Tensor is_token_in_rank;   // [T,R] bool
  Tensor tokens_per_node;    // [nodes] int32
};

struct MemoryUse {
  uint64_t used = 0, peak = 0, largest_free = 0;  // bytes of the arena
};

struct Stats {
  uint64_t dispatches = 0, combines = 0;            // that completed here
  uint64_t window_outputs = 0, caller_outputs = 0;  // what the outputs policy chose
  uint64_t faults = 0;
};

// Thread safety: any thread may call; calls are taken in lock order.  Every rank must make the same
// calls in the same order, also with T = 0.
class EPBuffer {
 public:
  // Collective.  Throws InvalidArgument on every rank, naming the argument and both values, when ranks
  // differ in what must agree.
  EPBuffer(std::shared_ptr<Communicator> group, const BufferConfig& config);
  ~EPBuffer();
  EPBuffer(EPBuffer&&) noexcept;
  EPBuffer& operator=(EPBuffer&&) noexcept;
  EPBuffer(const EPBuffer&) = delete;
  EPBuffer& operator=(const EPBuffer&) = delete;

  // Throw the errors of error.hpp; what a fault of this rank's own makes the others throw is PeerError.
  DispatchResult dispatch(const DispatchArgs& args);
  CombineResult combine(const CombineArgs& args);
  // The same into a result that exists: its vectors are used again, so that steady calls allocate nothing.
  // Its old tensors are dropped behind the new ones' making.  It is left as it is when the call throws.
  void dispatch(const DispatchArgs& args, DispatchResult& result);
  void combine(const CombineArgs& args, CombineResult& result);

  // Shapes, strides and dtypes of what dispatch(args) would give, without data: arithmetic only, nothing is
  // sent, `data` of the arguments may be null.  N of an exact dispatch that is no replay is its bound.
  // Throws InvalidArgument and CapacityError as dispatch would.
  DispatchTensors output_spec(const DispatchArgs& args) const;

  // Collective: prepares all that such calls need.  CPUs have nothing to compile or connect; the arguments'
  // reserved values throw Unsupported.
  void warm(const DispatchArgs& args);
  void warm(const CombineArgs& args);

  // Window-backed [N, hidden] to compute an expert's output into: combine then copies nothing.
  // Consumed by combine.  hidden 0: the buffer's.  The caller may write at once, so this waits for the
  // calls before it to end.  Throws CapacityError when no free extent holds it.
  Tensor expert_output(const Handle& handle, uint32_t hidden = 0, DType dtype = DType::kBFloat16);

  // Twins that never throw.  `result` is left as it is where the status is not ok().
  static Status try_create(std::shared_ptr<Communicator> group,
                           const BufferConfig& config,
                           std::optional<EPBuffer>& result) noexcept;
  Status try_dispatch(const DispatchArgs& args, DispatchResult& result) noexcept;
  Status try_combine(const CombineArgs& args, CombineResult& result) noexcept;
  Status try_expert_output(const Handle& handle,
                           uint32_t hidden,
                           DType dtype,
                           Tensor& result) noexcept;
  Status try_check() noexcept;
  Status try_resync(uint64_t& result) noexcept;

  // Local: counts of one rank's routing.
  RoutingLayout routing_layout(const Tensor& topk_idx) const;

  uint32_t rank() const;
  uint32_t num_ranks() const;
  uint32_t num_nodes() const;
  uint32_t num_sms() const;
  void set_num_sms(uint32_t num_sms);
  double timeout_s() const;
  void set_timeout_s(double seconds);
  const std::vector<uint32_t>& expert_offsets() const;  // [R+1]
  Stream comm_stream() const;

  // What a buffer of this configuration registers on each of `num_ranks` ranks; arithmetic only.
  static Memory bytes_needed(const BufferConfig& config, uint32_t num_ranks);
  // Rows of a fixed-size (exact = false) output on this rank.
  uint64_t max_rows(Layout layout,
                    std::optional<uint32_t> max_tokens = {},
                    uint32_t expert_alignment = 1) const;
  MemoryUse memory() const;
  Stats stats() const;

  void check();  // raises a deferred fault, without waiting
  void abort(
      std::string_view reason);  // not collective: peers' current or next call raises PeerError
  uint64_t resync();             // collective: required after Timeout or PeerLost
  // For bindings whose caller's arguments could not even be read: spends this rank's turn in the call that
  // the others are making; they raise PeerError.  Without effect on a closed or broken buffer.
  void refuse(Operation operation) noexcept;
  void close() noexcept;  // idempotent
  // For a process that is about to exit: no wait, nothing is unmapped or joined; the buffer is unusable
  // afterwards.  Peers see the process leave (PeerLost), unless their calls need nothing more of it.
  void abandon() noexcept;

 private:
  friend class BufferAccess;  // tests
  explicit EPBuffer(std::shared_ptr<class BufferImpl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<class BufferImpl> impl_;
};

}  // namespace ep::inline EP_ABI_NAMESPACE
