// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c.
#if defined(__x86_64__)
#define EP_SIMD_BYTES 64
#include "kernels/host/simd_body.hpp"
#include "kernels/host/simd_tables.hpp"

namespace ep::kernels::host {
constinit const Leaves kAvx512Leaves = make_leaves("avx512");
}  // namespace ep::kernels::host
#endif
