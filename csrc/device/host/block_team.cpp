#include "device/host/block_team.hpp"

#include "device/host/thread.hpp"

namespace ep::device::host {

void BlockTeam::start(uint32_t num_blocks) {
  // Acquire: whoever queues a launch after this look passes the helpers on to the stream's worker.
  if (num_helpers_.load(std::memory_order_acquire) + 1 >= num_blocks) return;
  const std::lock_guard lock(starting_);
  for (uint32_t i = num_helpers_.load(std::memory_order_relaxed); i + 1 < num_blocks; ++i) {
    helpers_[i] = std::make_unique<Helper>();
    Helper& helper = *helpers_[i];
    helper.thread = start_thread("ep-block", [this, &helper, i] { help(helper, i + 1); });
    num_helpers_.store(i + 1, std::memory_order_release);
  }
}

void BlockTeam::run(const BlockJob& job) noexcept {
  const uint32_t num_helpers = job.num_blocks - 1;
  remaining_.store(num_helpers, std::memory_order_relaxed);
  for (uint32_t i = 0; i < num_helpers; ++i) {
    helpers_[i]->job.store(&job, std::memory_order_release);
    ring(helpers_[i]->doorbell);
  }
  job.run_block(0);
  Backoff backoff(&done_, job.wait_policy);
  while (remaining_.load(std::memory_order_acquire) != 0)
    backoff.step();
}

void BlockTeam::stop() noexcept {
  const uint32_t num_helpers = num_helpers_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < num_helpers; ++i) {
    helpers_[i]->job.store(&stop_, std::memory_order_release);
    ring(helpers_[i]->doorbell);
  }
  for (uint32_t i = 0; i < num_helpers; ++i)
    helpers_[i]->thread.join();
}

void BlockTeam::help(Helper& helper, uint32_t block) noexcept {
  WaitPolicy idle_policy{};
  while (true) {
    const BlockJob* job = nullptr;
    {
      Backoff backoff(&helper.doorbell, idle_policy);
      while ((job = helper.job.load(std::memory_order_acquire)) == nullptr)
        backoff.step();
    }
    if (job == &stop_) return;
    helper.job.store(nullptr, std::memory_order_relaxed);
    idle_policy = job->wait_policy;
    job->run_block(block);
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1) ring(done_);
  }
}

}  // namespace ep::device::host
