#include "fabric/host/identity.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string_view>

#include <sys/stat.h>
#include <unistd.h>

#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/host/socket.hpp"

namespace ep::fabric {
namespace {

std::string read_line(const char* path, uint32_t rank) {
  errno = 0;
  std::ifstream file(path);
  if (errno == EMFILE || errno == ENFILE) throw descriptor_shortage(rank, errno);
  std::string line;
  if (!std::getline(file, line))
    throw Unsupported(str(path, " cannot be read; windows need /proc"));
  return line;
}

void stat_namespace(const char* path, uint64_t& device, uint64_t& inode) {
  struct stat info {};
  if (::stat(path, &info) != 0) {
    throw Unsupported(str(path, ": ", errno_text(errno), "; windows need /proc"));
  }
  device = info.st_dev;
  inode = info.st_ino;
}

// Field 22 of /proc/self/stat; field 2, the name, may hold spaces but ends at the last parenthesis.
uint64_t start_time(uint32_t rank) {
  const std::string line = read_line("/proc/self/stat", rank);
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i)
    fields >> field;
  if (!fields) throw Unsupported("/proc/self/stat has no start time");
  return std::stoull(field);
}

std::string_view boot_id(const Identity& identity) {
  return {identity.boot_id, sizeof identity.boot_id};
}

}  // namespace

Identity this_process(uint32_t rank) {
  Identity identity{};
  const std::string boot = read_line("/proc/sys/kernel/random/boot_id", rank);
  std::copy_n(boot.begin(), std::min(boot.size(), sizeof identity.boot_id), identity.boot_id);
  stat_namespace("/proc/self/ns/net", identity.net_namespace_device, identity.net_namespace_inode);
  stat_namespace("/proc/self/ns/pid", identity.pid_namespace_device, identity.pid_namespace_inode);
  identity.pid = static_cast<uint64_t>(::getpid());
  identity.start_time = start_time(rank);
  identity.user = ::geteuid();
  return identity;
}

bool is_same_process(const Identity& a, const Identity& b) {
  return boot_id(a) == boot_id(b) && a.pid_namespace_device == b.pid_namespace_device &&
         a.pid_namespace_inode == b.pid_namespace_inode && a.pid == b.pid &&
         a.start_time == b.start_time;
}

std::string why_apart(const Identity& a, const Identity& b) {
  if (boot_id(a) != boot_id(b)) return "they are on different machines";
  if (a.net_namespace_device != b.net_namespace_device ||
      a.net_namespace_inode != b.net_namespace_inode) {
    return "they are in different network namespaces (containers) of one machine";
  }
  if (a.user != b.user) return str("they run as different users (", a.user, " and ", b.user, ")");
  return "";
}

}  // namespace ep::fabric
