// The units that are compiled for GPUs: one per kernel, complete in themselves.
#include "device/cuda/kernel_source.hpp"

#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "device/host/host_kernels.hpp"
#include "kernels/all_kernels.hpp"

namespace ep::device::cuda {
namespace {

using kernels::kAllKernels;
using kernels::KernelKey;
using kernels::KernelOp;

TEST(AllKernels, AreDifferentOnesAndExistForCpus) {
  std::set<std::string> names, keys;
  std::set<host::HostKernel> functions;
  for (const KernelKey& key : kAllKernels) {
    EXPECT_EQ(kernels::canonical(key), key) << kernel_name(key);
    names.insert(kernel_name(key));
    keys.insert(jit::key_of(kernel_unit(key, "sm_90a"), {13, 0}));
    functions.insert(host::find_kernel(key));
  }
  EXPECT_EQ(names.size(), kAllKernels.size());
  EXPECT_EQ(keys.size(), kAllKernels.size());
  EXPECT_EQ(functions.size(), kAllKernels.size());
  EXPECT_FALSE(functions.contains(nullptr));
}

// Every value of every field: none is left out of the list, and none that is read is dropped.
TEST(AllKernels, EveryKeyNamesOne) {
  for (int layout = 0; layout < 2; ++layout) {
    for (int element = 0; element < 3; ++element) {
      for (int other = 0; other < 4; ++other) {
        const auto kind = static_cast<kernels::LayoutKind>(layout);
        const auto in = static_cast<kernels::Element>(element);
        const auto format = static_cast<kernels::Format>(other);
        EXPECT_NE(host::find_kernel({KernelOp::kDispatch, {kind, format, in}, {}}), nullptr);
        if (other == 3) continue;
        const auto out = static_cast<kernels::Element>(other);
        EXPECT_NE(host::find_kernel({KernelOp::kCombine, {}, {kind, in, out}}), nullptr);
      }
    }
  }
  const KernelKey beyond{KernelOp::kCombine, {}, {.in = static_cast<kernels::Element>(3)}};
  EXPECT_EQ(host::find_kernel(beyond), nullptr);
}

TEST(KernelSource, IsWhatAPersonWouldWrite) {
  const KernelKey key{
      KernelOp::kDispatch,
      {kernels::LayoutKind::kExpert, kernels::Format::kFp8Block128, kernels::Element::kFP16},
      {}};
  EXPECT_EQ(kernel_name(key), "dispatch-expert-fp8_block128-fp16");
  EXPECT_EQ(kernel_unit(key, "sm_90a").source, R"(#include "device/cuda/warp.cuh"
#include "kernels/dispatch.cuh"
using namespace ep::kernels;
extern "C" __global__ void __launch_bounds__(1024, 1)
ep_dispatch(const __grid_constant__ DispatchParams params) {
  dispatch<DispatchConfig{LayoutKind::kExpert, Format::kFp8Block128, Element::kFP16}>(ep::device::cuda::Warp{}, params);
}
)");
}

TEST(KernelHeaders, AreTheFilesToTheByte) {
  const std::filesystem::path root = std::filesystem::path(EP_SOURCE_DIR) / "csrc";
  const jit::HeaderBundle& bundle = kernel_headers();
  EXPECT_EQ(bundle.hash.size(), 64u);
  size_t num_bytes = 0;
  for (const jit::Header& header : bundle.headers) {
    std::ifstream file(root / header.name, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_FALSE(text.empty()) << header.name;
    EXPECT_TRUE(header.text == text) << header.name;
    num_bytes += text.size();
  }
  EXPECT_LT(num_bytes, 512u * 1024) << "the library carries them";
}

}  // namespace
}  // namespace ep::device::cuda
