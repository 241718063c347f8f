// The forms of leaves for workers with lanes, run lane by lane on a CPU: to the bit what the CPU's own make.
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/leaves/copy.cuh"
#include "kernels/leaves/reduce.cuh"

namespace ep::kernels {
namespace {

// One lane of a warp.  The leaves below have no traffic between lanes, so lanes may run one after the other.
struct Lane {
  uint32_t rank;
  uint32_t thread_rank() const { return rank; }
  static constexpr uint32_t size() { return 32; }
  template <typename T>
  static T read(const T* at) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % sizeof(T), 0u);
    return *at;
  }
  template <typename T>
  static void write(T* at, T value) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % sizeof(T), 0u);
    *at = value;
  }
};
struct OneThread {
  static constexpr uint32_t thread_rank() { return 0; }
};

template <typename Call>
void on_all_lanes(Call call) {
  for (uint32_t rank = 0; rank < Lane::size(); ++rank)
    call(Lane{rank});
}

// Memory that begins at a multiple of 64.
struct Memory {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  explicit Memory(size_t num_bytes) : lines(num_bytes / 64 + 2) {}
  std::byte* data() { return lines[0].bytes; }
  size_t size() const { return lines.size() * 64; }
  std::vector<Line> lines;
};

Memory random_memory(size_t num_bytes, uint32_t seed) {
  Memory memory(num_bytes);
  std::mt19937 random(seed);
  for (size_t i = 0; i < memory.size(); ++i)
    memory.data()[i] = static_cast<std::byte>(random());
  return memory;
}

TEST(CopyByLanes, CopiesTheRowAndNothingElse) {
  for (const uint64_t num_bytes : {0, 1, 15, 16, 17, 511, 512, 1024, 1040, 4096, 14336, 14345}) {
    for (const uint64_t offset : {0, 1, 8, 16}) {  // of the source
      Memory from = random_memory(num_bytes + 64, 1), to = random_memory(num_bytes + 64, 2);
      Memory expected = to;
      std::memcpy(expected.data(), from.data() + offset, num_bytes);
      on_all_lanes(
          [&](Lane lane) { copy_row_by_lanes(lane, to.data(), from.data() + offset, num_bytes); });
      EXPECT_EQ(std::memcmp(to.data(), expected.data(), to.size()), 0)
          << num_bytes << " bytes from " << offset;
    }
  }
}

struct ReduceCase {
  uint32_t num_terms, num_bias, columns;
  bool weighted;
  uint64_t offset;  // of every row and of the output
};

// Rows of random bits have every kind of value in them: NaN, infinities, subnormals.
template <Element kIn, Element kOut>
void compare(const ReduceCase& c) {
  const uint64_t pitch = (c.columns * 4 + 64 + 63) / 64 * 64;
  Memory rows = random_memory(pitch * 8, 3), out = random_memory(pitch, 4);
  std::vector<float> weights = {0.5f, -1.25f, 3.0f, 1e-3f, 7.0f};
  CombineParams p{};
  p.num_columns = c.columns;
  p.out_stride = static_cast<int64_t>(pitch);
  p.num_bias = c.num_bias;
  p.weights.data = c.weighted ? reinterpret_cast<const std::byte*>(weights.data()) : nullptr;
  for (uint32_t b = 0; b < c.num_bias; ++b) {
    p.bias[b].rows.data = rows.data() + (5 + b) * pitch;
    p.bias[b].element = b == 0 ? Element::kBF16 : Element::kFP32;
  }
  Terms terms{};
  terms.num_terms = c.num_terms;
  for (uint32_t i = 0; i < c.num_terms; ++i) {
    terms.rows[i] = rows.data() + i * pitch + c.offset;
    terms.weights[i] = weights[i];
  }
  Memory expected = out;
  p.out = expected.data() + c.offset;
  reduce_row<kIn, kOut>(OneThread{}, p, terms, 0u);
  p.out = out.data() + c.offset;
  on_all_lanes([&](Lane lane) { reduce_row_by_lanes<kIn, kOut>(lane, p, terms, 0u); });
  EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size()), 0)
      << c.num_terms << " terms, " << c.num_bias << " biases, " << c.columns
      << " columns, weighted " << c.weighted << ", offset " << c.offset;
}

template <Element kIn, Element kOut>
void compare_all() {
  for (const uint32_t num_terms : {0u, 1u, 2u, 5u}) {
    for (const uint32_t num_bias : {0u, 1u, 2u}) {
      for (const uint32_t columns : {1u, 7u, 8u, 64u, 261u, 1024u}) {
        for (const uint64_t offset : {0, 4}) {
          compare<kIn, kOut>({num_terms, num_bias, columns, false, offset});
          compare<kIn, kOut>({num_terms, num_bias, columns, true, offset});
        }
      }
    }
  }
}

TEST(ReduceByLanes, IsToTheBitWhatACpuMakes) {
  compare_all<Element::kBF16, Element::kBF16>();
  compare_all<Element::kBF16, Element::kFP16>();
  compare_all<Element::kBF16, Element::kFP32>();
  compare_all<Element::kFP16, Element::kBF16>();
  compare_all<Element::kFP16, Element::kFP16>();
  compare_all<Element::kFP16, Element::kFP32>();
  compare_all<Element::kFP32, Element::kBF16>();
  compare_all<Element::kFP32, Element::kFP16>();
  compare_all<Element::kFP32, Element::kFP32>();
}

}  // namespace
}  // namespace ep::kernels
