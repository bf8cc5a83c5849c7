// Norms of rows.
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// An RMS norm, or with an offset a LayerNorm, which subtracts the mean first. Without factors there is no norm.
struct Norm {
  const float *weight = nullptr, *offset = nullptr;
  explicit operator bool() const { return weight; }
};

template <class X>
inline void norm_row(const float* x, const Norm& norm, float epsilon, int64_t size, X* y) {
  f32x16 mean = splat(0.f), squares = splat(0.f);
  if (norm.offset) {
    for (int64_t i = 0; i < size; i += kLanes) mean += load(x + i);
    mean = splat(sum(mean) / float(size));
  }
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 v = load(x + i) - mean;
    squares = fma(v, v, squares);
  }
  const f32x16 factor = splat(1.f / std::sqrt(sum(squares) / float(size) + epsilon));
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 v = (load(x + i) - mean) * factor * load(norm.weight + i);
    store(y + i, norm.offset ? v + load(norm.offset + i) : v);
  }
}

}  // namespace arbordraft
