// Values of command-line options; every function throws UsageError with one line that says what
// fits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/ep_bench/options.hpp"
#include "bench/ep_bench/text.hpp"

namespace ep::bench {

[[noreturn]] void refuse(const std::string& option,
                         std::string_view value,
                         const std::string& what_fits);

uint64_t parse_integer(const std::string& option,
                       std::string_view value,
                       uint64_t least,
                       uint64_t most);
inline uint32_t parse_count(const std::string& option,
                            std::string_view value,
                            uint32_t least,
                            uint32_t most) {
  return static_cast<uint32_t>(parse_integer(option, value, least, most));
}
double parse_number(const std::string& option, std::string_view value, double least, double most);

// The parts between commas; at least one.
std::vector<std::string_view> split(std::string_view value);

template <typename T>
T parse_choice(const std::string& option,
               std::string_view value,
               std::span<const Choice<T>> choices) {
  std::string names;
  for (const Choice<T>& choice : choices) {
    if (value == choice.name) return choice.value;
    names += str(names.empty() ? "" : ", ", choice.name);
  }
  refuse(option, value, "one of " + names);
}

// `parse_one(part)` of every part.
template <typename T, typename ParseOne>
std::vector<T> parse_list(std::string_view value, ParseOne&& parse_one) {
  std::vector<T> list;
  for (const std::string_view part : split(value))
    list.push_back(parse_one(part));
  return list;
}

template <typename T, typename Show>
std::string show_list(const std::vector<T>& list, Show&& show) {
  std::string text;
  for (const T& item : list)
    text += str(text.empty() ? "" : ",", show(item));
  return text;
}

}  // namespace ep::bench
