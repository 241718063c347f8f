// The tables that simd_*.cpp define; only leaves.cpp decides which of them this CPU may enter.
#pragma once

#include "kernels/host/leaves.hpp"

namespace ep::kernels::host {

extern const Leaves kBaselineLeaves;
#if defined(__x86_64__)
extern const Leaves kAvx2Leaves;
extern const Leaves kAvx512Leaves;
#endif

}  // namespace ep::kernels::host
