// From rows of blocks, as files have them, to panels and to numbers.
#pragma once

#include "formats.h"

namespace arbordraft {

// Lays a group's codes of 16 rows out, which lie `apart` bytes from each other.
template <class F>
inline void lay_codes(const uint8_t* codes, int64_t apart, uint8_t* to) {
  constexpr int kWide = kFloats<F> ? F::kBits / 8 : 4;  // floats one by one, codes four by four
  constexpr int kEach = F::kBits - 4;
  uint8_t wide[kGroupSize * kLanes * (kFloats<F> ? F::kBits / 8 : 1)];
  uint8_t* quads = F::kBits >= 8 ? to : wide;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t i = 0; i < int64_t(sizeof wide) / (kLanes * kWide); ++i)
      std::memcpy(quads + (i * kLanes + lane) * kWide, codes + lane * apart + i * kWide, kWide);
  if constexpr (F::kBits < 8) {
    for (int line = 0; line < 4; ++line)
      for (int i = 0; i < 64; ++i)
        to[64 * line + i] = uint8_t((wide[128 * line + i] & 15) | (wide[128 * line + 64 + i] & 15) << 4);
    if constexpr (kEach > 0)
      for (int line = 0; line < kEach; ++line)
        for (int i = 0; i < 64; ++i) {
          int bits = 0;
          for (int n = 0; n < 8 / kEach; ++n) bits |= wide[64 * (8 / kEach * line + n) + i] >> 4 << kEach * n;
          to[256 + 64 * line + i] = uint8_t(bits);
        }
  }
}

// Lays 16 rows out as a panel; rows that are null count as zeros.
template <class F>
inline void lay_panel(const uint8_t* const* rows, int64_t groups, uint8_t* to) {
  constexpr int64_t kCodes = kFloats<F> ? F::kRaw : kGroupSize * F::kGroups;
  const int64_t filled = field_bytes<F>(groups);
  uint8_t *fields = to + kLanes * F::kRow, *panel = to + filled;
  uint8_t nothing[F::kRaw] = {}, codes[kLanes][kCodes], own[kLanes][F::kFields + 1];
  std::memset(to, 0, filled);
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t i = 0; i < F::kRow; i += 4)
      if (rows[lane]) std::memcpy(to + kLanes * i + 4 * lane, rows[lane] + i, 4);
  for (int64_t block = 0; block < groups / F::kGroups; ++block, fields += kLanes * F::kFields) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const uint8_t* raw = rows[lane] ? rows[lane] + F::kRow + block * F::kRaw : nothing;
      if constexpr (kFloats<F>)
        std::memcpy(codes[lane], raw, F::kRaw);
      else
        F::parse(raw, codes[lane], own[lane]);
    }
    if constexpr (!kFloats<F>)
      for (int place = 0; place < F::kFields; place += F::width(place))
        for (int64_t lane = 0; lane < kLanes; ++lane)
          std::memcpy(fields + kLanes * place + lane * F::width(place), own[lane] + place, F::width(place));
    for (int64_t j = 0; j < F::kGroups; ++j, panel += kGroupBytes<F>)
      lay_codes<F>(codes[0] + j * (kCodes / F::kGroups), kCodes, panel);
  }
}

// The float32 weights of a row of blocks.
template <class F>
inline void dequantize_row(const uint8_t* row, int64_t groups, float* to) {
  const uint8_t* raw = row + F::kRow;
  for (int64_t block = 0; block < groups / F::kGroups; ++block, raw += F::kRaw) {
    if constexpr (kFloats<F>) {
      for (int64_t i = 0; i < kGroupSize; ++i) *to++ = F::value_at(raw + i * (F::kBits / 8));
    } else {
      uint8_t codes[kGroupSize * F::kGroups], fields[F::kFields];
      F::parse(raw, codes, fields);
      constexpr int kPart = kGroupSize / F::kParts;
      for (int part = 0; part < F::kGroups * F::kParts; ++part) {
        const float scale = F::scale_of(row, fields, part);
        for (int i = 0; i < kPart; ++i) {
          const float weight = scale * F::value(codes[part * kPart + i]);
          if constexpr (F::kMinimum)
            *to++ = weight + F::minimum_of(row, fields, part);
          else
            *to++ = weight;
        }
      }
    }
  }
}

}  // namespace arbordraft
