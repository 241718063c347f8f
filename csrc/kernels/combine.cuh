// Combine: every token's rows back, added up.
//
//   every worker | copy rows into the extent -> ready word | wait for records | pull and add | end
//   last block   |                                                                          | read-done words
//
// The source pulls: after the owner's record (rows in place) or ready word (rows copied), it reads the rows of
// its tokens where they are.  No staging, no second pass.
//
// Ready words.  State: ready[bank][owner][block], {rows | tag}, in the source's window.  Writers: the owner's
// block, with release, after its copies.  Readers: the source, with acquire.  Two banks: the owner does not
// hold the source's record yet.
// Read-done words.  State: read_done[reader] in the owner's window.  Writers: the reader's last block, with
// release, after its reads; only where the owner's record asks.  Readers: the owner, before it completes.
#pragma once

#include "kernels/dispatch_send.cuh"
#include "kernels/leaves/reduce.cuh"

namespace ep::kernels {

EP_HOST_DEVICE uint32_t rows_per_channel(const CombineParams& p,
                                         uint32_t num_rows,
                                         uint32_t num_blocks) {
  if (!p.copy && !p.has_row_weights) return 0;
  return max_of(1u, static_cast<uint32_t>(ceil_div(num_rows, num_blocks)));
}

// This block's share of the owner's rows into its extent.
template <class Coop>
EP_OUTLINED void copy_share(Coop coop, const Operation& op, const CombineParams& p) {
  const DeviceState& s = *p.entry.state;
  const uint32_t num_rows = coop.read(p.plan + layout::PlanLayout::kNumRows);
  const uint32_t share = rows_per_channel(p, num_rows, coop.num_blocks());
  if (share == 0) return;
  std::byte* window = window_of(s, s.rank);
  const uint64_t begin = min_of<uint64_t>(uint64_t{coop.block()} * share, num_rows);
  const uint64_t end = min_of<uint64_t>(begin + share, num_rows);
  for (uint64_t row = begin + coop.worker(); row < end; row += coop.num_workers()) {
    if (p.copy) {
      copy_row(coop, window + p.rows_offset + row * p.rows_pitch,
               p.x.data + static_cast<int64_t>(row) * p.x.row_stride, p.x.row_bytes);
    }
    if (!p.has_row_weights) continue;
    float* out =
        reinterpret_cast<float*>(window + p.row_weights_offset) + row * p.row_weights.num_columns;
    for (uint32_t c = coop.thread_rank(); c < p.row_weights.num_columns; c += coop.size()) {
      coop.write(out + c, load_float(p.row_weights, Element::kFP32, row, c));
    }
  }
  stream_fence(coop);
  coop.block_sync();
  if (coop.worker() != 0) return;
  for (uint32_t peer = coop.thread_rank(); peer < s.num_ranks; peer += coop.size()) {
    uint64_t* word = words_at(s, peer, s.window_layout.ready(op.bank, s.rank, coop.block()));
    coop.template store<Order::kRelease, Scope::kSystem>(
        word, layout::tagged(static_cast<uint32_t>(end - begin), op.tag));
    coop.ring(&header_of(s, peer)->doorbell);
  }
  coop.sync();
}

// Block 0's first worker: publishes before it copies, so that nobody waits for the copy to learn of a refusal.
template <class Coop>
EP_HOST_DEVICE bool publish_combine(Coop coop, Operation& op, const CombineParams& p) {
  OwnFields own{};
  own.base = static_cast<uint32_t>(p.rows_offset / layout::kArenaAlignBytes);
  own.num_tokens = p.num_tokens;
  own.pitch = static_cast<uint32_t>(p.rows_pitch);
  own.num_rows = coop.read(p.plan + layout::PlanLayout::kNumRows);
  own.rows_per_channel = rows_per_channel(p, own.num_rows, coop.num_blocks());
  own.row_weights_base = static_cast<uint32_t>(p.row_weights_offset / layout::kArenaAlignBytes);
  own.wants_read_done = p.wants_read_done ? 1 : 0;
  return enter_records(coop, op, p.entry, own, Cause::kNone);
}

template <class Coop>
EP_HOST_DEVICE bool lead_combine(Coop coop, Operation& op, const CombineParams& p) {
  const DeviceState& s = *p.entry.state;
  if (!await_records(coop, op, p.entry)) return false;
  for (uint32_t rank = coop.thread_rank(); rank < s.num_ranks; rank += coop.size()) {
    const uint64_t* record = record_from(s, op.bank, rank);
    const auto address = [&](uint32_t word) {
      return window_of(s, rank) +
             uint64_t{record_value(coop, record, word)} * layout::kArenaAlignBytes;
    };
    Owner& owner = s.scratch.owners[rank];
    owner.rows = address(layout::kBase);
    owner.pitch = record_value(coop, record, layout::kPitch);
    owner.row_weights = address(layout::kRowWeightsBase);
    owner.num_rows = record_value(coop, record, layout::kNumRows);
    owner.rows_per_channel = record_value(coop, record, layout::kRowsPerChannel);
  }
  announce_placed(coop, op);
  return true;
}

// The owner's row is there, or the operation has ended.
template <class Coop>
EP_HOST_DEVICE bool await_row(Coop coop, Operation& op, uint32_t rank, uint32_t row) {
  const DeviceState& s = *op.state;
  const uint32_t share = s.scratch.owners[rank].rows_per_channel;
  if (share == 0) return true;
  const uint64_t* word =
      words_at(s, s.rank,
               s.window_layout.ready(op.bank, rank, min_of(row / share, layout::kMaxChannels - 1)));
  return wait_for(coop, op, {word, op.tag, op.bank, rank, Phase::kReady, false});
}

template <CombineConfig kConfig, class Coop>
EP_HOST_DEVICE bool combine_token(Coop coop,
                                  Operation& op,
                                  const CombineParams& p,
                                  uint32_t token) {
  const DeviceState& s = *p.entry.state;
  constexpr bool kByExpert = kConfig.layout == LayoutKind::kExpert;
  Terms& terms = *reinterpret_cast<Terms*>(s.scratch.worker_bytes +
                                           worker_index(coop) * s.scratch.worker_pitch);
  uint32_t num_terms = 0;
  EP_NO_UNROLL
  for (uint32_t k = 0; k < p.num_topk; ++k) {
    const layout::Route route = p.routes[uint64_t{token} * p.num_topk + k];
    const uint32_t rank = route.rank_and_flags & ~layout::kFirstSlot;
    float* out_weight =
        p.has_row_weights ? p.out_weights + uint64_t{token} * p.num_topk + k : nullptr;
    if (route.row == layout::kNoRow) {
      if (out_weight != nullptr && coop.thread_rank() == 0) *out_weight = 0.0f;
      continue;
    }
    if (rank >= s.num_ranks || route.row >= s.scratch.owners[rank].num_rows) {
      set_fault(coop, op, Cause::kBadRow, Phase::kReady, [&](FaultRecord& f) { f.peer = rank; });
      return false;
    }
    if (!await_row(coop, op, rank, route.row)) return false;
    const Owner& owner = s.scratch.owners[rank];
    if (out_weight != nullptr && coop.thread_rank() == 0) {
      const uint64_t column = kByExpert ? route.row : uint64_t{route.row} * p.num_topk + k;
      *out_weight = coop.read(reinterpret_cast<const float*>(owner.row_weights) + column);
    }
    if (!kByExpert && (route.rank_and_flags & layout::kFirstSlot) == 0) continue;
    if (coop.thread_rank() == 0) {
      terms.rows[num_terms] = owner.rows + route.row * owner.pitch;
      if (p.weights.data != nullptr)
        terms.weights[num_terms] = load_float(p.weights, p.weights_element, token, k);
    }
    ++num_terms;
  }
  if (coop.thread_rank() == 0) terms.num_terms = num_terms;
  coop.sync();
  reduce_row<kConfig.in, kConfig.out>(coop, p, terms, token);
  coop.sync();
  return true;
}

template <CombineConfig kConfig, class Coop>
EP_HOST_DEVICE void pull_rows(Coop coop, Operation& op, const CombineParams& p) {
  const uint32_t worker = worker_index(coop), workers = total_workers(coop);
  const uint32_t end = first_token(p.num_tokens, worker + 1, workers);
  for (uint32_t token = first_token(p.num_tokens, worker, workers); token < end; ++token) {
    if (!combine_token<kConfig>(coop, op, p, token)) return;
  }
  stream_fence(coop);
}

// The last block: tells owners that wait for it that their rows have been read, and waits in its turn.
template <class Coop>
EP_HOST_DEVICE void exchange_read_done(Coop coop, Operation& op, const CombineParams& p) {
  const DeviceState& s = *p.entry.state;
  for (uint32_t owner = coop.thread_rank(); owner < s.num_ranks; owner += coop.size()) {
    if (record_value(coop, record_from(s, op.bank, owner), layout::kWantsReadDone) == 0) continue;
    uint64_t* word = words_at(s, owner, s.window_layout.read_done(s.rank));
    coop.template store<Order::kRelease, Scope::kSystem>(word, layout::tagged(0, op.tag));
    coop.ring(&header_of(s, owner)->doorbell);
  }
  coop.sync();
  if (!p.wants_read_done) return;
  EP_NO_UNROLL
  for (uint32_t reader = 0; reader < s.num_ranks; ++reader) {
    const uint64_t* word = words_at(s, s.rank, s.window_layout.read_done(reader));
    if (!wait_for(coop, op, {word, op.tag, op.bank, reader, Phase::kReadDone, false})) return;
  }
}

template <CombineConfig kConfig, class Coop>
EP_HOST_DEVICE void combine(Coop coop, const CombineParams& p) {
  Operation op;
  if (coop.block_all(enter(coop, op, p.entry))) {
    const bool leads = coop.block() == 0 && coop.worker() == 0;
    if (coop.block_all(!leads || publish_combine(coop, op, p))) {
      copy_share(coop, op, p);
      if ((!leads || lead_combine(coop, op, p)) && await_placed(coop, op))
        pull_rows<kConfig>(coop, op, p);
    }
  }
  if (!arrive(coop, op, kEnd) || coop.worker() != 0) return;
  if (!faulted(coop, op)) exchange_read_done(coop, op, p);
  leave(coop, op, p.status);
}

}  // namespace ep::kernels
