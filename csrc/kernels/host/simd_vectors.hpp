// Vectors of EP_SIMD_BYTES bytes: loads, stores, conversions.  Part of simd_body.hpp.
//
// The arithmetic is that of numeric.hpp, whose comments explain the constants; the tests hold the
// two together.
#pragma once

#include <cstddef>
#include <cstdint>

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

// ---- Streaming stores ---------------------------------------------------------------------------

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

}  // namespace
}  // namespace ep::kernels::host
