#include "bench/ep_bench/latency.hpp"

#include "bench/ep_bench/board.hpp"
#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/exchange.hpp"
#include "bench/ep_bench/memory.hpp"
#include "bench/ep_bench/rank_data.hpp"
#include "bench/ep_bench/ranks.hpp"

namespace ep::bench {
namespace {

constexpr uint32_t kWarmupCalls = 200;
constexpr double kNsPerUs = 1e3;

// Calls of every kind, in turn.  Results are dropped, and rows filled, between the measurements.
class Calls {
 public:
  explicit Calls(Exchange& exchange) : exchange_(exchange) {}

  // Writes kNumSpans times in microseconds.
  void run(double* us) {
    us_ = us;
    time_async(Span::kDispatchReturn, Span::kDispatchDone,
               [&] { return exchange_.dispatch(/*replays=*/true, /*async_op=*/true); });
    time(Span::kDispatchSync, [&] { return exchange_.dispatch(/*replays=*/true); });
    Tensor rows = exchange_.filled_expert_output();
    time_async(Span::kCombineReturn, Span::kCombineDone,
               [&] { return exchange_.combine(rows, exchange_.handle(), /*async_op=*/true); });
    rows = exchange_.filled_expert_output();
    time(Span::kCombineSync, [&] { return exchange_.combine(rows, exchange_.handle()); });
    rows = exchange_.filled_expert_output();
    time(Span::kPairSync, [&] {
      const DispatchResult dispatched = exchange_.dispatch(/*replays=*/false);
      return exchange_.combine(rows, dispatched.handle);
    });
  }

 private:
  template <typename Call>
  void time(Span span, Call&& call) {
    const int64_t start = now_ns();
    const auto result = call();
    note(span, start);
  }

  template <typename Call>
  void time_async(Span until_return, Span until_done, Call&& call) {
    const int64_t start = now_ns();
    const auto result = call();
    note(until_return, start);
    result.event.synchronize();
    note(until_done, start);
  }

  void note(Span span, int64_t start_ns) {
    us_[static_cast<size_t>(span)] = static_cast<double>(now_ns() - start_ns) / kNsPerUs;
  }

  Exchange& exchange_;
  double* us_ = nullptr;
};

void run_rank(const Case& kase, const RankContext& context) {
  RankData data(kase, context.rank);
  BlockPool pool;
  EPBuffer buffer(context.communicator,
                  buffer_config(kase, [&pool](uint64_t n) { return pool.take(n); }));
  Exchange exchange(buffer, data);
  context.notes().num_sms = buffer.num_sms();
  Calls calls(exchange);
  double* const samples = context.board.samples(context.rank).data();
  for (uint32_t i = 0; i < kWarmupCalls; ++i)
    calls.run(samples);
  for (uint32_t i = 0; i < kLatencyCalls; ++i) {
    context.begin("calls", static_cast<int32_t>(i));
    calls.run(samples + uint64_t{i} * kNumSpans);
  }
}

}  // namespace

LatencyResult measure_latency(const Case& kase) {
  LatencyResult result{.kase = kase, .num_sms = 0, .us = {}};
  Board board(1, uint64_t{kLatencyCalls} * kNumSpans);
  run_ranks(kase, board, [&](const RankContext& context) { run_rank(kase, context); });
  result.num_sms = board.notes(0).num_sms;
  for (uint32_t i = 0; i < kLatencyCalls; ++i) {
    for (uint32_t span = 0; span < kNumSpans; ++span) {
      result.us[span].push_back(board.samples(0)[uint64_t{i} * kNumSpans + span]);
    }
  }
  return result;
}

}  // namespace ep::bench
