// y = x W^T with W in panels of blocks. Panels of codes multiply rows of x quantised to 8 bits in groups of 32 inputs, panels
// of floats the rows themselves.
//
// Row-invariant like all kernels here: a group's sum is an integer, groups are added in their order, and a row's codes
// depend on the row alone. A product and its sum are rounded separately, never fused, so these bits are also the same on
// every instruction set.
#pragma once

#include "cpu.h"
#include "formats.h"

namespace arbordraft {

struct Panels {};  // the type of weights in panels

// What pack_blocks made: see blocks.py.
template <>
struct Prepacked<Panels> {
  const uint8_t* weight;
  const int64_t* places;  // of the panels in `weight`, plus the number of the panel's kind; the last is the end
  const float* scale;
  const float* bias;
  int64_t outputs, inputs;  // inputs as padded

  int64_t groups() const { return inputs / kGroupSize; }
  const uint8_t* panel(int64_t block) const { return weight + places[block] / 64 * 64; }
  int64_t kind(int64_t block) const { return places[block] % 64; }
};
constexpr int64_t kLayout = 0x61726233, kHeader = 4;

// A quantised group of a row: scale * codes approximates it.
struct Eighth {
  float scale;
  float total;      // scale times the sum of the codes
  int32_t half[2];  // sums of the codes of each half
  int8_t codes[kGroupSize];
  const float* numbers;  // the group itself, which must outlive this
  int64_t count;         // of its numbers: fewer at the end of a row
};

inline int64_t groups_of(int64_t size) { return (size + kGroupSize - 1) / kGroupSize; }

// Symmetric, to nearest, ties to even. If a group has an infinity or NaN, its scale is NaN, so all outputs of its row are NaN.
// If no number of a group exceeds 1e-30, all count as 0.
inline void to_eighths(const float* x, int64_t size, Eighth* y) {
  for (int64_t i = 0; i < size; i += kGroupSize, ++y) {
    const f32x16 a = load(x + i, std::max<int64_t>(0, std::min<int64_t>(size - i, kLanes)));
    const f32x16 b = load(x + i + kLanes, std::max<int64_t>(0, std::min<int64_t>(size - i - kLanes, kLanes)));
    const f32x16 zero = splat(0.f);
    const float most = largest(max(max(a, zero - a), max(b, zero - b)));
    const bool sound = !any_nan(a) && !any_nan(b) && most <= std::numeric_limits<float>::max();
    const f32x16 steps = splat(sound && most > 1e-30f ? 127.f / most : 0.f);
    const f32x16 first = sound ? round(a * steps) : zero, second = sound ? round(b * steps) : zero;
    y->numbers = x + i, y->count = std::min(kGroupSize, size - i);
    y->scale = sound ? most / 127.f : std::numeric_limits<float>::quiet_NaN();
    y->half[0] = int32_t(sum(first)), y->half[1] = int32_t(sum(second));  // whole numbers: exact in any order
    y->total = y->scale * float(y->half[0] + y->half[1]);
    store_bytes(y->codes, first);
    store_bytes(y->codes + kLanes, second);
  }
}

// Rows that pass over panels together, and panels that they pass over at a time.
#if defined(__AVX512F__)
constexpr int kPanelRows = 8, kPasses = 1;
constexpr int kPanelBlocks(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }
#elif defined(__AVX2__)  // 8 rows pass over a group in two halves, for want of registers: its codes are opened once
constexpr int kPanelRows = 8, kPasses = 2;
constexpr int kPanelBlocks(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kPanelRows = 4, kPasses = 1;
constexpr int kPanelBlocks(int rows) { return rows == 1 ? 2 : 1; }
#endif

// The sums over groups, in registers if there are 32 of these. Otherwise they stay in memory between groups, so that the sums
// within a group have registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int N>
struct Sums {
  f32x16* of;
  explicit Sums(f32x16* found) : of(found) {}
  [[gnu::always_inline]] void set(int n, f32x16 x) { of[n] = x; }
  [[gnu::always_inline]] f32x16 operator[](int n) const { return of[n]; }
  void store(f32x16*) const {}
};
#else
template <int N>
struct Sums : Registers<N> {
  explicit Sums(f32x16*) {}
  void store(f32x16* found) const {
    each<N>([&](auto n) { found[n] = (*this)[n]; });
  }
};
#endif

// Prefetches a tile's next panels while it reads its own, as many bytes at a time, unless `at` is null.
template <class F, int NB>
struct Ahead {
  const uint8_t* at;
  [[gnu::always_inline]] void fetch() {
    constexpr int64_t kBytes = NB * (kGroupBytes<F> + kLanes * F::kFields / F::kGroups);
    if (!at) return;
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += kBytes;
  }
};

// found[r][b] = sum over inputs of x[r] and panel b, for panels of floats.
template <class F, int R, int NB>
[[gnu::flatten]] inline void tile_floats(
    const uint8_t* panel, int64_t groups, const Eighth* x, Ahead<F, NB> ahead, f32x16* found) {
  constexpr int64_t kBytes = kLanes * F::kBits / 8;
  const int64_t size = panel_bytes<F>(groups);
  Registers<R * NB> acc;
  each<R * NB>([&](auto n) { acc.set(n, splat(0.f)); });
  for (int64_t g = 0; g < groups; ++g, ++x, panel += kGroupBytes<F>) {
    ahead.fetch();
    float rows[R][kGroupSize];
    for (int r = 0; r < R; ++r)
      for (int half = 0; half < kGroupSize; half += kLanes) {
        const Eighth& own = x[r * groups];
        store(rows[r] + half, load(own.numbers + half, std::max<int64_t>(0, own.count - half)));
      }
    for (int64_t i = 0; i < kGroupSize; ++i)
      each<NB>([&](auto b) {
        const f32x16 w = F::load16(panel + b * size + i * kBytes);
        each<R>([&](auto r) { acc.set(r * NB + b, acc[r * NB + b] + w * splat(rows[r][i])); });
      });
  }
  each<R * NB>([&](auto n) { found[n] = acc[n]; });
}

// The same for panels of codes and P times R rows, R at a time. Flattened: a call that is not inlined would keep all sums in
// memory.
template <class F, int R, int P, int NB>
[[gnu::flatten]] inline void tile_codes(
    const uint8_t* panel, int64_t groups, const Eighth* x, Ahead<F, NB> ahead, f32x16* found) {
  static_assert(P == 1 || NB == 1);
  const int64_t size = panel_bytes<F>(groups);
  const uint8_t *fields = panel + kLanes * F::kRow, *codes = panel + field_bytes<F>(groups);
  Sums<P * R * NB> acc(found);
  each<P * R * NB>([&](auto n) { acc.set(n, splat(0.f)); });
  alignas(64) uint8_t opened[P == 1 ? 1 : 8 * 64];  // the group's codes, as units multiply them
  for (int64_t g = 0; g < groups; g += F::kGroups, fields += kLanes * F::kFields) {
    for (int64_t j = 0; j < F::kGroups; ++j, ++x, codes += kGroupBytes<F>) {
      ahead.fetch();
      if constexpr (P > 1)
        each<8>([&](auto quad) { store_bytes(opened + 64 * quad, F::template load<decltype(quad)::value>(codes)); });
      const auto load_codes = [&]<int Quad>(std::integral_constant<int, Quad>, const uint8_t* p) {
        if constexpr (P > 1)
          return load_bytes(opened + 64 * Quad);
        else
          return F::template load<Quad>(p);
      };
      for (int pass = 0; pass < P; ++pass) {
        const Eighth* const own = x + pass * R * groups;
        const int from = pass * R * NB;
        const auto begin_of = [&](int64_t r, int part) {
          const int32_t* half = own[r * groups].half;
          return begin<F, kBiased>(F::kParts == 2 ? half[part] : half[0] + half[1]);
        };
        Registers<R * NB, i32x16> sums;
        Registers<R * NB> parts;  // whole numbers, exact in float: below 2^24
        each<4>([&](auto line) {
          constexpr int kLine = decltype(line)::value, kPart = kLine * F::kParts / 4;
          if constexpr (kLine * F::kParts % 4 == 0)
            each<R * NB>([&](auto n) { sums.set(n, start<F>(begin_of(n / NB, kPart))); });
          const auto four = [&](int64_t r, int quad) { return read<int32_t>((const uint8_t*)own[r * groups].codes + 4 * quad); };
          each<NB>([&](auto b) {
            const uint8_t* p = codes + b * size;
            if constexpr (kTwice<F>) {
              const u8x64 first = load_codes(std::integral_constant<int, 2 * kLine>(), p);
              const u8x64 second = load_codes(std::integral_constant<int, 2 * kLine + 1>(), p);
              each<R>([&](auto r) {
                const int n = r * NB + b;
                sums.set(n, dot_twice<F>(sums[n], first, second, four(r, 2 * kLine), four(r, 2 * kLine + 1)));
              });
            } else {
              each<2>([&](auto half) {  // one after the other takes fewer registers
                constexpr int kQuad = 2 * kLine + decltype(half)::value;
                const u8x64 some = load_codes(std::integral_constant<int, kQuad>(), p);
                each<R>([&](auto r) { sums.set(r * NB + b, dot<F>(sums[r * NB + b], some, four(r, kQuad))); });
              });
            }
          });
          if constexpr (F::kParts == 2 && kLine % 2 == 1)
            each<NB>([&](auto b) {
              const f32x16 scale = F::part(fields + b * size, j, kPart);
              each<R>([&](auto r) {
                const int n = r * NB + b;
                const f32x16 part = to_float(total<F>(sums[n], begin_of(r, kPart))) * scale;
                parts.set(n, kPart ? parts[n] + part : part);
              });
            });
        });
        each<NB>([&](auto b) {
          const f32x16 scale = F::scale(panel + b * size, fields + b * size, j);
          f32x16 minimum;
          if constexpr (F::kMinimum) minimum = F::minimum(panel + b * size, fields + b * size, j);
          each<R>([&](auto r) {
            const int n = r * NB + b;
            const f32x16 sum = F::kParts == 2 ? parts[n] : to_float(total<F>(sums[n], begin_of(r, 0)));
            f32x16 more = acc[from + n] + sum * (scale * splat(own[r * groups].scale));
            if constexpr (F::kMinimum) more += minimum * splat(own[r * groups].total);
            acc.set(from + n, more);
          });
        });
      }
    }
  }
  acc.store(found);
}

// Runs the tile of `rows` and `blocks`. Compiled once for all calls of multiply().
template <class F>
[[gnu::noinline]] void some_tile(
    int rows, int blocks, const uint8_t* panel, int64_t groups, const Eighth* x, const uint8_t* ahead, f32x16* found) {
  const auto tile = [&]<int R, int NB>(std::integer_sequence<int, R, NB>) {
    constexpr int P = R == kPanelRows ? kPasses : 1;
    if constexpr (!kFloats<F>)
      tile_codes<F, R / P, P, NB>(panel, groups, x, {ahead}, found);
    else
      for (int pass = 0; pass < P; ++pass)
        tile_floats<F, R / P, NB>(panel, groups, x + pass * R / P * groups, {pass ? nullptr : ahead}, found + pass * R / P * NB);
  };
  const auto of = [&](auto known) {
    constexpr int R = decltype(known)::value;
    if (blocks == 1) return tile(std::integer_sequence<int, R, 1>());
    if constexpr (kPanelBlocks(R) > 2)
      if (blocks == 2) return tile(std::integer_sequence<int, R, 2>());
    if constexpr (kPanelBlocks(R) > 1) return tile(std::integer_sequence<int, R, kPanelBlocks(R)>());
  };
  switch (rows) {
    case 1: return of(std::integral_constant<int, 1>());
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
  }
#if defined(__AVX512F__)
  if (rows == 6) return of(std::integral_constant<int, 6>());
#endif
  of(std::integral_constant<int, kPanelRows>());
}

// The most rows up to `left` that have a tile.
inline int tile_rows(int64_t left) {
  const int rows = int(std::min<int64_t>(left, kPanelRows));
  return rows <= 4 || rows == kPanelRows ? rows : kPasses == 1 && rows >= 6 ? 6 : 4;
}

// See multiply() for other weights in cpu.h.
template <class Emit>
inline void multiply(const Prepacked<Panels>& m, const Eighth* x, int64_t rows, Range blocks, const Emit& emit) {
  const int64_t groups = m.groups(), end = blocks.end;
  const bool alone = rows > 0 && tile_rows(rows) == rows;
  const int64_t wide = alone ? std::max(2, kPanelBlocks(int(rows))) : 2;
  // Two panels at a time stay in the inner caches while all rows pass over them, and the first two tiles fetch the next
  // two panels. A lone tile fetches the weights of the next one.
  for (int64_t block = blocks.begin, n; block < end; block += n) {
    n = std::min(wide, end - block);
    if (n == 3) n = 2;
    int count;
    for (int64_t row = 0, pass = 0; row < rows; row += count, ++pass) {
      count = tile_rows(rows - row);
      f32x16 found[kPanelRows * 4], some[kPanelRows * 4];
      const int64_t next = block + n + (alone ? 0 : pass);
      const uint8_t* ahead = next < end && (alone || pass < 2) ? m.panel(next) : nullptr;
      for (int64_t b = 0, same; b < n; b += same) {  // panels of one kind make a tile
        const int64_t kind = m.kind(block + b), most = std::min<int64_t>(n - b, kPanelBlocks(count));
        for (same = 1; same < most && m.kind(block + b + same) == kind;) ++same;
        if (same == 3) same = 2;
        if (ahead && b) ahead = alone && next + b < end ? m.panel(next + b) : nullptr;
        with_kind(kind, [&](auto known) {
          some_tile<decltype(known)>(count, int(same), m.panel(block + b), groups, x + row * groups, ahead, some);
        });
        for (int64_t r = 0; r < count; ++r)
          for (int64_t k = 0; k < same; ++k) found[r * n + b + k] = some[r * same + k];
      }
      for (int r = 0; r < count; ++r) {
        for (int b = 0; b < n; ++b) found[r * n + b] = finish(m, found[r * n + b], (block + b) * kLanes);
        emit(row + r, block, found + r * n, int(n));
      }
    }
  }
}

}  // namespace arbordraft
