// Two ranks as threads exchange numbers that depend on `seed`; what comes home is compared.
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ep/ep.hpp"
#include "ep/version.hpp"

namespace {

bool exchange(std::shared_ptr<ep::Communicator> group, int seed) {
  ep::EPBuffer buffer(group,
                      {.num_experts = 2, .num_topk = 2, .hidden = 8, .max_tokens_per_rank = 4});
  std::vector<float> tokens(4 * 8, static_cast<float>(seed) + static_cast<float>(buffer.rank()));
  std::vector<int32_t> experts = {0, 1, 1, 0, 1, -1, -1, -1};
  ep::DispatchArgs args;
  args.x = ep::Tensor::contiguous(tokens.data(), ep::DType::kFloat32, {4, 8});
  args.topk_idx = ep::Tensor::contiguous(experts.data(), ep::DType::kInt32, {4, 2});
  const ep::DispatchResult rows = buffer.dispatch(args);
  const ep::CombineResult home = buffer.combine({.x = rows.x, .handle = &rows.handle});
  const auto* y = static_cast<const float*>(home.x.data);
  const float x = tokens[0];
  bool is_good = y[0] == 2 * x && y[8] == 2 * x && y[16] == x && y[24] == 0.0f;
  try {
    experts[0] = 7;
    if (buffer.rank() == 1) experts[0] = 0;
    buffer.dispatch(args);
    is_good = false;
  } catch (const ep::InvalidArgument&) {  // the type that the other plugin has too
    is_good &= buffer.rank() == 0;
  } catch (const ep::PeerError& error) {
    is_good &= buffer.rank() == 1 && error.peers == std::vector<uint32_t>{0};
  }
  return is_good;
}

}  // namespace

extern "C" const char* plugin_version() {
  return ep::version();
}

// 0: all came home as it should.
extern "C" int plugin_run(int seed) {
  int good = 0;
  std::vector<char> results(2, 0);
  std::vector<std::thread> ranks;
  for (const auto& group : ep::Communicator::threads(2))
    ranks.emplace_back([&, group] {
      try {
        results[group->rank()] = exchange(group, seed);
      } catch (const std::exception&) {
      }
    });
  for (std::thread& rank : ranks)
    rank.join();
  for (const char result : results)
    good += result;
  return good == 2 ? 0 : 1;
}
