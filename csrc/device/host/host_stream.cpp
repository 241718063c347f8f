#include "device/host/host_stream.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "device/host/host_event.hpp"
#include "ep/error.hpp"

namespace ep::device::host {

void HostStream::launch(const Launch& launch) {
  if (launch.num_blocks == 0 || launch.num_blocks > BlockTeam::kMaxBlocks) {
    throw Error("a launch has " + std::to_string(launch.num_blocks) + " blocks; 1 to " +
                std::to_string(BlockTeam::kMaxBlocks) + " can run");
  }
  if (launch.params.size() > kMaxParamsBytes) {
    throw Error("a launch has " + std::to_string(launch.params.size()) +
                " bytes of parameters; at most " + std::to_string(kMaxParamsBytes) + " fit");
  }
  const HostKernel kernel = find_kernel_(launch.kernel);
  if (kernel == nullptr) {
    throw Unsupported("the library has no CPU kernel for operation " +
                      std::to_string(static_cast<uint32_t>(launch.kernel.op)) +
                      " in this configuration");
  }
  state_->team().start(launch.num_blocks);
  state_->enqueue(state_, [&](StreamItem& item) {
    if (!launch.params.empty()) {
      std::memcpy(item.params.data(), launch.params.data(), launch.params.size());
    }
    item.job = {.kernel = kernel,
                .params = item.params.data(),
                .num_blocks = launch.num_blocks,
                .doorbell = launch.doorbell,
                .wait_policy = launch.wait_policy};
  });
}

void HostStream::call(std::function<void()> work) {
  state_->enqueue(state_, [&](StreamItem& item) { item.work = std::move(work); });
}

void HostStream::wait(std::shared_ptr<detail::EventImpl> event) {
  if (event->query()) return;
  const auto* own = dynamic_cast<const HostEvent*>(event.get());
  if (own != nullptr) own->require_own_process();
  if (own != nullptr && own->is_of(*state_)) return;  // the queue's order says it already
  state_->enqueue(state_, [&](StreamItem& item) { item.event = std::move(event); });
}

std::shared_ptr<detail::EventImpl> HostStream::record() {
  return make_pooled<HostEvent>(state_->allocator(), state_, state_->enqueued());
}

}  // namespace ep::device::host
