// Building messages.
#pragma once

#include <sstream>
#include <string>
#include <utility>

namespace ep {

// The parts, streamed one after the other: str("rank=", 3) is "rank=3".
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace ep
