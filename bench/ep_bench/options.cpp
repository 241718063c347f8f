#include "bench/ep_bench/options.hpp"

#include <algorithm>
#include <functional>

#include <getopt.h>

#include "bench/ep_bench/parse.hpp"

namespace ep::bench {
namespace {

constexpr int kFirstOption = 256;  // getopt's values for long options start above all characters

struct Spec {
  const char* name;
  const char* value;  // what follows the name, or null: nothing does
  const char* help;
  std::function<void(Options&, const std::string& value)> set;
  std::function<std::string(const Options&)> show;  // the default, for --help
};

std::string show_numbers(const std::vector<uint32_t>& list) {
  return show_list(list, [](uint32_t n) { return n; });
}

std::vector<uint32_t> parse_counts(const std::string& option,
                                   const std::string& value,
                                   uint32_t least,
                                   uint32_t most) {
  return parse_list<uint32_t>(
      value, [&](std::string_view part) { return parse_count(option, part, least, most); });
}

Skew parse_skew(const std::string& value) {
  if (value == "one-rank") return {0.0, true};
  return {parse_number("skew", value, 0.0, 10.0), false};
}

std::vector<Contender> parse_contenders(const std::string& value) {
  // memcpy_out comes and goes with memcpy.
  constexpr std::span<const Choice<Contender>> kNamed = std::span(kContenders).first<6>();
  auto list = parse_list<Contender>(value, [&](std::string_view part) {
    return parse_choice<Contender>("contenders", part, kNamed);
  });
  for (size_t i = 1; i < list.size(); ++i) {
    const auto end = list.begin() + static_cast<ptrdiff_t>(i);
    if (std::find(list.begin(), end, list[i]) != end) {
      refuse("contenders", value, "each contender once");
    }
  }
  return list;
}

std::vector<Spec> shape_specs() {
  return {
      {"ranks", "N[,N...]", "ranks of the group",
       [](Options& o, const std::string& v) { o.ranks = parse_counts("ranks", v, 1, 1024); },
       [](const Options& o) { return show_numbers(o.ranks); }},
      {"processes", nullptr, "a rank is a process (the default)",
       [](Options& o, const std::string&) { o.fixed.processes = true; }, nullptr},
      {"threads", nullptr, "a rank is a thread of one process",
       [](Options& o, const std::string&) { o.fixed.processes = false; }, nullptr},
      {"tokens", "T[,T...]", "tokens of each rank",
       [](Options& o, const std::string& v) { o.tokens = parse_counts("tokens", v, 0, 1u << 24); },
       [](const Options& o) { return show_numbers(o.tokens); }},
      {"hidden", "H[,H...]", "elements of a token",
       [](Options& o, const std::string& v) { o.hidden = parse_counts("hidden", v, 1, 1u << 20); },
       [](const Options& o) { return show_numbers(o.hidden); }},
      {"topk", "K", "experts that a token goes to",
       [](Options& o, const std::string& v) { o.fixed.num_topk = parse_count("topk", v, 1, 32); },
       [](const Options& o) { return str(o.fixed.num_topk); }},
      {"experts", "E", "experts of all ranks together",
       [](Options& o, const std::string& v) {
         o.fixed.num_experts = parse_count("experts", v, 1, 4096);
       },
       [](const Options& o) { return str(o.fixed.num_experts); }},
      {"skew", "S|one-rank",
       "spread of the experts' popularity, exp(S * normal); 0: uniform; one-rank: all to rank 0",
       [](Options& o, const std::string& v) { o.fixed.skew = parse_skew(v); },
       [](const Options& o) { return o.fixed.skew.text(); }},
      {"seed", "N", "of routing and data",
       [](Options& o, const std::string& v) {
         o.fixed.seed = parse_integer("seed", v, 0, UINT64_MAX);
       },
       [](const Options& o) { return str(o.fixed.seed); }},
  };
}

std::vector<Spec> call_specs() {
  return {
      {"format", "F[,F...]",
       "what travels: none, fp8_block128, fp8_block128_pow2, fp8_block128_ue8m0",
       [](Options& o, const std::string& v) {
         o.formats = parse_list<Quant>(v, [](std::string_view part) {
           return parse_choice<Quant>("format", part, kFormats);
         });
       },
       [](const Options& o) {
         return show_list(o.formats, [](Quant q) { return choice_name<Quant>(kFormats, q); });
       }},
      {"dtype", "D", "of tokens and experts' outputs: bf16, fp16, fp32",
       [](Options& o, const std::string& v) {
         o.fixed.dtype = parse_choice<DType>("dtype", v, kDTypes);
       },
       [](const Options& o) { return choice_name<DType>(kDTypes, o.fixed.dtype); }},
      {"layout", "L", "one row per (token, rank): rank; per (token, slot): expert",
       [](Options& o, const std::string& v) {
         o.fixed.layout = parse_choice<Layout>("layout", v, kLayouts);
       },
       [](const Options& o) { return choice_name<Layout>(kLayouts, o.fixed.layout); }},
      {"exact", nullptr, "outputs have exactly the received rows (the default)",
       [](Options& o, const std::string&) { o.fixed.exact = true; }, nullptr},
      {"fixed", nullptr, "outputs have the largest possible size",
       [](Options& o, const std::string&) { o.fixed.exact = false; }, nullptr},
      {"outputs", "O", "where received rows end up: window, caller, auto",
       [](Options& o, const std::string& v) {
         o.fixed.outputs = parse_choice<Outputs>("outputs", v, kOutputs);
       },
       [](const Options& o) { return choice_name<Outputs>(kOutputs, o.fixed.outputs); }},
      {"num-sms", "N", "worker threads per operation; 0: the library's own choice",
       [](Options& o, const std::string& v) {
         o.fixed.num_sms = parse_count("num-sms", v, 0, 4096);
       },
       [](const Options& o) { return str(o.fixed.num_sms); }},
  };
}

std::vector<Spec> run_specs() {
  return {
      {"contenders", "C[,C...]",
       "what runs in a round: dispatch, combine, pair, replay, combine_copy, memcpy",
       [](Options& o, const std::string& v) { o.contenders = parse_contenders(v); },
       [](const Options& o) { return show_list(o.contenders, name_of); }},
      {"warmup", "N", "rounds before those that count",
       [](Options& o, const std::string& v) { o.warmup = parse_count("warmup", v, 0, 100000); },
       [](const Options& o) { return str(o.warmup); }},
      {"rounds", "N", "rounds that count",
       [](Options& o, const std::string& v) { o.rounds = parse_count("rounds", v, 1, 100000); },
       [](const Options& o) { return str(o.rounds); }},
      {"verify", nullptr, "check a first and a last round bit by bit, outside the measurement",
       [](Options& o, const std::string&) { o.verify = true; }, nullptr},
      {"latency", nullptr, "instead: host time of one rank's calls, for each T (default 0 to 128)",
       [](Options& o, const std::string&) { o.mode = Mode::kLatency; }, nullptr},
      {"rss", nullptr,
       "instead: growth of resident memory from round 1000 to 10000 (default T 64, H 1024)",
       [](Options& o, const std::string&) { o.mode = Mode::kGrowth; }, nullptr},
      {"json", "FILE", "write conditions, summaries and raw rounds; '-': to standard output",
       [](Options& o, const std::string& v) { o.json = v; }, nullptr},
      {"timeout", "S", "seconds that any wait may take",
       [](Options& o, const std::string& v) {
         o.fixed.timeout_s = parse_number("timeout", v, 0.1, 1e6);
       },
       [](const Options& o) { return str(o.fixed.timeout_s); }},
      {"help", nullptr, "this text", [](Options& o, const std::string&) { o.wants_help = true; },
       nullptr},
  };
}

std::vector<Spec> all_specs() {
  std::vector<Spec> specs = shape_specs();
  for (std::vector<Spec>& more : std::vector<std::vector<Spec>>{call_specs(), run_specs()}) {
    std::move(more.begin(), more.end(), std::back_inserter(specs));
  }
  return specs;
}

void check_case(const Case& c) {
  const uint64_t row_bytes = c.combine_row_bytes();
  if (c.is_quantised() && c.hidden % 128 != 0) {
    refuse("hidden", str(c.hidden), "a multiple of 128 with an fp8 format");
  }
  if (row_bytes % 16 != 0) {
    refuse("hidden", str(c.hidden), str("rows of a multiple of 16 bytes, not ", row_bytes));
  }
  if (c.num_topk > c.num_experts) {
    refuse("topk", str(c.num_topk), str("at most --experts ", c.num_experts));
  }
  const uint32_t first = c.first_expert(1);  // as many as rank 0 owns
  if (c.skew.one_rank && c.num_topk > first) {
    refuse("topk", str(c.num_topk), str("at most the ", first, " experts of rank 0"));
  }
  const uint64_t most_rows = uint64_t{c.num_ranks} * c.num_tokens * c.num_topk;
  if (most_rows >= (uint64_t{1} << 31)) {
    refuse("tokens", str(c.num_tokens), "ranks * tokens * topk below 2^31");
  }
}

// Modes whose question is another one have other defaults.
Options defaults_of(Mode mode) {
  Options options;
  options.mode = mode;
  if (mode == Mode::kLatency) {
    options.ranks = {1};
    options.tokens = {0, 1, 2, 4, 8, 16, 32, 64, 128};
  } else if (mode == Mode::kGrowth) {
    options.tokens = {64};
    options.hidden = {1024};
  }
  return options;
}

using Given = std::vector<std::pair<size_t, std::string>>;  // index of the option, its value

Given read_command_line(int argc, char** argv, const std::vector<Spec>& specs) {
  std::vector<option> known;
  for (size_t i = 0; i < specs.size(); ++i) {
    known.push_back({specs[i].name, specs[i].value ? required_argument : no_argument, nullptr,
                     kFirstOption + static_cast<int>(i)});
  }
  known.push_back({});
  Given given;
  opterr = 0;
  for (;;) {
    const int at = std::max(optind, 1);
    const int found = getopt_long(argc, argv, "+:h", known.data(), nullptr);
    if (found == -1) break;
    if (found == 'h') return {{specs.size() - 1, ""}};
    if (found == ':') throw UsageError(str(argv[at], " needs a value"));
    if (found < kFirstOption) {
      throw UsageError(str("unknown option ", argv[at], "; ep-bench --help lists all"));
    }
    given.emplace_back(found - kFirstOption, optarg ? optarg : "");
  }
  if (optind < argc) {
    throw UsageError(str("unexpected '", argv[optind], "'; ep-bench --help lists all options"));
  }
  return given;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  const std::vector<Spec> specs = all_specs();
  const Given given = read_command_line(argc, argv, specs);
  Options options;
  for (const auto& [index, value] : given)
    specs[index].set(options, value);
  options = defaults_of(options.mode);
  for (const auto& [index, value] : given)
    specs[index].set(options, value);
  if (options.wants_help) return options;
  if (options.mode == Mode::kLatency && options.ranks != std::vector<uint32_t>{1}) {
    refuse("ranks", show_numbers(options.ranks), "1 with --latency");
  }
  if (options.mode != Mode::kThroughput && options.verify) {
    throw UsageError("--verify: not with --latency or --rss");
  }
  for (const Case& c : options.cases())
    check_case(c);
  return options;
}

std::vector<Case> Options::cases() const {
  std::vector<Case> all;
  for (const uint32_t h : hidden) {
    for (const Quant format : formats) {
      for (const uint32_t t : tokens) {
        for (const uint32_t r : ranks) {
          Case c = fixed;
          c.num_ranks = r;
          c.num_tokens = t;
          c.hidden = h;
          c.format = format;
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

std::string help_text() {
  const Options defaults;
  std::string text =
      "usage: ep-bench [options]\n"
      "Times dispatch and combine between ranks, beside memcpy of the same bytes.\n"
      "Lists are swept: every combination is measured.  bench/README.md explains the columns.\n\n";
  for (const Spec& spec : all_specs()) {
    std::string line = str("  --", spec.name, spec.value ? " " : "", spec.value ? spec.value : "");
    line.resize(std::max<size_t>(line.size() + 2, 26), ' ');
    text += line + spec.help;
    if (spec.show) text += str("\n", std::string(26, ' '), "[", spec.show(defaults), "]");
    text += "\n";
  }
  return text +
         "\nExit status: 0 good, 1 a rank failed or --verify found a difference, 2 bad usage.\n";
}

}  // namespace ep::bench
