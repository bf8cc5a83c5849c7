// Sixteen exact sums of products of bytes, on the vector unit that the compiler targets: codes of weights times signed codes
// of activations. Integers are not rounded, so every unit gives the same numbers.
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// start, dot and total add up the products of a group of 32 inputs for codes of kind C: with kMost, the largest absolute
// value, kSigned and kCentre. Units multiply codes that are not negative: signed codes have 128 added if kBiased. What is
// too much is subtracted at the start: see begin. Units without 32-bit sums add products pairwise into 16 bits, which
// saturates above 32767. There signed codes lend their sign to the activation, and their pairs stay within 2 * 128 * 127.
// Of codes up to 15, all pairs of a group add up to at most 8 * 2 * 15 * 127 = 30480, and are widened only at its end. Of
// codes up to 63, two pairs add up to 2 * 2 * 63 * 127 = 32004: dot_twice widens these together.
template <class C, bool Biased>
inline int32_t begin(int32_t codes) {  // of the sums, for activations whose codes add up to this
  return C::kSigned && !Biased ? 0 : -C::kCentre * codes;
}

#if defined(__AVX512BW__)

struct i32x16 {
  __m512i v;
};
struct u8x64 {
  __m512i v;
};
inline i32x16 splat_integer(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline u8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
template <bool High>
inline u8x64 load_nibbles(const uint8_t* p) {
  const __m512i both = _mm512_loadu_si512(p);
  return {_mm512_and_si512(High ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15))};
}
// Puts bits of `high`, shifted to the left or by a negative number to the right, beside those of `low`.
template <int Left, int Mask>
inline u8x64 with_bits(u8x64 low, u8x64 high) {
  const __m512i moved = Left >= 0 ? _mm512_slli_epi16(high.v, std::max(Left, 0)) : _mm512_srli_epi16(high.v, std::max(-Left, 0));
  return {_mm512_ternarylogic_epi32(low.v, moved, _mm512_set1_epi8(Mask), 0xf8)};  // low | moved & mask
}
inline u8x64 look_up(const int8_t* levels, u8x64 codes) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)levels)), codes.v)};
}
inline f32x16 to_float(i32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
#if defined(__AVX512VNNI__)
constexpr bool kBiased = true, kSums32 = true;
inline u8x64 signed_codes(u8x64 biased) { return biased; }
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(begin);
}
template <class C>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  return {_mm512_dpbusd_epi32(sums.v, codes.v, _mm512_set1_epi32(x))};
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t) {
  return sums;
}
#else
constexpr bool kBiased = false, kSums32 = false;
inline u8x64 signed_codes(u8x64 biased) { return {_mm512_xor_si512(biased.v, _mm512_set1_epi8(char(0x80)))}; }
template <class C>
inline __m512i pairs_of(__m512i w, int32_t x) {
  __m512i y = _mm512_set1_epi32(x);
  if constexpr (C::kSigned) {
    y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(w), _mm512_setzero_si512(), y);
    w = _mm512_abs_epi8(w);
  }
  return _mm512_maddubs_epi16(w, y);
}
inline __m512i widened(__m512i pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(C::kMost <= 15 ? 0 : begin);
}
template <class C>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  const __m512i pairs = pairs_of<C>(codes.v, x);
  return {C::kMost <= 15 ? _mm512_add_epi16(sums.v, pairs) : _mm512_add_epi32(sums.v, widened(pairs))};
}
template <class C>
inline i32x16 dot_twice(i32x16 sums, u8x64 first, u8x64 second, int32_t x, int32_t y) {
  return {_mm512_add_epi32(sums.v, widened(_mm512_add_epi16(pairs_of<C>(first.v, x), pairs_of<C>(second.v, y))))};
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t begin) {
  return C::kMost <= 15 ? i32x16{_mm512_add_epi32(widened(sums.v), _mm512_set1_epi32(begin))} : sums;
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
inline void store_bytes(uint8_t* p, u8x64 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
template <bool High>
inline u8x64 load_nibbles(const uint8_t* p) {
  const u8x64 both = load_bytes(p);
  const __m256i mask = _mm256_set1_epi8(15);
  if constexpr (!High) return {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
  return {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
}
template <int Left, int Mask>
inline __m256i with_bits8(__m256i low, __m256i high) {
  const __m256i moved = Left >= 0 ? _mm256_slli_epi16(high, std::max(Left, 0)) : _mm256_srli_epi16(high, std::max(-Left, 0));
  return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(Mask)));
}
template <int Left, int Mask>
inline u8x64 with_bits(u8x64 low, u8x64 high) {
  return {with_bits8<Left, Mask>(low.a, high.a), with_bits8<Left, Mask>(low.b, high.b)};
}
inline u8x64 look_up(const int8_t* levels, u8x64 codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)levels));
  return {_mm256_shuffle_epi8(table, codes.a), _mm256_shuffle_epi8(table, codes.b)};
}
inline f32x16 to_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
#if defined(__AVXVNNI__)
constexpr bool kBiased = true, kSums32 = true;
inline u8x64 signed_codes(u8x64 biased) { return biased; }
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(begin);
}
template <class C>
inline __m256i dot8(__m256i sums, __m256i codes, __m256i x) {
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t) {
  return sums;
}
#else
constexpr bool kBiased = false, kSums32 = false;
inline u8x64 signed_codes(u8x64 biased) {
  const __m256i centre = _mm256_set1_epi8(char(0x80));
  return {_mm256_xor_si256(biased.a, centre), _mm256_xor_si256(biased.b, centre)};
}
template <class C>
inline __m256i pairs_of(__m256i w, __m256i x) {
  return C::kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
}
// Compilers turn sums of integers into trees, which takes more registers than there are.
inline __m256i in_order(__m256i sums) {
  __asm__("" : "+x"(sums));
  return sums;
}
inline __m256i widened(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(C::kMost <= 15 ? 0 : begin);
}
template <class C>
inline __m256i dot8(__m256i sums, __m256i codes, __m256i x) {
  const __m256i pairs = pairs_of<C>(codes, x);
  return in_order(C::kMost <= 15 ? _mm256_add_epi16(sums, pairs) : _mm256_add_epi32(sums, widened(pairs)));
}
template <class C>
inline i32x16 dot_twice(i32x16 sums, u8x64 first, u8x64 second, int32_t x, int32_t y) {
  const __m256i p = _mm256_set1_epi32(x), q = _mm256_set1_epi32(y);
  const __m256i a = _mm256_add_epi16(pairs_of<C>(first.a, p), pairs_of<C>(second.a, q));
  const __m256i b = _mm256_add_epi16(pairs_of<C>(first.b, p), pairs_of<C>(second.b, q));
  return {in_order(_mm256_add_epi32(sums.a, widened(a))), in_order(_mm256_add_epi32(sums.b, widened(b)))};
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t begin) {
  if constexpr (C::kMost > 15) return sums;
  const __m256i more = _mm256_set1_epi32(begin);
  return {_mm256_add_epi32(widened(sums.a), more), _mm256_add_epi32(widened(sums.b), more)};
}
#endif
template <class C>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  const __m256i y = _mm256_set1_epi32(x);
  return {dot8<C>(sums.a, codes.a, y), dot8<C>(sums.b, codes.b, y)};
}

#elif !defined(ARBORDRAFT_NEON)  // neon.h has its own

struct i32x16 {
  int32_t v[16];
};
struct u8x64 {
  uint8_t v[64];
};
constexpr bool kBiased = true, kSums32 = true;
inline i32x16 splat_integer(int32_t x) {
  i32x16 r;
  for (int32_t& lane : r.v) lane = x;
  return r;
}
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
template <bool High>
inline u8x64 load_nibbles(const uint8_t* p) {
  u8x64 r;
  for (int i = 0; i < 64; ++i) r.v[i] = High ? p[i] >> 4 : p[i] & 15;
  return r;
}
template <int Left, int Mask>
inline u8x64 with_bits(u8x64 low, u8x64 high) {
  for (int i = 0; i < 64; ++i) low.v[i] |= (Left >= 0 ? high.v[i] << std::max(Left, 0) : high.v[i] >> std::max(-Left, 0)) & Mask;
  return low;
}
inline u8x64 signed_codes(u8x64 biased) { return biased; }
inline u8x64 look_up(const int8_t* levels, u8x64 codes) {
  for (uint8_t& code : codes.v) code = uint8_t(levels[code]);
  return codes;
}
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(begin);
}
template <class C>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  int8_t y[4];
  std::memcpy(y, &x, 4);
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) sums.v[i] += int32_t(codes.v[4 * i + k]) * y[k];
  return sums;
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t) {
  return sums;
}

#endif

template <class C>
constexpr bool kTwice = !kSums32 && C::kMost > 15 && C::kMost <= 63;

template <class T>
inline T read(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}
inline float float_at(const uint8_t* p) { return read<float>(p); }
inline float half_at(const uint8_t* p) {
  const uint32_t half = read<uint16_t>(p), exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 0) {
    const float size = float(mantissa) * 0x1p-24f;
    return half >> 15 ? -size : size;
  }
  const uint32_t bits = (half >> 15) << 31 | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
  return read<float>((const uint8_t*)&bits);
}
inline float power(uint8_t exponent) {  // 2^(exponent - 128), which may be denormal
  const uint32_t bits = exponent < 2 ? 0x200000u << exponent : uint32_t(exponent - 1) << 23;
  return read<float>((const uint8_t*)&bits);
}
inline f32x16 load_powers(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __m512i least = _mm512_sllv_epi32(_mm512_set1_epi32(0x200000), _mm512_min_epi32(e, _mm512_set1_epi32(2)));
  return {_mm512_castsi512_ps(_mm512_max_epi32(normal, least))};  // equal at 2, and less from there on
#elif defined(__AVX2__) && defined(__FMA__)
  const __m128i all = _mm_loadu_si128((const __m128i*)p);
  const auto eight = [](__m256i e) {
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i least = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), _mm256_min_epi32(e, _mm256_set1_epi32(2)));
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, least));
  };
  return {eight(_mm256_cvtepu8_epi32(all)), eight(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = power(p[i]);
  return load(lanes);
#endif
}

#if !defined(ARBORDRAFT_NEON)
inline f32x16 load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = half_at((const uint8_t*)(p + i));
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
