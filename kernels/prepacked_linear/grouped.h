// y = x W^T with W in groups of 32 inputs of 8 or 4 bits, and the rows of x quantised to 8 bits group by group.
//
// Row-invariant like all kernels here: a group's sum is an integer, groups are added in their order, and a row's codes
// depend on the row alone. A product and its sum are rounded separately, never fused, so these bits are also the same on
// every instruction set.
//
// Layouts, for O outputs (padded to 16) and I inputs (padded to 32), as groups.py has them:
//   8 bits:   codes [O/16][I/32][8][16][4], scales [O/16][I/32][16];        weight = scale * (code - 128)
//   4 bits:   codes [O/16][I/32][4][16][4], scales [O/16][I/32][2][16];     weight = scale * code + minimum
//             or scales and minima as bytes, [O/16][4 + I/32][2][16], times two factors per output: floats [2][16] in the
//             place of the first four groups
// Four inputs are side by side as the dot-product instructions need them. A byte's low half belongs to the inputs 0..15 of
// its group, its high half to 16..31.
#pragma once

#include "bytes.h"
#include "cpu.h"

namespace arbordraft {

constexpr int64_t kGroupSize = 32;

struct Grouped {};  // the type of weights in groups

template <>
struct Prepacked<Grouped> {
  const uint8_t* weight;
  const void* scale;  // halves, or factors followed by bytes
  const float* bias;
  int64_t outputs, inputs;  // inputs as padded
  bool four, bytes;         // whether codes have 4 bits, and whether scales are bytes

  int64_t groups() const { return inputs / kGroupSize; }
};

// A quantised group of a row: scale * codes approximates it.
struct Eighth {
  float scale;
  float total;    // scale times the sum of the codes
  int32_t begin;  // start of sums of products with 8-bit weights, which corrects for their centre
  int8_t codes[kGroupSize];
};

inline int64_t groups_of(int64_t size) { return (size + kGroupSize - 1) / kGroupSize; }

// Symmetric, to nearest, ties to even. If a group has an infinity or NaN, its scale is NaN, so all outputs of its row are NaN.
// If no number of a group exceeds 1e-30, all count as 0.
template <class X>
inline void to_eighths(const X* x, int64_t size, Eighth* y) {
  for (int64_t i = 0; i < size; i += kGroupSize, ++y) {
    const f32x16 a = load(x + i, std::max<int64_t>(0, std::min<int64_t>(size - i, kLanes)));
    const f32x16 b = load(x + i + kLanes, std::max<int64_t>(0, std::min<int64_t>(size - i - kLanes, kLanes)));
    const f32x16 zero = splat(0.f);
    const float most = largest(max(max(a, zero - a), max(b, zero - b)));
    const bool sound = !any_nan(a) && !any_nan(b) && most <= std::numeric_limits<float>::max();
    const f32x16 steps = splat(sound && most > 1e-30f ? 127.f / most : 0.f);
    const f32x16 first = sound ? round(a * steps) : zero, second = sound ? round(b * steps) : zero;
    y->scale = sound ? most / 127.f : std::numeric_limits<float>::quiet_NaN();
    const float codes = sum(first + second);  // whole numbers: exact in any order
    y->total = y->scale * codes;
    y->begin = int32_t(codes) * (kOffset<8> - 128);
    store_bytes(y->codes, first);
    store_bytes(y->codes + kLanes, second);
  }
}

#if defined(__AVX512F__)
template <int Bits>
constexpr int kGroupedRows = Bits == 8 ? 6 : 4;  // unpacking takes registers as well
constexpr int kGroupedBlocks(int rows) { return rows == 1 ? 4 : 2; }
#else
template <int Bits>
constexpr int kGroupedRows = 4;
constexpr int kGroupedBlocks(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Scales are halves, or bytes that have a factor.
template <class S>
constexpr int64_t kFactors = std::is_same_v<S, uint8_t> ? 2 * kLanes * sizeof(float) : 0;  // bytes before a block's scales
inline f32x16 load_scales(const uint16_t* p, f32x16) { return load_halves(p); }
inline f32x16 load_scales(const uint8_t* p, f32x16 factor) { return load_counts(p) * factor; }

// found[r][b] = sum over inputs of x[r] and block b. Meanwhile prefetches the first `fetched` of the next blocks, which begin
// at `ahead`.
template <int R, int NB, int Bits, class S>
inline void tile_groups(
    const Prepacked<Grouped>& m, const Eighth* x, int64_t block, int64_t ahead, int fetched, f32x16* found) {
  constexpr int64_t kBytes = 64 * Bits, kScales = Bits == 4 ? 2 * kLanes : kLanes;
  const int64_t groups = m.groups(), stride = kFactors<S> + groups * kScales;
  const uint8_t* codes = m.weight + block * groups * kBytes;
  const S* scales = static_cast<const S*>(m.scale) + block * stride;
  const int64_t next = (ahead - block) * groups;
  Registers<2 * NB> factors;
  each<2 * NB>([&](auto n) {
    const float* p = reinterpret_cast<const float*>(scales + n / 2 * stride) + n % 2 * kLanes;
    factors.set(n, kFactors<S> ? load(p) : splat(0.f));
  });
  scales += kFactors<S>;
  Registers<R * NB> acc;
  each<R * NB>([&](auto n) { acc.set(n, splat(0.f)); });
  for (int64_t g = 0; g < groups; ++g, x += 1) {
    Registers<R * NB, i32x16> sums;
    each<R * NB>([&](auto n) { sums.set(n, splat_integer(Bits == 8 ? x[n / NB * groups].begin : 0)); });
    each<kBytes / 64>([&](auto line) {
      each<NB>([&](auto b) {
        const uint8_t* p = codes + (b * groups + g) * kBytes + line * 64;
        if (b < fetched) __builtin_prefetch(p + next * kBytes, 0, 2);
        const auto add = [&](u8x64 w, int quad) {
          each<R>([&](auto r) {
            int32_t four;
            std::memcpy(&four, x[r * groups].codes + 4 * quad, 4);
            sums.set(r * NB + b, dot<Bits>(sums[r * NB + b], w, four));
          });
        };
        if constexpr (Bits == 8) {
          add(load_bytes(p), line);
        } else {
          u8x64 low, high;
          load_nibbles(p, low, high);
          add(low, line);
          add(high, line + 4);
        }
      });
    });
    each<NB>([&](auto b) {
      const S* s = scales + b * stride + g * kScales;
      if (b < fetched) __builtin_prefetch(s + (ahead - block) * stride, 0, 2);
      const f32x16 scale = load_scales(s, factors[2 * b]);
      each<R>([&](auto r) {
        const int n = r * NB + b;
        acc.set(n, acc[n] + to_float<Bits>(sums[n]) * (scale * splat(x[r * groups].scale)));
      });
      if constexpr (Bits == 4) {
        const f32x16 minimum = load_scales(s + kLanes, factors[2 * b + 1]);
        each<R>([&](auto r) { acc.set(r * NB + b, acc[r * NB + b] + minimum * splat(x[r * groups].total)); });
      }
    });
  }
  each<R * NB>([&](auto n) { found[n] = acc[n]; });
}

template <int Bits, class S>
[[gnu::noinline]] void some_tile(
    int rows, int blocks, const Prepacked<Grouped>& m, const Eighth* x, int64_t block, int64_t ahead, int fetched,
    f32x16* found) {
  const auto of = [&](auto known) {
    constexpr int R = decltype(known)::value;
    if (blocks == 1) return tile_groups<R, 1, Bits, S>(m, x, block, ahead, fetched, found);
    if constexpr (kGroupedBlocks(R) > 2)
      if (blocks == 2) return tile_groups<R, 2, Bits, S>(m, x, block, ahead, fetched, found);
    return tile_groups<R, kGroupedBlocks(R), Bits, S>(m, x, block, ahead, fetched, found);
  };
  switch (rows) {
    case 1: return of(std::integral_constant<int, 1>());
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
  }
#if defined(__AVX512F__)
  if constexpr (Bits == 8) return rows == 5 ? of(std::integral_constant<int, 5>()) : of(std::integral_constant<int, 6>());
#endif
}

// See multiply() for other weights in cpu.h.
template <class Emit>
inline void multiply(const Prepacked<Grouped>& m, const Eighth* x, int64_t rows, Range blocks, const Emit& emit) {
  const auto tile = !m.four ? some_tile<8, uint16_t> : m.bytes ? some_tile<4, uint8_t> : some_tile<4, uint16_t>;
  const int64_t most = m.four ? kGroupedRows<4> : kGroupedRows<8>, groups = m.groups();
  const bool alone = rows <= most;
  const int64_t wide = alone ? std::max(2, kGroupedBlocks(int(rows))) : 2;
  // Two blocks at a time stay in the inner caches while all rows pass over them, and the first two tiles fetch the next
  // two blocks. A lone tile fetches the weights of the next one.
  for (int64_t block = blocks.begin, n; block < blocks.end; block += n) {
    n = std::min(wide, blocks.end - block);
    if (n == 3) n = 2;
    for (int64_t row = 0; row < rows; row += most) {
      f32x16 found[kGroupedRows<8> * 4];
      const int64_t count = std::min(most, rows - row), ahead = alone ? block + n : block + 2 + (row > 0);
      const int64_t fetched = std::min<int64_t>(alone ? n : row <= most, blocks.end - ahead);
      const Eighth* from = x + row * groups;
      if (n <= kGroupedBlocks(int(count))) {
        tile(int(count), int(n), m, from, block, ahead, int(fetched), found);
      } else {  // two blocks, one after the other
        f32x16 apart[2][kGroupedRows<8>];
        for (int b = 0; b < 2; ++b) tile(int(count), 1, m, from, block + b, ahead + b, b < fetched, apart[b]);
        for (int n = 0; n < 2 * count; ++n) found[n] = apart[n % 2][n / 2];
      }
      for (int r = 0; r < count; ++r) {
        if (m.bias)
          for (int b = 0; b < n; ++b)
            found[r * n + b] += load(m.bias + (block + b) * kLanes, m.outputs - (block + b) * kLanes);
        emit(row + r, block, found + r * n, int(n));
      }
    }
  }
}

}  // namespace arbordraft
