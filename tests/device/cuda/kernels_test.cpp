// Every kernel compiles for every GPU that is supported, and needs no more than was planned.
//
// ctest runs this program as several shards side by side: NVRTC serialises the threads of a process.
#include <cctype>
#include <regex>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "device/cuda/kernel_source.hpp"
#include "jit/compile.hpp"
#include "kernels/all_kernels.hpp"
#include "support/nvrtc.hpp"

namespace ep::device::cuda {
namespace {

using kernels::kAllKernels;
using kernels::KernelKey;
using kernels::KernelOp;

constexpr const char* kArchs[] = {"sm_90a", "sm_100f"};
// With more, a launch of kMaxBlockThreads would not fit an SM.
constexpr uint32_t kMaxRegisters = 64;

using Case = std::tuple<const char*, KernelKey>;

class Kernels : public testing::TestWithParam<Case> {};

bool moves_whole_rows(const KernelKey& key) {
  return key.op != KernelOp::kRefuse && key.op != KernelOp::kClose;
}

bool has(const std::string& ptx, const char* pattern) {
  return std::regex_search(ptx, std::regex(pattern, std::regex::optimize));
}

TEST_P(Kernels, NeedsNoMoreThanPlanned) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  const auto& [arch, key] = GetParam();
  const jit::Kernel kernel = jit::compile(*nvrtc, kernel_unit(key, arch));
  EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log;
  EXPECT_EQ(kernel.use.spill_store_bytes, 0u) << kernel.log;
  EXPECT_EQ(kernel.use.spill_load_bytes, 0u) << kernel.log;
  EXPECT_LE(kernel.use.registers, kMaxRegisters);
  EXPECT_NE(kernel.ptx.find(".entry " + kernel_entry(key) + "("), std::string::npos);
  // An acquire does not invalidate what ld.global.nc has cached.
  EXPECT_FALSE(has(kernel.ptx, R"(\bld\.[\w.:]*\bnc\b)"));
  if (moves_whole_rows(key)) {
    EXPECT_TRUE(has(kernel.ptx, R"(\bld\.(global\.)?(v2\.[ub]64|v4\.[ub]32)\b)"));
    EXPECT_TRUE(has(kernel.ptx, R"(\bst\.(global\.)?(v2\.[ub]64|v4\.[ub]32)\b)"));
  }
  RecordProperty("registers", static_cast<int>(kernel.use.registers));
  RecordProperty("milliseconds", static_cast<int>(kernel.seconds * 1e3));
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const auto& [arch, key] = info.param;
  std::string name = std::string(arch) + "_" + kernel_name(key);
  for (char& c : name)
    c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(All,
                         Kernels,
                         testing::Combine(testing::ValuesIn(kArchs),
                                          testing::ValuesIn(kAllKernels)),
                         name_of);

}  // namespace
}  // namespace ep::device::cuda
