// NVRTC behind the library's core: what it makes of a unit, what it says no to, and how.
#include "jit/compile.hpp"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "support/nvrtc.hpp"

namespace ep::jit {
namespace {

constexpr const char* kSource = R"(#include "value.hpp"
extern "C" __global__ void kernel(int* out) { *out = kValue; }
)";
constexpr Header kHeaders[] = {{"value.hpp", "constexpr int kValue = 7;\n"}};
constexpr HeaderBundle kBundle{kHeaders, "one"};

Unit unit_of(const std::string& source, const HeaderBundle* headers = &kBundle) {
  return {.name = "kernel",
          .source = source,
          .arch = "sm_90a",
          .options = {"-std=c++20"},
          .headers = headers};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The text of the error that the call ends with; empty: it ends with none.
template <typename E, typename Call>
std::string text_of(Call call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return {};
}

TEST(Nvrtc, AMissingLibraryIsNamedTogetherWithWhatBringsIt) {
  const std::string text = text_of<Unsupported>([] { Nvrtc::open("/nowhere/libnvrtc.so.13"); });
  EXPECT_TRUE(contains(text, "/nowhere/libnvrtc.so.13")) << text;
  EXPECT_TRUE(contains(text, "pip install nvidia-cuda-nvrtc")) << text;
}

TEST(Nvrtc, ALibraryThatIsSomethingElseIsRefused) {
  const std::string text = text_of<Unsupported>([] { Nvrtc::open("libm.so.6"); });
  EXPECT_TRUE(contains(text, "lacks nvrtc")) << text;
}

TEST(Nvrtc, LooksWhereTheLoaderAndPipPutIt) {
  const std::vector<std::string> places = nvrtc_places("/site-packages/ep");
  ASSERT_EQ(places.size(), 2u);
  EXPECT_EQ(places[0], "libnvrtc.so.13");
  EXPECT_EQ(std::filesystem::path(places[1]).lexically_normal(),
            "/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
}

TEST(Nvrtc, TellsItsVersionAndItsPlace) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  EXPECT_GE(nvrtc->version().major, Nvrtc::kOldestMajor);
  EXPECT_TRUE(contains(nvrtc->path(), "libnvrtc.so." + std::to_string(nvrtc->version().major)));
}

TEST(Nvrtc, KnowsArchitecturesByTheirNumber) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  for (const char* arch : {"sm_90", "sm_90a", "sm_100f"})
    EXPECT_TRUE(nvrtc->knows(arch)) << arch;
  for (const char* arch : {"", "sm_", "sm_1", "sm_90ab", "compute_90", "90"})
    EXPECT_FALSE(nvrtc->knows(arch)) << arch;
}

TEST(Compile, MakesAKernelFromHeadersInMemory) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  const Kernel kernel = compile(*nvrtc, unit_of(kSource));
  ASSERT_GE(kernel.cubin.size(), 4u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(kernel.cubin.data()), 4),
            "\x7F"
            "ELF");
  EXPECT_TRUE(contains(kernel.ptx, ".entry kernel("));
  EXPECT_GT(kernel.use.registers, 0u);
  EXPECT_EQ(kernel.use.spill_store_bytes + kernel.use.spill_load_bytes, 0u);
  EXPECT_GT(kernel.seconds, 0.0);
}

TEST(Compile, AnErrorCarriesTheLogAndTheSource) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  const Unit unit = unit_of("extern \"C\" __global__ void kernel() {\n  undeclared();\n}\n");
  const std::string text = text_of<CompileError>([&] { compile(*nvrtc, unit); });
  for (const char* part : {"does not compile kernel", "sm_90a", "kernel.cu(2): error",
                           "identifier \"undeclared\" is undefined", "2\t  undeclared();"})
    EXPECT_TRUE(contains(text, part)) << part << " is not in\n" << text;
}

// Nothing but the bundle: not the folder of the process, not the source tree.
TEST(Compile, AHeaderThatIsNotInTheBundleIsNotFoundElsewhere) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(std::filesystem::path(EP_SOURCE_DIR) / "csrc");
  const std::string text =
      text_of<CompileError>([&] { compile(*nvrtc, unit_of("#include \"common/target.hpp\"\n")); });
  std::filesystem::current_path(before);
  EXPECT_TRUE(contains(text, "common/target.hpp")) << text;
}

TEST(Compile, AnUnknownArchitectureIsUnsupported) {
  const auto nvrtc = test::open_nvrtc();
  EP_NEEDS_NVRTC(nvrtc);
  Unit unit = unit_of(kSource);
  unit.arch = "sm_13";
  const std::string text = text_of<Unsupported>([&] { compile(*nvrtc, unit); });
  EXPECT_TRUE(contains(text, "sm_13") && contains(text, nvrtc->path())) << text;
}

TEST(Key, IsTheSameForTheSameUnit) {
  EXPECT_EQ(key_of(unit_of(kSource), {13, 0}), key_of(unit_of(kSource), {13, 0}));
  EXPECT_EQ(key_of(unit_of(kSource), {13, 0}).size(), 32u);
}

TEST(Key, ChangesWithEverythingThatChangesTheKernel) {
  const std::string key = key_of(unit_of(kSource), {13, 0});
  EXPECT_NE(key_of(unit_of(kSource), {13, 1}), key);
  EXPECT_NE(key_of(unit_of(std::string(kSource) + "\n"), {13, 0}), key);
  constexpr HeaderBundle kOther{kHeaders, "two"};
  EXPECT_NE(key_of(unit_of(kSource, &kOther), {13, 0}), key);
  Unit unit = unit_of(kSource);
  unit.arch = "sm_100f";
  EXPECT_NE(key_of(unit, {13, 0}), key);
  unit = unit_of(kSource);
  unit.options.push_back("--fmad=false");
  EXPECT_NE(key_of(unit, {13, 0}), key);
  unit = unit_of(kSource);
  unit.options = {"-std=c++2", "0"};  // the same letters
  EXPECT_NE(key_of(unit, {13, 0}), key);
}

}  // namespace
}  // namespace ep::jit
