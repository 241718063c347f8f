// Who a rank is: its node, its process, its user.
#pragma once

#include <cstdint>
#include <string>

namespace ep::fabric {

// Travels as bytes; no padding.
struct Identity {
  char boot_id[40];  // of the kernel
  uint64_t net_namespace_device, net_namespace_inode;
  uint64_t pid_namespace_device, pid_namespace_inode;
  uint64_t pid, start_time;  // the start time tells a process from a later one of the same number
  uint64_t user;
};
static_assert(sizeof(Identity) == 96);

// Of the process that `rank` runs in.  Throws Unsupported when /proc does not tell, CapacityError
// of `rank` when there is no descriptor to read it with.
Identity this_process(uint32_t rank);

bool is_same_process(const Identity& a, const Identity& b);

// Why windows of `a` and `b` cannot be shared; empty when they can.
std::string why_apart(const Identity& a, const Identity& b);

}  // namespace ep::fabric
