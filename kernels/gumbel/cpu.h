// Gumbel noise by the definition in reference.py, and the highest of scores with noise. Rounding is part of the definition,
// so compile without contraction.
#pragma once

#include <bit>

#include "../native/simd.h"

namespace arbordraft {

constexpr int64_t kGroup = 4 * kLanes;  // tokens of 16 neighbouring counters

struct NoiseKey {
  uint32_t low, high, position;
};

using u32x16 = uint32_t __attribute__((vector_size(64)));

// Computes the upper and the lower words of sixteen products.
inline void product(u32x16 x, uint32_t by, u32x16& high, u32x16& low) {
#if defined(__AVX512F__)
  const __m512i even = (__m512i)x, m = _mm512_set1_epi32(int(by));
  const __m512i p = _mm512_mul_epu32(even, m), q = _mm512_mul_epu32(_mm512_srli_epi64(even, 32), m);
  high = (u32x16)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(p, 32), q);
  low = (u32x16)_mm512_mask_blend_epi32(0xaaaa, p, _mm512_slli_epi64(q, 32));
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32(int(by));
  for (int half = 0; half < 2; ++half) {
    const __m256i even = ((const __m256i*)&x)[half];
    const __m256i p = _mm256_mul_epu32(even, m), q = _mm256_mul_epu32(_mm256_srli_epi64(even, 32), m);
    ((__m256i*)&high)[half] = _mm256_blend_epi32(_mm256_srli_epi64(p, 32), q, 0xaa);
    ((__m256i*)&low)[half] = _mm256_blend_epi32(p, _mm256_slli_epi64(q, 32), 0xaa);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t p = uint64_t(x[i]) * by;
    high[i] = uint32_t(p >> 32);
    low[i] = uint32_t(p);
  }
#endif
}

// Computes words `half` (0: upper, 1: lower) of the group of tokens that begins at `first`.
inline void philox(NoiseKey key, int64_t first, uint32_t half, uint32_t* words) {
  u32x16 a, b = u32x16{} + key.position, c = u32x16{} + half, d = {};
  for (int i = 0; i < kLanes; ++i) a[i] = uint32_t(first / kGroup * kLanes + i);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    u32x16 above_a, below_a, above_c, below_c;
    product(a, 0xD2511F53u, above_a, below_a);
    product(c, 0xCD9E8D57u, above_c, below_c);
    a = above_c ^ b ^ key.low;
    b = below_c;
    c = above_a ^ d ^ key.high;
    d = below_a;
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
  std::memcpy(words, &a, sizeof a);
  std::memcpy(words + kLanes, &b, sizeof b);
  std::memcpy(words + 2 * kLanes, &c, sizeof c);
  std::memcpy(words + 3 * kLanes, &d, sizeof d);
}

inline double logarithm(double x) {
  constexpr double kRootHalf = 0.7071067811865476;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const double m = std::bit_cast<double>((bits & 0xfffffffffffffull) | 0x3fe0000000000000ull);  // 1/2 to 1
  const bool small = m < kRootHalf;
  const int32_t e = int32_t(bits >> 52) - 1022 - small;
  const double near = small ? m + m : m, s = (near - 1) / (near + 1), square = s * s;
  double series = 1.0 / 21;
  series = series * square + 1.0 / 19;
  series = series * square + 1.0 / 17;
  series = series * square + 1.0 / 15;
  series = series * square + 1.0 / 13;
  series = series * square + 1.0 / 11;
  series = series * square + 1.0 / 9;
  series = series * square + 1.0 / 7;
  series = series * square + 1.0 / 5;
  series = series * square + 1.0 / 3;
  series = series * square + 1.0;
  return double(e) * 0.6931471805599453 + (s + s) * series;
}

inline double gumbel_of(uint32_t upper, uint32_t lower) {
  const double y = std::min(((lower + 0.5) * 0x1p-32 + upper) * 0x1p-32, 1 - 0x1p-53);
  const double rest = 1 - y;
  const bool lost = rest == 1;
  const double exact = -logarithm(rest) * (y / (lost ? y : 1 - rest));
  return -logarithm(lost ? y : exact);
}

// Computes the noise of tokens `range` of one row, in whole groups; only tokens below `size` are stored.
inline void gumbel_row(NoiseKey key, Range range, int64_t size, double* out) {
  uint32_t upper[kGroup], lower[kGroup];
  for (int64_t first = range.begin; first < range.end; first += kGroup) {
    philox(key, first, 0, upper);
    philox(key, first, 1, lower);
    double values[kGroup];
    for (int i = 0; i < kGroup; ++i) values[i] = gumbel_of(upper[i], lower[i]);
    std::memcpy(out + first, values, std::min(kGroup, size - first) * sizeof(double));
  }
}

// log2 within 0.01, by a parabola through 1 and 2.
inline float rough_log2(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float m = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u);
  return float(int32_t(bits >> 23) - 127) + ((-1.f / 3 * m + 2.f) * m - 5.f / 3);
}

// Returns an upper bound of the noise, given its upper word: infinity if that is 0.
inline float gumbel_bound(uint32_t upper) {
  const float y = float(upper >> 8) * 0x1p-24f;  // truncated, so that it is no greater
  const float least = std::max(y, -0.6931472f * (rough_log2(std::max(1.f - y, 0x1p-24f)) + 0.0101f));  // <= -ln(1 - y)
  return y > 0 ? -0.6931472f * (rough_log2(least) - 0.0101f) : std::numeric_limits<float>::infinity();
}

// Finds the first of the highest `scores / temperature + noise` among a range's tokens whose divided score is not below
// `lowest`. Words are costly and logarithms more so. Half of the words and a bound of the noise exclude nearly all tokens.
template <class T>
inline void gumbel_maximum(
    const T* scores, float temperature, NoiseKey key, Range range, int64_t size, double& best, int64_t& token,
    float lowest = -std::numeric_limits<float>::infinity()) {
  best = -std::numeric_limits<double>::infinity();
  token = -1;
  uint32_t upper[kGroup], lower[kGroup];
  float x[kGroup], bound[kGroup];
  for (int64_t first = range.begin; first < range.end; first += kGroup) {
    const int64_t real = std::min(kGroup, size - first);
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      if (i >= real) break;
      const f32x16 logits = load(scores + first + i, real - i);
      store(x + i, temperature == 1 ? logits : logits / splat(temperature));
    }
    for (int64_t i = real; i < kGroup; ++i) x[i] = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < kGroup; ++i) x[i] = x[i] < lowest ? -std::numeric_limits<float>::infinity() : x[i];
    philox(key, first, 0, upper);
    float highest = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < kGroup; ++i) {
      bound[i] = x[i] + gumbel_bound(upper[i]) + std::abs(x[i]) * 1e-6f + 1e-3f;
      bound[i] = x[i] > -std::numeric_limits<float>::infinity() ? bound[i] : x[i];
    }
    for (int i = 0; i < kGroup; ++i) highest = bound[i] > highest ? bound[i] : highest;
    if (!(highest > best)) continue;
    philox(key, first, 1, lower);
    for (int64_t i = 0; i < real; ++i) {
      if (!(bound[i] > best)) continue;
      const double value = x[i] + gumbel_of(upper[i], lower[i]);
      if (value > best) best = value, token = first + i;
    }
  }
}

}  // namespace arbordraft
