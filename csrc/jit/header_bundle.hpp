// Headers that are given to the compiler from memory.
#pragma once

#include <span>
#include <string_view>

namespace ep::jit {

struct Header {
  const char* name;  // as an #include writes it
  const char* text;
};

// Both strings end with a zero byte and live as long as the program.
struct HeaderBundle {
  std::span<const Header> headers;
  std::string_view hash;  // of all names and texts
};

}  // namespace ep::jit
