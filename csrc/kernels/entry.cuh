// Entry records: publishing one's own, waiting for everybody's.
#pragma once

#include "kernels/operation.cuh"

namespace ep::kernels {

// What a record holds beside the agreed fields.
struct OwnFields {
  uint32_t base, capacity;  // units of kArenaAlignBytes
  uint32_t num_tokens;
  uint32_t pitch, num_rows, rows_per_channel, row_weights_base, wants_read_done;
  const uint32_t* counts;  // [R + E], or null: a replay, a combine, a refusal
};

// This rank's value of agreed field `i`.
template <class Coop>
EP_HOST_DEVICE uint32_t agreed_word(Coop coop, const EntryParams& p, uint32_t i) {
  const bool of_routing = i == layout::kRoutingLow || i == layout::kRoutingHigh;
  if (!of_routing || p.routing_hash == nullptr) return p.agreed[i];
  return coop.read(p.routing_hash + (i - layout::kRoutingLow));
}

// Value of word `i` of this rank's record.
template <class Coop>
EP_HOST_DEVICE uint32_t
own_record_word(Coop coop, const EntryParams& p, const OwnFields& own, uint32_t i) {
  if (i < layout::kAgreedEnd) return agreed_word(coop, p, i);
  const uint64_t hash = p.state->routing_hash;
  switch (i) {
    case layout::kBase:
      return own.base;
    case layout::kCapacity:
      return own.capacity;
    case layout::kNumTokens:
      return own.num_tokens;
    case layout::kNumChannels:
      return coop.num_blocks();
    case layout::kHashLow:
      return static_cast<uint32_t>(hash);
    case layout::kHashHigh:
      return static_cast<uint32_t>(hash >> 32);
    case layout::kPitch:
      return own.pitch;
    case layout::kNumRows:
      return own.num_rows;
    case layout::kRowsPerChannel:
      return own.rows_per_channel;
    case layout::kRowWeightsBase:
      return own.row_weights_base;
    case layout::kWantsReadDone:
      return own.wants_read_done;
    case layout::kNeeded:
      return p.needed;
    case layout::kAvailable:
      return p.available;
    default:
      return own.counts == nullptr ? 0 : coop.read(own.counts + (i - layout::kFixedWords));
  }
}

// An operation that ended at entry may have left before it saw all records of it.  Its banks stay valid
// until this rank publishes again, so the wait is made up for here.
template <class Coop>
EP_OUTLINED bool drain_previous(Coop coop, Operation& op) {
  DeviceState& s = *op.state;
  if (s.drain == 0) return true;
  const uint64_t sequence = s.drain - 1;
  const uint32_t tag = layout::tag_of(sequence), bank = layout::bank_of(sequence);
  EP_NO_UNROLL
  for (uint32_t peer = 0; peer < s.num_ranks; ++peer) {
    const uint64_t* word = record_from(s, bank, peer) + layout::kStatus;
    if (!wait_for(coop, op, {word, tag, bank, peer, Phase::kDrain, false})) return false;
  }
  if (coop.thread_rank() == 0) s.drain = 0;
  coop.sync();
  return true;
}

// Writes this rank's record to every peer.  `status` != kNone refuses the operation for everybody.
template <class Coop>
EP_OUTLINED void publish_record(
    Coop coop, const Operation& op, const EntryParams& p, const OwnFields& own, Cause status) {
  const DeviceState& s = *op.state;
  const uint32_t num_words = own.counts == nullptr
                                 ? layout::kFixedWords
                                 : layout::record_words(s.num_ranks, s.num_experts);
  EP_NO_UNROLL
  for (uint32_t step = 0; step < s.num_ranks; ++step) {
    const uint32_t peer = (s.rank + step) % s.num_ranks;
    uint64_t* record = words_at(s, peer, s.window_layout.record(op.bank, s.rank));
    EP_NO_UNROLL
    for (uint32_t i = 1 + coop.thread_rank(); i < num_words; i += coop.size()) {
      coop.template store<Order::kRelaxed, Scope::kSystem>(
          record + i, layout::tagged(own_record_word(coop, p, own, i), op.tag));
    }
    coop.sync();
    if (coop.thread_rank() == 0) {
      coop.template store<Order::kRelease, Scope::kSystem>(
          record + layout::kStatus, layout::tagged(static_cast<uint32_t>(status), op.tag));
      if (status != Cause::kNone) {  // whoever waits for another rank shall look now
        coop.template fetch_add<Order::kRelease, Scope::kSystem>(&header_of(s, peer)->alarm,
                                                                 uint64_t{1});
      }
      coop.ring(&header_of(s, peer)->doorbell);
    }
  }
  coop.sync();
}

// Publishes; a status of this rank's own, or an abort that came before, ends the operation alike everywhere.
template <class Coop>
EP_HOST_DEVICE bool enter_records(
    Coop coop, Operation& op, const EntryParams& p, const OwnFields& own, Cause status) {
  if (!drain_previous(coop, op)) return false;
  if (status == Cause::kNone) {
    uint32_t abort = 0;
    if (coop.thread_rank() == 0) {
      abort = coop.template exchange<Order::kAcqRel, Scope::kSystem>(&op.state->abort, 0u);
    }
    status = static_cast<Cause>(coop.uniform(abort));
  }
  publish_record(coop, op, p, own, status);
  op.published = true;
  if (status == Cause::kNone) return true;
  set_fault(coop, op, status, Phase::kIdle, [&](FaultRecord& f) {
    f.needed = p.needed;
    f.available = p.available;
  });
  return false;
}

// Holds `peer`'s record, or the operation has ended.
template <class Coop>
EP_HOST_DEVICE bool await_record(Coop coop, Operation& op, const EntryParams& p, uint32_t peer) {
  const uint64_t* record = record_from(*op.state, op.bank, peer);
  if (!wait_for(coop, op, {record + layout::kStatus, op.tag, op.bank, peer, Phase::kRecords, true}))
    return false;
  const uint64_t status =
      coop.uniform(coop.template load<Order::kAcquire, Scope::kSystem>(record + layout::kStatus));
  if (layout::tag_in(status) != op.tag) {
    set_fault(coop, op, Cause::kPeerAhead, Phase::kRecords, [&](FaultRecord& f) { f.peer = peer; });
    return false;
  }
  if (layout::value_in(status) != 0) {
    refuse_from_record(coop, op, peer, Phase::kRecords);
    return false;
  }
  EP_NO_UNROLL
  for (uint32_t field = layout::kKind; field < layout::kAgreedEnd; ++field) {
    const uint32_t theirs = coop.uniform(record_value(coop, record, field));
    const uint32_t mine = agreed_word(coop, p, field);
    if (theirs == mine) continue;
    set_fault(coop, op, Cause::kMismatch, Phase::kRecords, [&](FaultRecord& f) {
      f.peer = peer;
      f.field = field;
      f.mine = mine;
      f.theirs = theirs;
    });
    return false;
  }
  return true;
}

template <class Coop>
EP_HOST_DEVICE bool await_records(Coop coop, Operation& op, const EntryParams& p) {
  EP_NO_UNROLL
  for (uint32_t peer = 0; peer < op.state->num_ranks; ++peer) {
    if (!await_record(coop, op, p, peer)) return false;
  }
  return true;
}

// Lets the other blocks go on, or waits until one worker of the launch has.
template <class Coop>
EP_HOST_DEVICE void announce_placed(Coop coop, const Operation& op) {
  coop.sync();
  if (coop.thread_rank() == 0) {
    coop.template store<Order::kRelease, Scope::kDevice>(&op.state->placed, uint64_t{op.tag});
    coop.ring(&header_of(*op.state, op.state->rank)->doorbell);
  }
}

template <class Coop>
EP_HOST_DEVICE bool await_placed(Coop coop, Operation& op) {
  return wait_for(coop, op,
                  {&op.state->placed, op.tag, op.bank, op.state->rank, Phase::kRecords, false});
}

}  // namespace ep::kernels
