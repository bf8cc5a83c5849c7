// Sixteen float lanes on the vector unit that the compiler targets, and the thread team of all CPU kernels.
//
// Every function treats its lanes alike and in a fixed order, so a row's bits never depend on other rows. That rules out
// -ffast-math and any summation order that depends on size.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(ARBORDRAFT_GENERIC)  // all have NEON; only ARBORDRAFT_GENERIC asks for plain loops
#define ARBORDRAFT_NEON
#include "neon.h"
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace arbordraft {

constexpr int kLanes = 16;
using bf16 = uint16_t;

#if defined(__AVX512BF16__)
constexpr const char* kIsa = "avx512_bf16";
#elif defined(__AVX512F__)
constexpr const char* kIsa = "avx512";
#elif defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__)
constexpr const char* kIsa = "avx_vnni";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr const char* kIsa = "avx2";
#elif defined(ARBORDRAFT_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr const char* kIsa = "neon_bf16";
#elif defined(ARBORDRAFT_NEON) && defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kIsa = "neon_dot";
#elif defined(ARBORDRAFT_NEON)
constexpr const char* kIsa = "neon";
#else
constexpr const char* kIsa = "generic";
#endif

inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float widen(float x) { return x; }

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
};
inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
inline f32x16 load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline f32x16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline float sum(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
// Loads the even and the odd elements of sixteen adjacent pairs.
inline void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  const __m512i w = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))));
}
inline void load_pairs(const int8_t* p, f32x16& even, f32x16& odd) {
  const __m512i w = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
  even.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 24), 24));
  odd.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(w, 8));
}
inline bool any_nan(f32x16 x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0; }
// Lane i becomes the sum of the lanes of x[i].
inline f32x16 sums(const f32x16* x) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct f32x16 {
  __m256 a, b;
};
inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256 widen8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline f32x16 load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256 widen8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline f32x16 load(const int8_t* p) { return {widen8(p), widen8(p + 8)}; }
#define ARBORDRAFT_BOTH(name, f) \
  inline f32x16 name(f32x16 x, f32x16 y) { return {f(x.a, y.a), f(x.b, y.b)}; }
ARBORDRAFT_BOTH(operator+, _mm256_add_ps)
ARBORDRAFT_BOTH(operator-, _mm256_sub_ps)
ARBORDRAFT_BOTH(operator*, _mm256_mul_ps)
ARBORDRAFT_BOTH(operator/, _mm256_div_ps)
ARBORDRAFT_BOTH(max, _mm256_max_ps)
ARBORDRAFT_BOTH(min, _mm256_min_ps)
#undef ARBORDRAFT_BOTH
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline f32x16 round(f32x16 x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 scale8(__m256 x, __m256 n) {
  // In two halves, so that exponents down to the denormals stay in range.
  const __m256i i = _mm256_cvtps_epi32(n), h = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(h, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, h), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(x, first), second);
}
inline f32x16 times_power_of_two(f32x16 x, f32x16 n) { return {scale8(x.a, n.a), scale8(x.b, n.b)}; }
inline float sum(f32x16 x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float largest(f32x16 x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline void pairs8(__m256i w, __m256& even, __m256& odd) {
  even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000))));
}
inline void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  pairs8(_mm256_loadu_si256((const __m256i*)p), even.a, odd.a);
  pairs8(_mm256_loadu_si256((const __m256i*)(p + 16)), even.b, odd.b);
}
inline void pairs8(const int8_t* p, __m256& even, __m256& odd) {
  const __m256i w = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
  even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24), 24));
  odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 8));
}
inline void load_pairs(const int8_t* p, f32x16& even, f32x16& odd) {
  pairs8(p, even.a, odd.a);
  pairs8(p + 16, even.b, odd.b);
}
inline bool any_nan(f32x16 x) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)));
}
inline f32x16 sums(const f32x16* x) {
  float s[16];
  for (int i = 0; i < 16; ++i) s[i] = sum(x[i]);
  return load(s);
}

#elif !defined(ARBORDRAFT_NEON)  // any other processor: plain loops, which compilers vectorise

struct f32x16 {
  float v[16];
};
#define ARBORDRAFT_LANES(expression)                   \
  f32x16 r;                                            \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r
inline f32x16 splat(float x) { ARBORDRAFT_LANES(x); }
inline f32x16 load(const float* p) { ARBORDRAFT_LANES(p[i]); }
inline f32x16 load(const bf16* p) { ARBORDRAFT_LANES(widen(p[i])); }
inline f32x16 load(const int8_t* p) { ARBORDRAFT_LANES(float(p[i])); }
inline void store(float* p, f32x16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline f32x16 operator+(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] + b.v[i]); }
inline f32x16 operator-(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] - b.v[i]); }
inline f32x16 operator*(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] * b.v[i]); }
inline f32x16 operator/(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] / b.v[i]); }
// Two roundings on purpose: whether a compiler fuses them must not depend on the loop around it.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  float product[16];
  for (int i = 0; i < 16; ++i) product[i] = a.v[i] * b.v[i];
  ARBORDRAFT_LANES(product[i] + c.v[i]);
}
inline f32x16 max(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline f32x16 min(f32x16 a, f32x16 b) { ARBORDRAFT_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline f32x16 round(f32x16 a) { ARBORDRAFT_LANES(std::nearbyintf(a.v[i])); }
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) { ARBORDRAFT_LANES(std::ldexp(a.v[i], int(n.v[i]))); }
inline float sum(f32x16 a) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
  return a.v[0];
}
inline float largest(f32x16 a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
inline void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  for (int i = 0; i < 16; ++i) even.v[i] = widen(p[2 * i]), odd.v[i] = widen(p[2 * i + 1]);
}
inline void load_pairs(const int8_t* p, f32x16& even, f32x16& odd) {
  for (int i = 0; i < 16; ++i) even.v[i] = p[2 * i], odd.v[i] = p[2 * i + 1];
}
inline bool any_nan(f32x16 x) {
  bool found = false;
  for (float lane : x.v) found |= lane != lane;
  return found;
}
inline f32x16 sums(const f32x16* x) { ARBORDRAFT_LANES(sum(x[i])); }
#undef ARBORDRAFT_LANES

#endif

// Calls the function with the constants n = 0..N-1. Unlike a loop this is unrolled before compilers allocate registers:
// with a loop, sums in an array would be stored at every change.
template <class What, int... Numbers>
[[gnu::always_inline]] inline void each(const What& what, std::integer_sequence<int, Numbers...>) {
  (what(std::integral_constant<int, Numbers>()), ...);
}
template <int N, class What>
[[gnu::always_inline]] inline void each(const What& what) {
  each(what, std::make_integer_sequence<int, N>());
}

// N vectors, kept in registers if their address is never taken, also if a vector is two of the processor's.
template <int N, class V = f32x16>
struct Registers {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  decltype(V::a) a[N], b[N];
  [[gnu::always_inline]] void set(int n, V x) { a[n] = x.a, b[n] = x.b; }
  [[gnu::always_inline]] V operator[](int n) const { return {a[n], b[n]}; }
#else
  V v[N];
  [[gnu::always_inline]] void set(int n, V x) { v[n] = x; }
  [[gnu::always_inline]] V operator[](int n) const { return v[n]; }
#endif
};

inline bf16 narrow(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A prepacked matrix multiplies bf16 rows if the processor has a bf16 dot product, floats otherwise. Lane i of dot(a, b, c)
// is c[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1].
#if defined(__AVX512BF16__) || (defined(ARBORDRAFT_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define ARBORDRAFT_DOT_BF16
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
inline void store(bf16* p, f32x16 x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = narrow(lanes[i]);
}
#endif
#if defined(__AVX512BF16__)
struct bf16x32 {
  __m512bh v;
};
inline bf16x32 load_dot(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline bf16x32 load_dot(const int8_t* p) {  // exact: 8 bits fit into the mantissa of bf16
  f32x16 even, odd;
  load_pairs(p, even, odd);
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
  return {(__m512bh)_mm512_or_si512(low, _mm512_castps_si512(odd.v))};
}
inline bf16x32 splat_pair(const bf16* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {(__m512bh)_mm512_set1_epi32(pair)};
}
inline f32x16 dot(bf16x32 a, bf16x32 b, f32x16 c) { return {_mm512_dpbf16_ps(c.v, a.v, b.v)}; }
// Interleaves 32 elements of a with those of b: `low` gets elements 0-3, 8-11, ..., `high` 4-7, 12-15, ...
inline void zip(const bf16* a, const bf16* b, bf16x32& low, bf16x32& high) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  low.v = (__m512bh)_mm512_unpacklo_epi16(x, y);
  high.v = (__m512bh)_mm512_unpackhi_epi16(x, y);
}
inline void store_unzipped(float* p, f32x16 low, f32x16 high) {  // in the order before zip
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(low.v, front, high.v));
  _mm512_storeu_ps(p + kLanes, _mm512_permutex2var_ps(low.v, back, high.v));
}
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v)); }
#endif
template <class T>
inline void store(T* p, f32x16 x, int64_t lanes) {  // the first `lanes` lanes
  if (lanes >= kLanes) return store(p, x);
  T all[kLanes];
  store(all, x);
  std::memcpy(p, all, lanes * sizeof(T));
}
template <class T>
inline f32x16 load(const T* p, int64_t lanes) {  // zeros after the first `lanes` lanes
  if (lanes >= kLanes) return load(p);
  T all[kLanes] = {};
  std::memcpy(all, p, lanes * sizeof(T));
  return load(all);
}
inline f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

// exp by the range reduction x = n ln 2 + r and a polynomial in r (Cephes' coefficients), within 2 units in the last
// place; exp(-inf) and anything below the smallest normal number give 0.
inline f32x16 exp(f32x16 x) {
  const f32x16 c = max(splat(-110.f), min(splat(89.f), x));  // in this order NaN comes through
  const f32x16 n = round(c * splat(1.44269504f));
  f32x16 r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.f));
  return times_power_of_two(p, n);
}
inline f32x16 sigmoid(f32x16 x) { return splat(1.f) / (splat(1.f) + exp(splat(0.f) - x)); }
inline f32x16 tanh(f32x16 x) { return splat(1.f) - splat(2.f) / (exp(x + x) + splat(1.f)); }

enum class Activation : int64_t { silu = 0, gelu_tanh = 1, gelu = 2, relu = 3, relu2 = 4 };

inline f32x16 activate(f32x16 x, Activation kind) {
  switch (kind) {
    case Activation::silu:
      return x * sigmoid(x);
    case Activation::gelu_tanh: {
      const f32x16 inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
      return splat(0.5f) * x * (splat(1.f) + tanh(inner));
    }
    case Activation::gelu: {
      float lanes[kLanes];
      store(lanes, x);
      for (float& lane : lanes) lane *= 0.5f * (1.f + std::erf(lane * 0.70710678f));
      return load(lanes);
    }
    default: {
      const f32x16 y = max(splat(0.f), x);  // in this order NaN comes through
      return kind == Activation::relu2 ? y * y : y;
    }
  }
}

// Whether this process was forked. team() runs body(thread, threads) in PyTorch's own OpenMP team of
// torch.get_num_threads() threads. A forked child inherits the team without its threads and would wait for them forever, so
// it works alone.
inline bool& forked() {
  static bool value = [] {
    pthread_atfork(nullptr, nullptr, [] { forked() = true; });
    return false;
  }();
  return value;
}
// A barrier for the threads of a team. OpenMP's own barriers put threads to sleep at once if a process has more teams than
// processors, and every computing thread of Python has a team. Waking them takes longer than most waits. A thread that has
// waited long still sleeps, because another thread may need this processor to arrive.
class Meeting {
 public:
  void wait(int threads) {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kPatience)
        relax();
      else
        round_.wait(round, std::memory_order_acquire);
    }
  }

 private:
  static constexpr int kPatience = 1 << 14;  // some 100 microseconds
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // waits about as long as pause; `yield` does not wait
#endif
  }
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};
inline Meeting*& meeting() {  // of the team that this thread is in
  static thread_local Meeting* here = nullptr;
  return here;
}
inline void meet(int threads) {  // all threads of the team wait for each other here
  if (threads > 1) meeting()->wait(threads);
}
template <class Body>
inline void team(bool worthwhile, const Body& body) {
#ifdef _OPENMP
  if (worthwhile && !forked() && omp_get_max_threads() > 1 && !omp_in_parallel()) {
    Meeting here;
#pragma omp parallel
    {
      const int threads = omp_get_num_threads();
      meeting() = &here;
      body(omp_get_thread_num(), threads);
      meet(threads);  // the region ends with one of OpenMP's barriers: no thread should wait there
    }
    return;
  }
#endif
  body(0, 1);
}
struct Range {
  int64_t begin, end;
};
// Returns a thread's share of `count` items, in whole groups.
inline Range share(int64_t count, int64_t group, int thread, int threads) {
  const int64_t groups = (count + group - 1) / group, each = (groups + threads - 1) / threads;
  return {std::min(count, thread * each * group), std::min(count, (thread + 1) * each * group)};
}

}  // namespace arbordraft
