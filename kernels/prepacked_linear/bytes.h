// Sixteen exact sums of products of bytes, on the vector unit that the compiler targets: unsigned codes of weights times
// signed codes of activations. Integers are not rounded, so every unit gives the same numbers.
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// dot<Bits>(sums, codes, x) adds to lane i the sum over k of (codes[4 i + k] - kOffset<Bits>) * x[k]. to_float<Bits> returns
// the sums of at most eight such calls, which make up a group. Multiplying bytes pairwise into 16 bits saturates above 32767.
// Codes of 8 bits are therefore centred first: pairs stay within 2 * 128 * 127. With codes of 4 bits, all pairs of a group add
// up to at most 8 * 2 * 15 * 127 = 30480, and are widened only at its end. Units that sum into 32 bits at once do not centre,
// and leave it to the caller.
#if defined(__AVX512BW__)

struct i32x16 {
  __m512i v;
};
struct u8x64 {
  __m512i v;
};
inline i32x16 splat_integer(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline u8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void load_nibbles(const uint8_t* p, u8x64& low, u8x64& high) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low.v = _mm512_and_si512(both, mask);
  high.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
#if defined(__AVX512VNNI__)
template <int Bits>
constexpr int kOffset = 0;
template <int Bits>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  return {_mm512_dpbusd_epi32(sums.v, codes.v, _mm512_set1_epi32(x))};
}
template <int Bits>
inline f32x16 to_float(i32x16 sums) {
  return {_mm512_cvtepi32_ps(sums.v)};
}
#else
template <int Bits>
constexpr int kOffset = Bits == 8 ? 128 : 0;
template <int Bits>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  __m512i w = codes.v, y = _mm512_set1_epi32(x);
  if constexpr (Bits == 8) {
    const __m512i centred = _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80)));
    w = _mm512_abs_epi8(centred);
    y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(centred), _mm512_setzero_si512(), y);
  }
  const __m512i pairs = _mm512_maddubs_epi16(w, y);
  if constexpr (Bits == 4) return {_mm512_add_epi16(sums.v, pairs)};
  return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
template <int Bits>
inline f32x16 to_float(i32x16 sums) {
  return {_mm512_cvtepi32_ps(Bits == 4 ? _mm512_madd_epi16(sums.v, _mm512_set1_epi16(1)) : sums.v)};
}
#endif

#elif defined(__AVX2__)

struct i32x16 {
  __m256i a, b;
};
struct u8x64 {
  __m256i a, b;
};
inline i32x16 splat_integer(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline u8x64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline void load_nibbles(const uint8_t* p, u8x64& low, u8x64& high) {
  const u8x64 both = load_bytes(p);
  const __m256i mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
}
#if defined(__AVXVNNI__)
template <int Bits>
constexpr int kOffset = 0;
template <int Bits>
inline __m256i dot8(__m256i sums, __m256i w, __m256i y) {
  return _mm256_dpbusd_avx_epi32(sums, w, y);
}
template <int Bits>
inline __m256 to_float8(__m256i sums) {
  return _mm256_cvtepi32_ps(sums);
}
#else
template <int Bits>
constexpr int kOffset = Bits == 8 ? 128 : 0;
template <int Bits>
inline __m256i dot8(__m256i sums, __m256i w, __m256i y) {
  if constexpr (Bits == 8) {
    const __m256i centred = _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80)));
    w = _mm256_abs_epi8(centred);
    y = _mm256_sign_epi8(y, centred);
  }
  const __m256i pairs = _mm256_maddubs_epi16(w, y);
  if constexpr (Bits == 4) return _mm256_add_epi16(sums, pairs);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int Bits>
inline __m256 to_float8(__m256i sums) {
  return _mm256_cvtepi32_ps(Bits == 4 ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums);
}
#endif
template <int Bits>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  const __m256i y = _mm256_set1_epi32(x);
  return {dot8<Bits>(sums.a, codes.a, y), dot8<Bits>(sums.b, codes.b, y)};
}
template <int Bits>
inline f32x16 to_float(i32x16 sums) {
  return {to_float8<Bits>(sums.a), to_float8<Bits>(sums.b)};
}

#elif !defined(ARBORDRAFT_NEON)  // neon.h has its own

struct i32x16 {
  int32_t v[16];
};
struct u8x64 {
  uint8_t v[64];
};
inline i32x16 splat_integer(int32_t x) {
  i32x16 r;
  for (int32_t& lane : r.v) lane = x;
  return r;
}
template <int Bits>
inline f32x16 to_float(i32x16 x) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float(x.v[i]);
  return r;
}
inline u8x64 load_bytes(const uint8_t* p) {
  u8x64 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void load_nibbles(const uint8_t* p, u8x64& low, u8x64& high) {
  for (int i = 0; i < 64; ++i) low.v[i] = p[i] & 15, high.v[i] = p[i] >> 4;
}
template <int Bits>
constexpr int kOffset = 0;
template <int Bits>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  int8_t y[4];
  std::memcpy(y, &x, 4);
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) sums.v[i] += int32_t(codes.v[4 * i + k]) * y[k];
  return sums;
}

#endif

#if !defined(ARBORDRAFT_NEON)
inline float half_to_float(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent == 31 ? (mantissa ? std::nanf("") : std::numeric_limits<float>::infinity())
                     : exponent     ? std::ldexp(float(1024 + mantissa), int(exponent) - 25)
                                    : std::ldexp(float(mantissa), -24);
  return half >> 15 ? -size : size;
}
inline f32x16 load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
  return load(lanes);
#endif
}
inline f32x16 load_counts(const uint8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
#elif defined(__AVX2__) && defined(__FMA__)
  const __m128i all = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = p[i];
  return load(lanes);
#endif
}
#endif

// Stores whole numbers of -127..127 as bytes.
inline void store_bytes(int8_t* p, f32x16 x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(lanes[i]);
#endif
}

}  // namespace arbordraft
