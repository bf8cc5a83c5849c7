// The largest logit of every row and its first position.
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// Returns the largest of some logits, NaN if one is NaN.
template <class T>
inline float maximum_of(const T* row, int64_t size) {
  constexpr int64_t kSums = 4;  // independent maxima, which do not wait for each other
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  f32x16 tops[kSums];
  std::fill(tops, tops + kSums, splat(kLowest));
  bool nan = false;
  int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes)
    for (int64_t n = 0; n < kSums; ++n) {
      const f32x16 x = load(row + i + n * kLanes);
      nan |= any_nan(x);
      tops[n] = max(tops[n], x);
    }
  float top = largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  for (; i < size; ++i) {
    const float x = widen(row[i]);
    nan |= x != x;
    top = std::max(top, x);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : top;
}

// Finds the maximum and its first token; NaN at token 0 if the row holds NaN. Only one stretch is searched for the token.
template <class T>
inline void row_maximum(const T* row, int64_t size, float& value, int64_t& token) {
  constexpr int64_t kStretch = 1024;
  value = maximum_of(row, std::min(size, kStretch));
  token = 0;
  for (int64_t begin = kStretch; begin < size && value == value; begin += kStretch) {
    const float top = maximum_of(row + begin, std::min(kStretch, size - begin));
    if (!(top <= value)) value = top, token = begin;
  }
  if (value != value) token = 0;
  else while (widen(row[token]) != value) ++token;
}

}  // namespace arbordraft
