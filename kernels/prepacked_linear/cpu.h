// y = x W^T with W prepacked for the vector unit. Row-invariant: a row's bits do not depend on the other rows, because every
// element of y is one accumulator that adds its products in the same order in every tile shape.
//
// Layouts, for O outputs (padded to 16 with zeros) and I inputs (padded to 2):
//   float:        [O/16][I][16]
//   bf16, int8:   [O/16][I/2][16][2], pairs of inputs side by side as the dot-product instructions need them
#pragma once

#include "tiles.h"

namespace arbordraft {

#if defined(__AVX512F__)
constexpr int kTileRows = 8;
constexpr int kTileBlocks(int rows) { return rows <= 4 ? 4 : 2; }
#else  // half as many registers of half the size
constexpr int kTileRows = 6;
constexpr int kTileBlocks(int rows) { return rows <= 2 ? 2 : 1; }
#endif

// Weights are prefetched while earlier ones are multiplied. A lone tile fetches all weights of the next one, which would
// otherwise wait for its first lines. If several tiles of rows pass over the same weights, each fetches one of the next
// blocks, which spreads memory traffic over all of them.
//
// found[r][b] = sum over inputs of x[r] and block b of w.
template <int R, int NB, bool Alone, class W, class X>
inline void tile(const W* w, const X* x, int64_t inputs, const W* ahead, f32x16* found) {
  const auto fetch = [&](int64_t i) {
    for (int b = 0; b < (Alone ? NB : 1); ++b) __builtin_prefetch(ahead + (b * inputs + i) * kLanes, 0, 2);
  };
  Registers<R * NB> acc;
  each<R * NB>([&](auto n) { acc.set(n, splat(0.f)); });
  if constexpr (std::is_same_v<W, float>) {
    for (int64_t i = 0; i < inputs; ++i) {
      fetch(i);
      Registers<NB> wb;
      each<NB>([&](auto b) { wb.set(b, load(w + (b * inputs + i) * kLanes)); });
      each<R>([&](auto r) {
        const f32x16 xr = splat(x[r * inputs + i]);
        each<NB>([&](auto b) { acc.set(r * NB + b, fma(wb[b], xr, acc[r * NB + b])); });
      });
    }
  } else if constexpr (std::is_same_v<X, float>) {
    for (int64_t i = 0; i < inputs; i += 2) {
      fetch(i);
      each<NB>([&](auto b) {
        f32x16 even, odd;
        load_pairs(w + (b * inputs + i) * kLanes, even, odd);
        each<R>([&](auto r) {
          const f32x16 sum = fma(even, splat(x[r * inputs + i]), acc[r * NB + b]);
          acc.set(r * NB + b, fma(odd, splat(x[r * inputs + i + 1]), sum));
        });
      });
    }
  } else {
#if defined(ARBORDRAFT_DOT_BF16)
    for (int64_t i = 0; i < inputs; i += 2) {
      fetch(i);
      bf16x32 wb[NB];
      each<NB>([&](auto b) { wb[b] = load_dot(w + (b * inputs + i) * kLanes); });
      each<R>([&](auto r) {
        const bf16x32 xr = splat_pair(x + r * inputs + i);
        each<NB>([&](auto b) { acc.set(r * NB + b, dot(wb[b], xr, acc[r * NB + b])); });
      });
    }
#endif
  }
  each<R * NB>([&](auto n) { found[n] = acc[n]; });
}

// One prepacked matrix. `scale` has a factor per output, and `bias` is added after it; both may be missing. Weights in panels:
// see panels.h.
template <class W>
struct Prepacked {
  const W* weight;
  const float* scale;
  const float* bias;
  int64_t outputs, inputs;  // inputs as padded
};

// Returns sixteen outputs from their sums.
template <class W>
inline f32x16 finish(const Prepacked<W>& m, f32x16 acc, int64_t output) {
  const int64_t left = m.outputs - output;
  if (m.scale) acc = acc * load(m.scale + output, left);
  if (m.bias) acc += load(m.bias + output, left);
  return acc;
}

// Runs the tile of `rows` and `blocks`. Compiled once for all calls of multiply().
template <class W, class X>
[[gnu::noinline]] void some_tile(
    int rows, int blocks, bool alone, const W* w, const X* x, int64_t inputs, const W* ahead, f32x16* found) {
  const auto of = [&](auto known) {
    constexpr int R = decltype(known)::value;
    if (alone) {
      if (blocks == 1) return tile<R, 1, true>(w, x, inputs, ahead, found);
      if (blocks == 2) return tile<R, 2, true>(w, x, inputs, ahead, found);
      return tile<R, kTileBlocks(R), true>(w, x, inputs, ahead, found);
    }
    if constexpr (R >= kTileRows / 2) {  // passes have about equal numbers of rows
      if constexpr (kTileBlocks(R) > 1)
        if (blocks == 2) return tile<R, 2, false>(w, x, inputs, ahead, found);
      return tile<R, 1, false>(w, x, inputs, ahead, found);
    }
  };
  switch (rows) {
    case 1: return of(std::integral_constant<int, 1>());
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
    case 5: return of(std::integral_constant<int, 5>());
    case 6: return of(std::integral_constant<int, 6>());
#if defined(__AVX512F__)
    case 7: return of(std::integral_constant<int, 7>());
    case 8: return of(std::integral_constant<int, 8>());
#endif
  }
}

// Emits outputs of all rows for a range of blocks: emit(row, first block, accumulators, number of blocks). If the range has
// an even number of blocks, so has every call: a gated activation gets its two halves, prepacked as neighbours, together.
template <class W, class X, class Emit>
inline void multiply(const Prepacked<W>& m, const X* x, int64_t rows, Range blocks, const Emit& emit) {
#if defined(ARBORDRAFT_AMX)
  if constexpr (std::is_same_v<W, bf16> && std::is_same_v<X, bf16>)
    if (has_tiles())
      return multiply_by_tiles(m.weight, m.inputs, x, rows, blocks, [&](int64_t row, int64_t block, f32x16* acc, int n) {
        for (int b = 0; b < n; ++b) acc[b] = finish(m, acc[b], (block + b) * kLanes);
        emit(row, block, acc, n);
      });
#endif
  // Two blocks at a time stay in the inner caches while all rows pass over them. Passes have about equal numbers of rows: a
  // pass of few rows would wait for its own sums.
  const int64_t half = m.inputs * kLanes, passes = (rows + kTileRows - 1) / kTileRows;
  const int64_t wide = passes > 1 ? 2 : std::max(2, kTileBlocks(int(rows)));
  for (int64_t block = blocks.begin, n; block < blocks.end; block += n) {
    n = std::min(wide, blocks.end - block);
    if (n == 3) n = 2;
    const W* next = m.weight + (block + n) * half;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = rows * pass / passes, count = rows * (pass + 1) / passes - row;
      f32x16 acc[kTileRows * 2];
      const auto some = [&](int64_t b, int64_t of, f32x16* found) {
        some_tile(
            int(count), int(of), passes == 1, m.weight + (block + b) * half, x + row * m.inputs, m.inputs,
            next + (passes == 1 ? b * half : pass == 0 ? 0 : half), found);
      };
      if (n <= kTileBlocks(int(count))) {
        some(0, n, acc);
      } else {  // two blocks, one after the other
        f32x16 apart[2][kTileRows];
        for (int64_t b = 0; b < 2; ++b) some(b, 1, apart[b]);
        for (int64_t r = 0; r < count; ++r)
          for (int64_t b = 0; b < 2; ++b) acc[2 * r + b] = apart[b][r];
      }
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t b = 0; b < n; ++b) acc[r * n + b] = finish(m, acc[r * n + b], (block + b) * kLanes);
        emit(row + r, block, acc + r * n, int(n));
      }
    }
  }
}

}  // namespace arbordraft
