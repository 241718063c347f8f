// The NVRTC that tests labelled rtc compile with.
#pragma once

#include <memory>

#include "jit/nvrtc.hpp"

namespace ep::test {

// Null where CMake found none: the test then skips, and says so.
inline std::shared_ptr<const jit::Nvrtc> open_nvrtc() {
  const std::string path = EP_TEST_NVRTC;
  return path.empty() ? nullptr : jit::Nvrtc::open(path);
}

}  // namespace ep::test

#define EP_NEEDS_NVRTC(nvrtc) \
  if ((nvrtc) == nullptr)     \
  GTEST_SKIP() << "needs NVRTC: pip install -r requirements/dev.txt brings it with torch"
