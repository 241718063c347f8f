// The text that people read.
#pragma once

#include <cstdio>
#include <vector>

#include "bench/ep_bench/conditions.hpp"
#include "bench/ep_bench/growth.hpp"
#include "bench/ep_bench/latency.hpp"
#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/throughput.hpp"

namespace ep::bench {

void print_conditions(std::FILE* out, const Conditions& conditions, const Options& options);
void print_result(std::FILE* out, const ThroughputResult& result);
void print_result(std::FILE* out, const LatencyResult& result);
void print_result(std::FILE* out, const GrowthResult& result);

// How time per byte changes with the number of ranks, where only that differs.
void print_scaling(std::FILE* out, const std::vector<ThroughputResult>& results);

}  // namespace ep::bench
