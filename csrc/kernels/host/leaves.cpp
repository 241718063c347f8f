#include "kernels/host/leaves.hpp"

#include "kernels/host/simd_tables.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ep::kernels::host {
namespace {

struct Tables {
  const Leaves* entries[3];
  uint32_t count;
};

Tables detect_tables() {
  Tables t{{&kBaselineLeaves, nullptr, nullptr}, 1};
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks whether the operating system saves the wide registers.  It
  // does not know F16C in clang 14.
  uint32_t a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  if (!has_f16c || !__builtin_cpu_supports("avx2")) return t;
  t.entries[t.count++] = &kAvx2Leaves;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    t.entries[t.count++] = &kAvx512Leaves;
  }
#endif
  return t;
}

const Tables& tables() {
  static const Tables kTables = detect_tables();
  return kTables;
}

}  // namespace

const Leaves& leaves() {
  return *tables().entries[tables().count - 1];
}

uint32_t num_leaf_tables() {
  return tables().count;
}

const Leaves& leaf_table(uint32_t i) {
  return *tables().entries[i];
}

}  // namespace ep::kernels::host
