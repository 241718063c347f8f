// What a kernel needs is read from logs as compilers write them.
#include "jit/ptxas_log.hpp"

#include <gtest/gtest.h>

#include "ep/error.hpp"

namespace ep::jit {
namespace {

// NVRTC 13.0, a kernel that calls a function of its own.
constexpr const char* kTwoFunctions = R"(ptxas info    : 193 bytes gmem
ptxas info    : Compiling entry function 'ep_close' for 'sm_90a'
ptxas info    : Function properties for ep_close
ptxas         .     288 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 29 registers, used 1 barriers, 304 bytes cumulative stack size, 64 bytes smem
ptxas info    : Compile time = 23.063 ms
ptxas info    : Function properties for _ZN2ep7kernels12write_poisonEv
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
)";

// nvcc 12, one function.
constexpr const char* kOneFunction = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 360 bytes cmem[0]
)";

TEST(PtxasLog, AddsUpTheSpillsOfAllFunctions) {
  const ResourceUse expected{.registers = 29,
                             .spill_store_bytes = 12,
                             .spill_load_bytes = 12,
                             .stack_bytes = 304,
                             .shared_bytes = 64};
  EXPECT_EQ(parse_ptxas_log(kTwoFunctions), expected);
}

TEST(PtxasLog, WhatIsNotThereIsZero) {
  EXPECT_EQ(parse_ptxas_log(kOneFunction), ResourceUse{.registers = 12});
}

TEST(PtxasLog, ALogThatDoesNotTellIsAnError) {
  for (const char* log :
       {"", "ptxas info    : Used 12 registers\n", "0 bytes spill stores, 0 bytes spill loads\n"}) {
    EXPECT_THROW(parse_ptxas_log(log), Error) << log;
  }
}

}  // namespace
}  // namespace ep::jit
