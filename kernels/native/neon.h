// The sixteen float lanes of simd.h in four vectors of an AArch64 processor. Every such processor has NEON's basic set; dot
// products of bf16 exist if the compiler targets them.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace arbordraft {

using bf16 = uint16_t;

#define ARBORDRAFT_QUARTERS(type, expression)        \
  type r;                                            \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r

struct f32x16 {
  float32x4_t v[4];
};
inline float32x4_t widen4(int16x4_t x) { return vcvtq_f32_s32(vmovl_s16(x)); }
inline f32x16 splat(float x) { ARBORDRAFT_QUARTERS(f32x16, vdupq_n_f32(x)); }
inline f32x16 load(const float* p) { ARBORDRAFT_QUARTERS(f32x16, vld1q_f32(p + 4 * i)); }
inline void store(float* p, f32x16 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline f32x16 load(const bf16* p) {
  ARBORDRAFT_QUARTERS(f32x16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
inline f32x16 load(const int8_t* p) {
  const int16x8_t low = vmovl_s8(vld1_s8(p)), high = vmovl_s8(vld1_s8(p + 8));
  return {widen4(vget_low_s16(low)), widen4(vget_high_s16(low)), widen4(vget_low_s16(high)), widen4(vget_high_s16(high))};
}
inline f32x16 operator+(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vaddq_f32(a.v[i], b.v[i])); }
inline f32x16 operator-(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vsubq_f32(a.v[i], b.v[i])); }
inline f32x16 operator*(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vmulq_f32(a.v[i], b.v[i])); }
inline f32x16 operator/(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vdivq_f32(a.v[i], b.v[i])); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { ARBORDRAFT_QUARTERS(f32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// Unlike in simd.h, these two give NaN if either argument is NaN.
inline f32x16 max(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vmaxq_f32(a.v[i], b.v[i])); }
inline f32x16 min(f32x16 a, f32x16 b) { ARBORDRAFT_QUARTERS(f32x16, vminq_f32(a.v[i], b.v[i])); }
inline f32x16 round(f32x16 a) { ARBORDRAFT_QUARTERS(f32x16, vrndnq_f32(a.v[i])); }
inline float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {  // in two halves, so that exponents stay in range
  f32x16 r;
  for (int i = 0; i < 4; ++i) {
    const int32x4_t whole = vcvtq_s32_f32(n.v[i]), half = vshrq_n_s32(whole, 1);
    r.v[i] = vmulq_f32(vmulq_f32(a.v[i], power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
  }
  return r;
}
inline float32x4_t sum4(f32x16 a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3])); }
inline float sum(f32x16 a) { return vaddvq_f32(sum4(a)); }
inline float largest(f32x16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3])));
}
inline f32x16 sums(const f32x16* x) {
  const auto four = [&](const f32x16* y) {
    return vpaddq_f32(vpaddq_f32(sum4(y[0]), sum4(y[1])), vpaddq_f32(sum4(y[2]), sum4(y[3])));
  };
  ARBORDRAFT_QUARTERS(f32x16, four(x + 4 * i));
}
inline void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t w = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    even.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(w, 16));
    odd.v[i] = vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u)));
  }
}
inline void load_pairs(const int8_t* p, f32x16& even, f32x16& odd) {
  for (int i = 0; i < 2; ++i) {
    const int8x8x2_t w = vld2_s8(p + 16 * i);
    const int16x8_t first = vmovl_s8(w.val[0]), second = vmovl_s8(w.val[1]);
    even.v[2 * i] = widen4(vget_low_s16(first)), even.v[2 * i + 1] = widen4(vget_high_s16(first));
    odd.v[2 * i] = widen4(vget_low_s16(second)), odd.v[2 * i + 1] = widen4(vget_high_s16(second));
  }
}
inline bool any_nan(f32x16 x) {
  uint32x4_t same = vceqq_f32(x.v[0], x.v[0]);
  for (int i = 1; i < 4; ++i) same = vandq_u32(same, vceqq_f32(x.v[i], x.v[i]));
  return vminvq_u32(same) == 0;
}
inline f32x16 load_halves(const uint16_t* p) {
  ARBORDRAFT_QUARTERS(f32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
inline f32x16 load_counts(const uint8_t* p) {
  const uint8x16_t all = vld1q_u8(p);
  const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(all)), vmovl_high_u8(all)};
  ARBORDRAFT_QUARTERS(
      f32x16,
      vcvtq_f32_u32(i % 2 ? vmovl_high_u16(halves[i / 2]) : vmovl_u16(vget_low_u16(halves[i / 2]))));
}

// Bytes: see prepacked_linear/bytes.h.
struct i32x16 {
  int32x4_t v[4];
};
struct u8x64 {
  uint8x16_t v[4];
};
inline i32x16 splat_integer(int32_t x) { ARBORDRAFT_QUARTERS(i32x16, vdupq_n_s32(x)); }
inline f32x16 to_float(i32x16 x) { ARBORDRAFT_QUARTERS(f32x16, vcvtq_f32_s32(x.v[i])); }
inline u8x64 load_bytes(const uint8_t* p) { ARBORDRAFT_QUARTERS(u8x64, vld1q_u8(p + 16 * i)); }
template <bool High>
inline u8x64 load_nibbles(const uint8_t* p) {
  const u8x64 both = load_bytes(p);
  ARBORDRAFT_QUARTERS(u8x64, High ? vshrq_n_u8(both.v[i], 4) : vandq_u8(both.v[i], vdupq_n_u8(15)));
}
template <int Left, int Mask>
inline u8x64 with_bits(u8x64 low, u8x64 high) {
  const int8x16_t left = vdupq_n_s8(Left);  // a negative number shifts to the right
  ARBORDRAFT_QUARTERS(u8x64, vorrq_u8(low.v[i], vandq_u8(vshlq_u8(high.v[i], left), vdupq_n_u8(Mask))));
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kBiased = true, kSums32 = true;
inline u8x64 signed_codes(u8x64 biased) { return biased; }
inline int32x4_t dot4(int32x4_t sums, uint8x16_t w, int8x16_t x) { return vusdotq_s32(sums, w, x); }
#else  // signed times signed: other codes are below 128
constexpr bool kBiased = false, kSums32 = true;
inline u8x64 signed_codes(u8x64 biased) { ARBORDRAFT_QUARTERS(u8x64, veorq_u8(biased.v[i], vdupq_n_u8(0x80))); }
inline int32x4_t dot4(int32x4_t sums, uint8x16_t codes, int8x16_t x) {
  const int8x16_t w = vreinterpretq_s8_u8(codes);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, w, x);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  return vaddq_s32(sums, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(w, x))));
#endif
}
#endif
inline u8x64 look_up(const int8_t* levels, u8x64 codes) {
  const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(levels));
  ARBORDRAFT_QUARTERS(u8x64, vqtbl1q_u8(table, codes.v[i]));
}
template <class C>
inline i32x16 start(int32_t begin) {
  return splat_integer(begin);
}
template <class C>
inline i32x16 dot(i32x16 sums, u8x64 codes, int32_t x) {
  const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
  ARBORDRAFT_QUARTERS(i32x16, dot4(sums.v[i], codes.v[i], four));
}
template <class C>
inline i32x16 total(i32x16 sums, int32_t) {
  return sums;
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

// Sixteen pairs of bf16: see simd.h.
struct bf16x32 {
  bfloat16x8_t v[4];
};
inline bf16x32 load_dot(const bf16* p) { ARBORDRAFT_QUARTERS(bf16x32, vreinterpretq_bf16_u16(vld1q_u16(p + 8 * i))); }
inline bf16x32 load_dot(const int8_t* p) {
  f32x16 even, odd;
  load_pairs(p, even, odd);
  ARBORDRAFT_QUARTERS(bf16x32, vreinterpretq_bf16_u16(vtrn2q_u16(
                                   vreinterpretq_u16_f32(even.v[i]), vreinterpretq_u16_f32(odd.v[i]))));
}
inline bf16x32 splat_pair(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  ARBORDRAFT_QUARTERS(bf16x32, vreinterpretq_bf16_u32(vdupq_n_u32(pair)));
}
inline f32x16 dot(bf16x32 a, bf16x32 b, f32x16 c) { ARBORDRAFT_QUARTERS(f32x16, vbfdotq_f32(c.v[i], a.v[i], b.v[i])); }
inline void zip(const bf16* a, const bf16* b, bf16x32& low, bf16x32& high) {
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t x = vld1q_u16(a + 8 * i), y = vld1q_u16(b + 8 * i);
    low.v[i] = vreinterpretq_bf16_u16(vzip1q_u16(x, y));
    high.v[i] = vreinterpretq_bf16_u16(vzip2q_u16(x, y));
  }
}
inline void store_unzipped(float* p, f32x16 low, f32x16 high) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(p + 8 * i, low.v[i]);
    vst1q_f32(p + 8 * i + 4, high.v[i]);
  }
}
inline void store(bf16* p, f32x16 x) {
  for (int i = 0; i < 4; i += 2) {
    const bfloat16x8_t half = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.v[i]), x.v[i + 1]);
    vst1q_u16(p + 4 * i, vreinterpretq_u16_bf16(half));
  }
}

#endif
#undef ARBORDRAFT_QUARTERS

}  // namespace arbordraft
