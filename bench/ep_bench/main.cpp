// ep-bench: how long do dispatch and combine take between ranks?
#include <cstdio>
#include <exception>
#include <vector>

#include "bench/ep_bench/conditions.hpp"
#include "bench/ep_bench/growth.hpp"
#include "bench/ep_bench/json_report.hpp"
#include "bench/ep_bench/latency.hpp"
#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/report.hpp"
#include "bench/ep_bench/throughput.hpp"

namespace ep::bench {
namespace {

void run(const Options& options) {
  std::FILE* const out = options.json == "-" ? stderr : stdout;
  const Conditions conditions = find_conditions();
  JsonReport json(conditions, options);
  std::vector<ThroughputResult> throughputs;
  const auto report = [&](const auto& result) {
    print_result(out, result);
    std::fflush(out);
    json.add(result);
  };
  print_conditions(out, conditions, options);
  for (const Case& kase : options.cases()) {
    switch (options.mode) {
      case Mode::kThroughput:
        throughputs.push_back(measure_throughput(options, kase));
        report(throughputs.back());
        break;
      case Mode::kLatency:
        report(measure_latency(kase));
        break;
      case Mode::kGrowth:
        report(measure_growth(kase));
        break;
    }
  }
  print_scaling(out, throughputs);
  if (!options.json.empty()) json.write(options.json);
}

int run_command_line(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.wants_help) {
      std::fputs(help_text().c_str(), stdout);
      return 0;
    }
    check_writable(options.json);
    run(options);
    return 0;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "ep-bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "ep-bench: failed\n%s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace ep::bench

int main(int argc, char** argv) {
  return ep::bench::run_command_line(argc, argv);
}
