// Sockets: addresses, listening, dialling, waiting.  All are non-blocking and close-on-exec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include "ep/error.hpp"
#include "fabric/host/deadline.hpp"
#include "fabric/host/fd.hpp"

namespace ep::fabric {

std::string errno_text(int error);

// "host:port", "1.2.3.4:port" or "[ipv6]:port", taken apart.
struct HostPort {
  std::string host, port;
};

// Throws InvalidArgument naming `address` and what is wrong with it.
HostPort parse_address(const std::string& address);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t num_bytes = 0;
};

// What the host is called on the network, in the resolver's order, each once.  Empty when the
// resolver asks to be called again later.  Throws InvalidArgument when there is no such host.
std::vector<SocketAddress> resolve(const HostPort& place);

// Listens at every address of the host that this machine has.  A name may mean several
// ("localhost": ::1 and 127.0.0.1), and callers may try any of them first, where another job must
// not sit.  Throws InvalidArgument when an address is taken or none is of this machine.
std::vector<Fd> listen_at(const HostPort& place);

// Connects; on failure the result is empty and `error` says why.
Fd dial(const SocketAddress& address, const Deadline& deadline, int& error);

// The next waiting connection; empty when there is none.  Throws CapacityError of `rank`, who
// listens, when the process has no descriptor left.
Fd accept_from(int listener, uint32_t rank);

// What `rank` throws where a call failed with EMFILE or ENFILE.
CapacityError descriptor_shortage(uint32_t rank, int error);

// Polls until something is ready, the deadline or `at_most_s` has passed, or the deadline's interrupt
// is to be asked; a signal may end it early too.  Throws Interrupted.
void wait_ready(std::span<pollfd> fds, const Deadline& deadline, double at_most_s = 1e6);

}  // namespace ep::fabric
