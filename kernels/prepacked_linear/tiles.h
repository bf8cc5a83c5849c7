// y = x W^T in bfloat16 by matrix tiles, whose layout is that of cpu.h: [16][16][2] of [O/16][I/2][16][2] make a tile.
//
// Tiles of rows have one height. The last may overlap the one before it, which gives the same sums. Two tiles pass over two
// blocks of outputs together; a lone one passes over four, so that products need not wait for sums.
#pragma once

#include "../native/amx.h"

#if defined(ARBORDRAFT_AMX)

namespace arbordraft {

constexpr int64_t kTileInputs = 32, kTileHeight = 16;

// The sums of a pass: [4][16 rows][16 outputs], one block after the other, for each of its tiles of rows.
struct alignas(64) TileSums {
  float of[4][kTileHeight][kLanes];
};

// Adds the products of 32 inputs. Instructions take tile numbers as constants: 0 to 3 are sums, 4 and 5 rows of x, 6 and 7
// weights.
template <int Rows, int Blocks>
inline void add_products(const bf16* const* x, int64_t row_bytes, const bf16* w, int64_t block) {
  _tile_loadd(4, x[0], row_bytes);
  _tile_loadd(6, w, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (Blocks > 1) {
    _tile_loadd(7, w + block, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (Blocks > 2) {
    _tile_loadd(6, w + 2 * block, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 3 * block, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  if constexpr (Rows > 1) {
    _tile_loadd(5, x[1], row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Computes sums of `height` rows at each x[r] for all blocks at w. Meanwhile prefetches the first `fetched` blocks at `ahead`.
template <int Rows, int Blocks>
[[gnu::noinline]] void some_tiles(
    const bf16* w, const bf16* const* x, int64_t height, int64_t inputs, const bf16* ahead, int64_t fetched,
    TileSums& sums) {
  static_assert(Rows == 1 ? Blocks <= 4 : Rows == 2 && Blocks == 2);
  const int64_t block = inputs * kLanes, whole = inputs / kTileInputs * kTileInputs, left = inputs - whole;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < whole; i += kTileInputs) {
    for (int64_t b = 0; b < fetched; ++b)
      for (int64_t line = 0; line < kTileInputs; line += 2)
        __builtin_prefetch(ahead + b * block + (i + line) * kLanes, 0, 2);
    const bf16* at[Rows];
    for (int r = 0; r < Rows; ++r) at[r] = x[r] + i;
    add_products<Rows, Blocks>(at, inputs * sizeof(bf16), w + i * kLanes, block);
  }
  if (left) {  // the remaining inputs, padded with zeros
    bf16 rows[Rows][kTileHeight][kTileInputs] = {}, weights[Blocks][kTileInputs * kLanes] = {};
    const bf16* at[Rows];
    for (int r = 0; r < Rows; ++r) {
      at[r] = rows[r][0];
      for (int64_t n = 0; n < height; ++n) std::memcpy(rows[r][n], x[r] + n * inputs + whole, left * sizeof(bf16));
    }
    for (int b = 0; b < Blocks; ++b)
      std::memcpy(weights[b], w + b * block + whole * kLanes, left * kLanes * sizeof(bf16));
    add_products<Rows, Blocks>(at, sizeof rows[0][0], weights[0], kTileInputs * kLanes);
  }
  _tile_stored(0, sums.of[0], 64);
  if constexpr (Rows * Blocks > 1) _tile_stored(1, sums.of[1], 64);
  if constexpr (Rows * Blocks > 2) {
    _tile_stored(2, sums.of[2], 64);
    _tile_stored(3, sums.of[3], 64);
  }
}

// Emits the sums of all rows for a range of blocks: emit(row, first block, sums, number of blocks). If the range has an even
// number of blocks, so has every call.
template <class Emit>
inline void multiply_by_tiles(
    const bf16* weight, int64_t inputs, const bf16* x, int64_t rows, Range blocks, const Emit& emit) {
  const int64_t tiles = (rows + kTileHeight - 1) / kTileHeight, block = inputs * kLanes;
  if (tiles == 0 || blocks.begin >= blocks.end) return;
  const int64_t height = (rows + tiles - 1) / tiles, wide = tiles == 1 ? 4 : 2;
  const TileShapes shapes(height);
  TileSums sums;
  for (int64_t b = blocks.begin, n; b < blocks.end; b += n) {
    n = std::min(wide, blocks.end - b);
    if (n == 3) n = 2;
    const int64_t most = n == 2 ? 2 : 1, passes = (tiles + most - 1) / most;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass * most * height, count = std::min(rows - row, most * height);
      const int64_t first[2] = {std::min(row, rows - height), std::min(row + height, rows - height)};
      const bf16 *w = weight + b * block, *from[2] = {x + first[0] * inputs, x + first[1] * inputs};
      // The next blocks are prefetched in one pass, or one block in each of the first passes.
      const bf16* ahead = w + (n + pass) * block;
      const int64_t fetched = passes == 1 ? n : pass < n ? 1 : 0;
      if (n == 4)
        some_tiles<1, 4>(w, from, height, inputs, ahead, fetched, sums);
      else if (n == 1)
        some_tiles<1, 1>(w, from, height, inputs, ahead, fetched, sums);
      else if (count <= height)
        some_tiles<1, 2>(w, from, height, inputs, ahead, fetched, sums);
      else
        some_tiles<2, 2>(w, from, height, inputs, ahead, fetched, sums);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t tile = r >= height;
        f32x16 found[4];
        for (int64_t k = 0; k < n; ++k) found[k] = load(sums.of[tile * n + k][row + r - first[tile]]);
        emit(row + r, b, found, int(n));
      }
    }
  }
}

}  // namespace arbordraft

#endif
