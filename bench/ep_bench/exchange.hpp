// One rank's calls: a buffer, the data, and each contender as prepare, run, release.
#pragma once

#include <cstdint>

#include "bench/ep_bench/case.hpp"
#include "bench/ep_bench/contender.hpp"
#include "bench/ep_bench/rank_data.hpp"
#include "ep/ep.hpp"

namespace ep::bench {

// `allocator` empty: the library's.
BufferConfig buffer_config(const Case& kase,
                           std::function<std::shared_ptr<void>(uint64_t)> allocator = {});

class Exchange {
 public:
  // Collective: dispatches once, for the handle that combine and replay need.
  // Throws std::runtime_error when the number of rows is not what the routing says.
  Exchange(EPBuffer& buffer, RankData& data);

  void prepare(Contender c);  // not measured
  void run(Contender c);      // measured; synchronous
  void release();             // drops what the contender made

  // Waits for `out`'s event only with async_op.
  DispatchResult dispatch(bool replays, bool async_op = false);
  CombineResult combine(const Tensor& rows, const Handle& handle, bool async_op = false);
  // Window memory that holds the answers.
  Tensor filled_expert_output();

  const Handle& handle() const { return handle_; }
  const DispatchResult& dispatched() const { return dispatched_; }
  const CombineResult& combined() const { return combined_; }
  uint64_t num_rows() const { return data_.rows.rows.size(); }

 private:
  EPBuffer& buffer_;
  RankData& data_;
  Handle handle_;
  Tensor expert_output_;
  DispatchResult dispatched_;
  CombineResult combined_;
};

}  // namespace ep::bench
