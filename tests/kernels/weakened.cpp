// Shows that the tests would notice a weaker protocol: two ranks dispatch through the library's own kernel
// bodies, on a Coop in which one thing is taken away.
//
//   weakened intact    nothing is: exits 0
//   weakened release   64-bit system-scope releases (records, channel words) are relaxed: ThreadSanitizer ends it
//   weakened wait      no wait waits: the call fails, or rows are missing
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "buffer/buffer_impl.hpp"
#include "device/host/host_device.hpp"
#include "device/host/worker.hpp"
#include "ep/ep.hpp"
#include "kernels/dispatch.cuh"
#include "kernels/turns.cuh"

namespace {

using ep::device::host::HostWorker;
using ep::kernels::Order;
using ep::kernels::Scope;

// Releases of flags that peers read order nothing.
struct NoRelease : HostWorker {
  explicit NoRelease(const HostWorker& worker) : HostWorker(worker) {}
  template <Order kOrder, Scope kScope, typename T>
  static void store(T* word, std::type_identity_t<T> value) {
    constexpr bool kWeaken =
        kOrder == Order::kRelease && kScope == Scope::kSystem && sizeof(T) == 8;
    HostWorker::store<kWeaken ? Order::kRelaxed : kOrder, kScope, T>(word, value);
  }
};

// Every condition that a wait looks at seems to hold.
struct NoWait : HostWorker {
  explicit NoWait(const HostWorker& worker) : HostWorker(worker) {}
  template <typename T>
  static T uniform(T value) {
    if constexpr (std::is_same_v<T, bool>) return true;
    return value;
  }
};

struct Intact : HostWorker {
  explicit Intact(const HostWorker& worker) : HostWorker(worker) {}
};

constexpr ep::kernels::DispatchConfig kConfig{};  // "rank", bytes

template <class Coop>
void run_dispatch(HostWorker& worker, const void* params) {
  ep::kernels::dispatch<kConfig>(Coop(worker),
                                 *static_cast<const ep::kernels::DispatchParams*>(params));
}

void run_close(HostWorker& worker, const void* params) {
  ep::kernels::close(worker, *static_cast<const ep::kernels::CloseParams*>(params));
}

template <class Coop>
ep::device::host::HostKernel find(const ep::kernels::KernelKey& key) {
  if (key.op == ep::kernels::KernelOp::kDispatch) return &run_dispatch<Coop>;
  return key.op == ep::kernels::KernelOp::kClose ? &run_close : nullptr;
}

constexpr int64_t kTokens = 64, kHidden = 64, kRounds = 50;

// Every token goes to both ranks.  True: all rows of every round were right.
bool run_rank(std::shared_ptr<ep::Communicator> group, ep::device::host::FindKernel kernels) {
  ep::buffer::Environment environment = ep::buffer::host_environment();
  environment.device = std::make_shared<ep::device::host::HostDevice>(kernels);
  ep::BufferConfig config;
  config.num_experts = 2;
  config.num_topk = 2;
  config.hidden = kHidden;
  config.max_tokens_per_rank = kTokens;
  config.timeout_s = 20;
  ep::EPBuffer buffer = ep::BufferAccess::create(group, config, environment);
  bool good = true;
  for (int64_t round = 0; good && round < kRounds; ++round) {
    std::vector<float> x(kTokens * kHidden, static_cast<float>(1 + 100 * round + buffer.rank()));
    std::vector<int32_t> idx(kTokens * 2);
    for (size_t i = 0; i < idx.size(); ++i)
      idx[i] = static_cast<int32_t>(i % 2);
    ep::DispatchArgs args;
    args.x = ep::Tensor::contiguous(x.data(), ep::DType::kFloat32, {kTokens, kHidden});
    args.topk_idx = ep::Tensor::contiguous(idx.data(), ep::DType::kInt32, {kTokens, 2});
    const ep::DispatchResult out = buffer.dispatch(args);
    const auto* rows = static_cast<const float*>(out.x.data);
    const auto* source = static_cast<const int32_t*>(out.source.data);
    good = out.num_rows == 2 * kTokens;
    for (int64_t row = 0; good && row < 2 * kTokens; ++row) {
      good =
          source[2 * row] == row / kTokens && source[2 * row + 1] == row % kTokens &&
          rows[row * kHidden + kHidden - 1] == static_cast<float>(1 + 100 * round + row / kTokens);
    }
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 2 ? argv[1] : "";
  const ep::device::host::FindKernel kernels = what == "intact"    ? &find<Intact>
                                               : what == "release" ? &find<NoRelease>
                                               : what == "wait"    ? &find<NoWait>
                                                                   : nullptr;
  if (kernels == nullptr) {
    std::fprintf(stderr, "usage: weakened intact|release|wait\n");
    return 2;
  }
  std::vector<std::thread> threads;
  bool good[2] = {};
  const auto groups = ep::Communicator::threads(2);
  for (uint32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        good[r] = run_rank(groups[r], kernels);
      } catch (const std::exception& error) {
        std::printf("rank %u: %s\n", r, error.what());
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  std::printf("%s: %s\n", what.c_str(), good[0] && good[1] ? "every row is right" : "noticed");
  return good[0] && good[1] ? 0 : 1;
}
