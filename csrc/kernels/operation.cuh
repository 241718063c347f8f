// The life of one operation on one rank: entry, waits, the first fault, the end.
//
//   every block   enter -> ... waits ... -> arrive(kEnd)
//   last block                              leave (leave.cuh): poison or progress, next number, ticket
//
// Faults.  State: fault_claimed, fault, fault_set in DeviceState.  The first worker to claim writes the
// record and sets fault_set (release); every wait of this operation looks at fault_set and stops.  The last
// block reads the record behind the grid arrival (acquire).
#pragma once

#include "kernels/coop.hpp"
#include "kernels/params.hpp"

namespace ep::kernels {

using layout::Cause;

// What a wait is for: a word of this rank's memory that holds a tag.
struct Wait {
  const uint64_t* word;
  uint32_t tag, bank;  // of the operation that the word belongs to
  uint32_t peer;       // whose word it is
  Phase phase;
  bool or_newer;  // the tag of a later operation will do
};

// One worker's view of the operation; the same in all its threads.
struct Operation {
  DeviceState* state;
  Ticket* ticket;
  uint64_t sequence;
  uint32_t tag, bank;
  uint64_t deadline_ns;
  uint64_t alarm;  // value of the window's alarm at the last scan
  layout::OpKind kind;
  bool leaving;  // it has its fault already: only its time and lost ranks still count
  // This worker has written the rank's record: it may end the operation on a peer's refusal.
  bool published;
  Wait wait;  // the one that is going on; here, so that it takes no registers
};

EP_HOST_DEVICE std::byte* window_of(const DeviceState& s, uint32_t rank) {
  return s.windows[rank];
}

EP_HOST_DEVICE layout::WindowHeader* header_of(const DeviceState& s, uint32_t rank) {
  return reinterpret_cast<layout::WindowHeader*>(window_of(s, rank));
}

EP_HOST_DEVICE uint64_t* words_at(const DeviceState& s, uint32_t rank, uint64_t offset) {
  return reinterpret_cast<uint64_t*>(window_of(s, rank) + offset);
}

// The record that `source` wrote to this rank.
EP_HOST_DEVICE const uint64_t* record_from(const DeviceState& s, uint32_t bank, uint32_t source) {
  return words_at(s, s.rank, s.window_layout.record(bank, source));
}

template <class Coop>
EP_HOST_DEVICE uint32_t record_value(Coop coop, const uint64_t* record, uint32_t word) {
  return layout::value_in(coop.template load<Order::kRelaxed, Scope::kSystem>(record + word));
}

// How many channels `source` announces its rows on, by its record.
template <class Coop>
EP_HOST_DEVICE uint32_t
channels_of(Coop coop, const DeviceState& s, uint32_t bank, uint32_t source) {
  return min_of(record_value(coop, record_from(s, bank, source), layout::kNumChannels),
                layout::kMaxChannels);
}

// The record to fill in; null for all threads but one, and where something has ended the operation already.
template <class Coop>
EP_OUTLINED FaultRecord* claim_fault(Coop coop, const Operation& op, Cause cause, Phase phase) {
  DeviceState& s = *op.state;
  if (coop.thread_rank() != 0) return nullptr;
  if (coop.template exchange<Order::kRelaxed, Scope::kDevice>(&s.fault_claimed, 1u) != 0)
    return nullptr;
  s.fault = FaultRecord{};
  s.fault.cause = cause;
  s.fault.phase = phase;
  s.fault.peer = s.rank;
  s.fault.needs_resync = s.fault.poisons = layout::needs_resync(cause) ? 1 : 0;
  s.fault.bad_slot = s.bad_slot;
  s.fault.bad_id = s.bad_id;
  return &s.fault;
}

// `record` is filled in.
template <class Coop>
EP_OUTLINED void announce_fault(Coop coop, const Operation& op, FaultRecord* record) {
  if (record != nullptr) {
    coop.template store<Order::kRelease, Scope::kDevice>(&op.state->fault_set, 1u);
    coop.ring(&header_of(*op.state, op.state->rank)->doorbell);
  }
  coop.sync();
}

// Ends the operation here unless something already has.  One thread fills in the record.
template <class Coop, class Fill>
EP_HOST_DEVICE void set_fault(Coop coop, const Operation& op, Cause cause, Phase phase, Fill fill) {
  FaultRecord* record = claim_fault(coop, op, cause, phase);
  if (record != nullptr) fill(*record);
  announce_fault(coop, op, record);
}

template <class Coop>
EP_HOST_DEVICE bool faulted(Coop coop, const Operation& op) {
  return coop.uniform(coop.template load<Order::kAcquire, Scope::kDevice>(&op.state->fault_set)) !=
         0;
}

// `source` refused the operation: its record says why.
template <class Coop>
EP_OUTLINED void refuse_from_record(Coop coop, const Operation& op, uint32_t source, Phase phase) {
  const uint64_t* record = record_from(*op.state, op.bank, source);
  set_fault(coop, op, static_cast<Cause>(record_value(coop, record, layout::kStatus)), phase,
            [&](FaultRecord& f) {
              f.peer = source;
              f.from_peer = source != op.state->rank ? 1 : 0;
              f.needed = record_value(coop, record, layout::kNeeded);
              const bool relayed = f.cause == Cause::kAborted || f.cause == Cause::kInterrupted;
              if (relayed && f.needed != 0) f.peer = static_cast<uint32_t>(f.needed - 1);
              f.available = record_value(coop, record, layout::kAvailable);
            });
}

// Looks for poison of operation `sequence`, and, once this rank's own record is out, for records of it that
// refuse.  (Before: a rank that left without its record would let its peers wait for it.)
template <class Coop>
EP_HOST_DEVICE bool scan_alarm(Coop coop, const Operation& op, uint64_t sequence, Phase phase) {
  const DeviceState& s = *op.state;
  const uint32_t tag = layout::tag_of(sequence), bank = layout::bank_of(sequence);
  EP_NO_UNROLL
  for (uint32_t source = 0; source < s.num_ranks; ++source) {
    const uint64_t* poison = words_at(s, s.rank, s.window_layout.poison(bank, source));
    const uint64_t word = coop.uniform(
        coop.template load<Order::kAcquire, Scope::kSystem>(poison + layout::kPoisonCause));
    if (layout::tag_in(word) == tag) {
      const uint32_t where = record_value(coop, poison, layout::kPoisonPhase);
      const Phase their_phase = static_cast<Phase>(where & ~layout::kPoisonNeedsResync);
      set_fault(coop, op, static_cast<Cause>(layout::value_in(word)), their_phase,
                [&](FaultRecord& f) {
                  f.peer = source;
                  f.from_peer = f.poisons = 1;
                  f.needs_resync = (where & layout::kPoisonNeedsResync) != 0 ? 1 : 0;
                  EP_NO_UNROLL
                  for (uint32_t i = 0; i < layout::mask_words(s.num_ranks); ++i) {
                    f.mask[i] = record_value(coop, poison, layout::kPoisonMask + i);
                  }
                });
      return true;
    }
    const uint64_t* record = record_from(s, bank, source);
    const uint64_t status =
        coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(record + layout::kStatus));
    if (op.published && layout::tag_in(status) == tag && layout::value_in(status) != 0) {
      refuse_from_record(coop, op, source, phase);
      return true;
    }
  }
  return false;
}

template <class Coop>
EP_HOST_DEVICE bool is_ready(Coop coop, const Wait& wait) {
  const uint32_t tag =
      layout::tag_in(coop.template load<Order::kAcquire, Scope::kSystem>(wait.word));
  return tag == wait.tag || (wait.or_newer && tag != 0 && static_cast<int32_t>(tag - wait.tag) > 0);
}

// On expiry: is `peer` one of those who did not come?
template <class Coop>
EP_HOST_DEVICE bool is_missing(Coop coop, const DeviceState& s, const Wait& wait, uint32_t peer) {
  const auto lacks_tag = [&](const uint64_t* word) {
    return layout::tag_in(coop.template load<Order::kAcquire, Scope::kSystem>(word)) != wait.tag;
  };
  switch (wait.phase) {
    case Phase::kIdle:
      break;
    case Phase::kDrain:
    case Phase::kRecords:
      return lacks_tag(record_from(s, wait.bank, peer) + layout::kStatus);
    case Phase::kRows:
      EP_NO_UNROLL
      for (uint32_t c = 0; c < channels_of(coop, s, wait.bank, peer); ++c) {
        if (lacks_tag(words_at(s, s.rank, s.window_layout.channel(peer, c)))) return true;
      }
      break;
    case Phase::kReady:
      return peer == wait.peer;
    case Phase::kReadDone:
      return lacks_tag(words_at(s, s.rank, s.window_layout.read_done(peer)));
  }
  return false;
}

// Has anything ended this operation, or is its time up?
template <class Coop>
EP_HOST_DEVICE bool must_stop(Coop coop, Operation& op) {
  DeviceState& s = *op.state;
  const Phase phase = op.wait.phase;
  if (faulted(coop, op)) return true;
  const uint64_t alarm = coop.uniform(
      coop.template load<Order::kAcquire, Scope::kSystem>(&header_of(s, s.rank)->alarm));
  if (alarm != op.alarm && !op.leaving) {
    op.alarm = alarm;
    if (scan_alarm(coop, op, op.sequence, phase)) return true;
  }
  if (coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(&s.abort)) != 0) {
    uint32_t cause = 0;
    if (coop.thread_rank() == 0) {
      cause = coop.template exchange<Order::kAcqRel, Scope::kSystem>(&s.abort, 0u);
    }
    cause = coop.uniform(cause);
    if (cause != 0) {  // else another worker took it, and its fault is on the way
      // No rank completes a dispatch without this rank's rows, and those wait for the records: all ranks
      // see the abort in this call.  Elsewhere some may have completed it.
      const bool alike = op.kind == layout::OpKind::kDispatch && phase == Phase::kRecords;
      set_fault(coop, op, static_cast<Cause>(cause), phase, [&](FaultRecord& f) {
        f.poisons = 1;
        f.needs_resync = alike ? 0 : 1;
      });
      return true;
    }
  }
  if (coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(&s.lost)) != 0) {
    set_fault(coop, op, Cause::kLost, phase, [&](FaultRecord& f) {
      EP_NO_UNROLL
      for (uint32_t i = 0; i < layout::mask_words(s.num_ranks); ++i) {
        f.mask[i] = coop.template load<Order::kRelaxed, Scope::kSystem>(&s.lost_mask[i]);
      }
    });
    return true;
  }
  if (coop.uniform(coop.now_ns()) < op.deadline_ns) return false;
  set_fault(coop, op, Cause::kTimeout, phase, [&](FaultRecord& f) {
    EP_NO_UNROLL
    for (uint32_t peer = 0; peer < s.num_ranks; ++peer) {
      if (is_missing(coop, s, op.wait, peer)) f.mask[peer / 32] |= 1u << (peer % 32);
    }
  });
  return true;
}

// The rest of wait_for, where the first look did not find it ready.
template <class Coop>
EP_OUTLINED bool wait_longer(Coop coop, Operation& op) {
  DeviceState& s = *op.state;
  if (coop.thread_rank() == 0) {
    coop.template store<Order::kRelaxed, Scope::kSystem>(&header_of(s, s.rank)->phase,
                                                         static_cast<uint32_t>(op.wait.phase));
  }
  auto backoff = coop.make_backoff();
  while (!coop.uniform(is_ready(coop, op.wait))) {
    if (must_stop(coop, op)) return false;
    coop.back_off(backoff);
  }
  return true;
}

// Waits until the word holds its tag.  False: the operation has ended.
template <class Coop>
EP_HOST_DEVICE bool wait_for(Coop coop, Operation& op, const Wait& wait) {
  if (coop.uniform(is_ready(coop, wait))) return true;
  op.wait = wait;
  return wait_longer(coop, op);
}

// True in the worker-uniform sense for every worker of the last block to arrive at `grid_phase`.
enum GridPhase : uint32_t { kCounted = 0, kEnd = 1 };
template <class Coop>
EP_OUTLINED bool arrive(Coop coop, const Operation& op, GridPhase grid_phase) {
  coop.block_sync();
  uint32_t before = 0;
  if (coop.worker() == 0 && coop.thread_rank() == 0) {
    before =
        coop.template fetch_add<Order::kAcqRel, Scope::kDevice>(&op.state->arrived[grid_phase], 1u);
  }
  return coop.block_broadcast(before) == coop.num_blocks() - 1;
}

// False: an earlier operation failed on the way; nothing may be sent until resync().
template <class Coop>
EP_OUTLINED bool enter(Coop coop, Operation& op, const EntryParams& p) {
  DeviceState& s = *p.state;
  op.state = &s;
  op.ticket = p.ticket;
  op.sequence = s.sequence;
  op.tag = layout::tag_of(op.sequence);
  op.bank = layout::bank_of(op.sequence);
  op.alarm = 0;
  op.kind = static_cast<layout::OpKind>(p.agreed[layout::kKind]);
  op.published = op.leaving = false;
  if (s.broken != Cause::kNone) {
    set_fault(coop, op, Cause::kBroken, Phase::kIdle, [](FaultRecord&) {});
    return false;
  }
  uint64_t deadline = 0;
  if (coop.thread_rank() == 0) {
    const uint64_t timeout = coop.template load<Order::kRelaxed, Scope::kSystem>(&s.timeout_ns);
    const uint64_t mine = coop.now_ns() + timeout;
    deadline = coop.template compare_exchange<Order::kRelaxed, Scope::kDevice>(&s.deadline_ns,
                                                                               uint64_t{0}, mine);
    if (deadline == 0) deadline = mine;
    layout::WindowHeader* header = header_of(s, s.rank);
    coop.template store<Order::kRelease, Scope::kSystem>(&header->entered, op.sequence);
  }
  op.deadline_ns = coop.uniform(deadline);
  op.alarm = coop.uniform(
      coop.template load<Order::kAcquire, Scope::kSystem>(&header_of(s, s.rank)->alarm));
  if (op.alarm == 0) return true;
  // Poison of the operation before may have come after this rank had completed it.
  const uint64_t completed = coop.uniform(
      coop.template load<Order::kRelaxed, Scope::kSystem>(&header_of(s, s.rank)->completed));
  const bool late = completed + 1 == op.sequence && op.sequence > s.first_sequence;
  EP_NO_UNROLL
  for (uint64_t sequence = op.sequence - (late ? 1 : 0); sequence <= op.sequence; ++sequence) {
    if (scan_alarm(coop, op, sequence, Phase::kIdle)) return false;
  }
  return true;
}

// Tells every peer that this rank ends the operation on the way.
template <class Coop>
EP_OUTLINED void write_poison(Coop coop, const Operation& op, const FaultRecord& fault) {
  const DeviceState& s = *op.state;
  const uint32_t phase = static_cast<uint32_t>(fault.phase) |
                         (fault.needs_resync != 0 ? layout::kPoisonNeedsResync : 0u);
  EP_NO_UNROLL
  for (uint32_t peer = coop.thread_rank(); peer < s.num_ranks; peer += coop.size()) {
    if (peer == s.rank) continue;
    uint64_t* poison = words_at(s, peer, s.window_layout.poison(op.bank, s.rank));
    EP_NO_UNROLL
    for (uint32_t i = 0; i < layout::mask_words(s.num_ranks); ++i) {
      coop.template store<Order::kRelaxed, Scope::kSystem>(poison + layout::kPoisonMask + i,
                                                           layout::tagged(fault.mask[i], op.tag));
    }
    coop.template store<Order::kRelaxed, Scope::kSystem>(poison + layout::kPoisonPhase,
                                                         layout::tagged(phase, op.tag));
    coop.template store<Order::kRelease, Scope::kSystem>(
        poison + layout::kPoisonCause, layout::tagged(static_cast<uint32_t>(fault.cause), op.tag));
    coop.template fetch_add<Order::kRelease, Scope::kSystem>(&header_of(s, peer)->alarm,
                                                             uint64_t{1});
    coop.ring(&header_of(s, peer)->doorbell);
  }
  coop.sync();
}

}  // namespace ep::kernels
