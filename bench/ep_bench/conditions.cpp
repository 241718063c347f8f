#include "bench/ep_bench/conditions.hpp"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <string_view>

#include <sched.h>
#include <sys/utsname.h>

namespace ep::bench {
namespace {

// The value of the first line of /proc/cpuinfo that begins with `key`.
std::string cpuinfo(std::string_view key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string::npos) {
      return line.substr(std::min(colon + 2, line.size()));
    }
  }
  return {};
}

bool has_all(const std::string& flags, std::initializer_list<const char*> names) {
  const std::string padded = " " + flags + " ";
  return std::all_of(names.begin(), names.end(), [&](const char* name) {
    return padded.find(std::string(" ") + name + " ") != std::string::npos;
  });
}

}  // namespace

Conditions find_conditions() {
  Conditions found;
  utsname system{};
  uname(&system);
  found.kernel = system.release;
  found.cpu = cpuinfo("model name");
  if (found.cpu.empty()) found.cpu = system.machine;
  const std::string flags = cpuinfo("flags");
  if (has_all(flags, {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "fma"})) {
    found.isa = "avx512";
  } else if (has_all(flags, {"avx2", "f16c", "fma"})) {
    found.isa = "avx2";
  } else {
    found.isa = "baseline";
  }
  found.num_cores = num_usable_cores();
  return found;
}

uint32_t num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1u, static_cast<uint32_t>(CPU_COUNT(&cores)));
}

}  // namespace ep::bench
