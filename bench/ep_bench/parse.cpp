#include "bench/ep_bench/parse.hpp"

#include <charconv>
#include <cmath>

namespace ep::bench {

void refuse(const std::string& option, std::string_view value, const std::string& what_fits) {
  throw UsageError(str("--", option, " ", value, ": expected ", what_fits));
}

uint64_t parse_integer(const std::string& option,
                       std::string_view value,
                       uint64_t least,
                       uint64_t most) {
  uint64_t number = 0;
  const char* const end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || stop != end || number < least || number > most) {
    refuse(option, value, str("a whole number from ", least, " to ", most));
  }
  return number;
}

double parse_number(const std::string& option, std::string_view value, double least, double most) {
  double number = 0.0;
  const char* const end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || stop != end || !(number >= least && number <= most)) {
    refuse(option, value, str("a number from ", least, " to ", most));
  }
  return number;
}

std::vector<std::string_view> split(std::string_view value) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t comma = value.find(',');
    parts.push_back(value.substr(0, comma));
    if (comma == std::string_view::npos) return parts;
    value.remove_prefix(comma + 1);
  }
}

}  // namespace ep::bench
