// The largest logit of every row and where it stands first.
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// NaN at token 0 if the row holds one anywhere.
template <class T>
inline void row_maximum(const T* row, int64_t size, float& value, int64_t& token) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float top = kLowest;
  bool nan = false;
  int64_t i = 0;
  f32x16 tops = splat(kLowest);
  for (; i + kLanes <= size; i += kLanes) {
    const f32x16 x = load(row + i);
    nan |= any_nan(x);
    tops = max(tops, x);
  }
  top = largest(tops);
  const auto at = [&](int64_t j) {
    if constexpr (std::is_same_v<T, bf16>) return widen(row[j]);
    else return row[j];
  };
  for (; i < size; ++i) {
    nan |= at(i) != at(i);
    top = std::max(top, at(i));
  }
  value = nan ? std::numeric_limits<float>::quiet_NaN() : top;
  token = 0;
  if (nan) return;
  while (at(token) != top) ++token;
}

}  // namespace arbordraft
