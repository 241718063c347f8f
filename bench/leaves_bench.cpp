// GB/s of every leaf of every table this CPU can run, beside memcpy.
//
//   copy      scatters 58 MB (4096 rows of 14336 bytes, or more of fewer) into a permuted order;
//             copy_cached scatters 1 MB again and again
//   quantize  bf16, fp16, fp32 -> e4m3fn, bytes of input, from the caches and from memory
//   reduce    8 rows -> 1, bytes of the rows read, from memory; memcpy of the same bytes beside it
//
// The sources are larger than any cache unless the name says so.  Rates are of CPU time.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "kernels/host/leaves.hpp"

namespace {

using ep::kernels::Element;
using ep::kernels::host::Leaves;

constexpr uint64_t kPoolBytes = uint64_t{4096} * 14336;
constexpr uint32_t kColumns = 7168;
constexpr const char* kElementNames[] = {"bf16", "fp16", "fp32"};

struct Free {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Bytes = std::unique_ptr<std::byte[], Free>;

// Ordinary numbers in every format: 0x3Cxx..0x3Fxx as bf16, fp16 and the top of an fp32.
Bytes make_pool(uint64_t num_bytes) {
  Bytes pool(new (std::align_val_t{64}) std::byte[num_bytes]);
  std::mt19937 random(1);
  for (uint64_t i = 0; i < num_bytes; i += 2) {
    const uint16_t value = static_cast<uint16_t>(0x3C00u | (random() & 0x83FFu));
    std::memcpy(&pool[i], &value, sizeof(value));
  }
  return pool;
}

std::byte* source() {
  static const Bytes kPool = make_pool(kPoolBytes);
  return kPool.get();
}

std::byte* target() {
  static const Bytes kPool = make_pool(kPoolBytes);
  return kPool.get();
}

std::vector<uint32_t> shuffled(uint64_t n) {
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(2));
  return order;
}

void set_rate(benchmark::State& state, uint64_t bytes_per_iteration) {
  const double gigabytes = static_cast<double>(bytes_per_iteration) / 1e9;
  state.counters["GB"] =
      benchmark::Counter(gigabytes, benchmark::Counter::kIsIterationInvariantRate);
}

// `leaves` is null for memcpy.
void copy(benchmark::State& state, const Leaves* leaves, uint64_t row_bytes, uint64_t pool_bytes) {
  const std::vector<uint32_t> order = shuffled(pool_bytes / row_bytes);
  const std::byte* src = source();
  std::byte* dst = target();
  for (auto _ : state) {
    for (uint64_t i = 0; i < order.size(); ++i) {
      std::byte* to = dst + order[i] * row_bytes;
      if (leaves != nullptr) {
        leaves->copy_row(to, src + i * row_bytes, row_bytes);
      } else {
        std::memcpy(to, src + i * row_bytes, row_bytes);
      }
    }
    if (leaves != nullptr) leaves->stream_fence();
    benchmark::ClobberMemory();
  }
  set_rate(state, order.size() * row_bytes);
}

void quantize(benchmark::State& state, const Leaves* leaves, Element in, uint64_t num_rows) {
  const uint64_t row_bytes = uint64_t{kColumns} * num_bytes(in);
  std::byte* scales = target() + kPoolBytes - 4096;
  for (auto _ : state) {
    for (uint64_t i = 0; i < num_rows; ++i) {
      leaves->quantize_row[static_cast<int>(in)][0](
          {source() + i * row_bytes, target() + i * kColumns, scales, kColumns});
    }
    benchmark::ClobberMemory();
  }
  set_rate(state, num_rows * row_bytes);
}

// memcpy moves the bytes of the terms to as many other places.
void reduce(benchmark::State& state, const Leaves* leaves, Element in, Element out, bool weighted) {
  constexpr uint32_t kTerms = 8;
  const uint64_t row_bytes = uint64_t{kColumns} * num_bytes(in);
  const std::vector<uint32_t> order = shuffled(kPoolBytes / row_bytes);
  const float weights[kTerms] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
  for (auto _ : state) {
    for (uint64_t i = 0; i + kTerms <= order.size(); i += kTerms) {
      const std::byte* terms[kTerms];
      for (uint32_t t = 0; t < kTerms; ++t)
        terms[t] = source() + order[i + t] * row_bytes;
      if (leaves != nullptr) {
        leaves->reduce_row[static_cast<int>(in)][static_cast<int>(out)](
            {.terms = terms,
             .weights = weighted ? weights : nullptr,
             .num_terms = kTerms,
             .num_bias = 0,
             .bias = {},
             .bias_element = {},
             .out = target() + i / kTerms * kColumns * num_bytes(out),
             .columns = kColumns});
      } else {
        for (uint32_t t = 0; t < kTerms; ++t) {
          std::memcpy(target() + (i + t) * row_bytes, terms[t], row_bytes);
        }
      }
    }
    if (leaves != nullptr) leaves->stream_fence();
    benchmark::ClobberMemory();
  }
  set_rate(state, order.size() / kTerms * kTerms * row_bytes);
}

template <typename... Args>
void add(const std::string& name,
         void (*run)(benchmark::State&, Args...),
         std::type_identity_t<Args>... args) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
    run(s, args...);
  })->Unit(benchmark::kMillisecond);
}

void add_copies(const std::string& prefix, uint64_t pool_bytes) {
  for (const uint64_t row_bytes : {272, 1040, 2048, 7392, 14336, 28672}) {
    const std::string rows = "/" + std::to_string(row_bytes);
    add(prefix + "/memcpy" + rows, copy, nullptr, row_bytes, pool_bytes);
    for (uint32_t i = 0; i < ep::kernels::host::num_leaf_tables(); ++i) {
      const Leaves& table = ep::kernels::host::leaf_table(i);
      add(prefix + "/" + table.isa + rows, copy, &table, row_bytes, pool_bytes);
    }
  }
}

void add_table(const Leaves& table) {
  const std::string isa = table.isa;
  for (const Element in : {Element::kBF16, Element::kFP16, Element::kFP32}) {
    const std::string name = kElementNames[static_cast<int>(in)];
    add("quantize_cached/" + isa + "/" + name, quantize, &table, in, 4);
    add("quantize/" + isa + "/" + name, quantize, &table, in, 2000);
  }
  for (const bool weighted : {false, true}) {
    const std::string name = "reduce/" + isa + (weighted ? "/weighted/" : "/plain/");
    add(name + "bf16_bf16", reduce, &table, Element::kBF16, Element::kBF16, weighted);
    add(name + "fp16_fp16", reduce, &table, Element::kFP16, Element::kFP16, weighted);
    add(name + "fp32_fp32", reduce, &table, Element::kFP32, Element::kFP32, weighted);
    add(name + "bf16_fp32", reduce, &table, Element::kBF16, Element::kFP32, weighted);
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  add_copies("copy", kPoolBytes);
  add_copies("copy_cached", uint64_t{1} << 20);
  for (uint32_t i = 0; i < ep::kernels::host::num_leaf_tables(); ++i) {
    add_table(ep::kernels::host::leaf_table(i));
  }
  add("reduce/memcpy", reduce, nullptr, Element::kBF16, Element::kBF16, false);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
