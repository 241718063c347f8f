// The threads that run the blocks of one stream's launches.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "common/doorbell.hpp"
#include "device/host/host_kernels.hpp"
#include "ep/config.hpp"

namespace ep::device::host {

// A launch as its blocks see it.
struct BlockJob {
  HostKernel kernel = nullptr;
  const void* params = nullptr;
  uint32_t num_blocks = 0;
  Doorbell* doorbell = nullptr;
  WaitPolicy wait_policy{};

  void run_block(uint32_t block) const {
    HostWorker worker(block, num_blocks, doorbell, wait_policy);
    kernel(worker, params);
  }
};

// Blocks spin on each other, so each has a thread of its own: block 0 the caller's, block i helper
// i - 1.  Helpers are started on demand and kept.
//
// State:    helper.job, the job it shall run or null; remaining_, helpers still in the job.
// Writers:  run() sets remaining_, then each helper's job (release), then rings; a helper clears its
//           job, runs its block, then counts itself off (acq_rel), and the last one rings done_.
// Readers:  a helper waits for a job (acquire); run() waits for remaining_ == 0 (acquire), after
//           which no helper touches the job: it may live on run()'s stack.
// Lifetime: start() happens before the run() that needs it, stop() is the last call of all.
class BlockTeam {
 public:
  static constexpr uint32_t kMaxBlocks = 64;

  // Any thread: makes sure that a launch of `num_blocks` can run.  Throws Error without a thread.
  void start(uint32_t num_blocks);

  // One thread, the stream's worker: runs all blocks and returns when all have returned.
  void run(const BlockJob& job) noexcept;
  // The same thread: ends and joins the helpers.
  void stop() noexcept;

 private:
  struct Helper {
    Doorbell doorbell{};
    std::atomic<const BlockJob*> job{nullptr};
    std::thread thread{};
  };

  void help(Helper& helper, uint32_t block) noexcept;

  const BlockJob stop_{};  // its address tells a helper to end
  std::mutex starting_{};
  std::atomic<uint32_t> num_helpers_{0};  // written under starting_
  std::array<std::unique_ptr<Helper>, kMaxBlocks - 1> helpers_{};
  Doorbell done_{};
  std::atomic<uint32_t> remaining_{0};
};

}  // namespace ep::device::host
