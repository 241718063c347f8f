// The leaves, written once with the compiler's vector types and compiled once per instruction set:
// simd_baseline.cpp, simd_avx2.cpp and simd_avx512.cpp define EP_SIMD_BYTES, the width of a vector,
// and include this.
//
// Code for AVX must never reach a CPU without it.  An inline function or a template instantiation
// with external linkage that is emitted here would be merged by the linker with the baseline copy
// of the same name, and either may win.  Therefore everything below is in an anonymous namespace,
// and nothing below calls a function from another header: not numeric.hpp, not <algorithm>.
// `nm -C` on the objects shows no weak symbol.  Intrinsics are safe: they are always inlined.
//
// The arithmetic is that of numeric.hpp, whose comments explain the constants; the tests hold the
// two together.  Every operation is one IEEE operation: compile with -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/host/leaves.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

#define EP_SIMD_INLINE [[gnu::always_inline]] inline

namespace ep::kernels::host {
namespace {

constexpr uint32_t kLanes = EP_SIMD_BYTES / 4;  // fp32 columns in a vector

using F32 = float __attribute__((vector_size(EP_SIMD_BYTES)));
using U32 = uint32_t __attribute__((vector_size(EP_SIMD_BYTES)));
using I32 = int32_t __attribute__((vector_size(EP_SIMD_BYTES)));
using I16 = int16_t __attribute__((vector_size(EP_SIMD_BYTES)));
using U8 = uint8_t __attribute__((vector_size(EP_SIMD_BYTES)));
using HalfU16 = uint16_t __attribute__((vector_size(EP_SIMD_BYTES / 2)));
using HalfI16 = int16_t __attribute__((vector_size(EP_SIMD_BYTES / 2)));
using QuarterU8 = uint8_t __attribute__((vector_size(EP_SIMD_BYTES / 4)));

template <Element kElement>
constexpr uint32_t kElementBytes = kElement == Element::kFP32 ? 4 : 2;

template <typename V>
EP_SIMD_INLINE V load(const std::byte* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V>
EP_SIMD_INLINE void store(std::byte* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

EP_SIMD_INLINE uint32_t bits_of(float v) {
  return __builtin_bit_cast(uint32_t, v);
}
EP_SIMD_INLINE float float_of(uint32_t v) {
  return __builtin_bit_cast(float, v);
}

// ---- Conversions ----------------------------------------------------------------------------

#if EP_SIMD_BYTES == 64 && defined(__AVX512F__)
// The unmasked intrinsics of g++ 12 pass an uninitialised vector along, and it warns of that.
constexpr __mmask16 kAllLanes = 0xFFFF;
#endif

// The intrinsic is one instruction where g++ 12 makes four of a conversion.
EP_SIMD_INLINE U32 widen(HalfU16 v) {
#if EP_SIMD_BYTES == 32 && defined(__AVX2__)
  return U32(_mm256_cvtepu16_epi32(__m128i(v)));
#else
  return __builtin_convertvector(v, U32);
#endif
}

EP_SIMD_INLINE F32 fp16_to_f32(HalfU16 v) {
#if EP_SIMD_BYTES == 64 && defined(__AVX512F__)
  return F32(_mm512_maskz_cvtph_ps(kAllLanes, __m256i(v)));
#elif EP_SIMD_BYTES == 32 && defined(__F16C__)
  return F32(_mm256_cvtph_ps(__m128i(v)));
#else
  const U32 wide = widen(v);
  const U32 sign = (wide & 0x8000u) << 16;
  const I32 magnitude = I32(wide & 0x7FFFu) << 13;
  const I32 normal = magnitude + 0x38000000;
  const I32 special = magnitude | 0x7F800000;
  const I32 subnormal = I32(F32(magnitude + 0x38800000) - float_of(0x38800000u));
  const I32 finite = magnitude < (0x0400 << 13) ? subnormal : normal;
  return F32(sign | U32(magnitude >= (0x7C00 << 13) ? special : finite));
#endif
}

// REQUIRES: a NaN is the canonical one; here and in f32_to_fp16.
EP_SIMD_INLINE I32 f32_to_bf16_bits(F32 v) {
  const U32 bits = U32(v);
  return I32(bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

EP_SIMD_INLINE HalfU16 f32_to_fp16(F32 v) {
#if EP_SIMD_BYTES == 64 && defined(__AVX512F__)
  return HalfU16(_mm512_maskz_cvtps_ph(kAllLanes, __m512(v), _MM_FROUND_TO_NEAREST_INT));
#elif EP_SIMD_BYTES == 32 && defined(__F16C__)
  return HalfU16(_mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT));
#else
  const I32 sign = I32(U32(v) >> 16) & 0x8000;
  const I32 magnitude = I32(v) & 0x7FFFFFFF;
  const I32 subnormal = I32(F32(magnitude) + 0.5f) - 0x3F000000;
  const I32 normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  I32 half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477FF000 ? I32{} + 0x7C00 : half;
  half = magnitude > 0x7F800000 ? I32{} + 0x7E00 : half;
  return __builtin_convertvector(U32(sign | half), HalfU16);
#endif
}

EP_SIMD_INLINE F32 canonical_nan(F32 v) {
  return v == v ? v : F32(U32{} + 0x7FC00000u);
}

template <Element kElement>
EP_SIMD_INLINE F32 load_columns(const std::byte* row, uint32_t begin) {
  const std::byte* p = row + uint64_t{begin} * kElementBytes<kElement>;
  if constexpr (kElement == Element::kBF16) {
    return F32(widen(load<HalfU16>(p)) << 16);
  } else if constexpr (kElement == Element::kFP16) {
    return fp16_to_f32(load<HalfU16>(p));
  } else {
    return load<F32>(p);
  }
}

// The lanes of a, then those of b.  REQUIRES: each fits in an int16.
EP_SIMD_INLINE I16 narrow_to_16(I32 a, I32 b) {
#if EP_SIMD_BYTES == 32 && defined(__AVX2__)
  return I16(_mm256_permute4x64_epi64(_mm256_packs_epi32(__m256i(a), __m256i(b)), 0xD8));
#elif EP_SIMD_BYTES == 16 && defined(__SSE2__)
  return I16(_mm_packs_epi32(__m128i(a), __m128i(b)));
#else
  const HalfI16 halves[2] = {__builtin_convertvector(a, HalfI16),
                             __builtin_convertvector(b, HalfI16)};
  return __builtin_bit_cast(I16, halves);
#endif
}

// REQUIRES: each lane fits in a uint8.
EP_SIMD_INLINE U8 narrow_to_8(const I32 (&v)[4]) {
#if EP_SIMD_BYTES == 32 && defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32(__m256i(v[0]), __m256i(v[1]));
  const __m256i high = _mm256_packs_epi32(__m256i(v[2]), __m256i(v[3]));
  // Packing works within 128-bit lanes: 4 bytes of v[0], v[1], v[2], v[3], then the other halves.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return U8(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
#elif EP_SIMD_BYTES == 16 && defined(__SSE2__)
  return U8(_mm_packus_epi16(_mm_packs_epi32(__m128i(v[0]), __m128i(v[1])),
                             _mm_packs_epi32(__m128i(v[2]), __m128i(v[3]))));
#else
  const QuarterU8 quarters[4] = {
      __builtin_convertvector(U32(v[0]), QuarterU8), __builtin_convertvector(U32(v[1]), QuarterU8),
      __builtin_convertvector(U32(v[2]), QuarterU8), __builtin_convertvector(U32(v[3]), QuarterU8)};
  return __builtin_bit_cast(U8, quarters);
#endif
}

// ---- copy_row -------------------------------------------------------------------------------

// Writes past the caches.  REQUIRES: `p` is 16-byte aligned.
EP_SIMD_INLINE void stream_16(std::byte* p, const std::byte* from) {
#if defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p),
                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  __builtin_memcpy(p, from, 16);
#endif
}

// REQUIRES: `p` is aligned to the vector.
template <typename V>
EP_SIMD_INLINE void stream(std::byte* p, V v) {
  static_assert(sizeof(V) == EP_SIMD_BYTES);
#if EP_SIMD_BYTES == 64 && defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), __m512i(v));
#elif EP_SIMD_BYTES == 32 && defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(v));
#elif EP_SIMD_BYTES == 16 && defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), __m128i(v));
#else
  store(p, v);
#endif
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Rows of 1040 bytes scattered over 58 MB: streamed 6.6 GB/s, memcpy 3.8; over 1 MB: 17 and 22.
// Rows of 272 bytes: 4.0 and 3.0; over 1 MB: 6 and 19.  (EPYC, AVX2; leaves_bench.)  So small rows,
// which the lines at both ends weigh on and which are often read again soon, stay in the caches.
constexpr uint64_t kStreamMinBytes = 1024;
constexpr uint64_t kLineBytes = 64;

void copy_row(std::byte* dst, const std::byte* src, uint64_t num_bytes) {
  if (num_bytes < kStreamMinBytes) {
    __builtin_memcpy(dst, src, num_bytes);
    return;
  }
  const uint64_t head = -reinterpret_cast<uintptr_t>(dst) % kLineBytes;
  // Plain stores to the two lines that are not whole were 10 to 30 % slower.
  uint64_t at = 0;
  for (; at < head; at += 16)
    stream_16(dst + at, src + at);
  for (; at + kLineBytes <= num_bytes; at += kLineBytes) {
    for (uint64_t i = 0; i < kLineBytes; i += EP_SIMD_BYTES) {
      stream(dst + at + i, load<U8>(src + at + i));
    }
  }
  for (; at + 16 <= num_bytes; at += 16)
    stream_16(dst + at, src + at);
  __builtin_memcpy(dst + at, src + at, num_bytes - at);
}

// ---- quantize_row ---------------------------------------------------------------------------

constexpr uint32_t kGroupColumns = 128;
constexpr uint32_t kWordGroups = 4;  // groups whose exponents share an int32

// Every lane holds lane i + kBy.
template <uint32_t kBy, typename V, size_t... kI>
EP_SIMD_INLINE V rotate(V v, std::index_sequence<kI...>) {
  return __builtin_shufflevector(v, v, ((kI + kBy) % sizeof...(kI))...);
}

template <uint32_t kBy, typename V>
EP_SIMD_INLINE int32_t max_lane(V v) {
  if constexpr (kBy == 0) {
    return v[0];
  } else {
    const V other = rotate<kBy>(v, std::make_index_sequence<sizeof(V) / sizeof(v[0])>{});
    return max_lane<kBy / 2>(v > other ? v : other);
  }
}

// The formats of x, seen as integers: magnitudes order as the numbers do, and NaNs are above kInf.
template <Element kIn>
struct Bits {
  using V = I16;
  static constexpr int16_t kMagnitude = 0x7FFF;
  static constexpr int16_t kInf = kIn == Element::kBF16 ? 0x7F80 : 0x7C00;
};
template <>
struct Bits<Element::kFP32> {
  using V = I32;
  static constexpr int32_t kMagnitude = 0x7FFFFFFF;
  static constexpr int32_t kInf = 0x7F800000;
};

// The greatest magnitude of a group, among its numbers if kSkipNan.
template <Element kIn, bool kSkipNan>
EP_SIMD_INLINE int32_t group_max_bits(const std::byte* in) {
  using V = typename Bits<kIn>::V;
  V most{};
  for (uint32_t at = 0; at < kGroupColumns * kElementBytes<kIn>; at += EP_SIMD_BYTES) {
    V v = load<V>(in + at) & Bits<kIn>::kMagnitude;
    if constexpr (kSkipNan) v = v > Bits<kIn>::kInf ? V{} : v;
    most = v > most ? v : most;
  }
  return max_lane<EP_SIMD_BYTES / kElementBytes<kIn> / 2>(most);
}

template <Element kIn>
EP_SIMD_INLINE float magnitude_to_float(int32_t bits) {
  if constexpr (kIn == Element::kFP16) return fp16_to_f32(HalfU16{} + uint16_t(bits))[0];
  return float_of(kIn == Element::kBF16 ? uint32_t(bits) << 16 : uint32_t(bits));
}

struct Amax {
  float value;   // max |x| over non-NaN x, inf counting as FLT_MAX
  bool is_rare;  // the group has an inf or a NaN
};

template <Element kIn>
EP_SIMD_INLINE Amax group_amax(const std::byte* in) {
  int32_t bits = group_max_bits<kIn, false>(in);
  if (bits < Bits<kIn>::kInf) [[likely]]
    return {magnitude_to_float<kIn>(bits), false};
  bits = group_max_bits<kIn, true>(in);
  return {bits == Bits<kIn>::kInf ? 0x1.fffffep127f : magnitude_to_float<kIn>(bits), true};
}

// e4m3fn(clamp(v, -448, 448)), in the low byte of each lane.  In a group without inf and NaN, which
// !kIsRare promises, |v| is at most some roundings above 448 and needs no clamp.
//
// Adding 2^20 times the power of two below v (2^-6 where v is subnormal) rounds v in the adder and
// leaves its steps, 8 to 16 (0 to 8), in the last bits; the exponent is put above them.
template <bool kIsRare>
EP_SIMD_INLINE I32 f32_to_e4m3fn(F32 v) {
  const I32 bits = I32(v);
  I32 magnitude = bits & 0x7FFFFFFF;
  I32 is_nan{};  // -1 where so
  if constexpr (kIsRare) {
    is_nan = magnitude > 0x7F800000;
    magnitude = magnitude > 0x43E00000 ? I32{} + 0x43E00000 : magnitude;
  }
  const I32 least = I32{} + 0x3C800000;
  const I32 exponent = magnitude & 0x7F800000;
  const I32 power = exponent > least ? exponent : least;
  const I32 steps = I32(F32(magnitude) + F32(power + (20 << 23))) - power;
  // 20 << 23 was added above, and 120 is between the exponent biases; steps count from 8.
  constexpr int32_t kExcess = (20 << 23) + (120 << 3) + 8;
  const I32 excess = bits < 0 ? I32{} + (kExcess - 0x80) : I32{} + kExcess;
  const I32 byte = steps + I32(U32(power) >> 20) - excess;
  if constexpr (kIsRare) return is_nan ? I32{} + 0x7F : byte;
  return byte;
}

template <Element kIn, bool kIsRare>
EP_SIMD_INLINE void encode_group(const std::byte* in, float inverse, std::byte* out) {
  for (uint32_t c = 0; c < kGroupColumns; c += 4 * kLanes) {
    I32 bytes[4];
    for (uint32_t i = 0; i < 4; ++i) {
      bytes[i] = f32_to_e4m3fn<kIsRare>(load_columns<kIn>(in, c + i * kLanes) * inverse);
    }
    store(out + c, narrow_to_8(bytes));
  }
}

// The scales of up to four groups come first: a division's latency is then hidden by the others.
template <Element kIn, Format kFormat>
void quantize_row(const QuantizeRow& row) {
  constexpr uint32_t kGroupBytes = kGroupColumns * kElementBytes<kIn>;
  const uint32_t num_groups = row.columns / kGroupColumns;
  for (uint32_t begin = 0; begin < num_groups; begin += kWordGroups) {
    const uint32_t n = num_groups - begin < kWordGroups ? num_groups - begin : kWordGroups;
    const std::byte* in = row.in + uint64_t{begin} * kGroupBytes;
    float inverse[kWordGroups];
    bool is_rare[kWordGroups];
    uint32_t exponents = 0x7F7F7F7Fu;
    for (uint32_t i = 0; i < n; ++i) {
      const Amax amax = group_amax<kIn>(in + i * kGroupBytes);
      float scale = (amax.value < 1e-4f ? 1e-4f : amax.value) / 448.0f;
      if constexpr (kFormat != Format::kFp8Block128) {
        const uint32_t exponent = (bits_of(scale) + 0x7FFFFFu) >> 23;  // rounds up
        scale = float_of(exponent << 23);
        exponents = (exponents & ~(0xFFu << 8 * i)) | exponent << 8 * i;
      }
      inverse[i] = 1.0f / scale;
      is_rare[i] = amax.is_rare;
      if constexpr (kFormat != Format::kFp8Block128Ue8m0) {
        store(row.scales + uint64_t{begin + i} * sizeof(float), scale);
      }
    }
    if constexpr (kFormat == Format::kFp8Block128Ue8m0) store(row.scales + begin, exponents);
    for (uint32_t i = 0; i < n; ++i) {
      const std::byte* from = in + i * kGroupBytes;
      std::byte* to = row.out + uint64_t{begin + i} * kGroupColumns;
      if (is_rare[i]) [[unlikely]] {
        encode_group<kIn, true>(from, inverse[i], to);
      } else {
        encode_group<kIn, false>(from, inverse[i], to);
      }
    }
  }
}

// ---- reduce_row -----------------------------------------------------------------------------

// A chunk's sums stay in registers while all terms pass.  Four cover the latency of an addition; 8
// and 12 were slower from memory (8 bf16 terms, AVX2: 13, 12 and 9 GB/s).
constexpr uint32_t kChunkVectors = 4;
constexpr uint32_t kLeastVectors = 2;  // two fp32 vectors make one of 16-bit elements

template <bool kStream, typename V>
EP_SIMD_INLINE void put(std::byte* p, V v) {
  if constexpr (kStream) {
    stream(p, v);
  } else {
    store(p, v);
  }
}

template <Element kOut, bool kStream, uint32_t kVectors>
EP_SIMD_INLINE void store_columns(std::byte* row, uint32_t begin, const F32 (&sums)[kVectors]) {
  std::byte* p = row + uint64_t{begin} * kElementBytes<kOut>;
  for (uint32_t v = 0; v < kVectors; v += 2, p += 2 * kLanes * kElementBytes<kOut>) {
    const F32 a = canonical_nan(sums[v]);
    const F32 b = canonical_nan(sums[v + 1]);
    if constexpr (kOut == Element::kBF16) {
      put<kStream>(p, narrow_to_16(f32_to_bf16_bits(a), f32_to_bf16_bits(b)));
    } else if constexpr (kOut == Element::kFP16) {
      const HalfU16 halves[2] = {f32_to_fp16(a), f32_to_fp16(b)};
      put<kStream>(p, __builtin_bit_cast(I16, halves));
    } else {
      put<kStream>(p, a);
      put<kStream>(p + EP_SIMD_BYTES, b);
    }
  }
}

// sums += (or, for the first addend, =) a row's columns, times its weight.
template <Element kIn, bool kWeighted, uint32_t kVectors>
EP_SIMD_INLINE void add_columns(
    F32 (&sums)[kVectors], bool is_first, const std::byte* row, uint32_t begin, float weight) {
  F32 addends[kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    addends[v] = load_columns<kIn>(row, begin + v * kLanes);
    if constexpr (kWeighted) addends[v] *= weight;
  }
  // Zero plus the first addend would turn -0 into 0.
  for (uint32_t v = 0; v < kVectors; ++v)
    sums[v] = is_first ? addends[v] : sums[v] + addends[v];
}

template <Element kIn, Element kOut, bool kWeighted, bool kStream, uint32_t kVectors>
EP_SIMD_INLINE void reduce_columns(const ReduceRow& row, uint32_t begin) {
  F32 sums[kVectors] = {};
  if (row.num_terms > 0) {
    add_columns<kIn, kWeighted>(sums, true, row.terms[0], begin, kWeighted ? row.weights[0] : 1);
    for (uint32_t t = 1; t < row.num_terms; ++t) {
      add_columns<kIn, kWeighted>(sums, false, row.terms[t], begin, kWeighted ? row.weights[t] : 1);
    }
  }
  for (uint32_t b = 0; b < row.num_bias; ++b) {
    const bool is_first = row.num_terms + b == 0;
    switch (row.bias_element[b]) {
      case Element::kBF16:
        add_columns<Element::kBF16, false>(sums, is_first, row.bias[b], begin, 1);
        break;
      case Element::kFP16:
        add_columns<Element::kFP16, false>(sums, is_first, row.bias[b], begin, 1);
        break;
      case Element::kFP32:
        add_columns<Element::kFP32, false>(sums, is_first, row.bias[b], begin, 1);
        break;
    }
  }
  store_columns<kOut, kStream>(row.out, begin, sums);
}

// The last columns, too few for two vectors: summed where whole vectors may be read and written.
template <Element kIn, Element kOut, bool kWeighted>
void reduce_tail(const ReduceRow& row, uint32_t begin) {
  constexpr uint32_t kMaxBytes = kLeastVectors * EP_SIMD_BYTES;
  alignas(EP_SIMD_BYTES) std::byte pieces[kMaxTerms + kMaxBias + 1][kMaxBytes] = {};
  const std::byte* terms[kMaxTerms];
  ReduceRow tail = row;
  tail.terms = terms;
  const uint32_t n = row.columns - begin;
  const auto copy_piece = [begin, n](std::byte* piece, const std::byte* from, uint32_t size) {
    __builtin_memcpy(piece, from + uint64_t{begin} * size, uint64_t{n} * size);
    return piece;
  };
  for (uint32_t t = 0; t < row.num_terms; ++t) {
    terms[t] = copy_piece(pieces[t], row.terms[t], kElementBytes<kIn>);
  }
  for (uint32_t b = 0; b < row.num_bias; ++b) {
    const uint32_t size = row.bias_element[b] == Element::kFP32 ? 4 : 2;
    tail.bias[b] = copy_piece(pieces[kMaxTerms + b], row.bias[b], size);
  }
  tail.out = pieces[kMaxTerms + kMaxBias];
  reduce_columns<kIn, kOut, kWeighted, false, kLeastVectors>(tail, 0);
  __builtin_memcpy(row.out + uint64_t{begin} * kElementBytes<kOut>, tail.out,
                   uint64_t{n} * kElementBytes<kOut>);
}

template <Element kIn, Element kOut, bool kWeighted, bool kStream>
void reduce_whole_row(const ReduceRow& row) {
  uint32_t at = 0;
  for (; at + kChunkVectors * kLanes <= row.columns; at += kChunkVectors * kLanes) {
    reduce_columns<kIn, kOut, kWeighted, kStream, kChunkVectors>(row, at);
  }
  for (; at + kLeastVectors * kLanes <= row.columns; at += kLeastVectors * kLanes) {
    reduce_columns<kIn, kOut, kWeighted, kStream, kLeastVectors>(row, at);
  }
  if (at < row.columns) reduce_tail<kIn, kOut, kWeighted>(row, at);
}

template <Element kIn, Element kOut>
void reduce_row(const ReduceRow& row) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(row.out) % EP_SIMD_BYTES == 0;
  if (row.weights != nullptr) {
    is_aligned ? reduce_whole_row<kIn, kOut, true, true>(row)
               : reduce_whole_row<kIn, kOut, true, false>(row);
  } else {
    is_aligned ? reduce_whole_row<kIn, kOut, false, true>(row)
               : reduce_whole_row<kIn, kOut, false, false>(row);
  }
}

// ---- The table ------------------------------------------------------------------------------

constexpr Leaves make_leaves(const char* isa) {
  using enum Element;
  using enum Format;
  return {
      isa,
      copy_row,
      stream_fence,
      {{quantize_row<kBF16, kFp8Block128>, quantize_row<kBF16, kFp8Block128Pow2>,
        quantize_row<kBF16, kFp8Block128Ue8m0>},
       {quantize_row<kFP16, kFp8Block128>, quantize_row<kFP16, kFp8Block128Pow2>,
        quantize_row<kFP16, kFp8Block128Ue8m0>},
       {quantize_row<kFP32, kFp8Block128>, quantize_row<kFP32, kFp8Block128Pow2>,
        quantize_row<kFP32, kFp8Block128Ue8m0>}},
      {{reduce_row<kBF16, kBF16>, reduce_row<kBF16, kFP16>, reduce_row<kBF16, kFP32>},
       {reduce_row<kFP16, kBF16>, reduce_row<kFP16, kFP16>, reduce_row<kFP16, kFP32>},
       {reduce_row<kFP32, kBF16>, reduce_row<kFP32, kFP16>, reduce_row<kFP32, kFP32>}},
  };
}

}  // namespace
}  // namespace ep::kernels::host

#undef EP_SIMD_INLINE
