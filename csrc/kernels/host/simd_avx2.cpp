// Compiled with -mavx2 -mf16c.
#if defined(__x86_64__)
#define EP_SIMD_BYTES 32
#include "kernels/host/simd_body.hpp"
#include "kernels/host/simd_tables.hpp"

namespace ep::kernels::host {
constinit const Leaves kAvx2Leaves = make_leaves("avx2");
}  // namespace ep::kernels::host
#endif
