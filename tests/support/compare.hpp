// Bitwise comparison of a tensor with the oracle's table, told in coordinates.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/oracle.hpp"

namespace ep::test {

struct CompareWhat {
  uint32_t rank = 0;
  std::string tensor{};
  const std::vector<Row>* rows = nullptr;  // where rows come from, for the text
  bool dead_tail = false;                  // rows of kind kTail are not looked at
};

// Empty, or: "rank 1, x: row 5 (token 3 of rank 0), column 8, byte 17: got 0x3f, want 0x40; 12
// bytes in 3 rows differ".  Dtype and shape count too.  Dimensions after the first are one row;
// their elements must be contiguous.
std::string difference(const CompareWhat& what, const Tensor& got, const Table& want);

// One-dimensional int32 tensors against numbers.
std::string difference(const CompareWhat& what,
                       const Tensor& got,
                       const std::vector<uint32_t>& want);

}  // namespace ep::test
