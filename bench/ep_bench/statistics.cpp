#include "bench/ep_bench/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ep::bench {

double percentile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(samples.begin(), samples.end());
  const double at = fraction * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<size_t>(std::floor(at));
  const size_t above = std::min(below + 1, samples.size() - 1);
  return std::lerp(samples[below], samples[above], at - std::floor(at));
}

Spread spread_of(const std::vector<double>& samples) {
  return {median(samples), percentile(samples, 0.1), percentile(samples, 0.9)};
}

}  // namespace ep::bench
