// Fault records into exceptions: the error table of the interface.
#include <atomic>
#include <string>

#include "buffer/call.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::buffer {
namespace {

using kernels::FaultRecord;
using kernels::Phase;
using layout::Cause;
using layout::OpKind;

std::vector<uint32_t> ranks_in(const FaultRecord& fault, uint32_t num_ranks) {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < num_ranks; ++r) {
    if ((fault.mask[r / 32] >> (r % 32) & 1) != 0) ranks.push_back(r);
  }
  return ranks;
}

std::string list(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += str(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

template <typename T>
T acquire(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_acquire);
}

// How far a rank has come, from its own window.
std::string whereabouts(const Core& core, uint32_t rank, uint64_t sequence) {
  layout::WindowHeader& header = core.header(rank);
  if (acquire(header.closed) != 0) return str("rank ", rank, " has closed its buffer");
  if (acquire(header.entered) < sequence) {
    return str("rank ", rank, " has not entered call ", sequence, " (it completed call ",
               acquire(header.completed), ")");
  }
  const auto phase = static_cast<Phase>(acquire(header.phase));
  if (phase == Phase::kIdle)
    return str("rank ", rank, " entered call ", sequence, " and waits for nobody");
  return str("rank ", rank, " entered call ", sequence, ", stuck in phase ", phase_name(phase));
}

// A second abort may write while this reads: see write_reason().
std::string reason_of(const Core& core, uint32_t rank) {
  layout::WindowHeader& header = core.header(rank);
  std::string reason(std::min<size_t>(acquire(header.reason_bytes), layout::kMaxReasonBytes), ' ');
  for (size_t i = 0; i < reason.size(); ++i) {
    reason[i] = std::atomic_ref(header.reason[i]).load(std::memory_order_relaxed);
  }
  return reason;
}

[[noreturn]] void throw_timeout(const Core& core,
                                const std::string& call,
                                uint64_t sequence,
                                const FaultRecord& f) {
  const std::vector<uint32_t> missing = ranks_in(f, core.settings.num_ranks);
  if (f.from_peer != 0 && (f.mask[core.settings.rank / 32] >> (core.settings.rank % 32) & 1) != 0) {
    const std::string reason =
        str("rank ", f.peer, " gave up on call ", sequence, " while it waited for this rank");
    throw PeerError(str(call, ": ", reason, "; resync() is needed"), {f.peer}, reason);
  }
  std::string text = str(call, " timed out");
  if (f.from_peer != 0) text += str(" on rank ", f.peer);
  text += str(" in phase ", phase_name(f.phase));
  for (const uint32_t rank : missing)
    text += "; " + whereabouts(core, rank, sequence);
  throw Timeout(text + "; resync() is needed", missing, phase_name(f.phase));
}

std::string refusal(const Core& core, const FaultRecord& f) {
  switch (f.cause) {
    case Cause::kArguments:
      return "it refused its arguments";
    case Cause::kTooManyTokens:
      return str("it has ", f.needed, " tokens, more than the ", f.available, " declared");
    case Cause::kNoHostMemory:
      return "its allocator has no room";
    case Cause::kInterrupted:
      return "it was interrupted";
    case Cause::kAborted:
      return "it aborted: " + reason_of(core, f.peer);
    case Cause::kClosed:
      return "it closed its buffer";
    case Cause::kPeerAhead:
      return "it is in a later call: the ranks do not make the same calls";
    case Cause::kBadRow:
      return "its handle names rows outside the output";
    default:
      return "it ended the call";
  }
}

[[noreturn]] void throw_capacity(const std::string& call, const FaultRecord& f) {
  if (f.cause == Cause::kTooManyRows) {
    throw CapacityError(
        str(call, ": rank ", f.peer, " would receive ", f.needed, " rows, more than its ",
            f.available, ": raise max_rows, or overflow=drop"),
        f.peer, f.needed, f.available);
  }
  const uint64_t unit = f.cause == Cause::kNoExtent ? layout::kArenaAlignBytes : 1;
  throw CapacityError(
      str(call, ": rank ", f.peer, " needs ", f.needed * unit,
          " bytes in one piece of its arena, the largest free extent has ", f.available * unit,
          ": drop outputs, or raise arena_bytes by ", (f.needed - f.available) * unit),
      f.peer, f.needed * unit, f.available * unit);
}

[[noreturn]] void throw_bad_ids(const Core& core, const std::string& call, const FaultRecord& f) {
  throw InvalidArgument(
      str(call, ": topk_idx[", f.bad_slot >> 32, ", ", f.bad_slot & 0xFFFFFFFFu, "] = ", f.bad_id,
          " is neither -1 nor in [0, num_experts=", core.settings.config.num_experts, ")"));
}

}  // namespace

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kIdle:
      return "idle";
    case Phase::kDrain:
      return "waiting for the records of the call before";
    case Phase::kRecords:
      return "waiting for entry records";
    case Phase::kRows:
      return "waiting for rows";
    case Phase::kReady:
      return "waiting for an owner's rows";
    case Phase::kReadDone:
      return "waiting for readers";
  }
  return "unknown";
}

const char* field_name(uint32_t word) {
  if (word >= layout::kExtraDType && word < layout::kExtraBytes) return "dtype of an extra";
  if (word >= layout::kExtraBytes && word < layout::kRoutingLow) return "row bytes of an extra";
  switch (word) {
    case layout::kKind:
      return "kind of operation";
    case layout::kRowLayout:
      return "layout";
    case layout::kQuant:
      return "quant";
    case layout::kExact:
      return "exact";
    case layout::kOverflow:
      return "overflow";
    case layout::kMaxTokens:
      return "max_tokens";
    case layout::kMaxRowsField:
      return "max_rows";
    case layout::kAlignment:
      return "expert_alignment";
    case layout::kTopk:
      return "K";
    case layout::kReplay:
      return "handle (replay)";
    case layout::kXDType:
      return "dtype of x";
    case layout::kXBytes:
      return "row bytes of x";
    case layout::kScalesDType:
      return "dtype of scales";
    case layout::kScalesBytes:
      return "row bytes of scales";
    case layout::kIdxDType:
      return "dtype of topk_idx";
    case layout::kHasWeights:
      return "topk_weights";
    case layout::kHasRowWeights:
      return "row_weights";
    case layout::kNumExtras:
      return "number of extras";
    case layout::kRoutingLow:
    case layout::kRoutingHigh:
      return "routing of the handle";
    default:
      return "record";
  }
}

void throw_fault(const Core& core, OpKind kind, uint64_t sequence, const FaultRecord& f) {
  const std::string call = str(kind == OpKind::kCombine ? "combine" : "dispatch", " (call ",
                               sequence, ", rank ", core.settings.rank, ")");
  switch (f.cause) {
    case Cause::kBadIds:
      throw_bad_ids(core, call, f);
    case Cause::kTooManyRows:
    case Cause::kExtentTooSmall:
    case Cause::kNoExtent:
      throw_capacity(call, f);
    case Cause::kTimeout:
      throw_timeout(core, call, sequence, f);
    case Cause::kMismatch:
      throw Desync(str(call, ": ", field_name(f.field), " differs between ranks: ", f.mine,
                       " here, ", f.theirs, " on rank ", f.peer),
                   field_name(f.field), f.peer, f.mine, f.theirs);
    case Cause::kLost: {
      const std::vector<uint32_t> lost = ranks_in(f, core.settings.num_ranks);
      throw PeerLost(str(call, ": ", list(lost), lost.size() == 1 ? " is" : " are", " gone"), lost);
    }
    case Cause::kBroken:
      throw Error(
          str(call, " was not made: an earlier call failed on the way; resync() must come first"));
    case Cause::kArguments:
      if (f.from_peer == 0) throw_bad_ids(core, call, f);
      break;
    case Cause::kBadRow:
      if (f.from_peer == 0) {
        throw InvalidArgument(str(call, ": the handle's rows do not fit rank ", f.peer,
                                  "'s output (expected ", f.needed, ", got ", f.available,
                                  "): its tensors were changed"));
      }
      break;
    case Cause::kInterrupted:
      if (f.from_peer == 0) throw Interrupted(str(call, " was interrupted"));
      break;
    default:
      break;
  }
  const std::string reason = refusal(core, f);
  throw PeerError(str(call, ": ended by rank ", f.peer, ": ", reason), {f.peer}, reason);
}

}  // namespace ep::buffer
