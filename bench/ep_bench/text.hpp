// Text from parts, and names of choices.
#pragma once

#include <span>
#include <sstream>
#include <string>

namespace ep::bench {

template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  out.precision(9);  // tells any two floats apart
  (out << ... << parts);
  return out.str();
}

// A value of a command-line option and what it stands for.
template <typename T>
struct Choice {
  const char* name;
  T value;
};

template <typename T>
const char* choice_name(std::span<const Choice<T>> choices, T value) {
  for (const Choice<T>& choice : choices) {
    if (choice.value == value) return choice.name;
  }
  return "?";
}

}  // namespace ep::bench
