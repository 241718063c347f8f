// A free loopback port for ranks that are processes.
#pragma once

#include <cstdint>
#include <string>

namespace ep::bench {

// Holds a port without listening at it, so that the system gives it to nobody else until rank 0,
// which allows the address to be shared, listens there.
class ReservedPort {
 public:
  ReservedPort();  // throws std::system_error
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  std::string address() const;  // "127.0.0.1:port"

 private:
  int fd_;
  uint16_t port_ = 0;
};

}  // namespace ep::bench
