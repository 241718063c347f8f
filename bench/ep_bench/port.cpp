#include "bench/ep_bench/port.hpp"

#include <cerrno>
#include <system_error>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/ep_bench/text.hpp"

namespace ep::bench {

ReservedPort::ReservedPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int yes = 1;
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  if (fd_ < 0 || setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      bind(fd_, address, length) != 0 || getsockname(fd_, address, &length) != 0) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw std::system_error(error, std::generic_category(), "no free port on 127.0.0.1");
  }
  port_ = ntohs(at.sin_port);
}

ReservedPort::~ReservedPort() {
  ::close(fd_);
}

std::string ReservedPort::address() const {
  return str("127.0.0.1:", port_);
}

}  // namespace ep::bench
