// The same results for programs, with every measured round.
#pragma once

#include <string>

#include "bench/ep_bench/conditions.hpp"
#include "bench/ep_bench/growth.hpp"
#include "bench/ep_bench/json.hpp"
#include "bench/ep_bench/latency.hpp"
#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/throughput.hpp"

namespace ep::bench {

// {"program", "mode", "conditions", "runs": [a result, ...]}
class JsonReport {
 public:
  JsonReport(const Conditions& conditions, const Options& options);

  void add(const ThroughputResult& result);
  void add(const LatencyResult& result);
  void add(const GrowthResult& result);

  // Ends the document and writes it to a path or, "-", to standard output.  Throws
  // std::system_error.
  void write(const std::string& path);

 private:
  void add_case(const Case& kase);

  Json json_;
};

// Throws UsageError when the file cannot be written; a long run should not end with that.
void check_writable(const std::string& path);

}  // namespace ep::bench
