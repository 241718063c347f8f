#include "bench/ep_bench/json.hpp"

#include <cmath>
#include <cstdio>

namespace ep::bench {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      result += escape;
    } else {
      result += c;
    }
  }
  return result + '"';
}

}  // namespace

Json& Json::key(std::string_view name) {
  raw(quoted(name));
  text_ += ": ";
  needs_comma_ = false;
  return *this;
}

Json& Json::value(std::string_view text) {
  return raw(quoted(text));
}

Json& Json::value(bool is_true) {
  return raw(is_true ? "true" : "false");
}

Json& Json::value(double number) {
  if (!std::isfinite(number)) return raw("null");
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.6g", number);
  return raw(digits);
}

Json& Json::open(char bracket) {
  raw(std::string_view(&bracket, 1));
  needs_comma_ = false;
  return *this;
}

Json& Json::close(char bracket) {
  text_ += bracket;
  needs_comma_ = true;
  return *this;
}

Json& Json::raw(std::string_view text) {
  if (needs_comma_) text_ += ", ";
  text_ += text;
  needs_comma_ = true;
  return *this;
}

}  // namespace ep::bench
