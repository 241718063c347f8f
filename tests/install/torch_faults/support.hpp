// What the tests of ep/torch.hpp share.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "ep/ep.hpp"
#include "ep/torch.hpp"

// The text of the E that `call` throws; empty, and a failure, when it throws none.
template <class E>
std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error than wanted: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

inline void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << '"' << text << "\" lacks \"" << part << '"';
}

// 1, 2, 3, ... in [rows, columns]
inline at::Tensor counting(int64_t rows, int64_t columns, c10::ScalarType type = at::kFloat) {
  return at::arange(1, rows * columns + 1, at::TensorOptions().dtype(type)).view({rows, columns});
}

inline const ep::BufferConfig kConfig{
    .num_experts = 4, .num_topk = 2, .hidden = 8, .max_tokens_per_rank = 16, .timeout_s = 20.0};

inline void with_ranks(uint32_t num_ranks,
                       const std::function<void(ep::EPBuffer&)>& body,
                       const ep::BufferConfig& config = kConfig) {
  std::vector<std::thread> ranks;
  for (const auto& group : ep::Communicator::threads(num_ranks))
    ranks.emplace_back([&, group] {
      try {
        ep::EPBuffer buffer(group, config);
        body(buffer);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << group->rank() << ": " << error.what();
      }
    });
  for (std::thread& rank : ranks)
    rank.join();
}

// Three tokens: two experts, one, none.
inline at::Tensor routing(c10::ScalarType type = at::kLong) {
  return at::tensor({0, 3, 2, -1, -1, -1}, at::TensorOptions().dtype(type)).view({3, 2});
}

inline ep::DispatchArgs call_with(const at::Tensor& x, const at::Tensor& ids = routing()) {
  ep::DispatchArgs args;
  args.x = ep::from_torch(x, "x");
  args.topk_idx = ep::from_torch(ids, "topk_idx");
  return args;
}
