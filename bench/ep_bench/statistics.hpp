// Order statistics.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace ep::bench {

// The value below which a share of `fraction` of the samples lies, linear between neighbours.
// No samples: NaN.
double percentile(std::vector<double> samples, double fraction);
inline double median(std::vector<double> samples) {
  return percentile(std::move(samples), 0.5);
}

struct Spread {
  double median, p10, p90;
};
Spread spread_of(const std::vector<double>& samples);

}  // namespace ep::bench
