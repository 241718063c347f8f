#include "bench/ep_bench/report.hpp"

#include <algorithm>
#include <string>

namespace ep::bench {
namespace {

constexpr double kBytesPerMb = 1e6;

std::string headline(const Case& c) {
  return str(c.num_ranks, c.processes ? " process" : " thread",
             c.num_ranks == 1 ? "" : (c.processes ? "es" : "s"), ", T ", c.num_tokens, ", H ",
             c.hidden, ", K ", c.num_topk, " of ", c.num_experts, ", ",
             choice_name<DType>(kDTypes, c.dtype), ", format ",
             choice_name<Quant>(kFormats, c.format), ", layout ",
             choice_name<Layout>(kLayouts, c.layout), c.exact ? ", exact" : ", fixed", ", outputs ",
             choice_name<Outputs>(kOutputs, c.outputs), ", skew ", c.skew.text());
}

// As the issue of a figure needs it: a value with its unit, or a dash.
std::string ratio_text(const std::optional<double>& ratio, const char* form, double value) {
  if (!ratio) return "-";
  char text[32];
  std::snprintf(text, sizeof text, form, value);
  return text;
}

}  // namespace

void print_conditions(std::FILE* out, const Conditions& conditions, const Options& options) {
  std::fprintf(out, "%s, %s, %u core%s, Linux %s", conditions.cpu.c_str(), conditions.isa.c_str(),
               conditions.num_cores, conditions.num_cores == 1 ? "" : "s",
               conditions.kernel.c_str());
  if (options.mode == Mode::kThroughput) {
    std::fprintf(out, "; %u rounds after %u; times: slowest rank of a round", options.rounds,
                 options.warmup);
  }
  std::fprintf(out, "\n");
}

void print_result(std::FILE* out, const ThroughputResult& result) {
  std::fprintf(out, "\n%s, num_sms %u\n", headline(result.kase).c_str(), result.num_sms);
  std::fprintf(out, "%-13s %9s %11s %11s %11s %12s %12s %7s %9s %6s\n", "contender", "MB",
               "median us", "p10", "p90", "fastest rank", "slowest rank", "GB/s", "x memcpy",
               "bound");
  for (const Summary& s : summarise(result)) {
    const double ratio = s.of_memcpy.value_or(0.0);
    std::fprintf(out, "%-13s %9.3f %11.1f %11.1f %11.1f %12.1f %12.1f %7.2f %9s %6s\n",
                 name_of(s.contender), static_cast<double>(s.num_bytes) / kBytesPerMb, s.us.median,
                 s.us.p10, s.us.p90, s.fastest_rank_us, s.slowest_rank_us, s.gb_per_s,
                 ratio_text(s.of_memcpy, "%.3f", ratio).c_str(),
                 ratio_text(s.of_memcpy, "%.0f %%", 100.0 / ratio).c_str());
  }
  if (result.verified) {
    std::fprintf(out, "verify: ok (%llu rows, %llu values)\n",
                 static_cast<unsigned long long>(result.verified->rows),
                 static_cast<unsigned long long>(result.verified->values));
  }
}

void print_result(std::FILE* out, const LatencyResult& result) {
  std::fprintf(out, "\n%s, num_sms %u: median us [p10, p90] of %u calls\n",
               headline(result.kase).c_str(), result.num_sms, kLatencyCalls);
  const auto print = [&](const char* what, Span span) {
    const Spread us = result.spread(span);
    std::fprintf(out, "  %-40s %8.2f  [%.2f, %.2f]\n", what, us.median, us.p10, us.p90);
  };
  print("replayed dispatch, async: call to return", Span::kDispatchReturn);
  print("  the same, until it is done", Span::kDispatchDone);
  print("replayed dispatch, synchronous", Span::kDispatchSync);
  print("combine, async: call to return", Span::kCombineReturn);
  print("  the same, until it is done", Span::kCombineDone);
  print("combine, synchronous", Span::kCombineSync);
  print("dispatch and combine, synchronous", Span::kPairSync);
}

void print_result(std::FILE* out, const GrowthResult& result) {
  std::fprintf(out, "\n%s: resident memory after round %u and %u\n", headline(result.kase).c_str(),
               kGrowthFirstRound, kGrowthLastRound);
  for (size_t i = 0; i < result.processes.size(); ++i) {
    const GrowthResult::Process& process = result.processes[i];
    std::fprintf(out, "  process %zu: %.3f MB, %.3f MB, growth %.3f MB\n", i,
                 static_cast<double>(process.first_bytes) / kBytesPerMb,
                 static_cast<double>(process.last_bytes) / kBytesPerMb,
                 static_cast<double>(process.growth()) / kBytesPerMb);
  }
}

void print_scaling(std::FILE* out, const std::vector<ThroughputResult>& results) {
  const auto is_same_but_for_ranks = [](const Case& a, const Case& b) {
    return a.num_tokens == b.num_tokens && a.hidden == b.hidden && a.format == b.format;
  };
  for (size_t i = 1; i < results.size(); ++i) {
    const auto base = std::find_if(results.begin(), results.begin() + static_cast<ptrdiff_t>(i),
                                   [&](const ThroughputResult& earlier) {
                                     return is_same_but_for_ranks(earlier.kase, results[i].kase);
                                   });
    if (base == results.begin() + static_cast<ptrdiff_t>(i)) continue;
    std::fprintf(out, "%stime per byte, %u ranks against %u (T %u, H %u, %s):", i == 1 ? "\n" : "",
                 results[i].kase.num_ranks, base->kase.num_ranks, results[i].kase.num_tokens,
                 results[i].kase.hidden, choice_name<Quant>(kFormats, results[i].kase.format));
    const std::vector<Summary> own = summarise(results[i]), others = summarise(*base);
    for (size_t c = 0; c < own.size(); ++c) {
      if (own[c].num_bytes == 0 || others[c].num_bytes == 0) continue;
      std::fprintf(out, " %s %.2fx", name_of(own[c].contender),
                   others[c].gb_per_s / own[c].gb_per_s);
    }
    std::fprintf(out, "\n");
  }
}

}  // namespace ep::bench
