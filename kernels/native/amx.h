// Tiles of Intel's matrix extension: eight registers of up to 16 rows of 64 bytes.
//
// A product adds two sums to each of 16 x 16 accumulators: over the even and over the odd inputs among 32, each in order, in
// float32 without denormals. An instruction computes each row from that row alone, for any number of rows, so a row's bits
// do not depend on the other rows. The bits differ from those of vector instructions. Therefore a process computes all
// products by tiles or all by vectors.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define ARBORDRAFT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace arbordraft {

#if defined(ARBORDRAFT_AMX)

// Returns whether Linux lets this process use tiles. They have to be requested, as they enlarge every thread's state.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = !syscall(SYS_arch_prctl, kRequest, kTileData);
  return granted;
}

// During its lifetime, this thread's tiles 0 to 5 have `rows` rows, 6 and 7 have 16. Torch's libraries also use tiles, and
// configure them each time.
class TileShapes {
 public:
  explicit TileShapes(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, first = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 64;
      shapes.rows[tile] = uint8_t(tile < 6 ? rows : 16);
    }
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
};

#else

inline bool has_tiles() { return false; }

#endif

inline const char* isa() { return has_tiles() ? "amx_bf16" : kIsa; }

}  // namespace arbordraft
