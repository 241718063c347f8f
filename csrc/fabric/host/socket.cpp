#include "fabric/host/socket.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::fabric {
namespace {

constexpr int kListenBacklog = 1024;  // the most ranks there can be; the system may cap it

void set_option(int fd, int level, int name) {
  const int on = 1;
  // Each of these is an improvement, none a condition.
  (void)::setsockopt(fd, level, name, &on, sizeof on);
}

Fd open_socket(const SocketAddress& address) {
  return Fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

const sockaddr* raw(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

bool same(const SocketAddress& a, const SocketAddress& b) {
  return a.num_bytes == b.num_bytes && std::memcmp(&a.storage, &b.storage, a.num_bytes) == 0;
}

// A connect to a local port nobody listens at can be given that very port as its own, and then
// reaches itself.
bool is_connected_to_itself(int fd) {
  SocketAddress here{}, there{};
  here.num_bytes = there.num_bytes = sizeof(sockaddr_storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&here.storage), &here.num_bytes) != 0)
    return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&there.storage), &there.num_bytes) != 0)
    return false;
  return same(here, there);
}

}  // namespace

std::string errno_text(int error) {
  char buffer[128];
  return ::strerror_r(error, buffer, sizeof buffer);  // GNU's: returns the text, thread-safe
}

HostPort parse_address(const std::string& address) {
  const auto refuse = [&](const char* why) {
    throw InvalidArgument(
        str("address=\"", address, "\": ", why, "; it must be \"host:port\" or \"[ipv6]:port\""));
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) refuse("there is no port");
  HostPort place{address.substr(0, colon), address.substr(colon + 1)};
  if (place.host.size() >= 2 && place.host.front() == '[' && place.host.back() == ']') {
    place.host = place.host.substr(1, place.host.size() - 2);
  } else if (place.host.find(':') != std::string::npos) {
    refuse("an IPv6 host needs brackets");
  }
  if (place.host.empty()) refuse("there is no host");
  const bool digits = place.port.find_first_not_of("0123456789") == std::string::npos;
  if (place.port.empty() || place.port.size() > 5 || !digits || std::stoul(place.port) > 65535) {
    refuse("the port must be a number from 1 to 65535");
  }
  if (std::stoul(place.port) == 0) refuse("port 0 is refused, since every rank must know the port");
  return place;
}

std::vector<SocketAddress> resolve(const HostPort& place) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(place.host.c_str(), place.port.c_str(), &hints, &found);
  if (status == EAI_AGAIN) return {};
  if (status != 0) {
    const std::string why = status == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(status);
    throw InvalidArgument(str("address: host \"", place.host, "\" cannot be resolved: ", why));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    SocketAddress address{};
    if (info->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.num_bytes = info->ai_addrlen;
    bool known = false;
    for (const SocketAddress& other : addresses)
      known = known || same(address, other);
    if (!known) addresses.push_back(address);
  }
  return addresses;
}

std::vector<Fd> listen_at(const HostPort& place) {
  std::vector<Fd> listeners;
  int last_error = EADDRNOTAVAIL;
  const std::vector<SocketAddress> addresses = resolve(place);
  for (const SocketAddress& address : addresses) {
    Fd fd = open_socket(address);
    if (!fd) {
      last_error = errno;
      continue;  // no such address family here
    }
    set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR);
    if (address.storage.ss_family == AF_INET6) set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY);
    const bool good = ::bind(fd.get(), raw(address), address.num_bytes) == 0 &&
                      ::listen(fd.get(), kListenBacklog) == 0;
    if (good) {
      listeners.push_back(std::move(fd));
      continue;
    }
    last_error = errno;
    if (last_error != EADDRNOTAVAIL) {
      throw InvalidArgument(str("address: rank 0 cannot listen at host \"", place.host, "\" port ",
                                place.port, ": ", errno_text(last_error)));
    }
  }
  if (listeners.empty() && addresses.empty()) {
    throw InvalidArgument(str("address: host \"", place.host, "\" cannot be resolved on rank 0"));
  }
  if (listeners.empty()) {
    throw InvalidArgument(str("address: host \"", place.host,
                              "\" is no address of rank 0's machine (", errno_text(last_error),
                              ")"));
  }
  return listeners;
}

Fd dial(const SocketAddress& address, const Deadline& deadline, int& error) {
  Fd fd = open_socket(address);
  error = errno;
  if (!fd) return Fd();
  // Keeps a port that a failed try is given from being in rank 0's way when it binds.
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR);
  error = 0;
  if (::connect(fd.get(), raw(address), address.num_bytes) != 0) {
    error = errno;
    // An interrupted connect goes on by itself, like one in progress.
    if (error != EINPROGRESS && error != EINTR) return Fd();
    pollfd waiting{fd.get(), POLLOUT, 0};
    do {
      wait_ready({&waiting, 1}, deadline);
    } while (waiting.revents == 0 && !deadline.passed());
    error = ETIMEDOUT;
    if (waiting.revents == 0) return Fd();
    socklen_t num_bytes = sizeof error;
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &num_bytes) != 0) error = errno;
    if (error != 0) return Fd();
  }
  error = ECONNREFUSED;
  if (is_connected_to_itself(fd.get())) return Fd();
  error = 0;
  set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY);
  set_option(fd.get(), SOL_SOCKET, SO_KEEPALIVE);
  return fd;
}

CapacityError descriptor_shortage(uint32_t rank, int error) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return CapacityError(str("rank ", rank, " has no descriptor for another peer: ",
                           errno_text(error), " (RLIMIT_NOFILE is ", limit.rlim_cur, ")"),
                       rank, limit.rlim_cur + 1, limit.rlim_cur);
}

Fd accept_from(int listener, uint32_t rank) {
  for (;;) {
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    const int error = errno;
    if (fd) {
      set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY);
      set_option(fd.get(), SOL_SOCKET, SO_KEEPALIVE);
      return fd;
    }
    if (error == EINTR || error == ECONNABORTED) continue;
    if (error == EMFILE || error == ENFILE) throw descriptor_shortage(rank, error);
    return Fd();  // nobody waits, or the network failed under a caller who will try again
  }
}

void wait_ready(std::span<pollfd> fds, const Deadline& deadline, double at_most_s) {
  const int bound_ms = static_cast<int>(std::ceil(at_most_s * 1e3));
  const int timeout_ms = std::min(deadline.poll_ms(), bound_ms);
  if (::poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR) {
    throw Error(str("poll of ", fds.size(), " sockets failed: ", errno_text(errno)));
  }
  deadline.ask();
}

}  // namespace ep::fabric
