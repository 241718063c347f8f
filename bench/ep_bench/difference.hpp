// Says where two results differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bench/ep_bench/rank_data.hpp"
#include "bench/ep_bench/text.hpp"
#include "ep/ep.hpp"

namespace ep::bench {

class Difference : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename T>
const T& element(const Tensor& t, uint64_t i, uint64_t j = 0) {
  const int64_t at = static_cast<int64_t>(i) * t.strides[0] +
                     (t.num_dims > 1 ? static_cast<int64_t>(j) * t.strides[1] : 0);
  return static_cast<const T*>(t.data)[at];
}

template <typename T>
void expect_equal(const T& got, const T& expected, const std::string& where) {
  if (got != expected) {
    throw Difference(str("verify: ", where, " is ", got, ", expected ", expected));
  }
}

void expect_dtype(const Tensor& t, DType dtype, const char* what, const char* name);
void expect_shape(
    const Tensor& t, uint64_t rows, uint64_t columns, const char* what, const char* name);

// Row `i` of `t` against the bytes of the same row, computed here; they came from `origin`.
void expect_row(const Tensor& t,
                uint64_t i,
                const std::byte* expected,
                const char* what,
                const char* name,
                const Origin& origin);

}  // namespace ep::bench
