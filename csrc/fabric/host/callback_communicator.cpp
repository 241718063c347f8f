// Communicator::callbacks and Communicator::single.
#include <algorithm>
#include <utility>

#include "common/text.hpp"
#include "ep/communicator.hpp"
#include "ep/error.hpp"
#include "fabric/host/verdict.hpp"

namespace ep {
namespace {

class CallbackCommunicator final : public Communicator {
 public:
  CallbackCommunicator(uint32_t rank, uint32_t num_ranks, AllGather all_gather)
      : rank_(rank), num_ranks_(num_ranks), all_gather_(std::move(all_gather)) {}

  uint32_t rank() const override { return rank_; }
  uint32_t num_ranks() const override { return num_ranks_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) override {
    fabric::check_contribution(mine);
    std::vector<Bytes> by_rank = all_gather_(mine, timeout_s);
    if (by_rank.size() != num_ranks_) {
      throw InvalidArgument(str("all_gather callback returned ", by_rank.size(),
                                " elements; num_ranks=", num_ranks_));
    }
    // The commonest mistake of such a callback is another order.
    if (!std::equal(by_rank[rank_].begin(), by_rank[rank_].end(), mine.begin(), mine.end())) {
      throw InvalidArgument(str("all_gather callback: element ", rank_, " of ",
                                by_rank[rank_].size(), " bytes is not what rank ", rank_, " gave (",
                                mine.size(), " bytes)"));
    }
    return by_rank;
  }

 private:
  uint32_t rank_, num_ranks_;
  AllGather all_gather_;
};

}  // namespace

std::shared_ptr<Communicator> Communicator::callbacks(uint32_t rank,
                                                      uint32_t num_ranks,
                                                      AllGather all_gather) {
  fabric::check_ranks(rank, num_ranks);
  if (!all_gather) throw InvalidArgument("all_gather: the callback is empty");
  return std::make_shared<CallbackCommunicator>(rank, num_ranks, std::move(all_gather));
}

std::shared_ptr<Communicator> Communicator::single() {
  return callbacks(0, 1, [](std::span<const std::byte> mine, double) {
    return std::vector<Bytes>{Bytes(mine.begin(), mine.end())};
  });
}

std::shared_ptr<Communicator> Communicator::from_nccl(void* /*nccl_comm*/) {
  throw Unsupported(
      "from_nccl: this version has no GPU path; Communicator::tcp, threads or callbacks do on "
      "CPUs");
}

}  // namespace ep
