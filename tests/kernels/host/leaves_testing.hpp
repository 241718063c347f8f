// Rows for the tests of the leaves: elements by their bits, guarded memory, seeded contents.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/config.hpp"
#include "support/number_reference.hpp"

namespace ep::kernels::host {

using test::fp32_from_bits;
using test::NumberFormat;

inline constexpr Element kElements[] = {Element::kBF16, Element::kFP16, Element::kFP32};
inline constexpr Format kFormats[] = {Format::kFp8Block128, Format::kFp8Block128Pow2,
                                      Format::kFp8Block128Ue8m0};
inline constexpr std::byte kCanary{0xA5};

inline uint32_t to_bits(Element e, float v) {
  switch (e) {
    case Element::kBF16:
      return NumberFormat::bf16().encode(v);
    case Element::kFP16:
      return NumberFormat::fp16().encode(v);
    case Element::kFP32:
      return test::fp32_bits(v);
  }
  return 0;
}

inline float to_float(Element e, uint32_t bits) {
  switch (e) {
    case Element::kBF16:
      return static_cast<float>(NumberFormat::bf16().decode(bits));
    case Element::kFP16:
      return static_cast<float>(NumberFormat::fp16().decode(bits));
    case Element::kFP32:
      return fp32_from_bits(bits);
  }
  return 0;
}

// Memory at a chosen distance from a 64-byte boundary, with canaries on both sides.
class Guarded {
 public:
  Guarded(uint64_t num_bytes, uint64_t misalignment)
      : num_bytes_(num_bytes), storage_(num_bytes + 2 * kMargin + 64, kCanary) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    begin_ = kMargin + (64 - address % 64) % 64 + misalignment;
  }

  std::byte* data() { return storage_.data() + begin_; }
  std::vector<std::byte> bytes() { return {data(), data() + num_bytes_}; }

  bool are_canaries_alive() const {
    for (uint64_t i = 0; i < storage_.size(); ++i) {
      const bool is_inside = i >= begin_ && i < begin_ + num_bytes_;
      if (!is_inside && storage_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr uint64_t kMargin = 128;
  uint64_t num_bytes_, begin_;
  std::vector<std::byte> storage_;
};

// A row of elements, given by their bits.
struct Row {
  Row(Element e, const std::vector<uint32_t>& codes, uint64_t misalignment)
      : memory(codes.size() * num_bytes(e), misalignment) {
    for (uint64_t c = 0; c < codes.size(); ++c) {
      std::memcpy(memory.data() + c * num_bytes(e), &codes[c], num_bytes(e));
    }
  }
  Guarded memory;
};

inline std::string difference(const std::vector<std::byte>& got,
                              const std::vector<std::byte>& want) {
  for (uint64_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    return "byte " + std::to_string(i) + ": got " + std::to_string(static_cast<int>(got[i])) +
           " want " + std::to_string(static_cast<int>(want[i]));
  }
  return "";
}

template <typename T>
void append(std::vector<std::byte>& bytes, T v, uint32_t num_bytes = sizeof(T)) {
  const auto* p = reinterpret_cast<const std::byte*>(&v);
  bytes.insert(bytes.end(), p, p + num_bytes);
}

// Numbers of nearby size, so that a group has e4m3fn subnormals, ties and zeros of both signs.
inline std::vector<uint32_t> ordinary_codes(Element e, uint32_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> codes(n);
  for (uint32_t& code : codes) {
    const float mantissa = 1.0f + static_cast<float>(random() % 256) / 256.0f;
    const float v = std::ldexp(mantissa, -static_cast<int>(random() % 20));
    code = to_bits(e, random() % 16 == 0 ? 0.0f : v);
    if (random() % 2 == 0) code |= e == Element::kFP32 ? 0x80000000u : 0x8000u;
  }
  return codes;
}

// Any bits at all: NaNs with payloads, infinities, subnormals.
inline std::vector<uint32_t> any_codes(Element e, uint32_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> codes(n);
  for (uint32_t& code : codes) {
    code = static_cast<uint32_t>(random());
    if (random() % 8 == 0) code |= 0x7F800000u;
    if (random() % 8 == 0) code &= 0x807FFFFFu;
    if (e != Element::kFP32) code >>= 16;
  }
  return codes;
}

}  // namespace ep::kernels::host
