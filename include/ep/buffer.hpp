// EPBuffer: memory that other ranks can reach, and the two operations on it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ep/communicator.hpp"
#include "ep/config.hpp"
#include "ep/handle.hpp"
#include "ep/stream.hpp"
#include "ep/tensor.hpp"

namespace ep {

enum class Quant : uint8_t {
  kNone,
  kFp8Block128,       // e4m3fn, fp32 scale per 128 columns
  kFp8Block128Pow2,   // the scale rounded up to a power of two
  kFp8Block128Ue8m0,  // as kFp8Block128Pow2, four exponent bytes per int32
  kMxFp8,             // reserved, as the two below: Unsupported
  kNvFp4,
  kInt8Row,
};

// Reserved: kLatency is Unsupported.
enum class Mode : uint8_t {
  kThroughput,  // exact counts, no staging
  kLatency,     // fixed slots, no count exchange
};
// How a quantised dispatch stores scales.  Reserved: all but kRow are Unsupported.
enum class ScaleLayout : uint8_t { kRow, kCol, kColUe8m0x4, kSwizzle128x4 };
enum class Overflow : uint8_t { kRaise, kDrop };
enum class Ids : uint8_t { kLocal, kGlobal };
enum class Operation : uint8_t { kDispatch, kCombine };

inline constexpr uint32_t kMaxExtras = 8;

struct DispatchArgs {
  Tensor x;               // [T,H] bf16, fp16, fp32; or opaque bytes; unit column stride, T may be 0
  Tensor topk_idx{};      // [T,K] int32 or int64; -1 = no expert.  Not given: `handle` is
  Tensor topk_weights{};  // [T,K] fp32, bf16 or fp16
  Tensor scales{};        // [T,S] of any 1-, 2- or 4-byte dtype, any strides; makes x opaque
  Quant quant = Quant::kNone;
  ScaleLayout scale_layout = ScaleLayout::kRow;
  Mode mode = Mode::kThroughput;
  bool split = false;  // reserved: the receiving half at a call of its own; Unsupported
  // Unset: the handle's value, else the default named here.  Another value than the handle's throws.
  std::optional<Layout> layout{};              // Layout::kRank
  std::optional<uint32_t> expert_alignment{};  // 1
  std::optional<bool> exact{};                 // true; false with max_rows
  std::optional<uint32_t> max_tokens{};        // max_tokens_per_rank of the buffer
  std::optional<uint32_t> max_rows{};          // none
  std::optional<Overflow> overflow{};          // Overflow::kRaise
  std::vector<Tensor> extras{};                // at most kMaxExtras, [T,...], rows contiguous
  std::optional<Ids> ids{};                    // Ids::kLocal
  std::optional<Outputs> outputs{};            // the buffer's policy; a rank's own choice per call
  const Handle* handle = nullptr;              // replay
  std::vector<Event> wait_for{};
  Stream stream{};  // undefined: the buffer's own
  bool async_op = false;
  uint32_t num_sms = 0;  // 0: the buffer's
};

struct DispatchResult {
  Tensor x;                      // [N,H]
  Tensor scales{};               // [N,S']; undefined without scales
  std::vector<Tensor> extras{};  // [N,...]
  Tensor topk_idx,
      topk_weights;  // "rank": [N,K]; "expert": [N].  weights undefined when none were given
  std::optional<uint64_t> num_rows{};                        // exact only
  Tensor num_rows_device, rows_needed_device;                // [1] int32
  std::optional<std::vector<uint32_t>> tokens_per_expert{};  // [L], exact only
  Tensor tokens_per_expert_device;                           // [L] int32
  Tensor expert_offsets;                                     // [L+1] int32, aligned
  Tensor rank_offsets;                                       // [R+1] int32; undefined for "expert"
  Tensor source;  // [N,2] int32: source rank, source token
  Tensor status;  // [1] int32, 0 = good
  Handle handle;
  Event event, inputs_done;

  // Another stream reads these tensors: their memory is handed out again only after its work so far at
  // the time the last of them is dropped.
  void record_stream(const Stream& stream) const;

  std::array<std::weak_ptr<void>, 2>
      window_blocks{};  // what record_stream() marks; none for the caller's memory
};

struct CombineArgs {
  Tensor x;  // [N,H'] bf16, fp16, fp32: rows as dispatch laid them out
  const Handle* handle = nullptr;
  Tensor weights{};            // [T,K] of the source's tokens; layout "expert" only
  Tensor row_weights{};        // fp32 [N,K] ("rank") or [N] ("expert"): travel home unmultiplied
  std::vector<Tensor> bias{};  // up to two [T,H'], bf16, fp16 or fp32
  Tensor out{};                // [T,H'] to write into; undefined: the allocator's
  Quant quant = Quant::kNone;  // reserved: what travels is quantised; Unsupported
  bool split = false;          // reserved: Unsupported
  Tensor ready{};              // reserved: flags of a producing GEMM; Unsupported
  std::optional<DType> out_dtype{};  // x's
  std::vector<Event> wait_for{};
  Stream stream{};
  bool async_op = false;
  uint32_t num_sms = 0;
};

struct CombineResult {
  Tensor x;             // [T,H']
  Tensor topk_weights;  // [T,K] fp32; undefined without row_weights
  Tensor status;        // [1] int32
  Event event;
};

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

  DispatchResult dispatch(const DispatchArgs& args);
  CombineResult combine(const CombineArgs& args);

  // Window-backed [N, hidden] to compute an expert's output into: combine then copies nothing.
  // Consumed by combine.  hidden 0: the buffer's.  The caller may write at once, so this waits for the
  // calls before it to end.  Throws CapacityError when no free extent holds it.
  Tensor expert_output(const Handle& handle, uint32_t hidden = 0, DType dtype = DType::kBFloat16);

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

}  // namespace ep
