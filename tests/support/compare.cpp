#include "support/compare.hpp"

#include <cstring>
#include <sstream>

namespace ep::test {
namespace {

std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (uint32_t d = 0; d < t.num_dims; ++d)
    text += (d == 0 ? "" : ",") + std::to_string(t.shape[d]);
  return text + "]";
}

void tell_row(std::ostream& out, const CompareWhat& what, uint64_t row) {
  out << "row " << row;
  if (what.rows == nullptr) return;
  const Row& r = (*what.rows)[row];
  if (r.kind == RowKind::kToken) {
    out << " (token " << r.token << " of rank " << r.source << ", slot " << r.slot << ")";
  } else {
    out << (r.kind == RowKind::kGap ? " (gap)" : " (tail)");
  }
}

// What makes a byte-by-byte look impossible; empty: nothing.
std::string mismatch(const Tensor& got, const Table& want) {
  if (!got.defined()) return "is not defined";
  if (got.dtype != want.dtype)
    return std::string("is ") + name_of(got.dtype) + ", want " + name_of(want.dtype);
  uint64_t columns = 1;
  int64_t stride = 1;
  bool contiguous = true;
  for (uint32_t d = got.num_dims; d-- > 1;) {
    contiguous &= got.shape[d] == 1 || got.strides[d] == stride;
    stride *= got.shape[d];
    columns *= static_cast<uint64_t>(got.shape[d]);
  }
  if (static_cast<uint64_t>(got.shape[0]) != want.rows || columns != want.columns) {
    return "is " + shape_of(got) + ", want [" + std::to_string(want.rows) + "," +
           std::to_string(want.columns) + "]";
  }
  if (want.rows != 0 && want.columns != 0 && !contiguous) return "is not contiguous inside a row";
  return "";
}

}  // namespace

std::string difference(const CompareWhat& what, const Tensor& got, const Table& want) {
  std::ostringstream out;
  out << "rank " << what.rank << ", " << what.tensor << ": ";
  if (const std::string text = mismatch(got, want); !text.empty()) return out.str() + text;
  uint64_t bad_bytes = 0, bad_rows = 0;
  for (uint64_t r = 0; r < want.rows; ++r) {
    if (what.dead_tail && what.rows != nullptr && (*what.rows)[r].kind == RowKind::kTail) continue;
    const uint8_t* have =
        static_cast<const uint8_t*>(got.data) +
        static_cast<int64_t>(r) * got.strides[0] * static_cast<int64_t>(num_bytes(got.dtype));
    if (std::memcmp(have, want.row(r), want.row_bytes()) == 0) continue;
    for (uint64_t b = 0; b < want.row_bytes(); ++b) {
      if (have[b] == want.row(r)[b]) continue;
      if (bad_bytes++ != 0) continue;
      tell_row(out, what, r);
      out << ", column " << b / num_bytes(want.dtype) << ", byte " << b << std::hex << ": got 0x"
          << int{have[b]} << ", want 0x" << int{want.row(r)[b]} << std::dec;
    }
    ++bad_rows;
  }
  if (bad_bytes == 0) return "";
  out << "; " << bad_bytes << " bytes in " << bad_rows << " of " << want.rows << " rows differ";
  return out.str();
}

std::string difference(const CompareWhat& what,
                       const Tensor& got,
                       const std::vector<uint32_t>& want) {
  Table column(DType::kInt32, want.size(), 1);
  for (uint64_t r = 0; r < want.size(); ++r)
    column.set<uint32_t>(r, 0, want[r]);
  if (got.defined() && got.num_dims != 1)
    return what.tensor + " is " + shape_of(got) + ", want one dimension";
  return difference(what, got, column);
}

}  // namespace ep::test
