#include "bench/ep_bench/difference.hpp"

#include <cstring>

namespace ep::bench {
namespace {

std::string hex(const std::byte* bytes, uint32_t n) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (uint32_t i = n; i-- > 0;) {
    const auto value = std::to_integer<uint32_t>(bytes[i]);
    text += {kDigits[value >> 4], kDigits[value & 15]};
  }
  return text;
}

}  // namespace

void expect_dtype(const Tensor& t, DType dtype, const char* what, const char* name) {
  if (t.dtype == dtype) return;
  throw Difference(str("verify: ", what, ": ", name, " is of dtype ", ep::name_of(t.dtype),
                       ", expected ", ep::name_of(dtype)));
}

void expect_shape(
    const Tensor& t, uint64_t rows, uint64_t columns, const char* what, const char* name) {
  if (t.num_dims == 2 && static_cast<uint64_t>(t.shape[0]) == rows &&
      static_cast<uint64_t>(t.shape[1]) == columns) {
    return;
  }
  throw Difference(str("verify: ", what, ": ", name, " has ", t.num_dims, " dimensions, [",
                       t.shape[0], ", ", t.shape[1], "], expected [", rows, ", ", columns, "]"));
}

void expect_row(const Tensor& t,
                uint64_t i,
                const std::byte* expected,
                const char* what,
                const char* name,
                const Origin& origin) {
  const uint32_t element_bytes = num_bytes(t.dtype);
  const auto num_columns = static_cast<uint64_t>(t.shape[1]);
  const std::byte* const row = row_of(t, i);
  if (num_columns == 0 || std::memcmp(row, expected, num_columns * element_bytes) == 0) return;
  uint64_t column = 0;
  while (std::memcmp(row + column * element_bytes, expected + column * element_bytes,
                     element_bytes) == 0) {
    ++column;
  }
  throw Difference(str("verify: ", what, ": ", name, "[", i, "][", column, "] is ",
                       hex(row + column * element_bytes, element_bytes), ", expected ",
                       hex(expected + column * element_bytes, element_bytes), " (token ",
                       origin.token, " of rank ", origin.rank, ")"));
}

}  // namespace ep::bench
