#include "bench/ep_bench/json_report.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace ep::bench {
namespace {

const char* mode_name(Mode mode) {
  switch (mode) {
    case Mode::kThroughput:
      return "throughput";
    case Mode::kLatency:
      return "latency";
    case Mode::kGrowth:
      return "rss";
  }
  return "?";
}

void add_spread(Json& json, const Spread& us) {
  json.field("median_us", us.median).field("p10_us", us.p10).field("p90_us", us.p90);
}

}  // namespace

JsonReport::JsonReport(const Conditions& conditions, const Options& options) {
  json_.begin_object().field("program", "ep-bench").field("mode", mode_name(options.mode));
  json_.key("conditions").begin_object();
  json_.field("cpu", conditions.cpu).field("isa", conditions.isa);
  json_.field("cores", conditions.num_cores).field("kernel", conditions.kernel).end_object();
  if (options.mode == Mode::kThroughput) {
    json_.field("warmup", options.warmup).field("rounds", options.rounds);
  }
  json_.key("runs").begin_array();
}

void JsonReport::add_case(const Case& c) {
  json_.key("case").begin_object();
  json_.field("ranks", c.num_ranks).field("how", c.processes ? "processes" : "threads");
  json_.field("tokens", c.num_tokens).field("hidden", c.hidden).field("topk", c.num_topk);
  json_.field("experts", c.num_experts).field("dtype", choice_name<DType>(kDTypes, c.dtype));
  json_.field("format", choice_name<Quant>(kFormats, c.format));
  json_.field("layout", choice_name<Layout>(kLayouts, c.layout)).field("exact", c.exact);
  json_.field("outputs", choice_name<Outputs>(kOutputs, c.outputs));
  json_.field("skew", c.skew.text()).field("seed", c.seed).end_object();
}

void JsonReport::add(const ThroughputResult& result) {
  json_.begin_object();
  add_case(result.kase);
  json_.field("num_sms", result.num_sms).field("rows_by_rank", result.num_rows);
  if (result.verified) {
    json_.field("verified_rows", result.verified->rows);
    json_.field("verified_values", result.verified->values);
  }
  json_.key("contenders").begin_object();
  const std::vector<Summary> summaries = summarise(result);
  for (size_t c = 0; c < summaries.size(); ++c) {
    const Summary& s = summaries[c];
    json_.key(name_of(s.contender)).begin_object().field("bytes", s.num_bytes);
    add_spread(json_, s.us);
    json_.field("fastest_rank_us", s.fastest_rank_us).field("slowest_rank_us", s.slowest_rank_us);
    json_.field("gb_per_s", s.gb_per_s);
    if (s.of_memcpy) json_.field("of_memcpy", *s.of_memcpy);
    json_.field("us_by_round_and_rank", result.times[c]).end_object();
  }
  json_.end_object().end_object();
}

void JsonReport::add(const LatencyResult& result) {
  json_.begin_object();
  add_case(result.kase);
  json_.field("num_sms", result.num_sms).key("calls").begin_object();
  for (const Choice<Span>& span : kSpans) {
    json_.key(span.name).begin_object();
    add_spread(json_, result.spread(span.value));
    json_.field("us", result.us[static_cast<size_t>(span.value)]).end_object();
  }
  json_.end_object().end_object();
}

void JsonReport::add(const GrowthResult& result) {
  json_.begin_object();
  add_case(result.kase);
  json_.field("first_round", kGrowthFirstRound).field("last_round", kGrowthLastRound);
  json_.key("processes").begin_array();
  for (const GrowthResult::Process& process : result.processes) {
    json_.begin_object().field("first_bytes", process.first_bytes);
    json_.field("last_bytes", process.last_bytes).end_object();
  }
  json_.end_array().end_object();
}

void JsonReport::write(const std::string& path) {
  json_.end_array().end_object();
  const std::string text = json_.text() + "\n";
  const bool is_stdout = path == "-";
  std::FILE* const file = is_stdout ? stdout : std::fopen(path.c_str(), "w");
  bool is_good = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file) is_good = (is_stdout ? std::fflush(file) : std::fclose(file)) == 0 && is_good;
  if (!is_good) throw std::system_error(errno, std::generic_category(), "--json " + path);
}

void check_writable(const std::string& path) {
  if (path.empty() || path == "-") return;
  std::FILE* const file = std::fopen(path.c_str(), "a");
  if (!file) throw UsageError("--json " + path + ": " + std::strerror(errno));
  std::fclose(file);
}

}  // namespace ep::bench
