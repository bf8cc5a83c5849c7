// y = x W^T with W packed for the vector unit. Row-invariant: a row's bits are the same whatever rows run beside it,
// because every element of y is one accumulator that visits its products in the same order in every tile shape.
//
// Layouts, for O outputs (padded to 16 with zeros) and I inputs (padded to 2):
//   float:        [O/16][I][16]
//   bf16, int8:   [O/16][I/2][16][2], pairs of inputs side by side as the dot-product instructions want them
#pragma once

#include "../native/simd.h"

namespace arbordraft {

// What a packed matrix multiplies: bf16 rows where the processor has a bf16 dot product, floats otherwise.
#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif

#if defined(__AVX512F__)
constexpr int kTileRows = 8;
constexpr int kTileBlocks(int rows) { return rows <= 4 ? 4 : 2; }
#else
constexpr int kTileRows = 2;
constexpr int kTileBlocks(int) { return 2; }
#endif

template <class W, class X, int R, int NB>
struct Tile {
  // acc[r][b] = sum over inputs of x[r] and block b of w.
  static inline void run(const W* w, const X* x, int64_t stride, int64_t inputs, f32x16 (&acc)[R][NB]) {
    constexpr int64_t kAhead = 2048 / sizeof(W);  // elements to prefetch ahead
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < NB; ++b) acc[r][b] = splat(0.f);
    if constexpr (std::is_same_v<W, float>) {
      for (int64_t i = 0; i < inputs; ++i) {
        f32x16 wb[NB];
        for (int b = 0; b < NB; ++b) {
          const W* p = w + (b * inputs + i) * kLanes;
          __builtin_prefetch(p + kAhead);
          wb[b] = load(p);
        }
        for (int r = 0; r < R; ++r) {
          const f32x16 xr = splat(x[r * stride + i]);
          for (int b = 0; b < NB; ++b) acc[r][b] = fma(wb[b], xr, acc[r][b]);
        }
      }
    } else if constexpr (std::is_same_v<X, float>) {
      for (int64_t i = 0; i < inputs; i += 2)
        for (int b = 0; b < NB; ++b) {
          const W* p = w + (b * inputs + i) * kLanes;
          __builtin_prefetch(p + kAhead);
          f32x16 even, odd;
          load_pairs(p, even, odd);
          for (int r = 0; r < R; ++r) {
            acc[r][b] = fma(even, splat(x[r * stride + i]), acc[r][b]);
            acc[r][b] = fma(odd, splat(x[r * stride + i + 1]), acc[r][b]);
          }
        }
    } else {
#if defined(__AVX512BF16__)
      for (int64_t i = 0; i < inputs; i += 2) {
        __m512bh wb[NB];
        for (int b = 0; b < NB; ++b) {
          const W* p = w + (b * inputs + i) * kLanes;
          __builtin_prefetch(p + kAhead);
          if constexpr (std::is_same_v<W, int8_t>) {  // exact: 8 bits fit bf16's mantissa
            f32x16 even, odd;
            load_pairs(p, even, odd);
            const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
            wb[b] = (__m512bh)_mm512_or_si512(low, _mm512_castps_si512(odd.v));
          } else {
            wb[b] = (__m512bh)_mm512_loadu_si512(p);
          }
        }
        for (int r = 0; r < R; ++r) {
          int pair;
          std::memcpy(&pair, x + r * stride + i, 4);
          const __m512bh xr = (__m512bh)_mm512_set1_epi32(pair);
          for (int b = 0; b < NB; ++b) acc[r][b].v = _mm512_dpbf16_ps(acc[r][b].v, wb[b], xr);
        }
      }
#endif
    }
  }
};

// One packed matrix. `scale` is int8's factor per output, `bias` may be missing.
template <class W>
struct Packed {
  const W* weight;
  const float* scale;
  const float* bias;
  int64_t outputs, inputs;  // inputs as padded

  f32x16 finish(f32x16 acc, int64_t output) const {
    const int64_t left = outputs - output;
    if (scale) acc = acc * load(scale + output, left);
    if (bias) acc += load(bias + output, left);
    return acc;
  }
};

template <int R, int NB, class W, class X, class Emit>
inline void tile_rows(const Packed<W>& m, const X* x, int64_t stride, int64_t row, int64_t block, const Emit& emit) {
  f32x16 acc[R][NB];
  Tile<W, X, R, NB>::run(m.weight + block * m.inputs * kLanes, x + row * stride, stride, m.inputs, acc);
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < NB; ++b) acc[r][b] = m.finish(acc[r][b], (block + b) * kLanes);
    emit(row + r, block, acc[r], NB);
  }
}

template <int R, class W, class X, class Emit>
inline void tile_blocks(
    const Packed<W>& m, const X* x, int64_t stride, int64_t row, Range blocks, const Emit& emit) {
  constexpr int NB = kTileBlocks(R);
  int64_t block = blocks.begin;
  for (; block + NB <= blocks.end; block += NB) tile_rows<R, NB>(m, x, stride, row, block, emit);
  for (; block + 2 <= blocks.end; block += 2) tile_rows<R, 2>(m, x, stride, row, block, emit);
  for (; block < blocks.end; ++block) tile_rows<R, 1>(m, x, stride, row, block, emit);
}

// Emits outputs of all rows for a range of blocks: emit(row, first block, accumulators, number of blocks). The number
// is even wherever the range is: a gated activation finds its two halves, packed as neighbours, in one call.
template <class W, class X, class Emit>
inline void multiply(const Packed<W>& m, const X* x, int64_t stride, int64_t rows, Range blocks, const Emit& emit) {
  // Few blocks at a time, so that they stay in the innermost caches while all rows pass over them.
  const int64_t step = 4;
  for (int64_t begin = blocks.begin; begin < blocks.end; begin += step) {
    const Range part{begin, std::min(blocks.end, begin + step)};
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) tile_blocks<kTileRows>(m, x, stride, row, part, emit);
    switch (rows - row) {
      case 1: tile_blocks<1>(m, x, stride, row, part, emit); break;
#if defined(__AVX512F__)
      case 2: tile_blocks<2>(m, x, stride, row, part, emit); break;
      case 3: tile_blocks<3>(m, x, stride, row, part, emit); break;
      case 4: tile_blocks<4>(m, x, stride, row, part, emit); break;
      case 5: tile_blocks<5>(m, x, stride, row, part, emit); break;
      case 6: tile_blocks<6>(m, x, stride, row, part, emit); break;
      case 7: tile_blocks<7>(m, x, stride, row, part, emit); break;
#endif
      default: break;
    }
  }
}

}  // namespace arbordraft
