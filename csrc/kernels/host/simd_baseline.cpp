// Compiled with the target's own flags: SSE2 on x86-64, NEON on aarch64, 16-byte vectors anywhere.
#define EP_SIMD_BYTES 16
#include "kernels/host/simd_body.hpp"
#include "kernels/host/simd_tables.hpp"

namespace ep::kernels::host {
constinit const Leaves kBaselineLeaves = make_leaves("baseline");
}  // namespace ep::kernels::host
