#include "bench/ep_bench/throughput.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "bench/ep_bench/board.hpp"
#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/exchange.hpp"
#include "bench/ep_bench/memory.hpp"
#include "bench/ep_bench/rank_data.hpp"
#include "bench/ep_bench/ranks.hpp"

namespace ep::bench {
namespace {

constexpr double kNsPerUs = 1e3;

// With a quantised format the halves differ in bytes, and so need a memcpy each.
std::vector<Contender> contenders_of(const Options& options, const Case& kase) {
  std::vector<Contender> all = options.contenders;
  const auto has = [&](auto&& predicate) { return std::any_of(all.begin(), all.end(), predicate); };
  if (kase.is_quantised() && has(is_memcpy) && has(moves_combine_rows)) {
    all.push_back(Contender::kMemcpyOut);
  }
  return all;
}

// One rank's part in the rounds.
class Rounds {
 public:
  Rounds(const Options& options,
         const RankContext& context,
         const RankData& data,
         Exchange& exchange,
         const std::vector<Contender>& contenders)
      : options_(options),
        context_(context),
        data_(data),
        exchange_(exchange),
        contenders_(contenders) {}

  void run() {
    if (options_.verify) run_checked();
    for (uint32_t i = 0; i < options_.warmup; ++i)
      run_round(i, nullptr);
    const std::span<double> samples = context_.board.samples(context_.rank);
    for (uint32_t i = 0; i < options_.rounds; ++i) {
      run_round(options_.warmup + i, samples.data() + i * contenders_.size());
    }
    if (options_.verify) run_checked();
    context_.wait_for_all();  // nobody closes its buffer while others still call
  }

 private:
  void run_round(uint32_t round, double* samples_us) {
    for (const size_t which : order_of(round)) {
      const int64_t ns = run_contender(contenders_[which], static_cast<int32_t>(round));
      if (samples_us) samples_us[which] = static_cast<double>(ns) / kNsPerUs;
      exchange_.release();
    }
  }

  // Another one in every round, the same on all ranks: what ran before (what it left in the caches,
  // where its memory was) must not always be to one contender's cost.
  std::vector<size_t> order_of(uint32_t round) const {
    std::vector<size_t> order(contenders_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937(round));
    return order;
  }

  void run_checked() {
    RankNotes& notes = context_.notes();
    for (const Contender contender : contenders_) {
      run_contender(contender, -1);
      context_.begin("verifying");
      const Verified verified = verify(data_, exchange_, contender);
      notes.verified_rows += verified.rows;
      notes.verified_values += verified.values;
      exchange_.release();
    }
  }

  int64_t run_contender(Contender contender, int32_t round) {
    exchange_.prepare(contender);
    context_.begin(name_of(contender), round);
    const int64_t start_ns = context_.align();
    exchange_.run(contender);
    return now_ns() - start_ns;
  }

  const Options& options_;
  const RankContext& context_;
  const RankData& data_;
  Exchange& exchange_;
  const std::vector<Contender>& contenders_;
};

void run_rank(const Options& options,
              const Case& kase,
              const std::vector<Contender>& contenders,
              const RankContext& context) {
  RankData data(kase, context.rank);
  BlockPool pool;
  EPBuffer buffer(context.communicator,
                  buffer_config(kase, [&pool](uint64_t n) { return pool.take(n); }));
  try {
    Exchange exchange(buffer, data);
    context.notes().num_rows = exchange.num_rows();
    context.notes().num_sms = buffer.num_sms();
    Rounds(options, context, data, exchange, contenders).run();
  } catch (const std::exception& error) {
    context.fail(error);
    buffer.abort(error.what());
    throw;
  }
}

}  // namespace

ThroughputResult measure_throughput(const Options& options, const Case& kase) {
  ThroughputResult result{.kase = kase,
                          .contenders = contenders_of(options, kase),
                          .times = {},
                          .num_rows = {},
                          .num_sms = 0,
                          .verified = {}};
  const size_t num_contenders = result.contenders.size();
  Board board(kase.num_ranks, num_contenders * options.rounds);
  run_ranks(kase, board, [&](const RankContext& context) {
    run_rank(options, kase, result.contenders, context);
  });
  result.num_sms = board.notes(0).num_sms;
  result.times.assign(num_contenders, std::vector(options.rounds, std::vector<double>()));
  if (options.verify) result.verified = Verified{};
  for (uint32_t rank = 0; rank < kase.num_ranks; ++rank) {
    const RankNotes& notes = board.notes(rank);
    result.num_rows.push_back(notes.num_rows);
    if (result.verified) {
      result.verified->rows += notes.verified_rows;
      result.verified->values += notes.verified_values;
    }
    for (size_t round = 0; round < options.rounds; ++round) {
      for (size_t c = 0; c < num_contenders; ++c) {
        result.times[c][round].push_back(board.samples(rank)[round * num_contenders + c]);
      }
    }
  }
  return result;
}

}  // namespace ep::bench
