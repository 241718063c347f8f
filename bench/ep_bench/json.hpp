// Writes JSON: values in order, the commas by itself.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace ep::bench {

class Json {
 public:
  Json& begin_object() { return open('{'); }
  Json& end_object() { return close('}'); }
  Json& begin_array() { return open('['); }
  Json& end_array() { return close(']'); }
  Json& key(std::string_view name);

  Json& value(std::string_view text);
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(bool is_true);
  Json& value(double number);  // null when it is not finite
  template <typename Integer>
  requires std::is_integral_v<Integer> Json& value(Integer number) {
    return raw(std::to_string(number));
  }
  template <typename T>
  Json& value(const std::vector<T>& list) {
    begin_array();
    for (const T& item : list)
      value(item);
    return end_array();
  }

  template <typename T>
  Json& field(std::string_view name, const T& item) {
    return key(name).value(item);
  }

  const std::string& text() const { return text_; }

 private:
  Json& open(char bracket);
  Json& close(char bracket);
  Json& raw(std::string_view text);

  std::string text_;
  bool needs_comma_ = false;
};

}  // namespace ep::bench
