// From rows of blocks or floats, as files and models have them, to panels, to prepacked numbers and to floats.
#pragma once

#include <vector>

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

// The float32 weights of a row of blocks, or of floats of any number.
template <class F>
inline void dequantize_row(const uint8_t* row, int64_t inputs, float* to) {
  if constexpr (kFloats<F>) {
    constexpr int64_t kBytes = F::kBits / 8;
    int64_t i = 0;
    for (; i + kLanes <= inputs; i += kLanes) store(to + i, F::load16(row + i * kBytes));
    for (; i < inputs; ++i) to[i] = F::value_at(row + i * kBytes);
  } else {
    const uint8_t* raw = row + F::kRow;
    for (int64_t block = 0; block < inputs / (kGroupSize * F::kGroups); ++block, raw += F::kRaw) {
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

// To nearest, ties to even; numbers beyond the largest half become infinite.
inline uint16_t half_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x477ff000) return uint16_t(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits < 0x38800000) {  // below the least normal half: in units of 2^-24
    float size;
    std::memcpy(&size, &bits, 4);
    return uint16_t(sign | uint32_t(std::nearbyint(size * 0x1p24f)));
  }
  return uint16_t(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// Rounding a row of whole groups to blocks, as quantize_groups in groups.py does. Returns false for numbers that are not finite
// or whose scales are not.
template <class F>
constexpr bool kRounded = std::is_same_v<F, Q8_0> || std::is_same_v<F, Int4>;

inline f32x16 nearest(f32x16 x, float step, float least, float most) {
  return max(min(round(x / splat(step > 0 ? step : 1.f)), splat(most)), splat(least));
}

inline bool round_row(Q8_0, const float* x, int64_t groups, uint8_t* to) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  bool sound = true;
  for (int64_t g = 0; g < groups; ++g, x += kGroupSize, to += Q8_0::kRaw) {
    const f32x16 a = load(x), b = load(x + kLanes), zero = splat(0.f);
    const float most = largest(max(max(a, zero - a), max(b, zero - b)));
    if (any_nan(a) || any_nan(b) || !(most <= kLargest)) return false;
    const uint16_t half = half_of(most / 127.f);
    std::memcpy(to, &half, 2);
    const float step = half_at(to);
    sound &= step <= kLargest;
    store_bytes((int8_t*)to + 2, nearest(a, step, -127.f, 127.f));
    store_bytes((int8_t*)to + 2 + kLanes, nearest(b, step, -127.f, 127.f));
  }
  return sound;
}

inline bool round_row(Int4, const float* x, int64_t groups, uint8_t* to) {
  const auto in_bytes = [](float value, float unit) { return std::nearbyint(value / (unit == 0 ? 1.f : unit)); };
  std::vector<float> least(groups), range(groups);
  float lowest = 0, widest = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const f32x16 a = load(x + g * kGroupSize), b = load(x + g * kGroupSize + kLanes), zero = splat(0.f);
    if (any_nan(a) || any_nan(b)) return false;
    range[g] = largest(max(a, b));
    least[g] = std::min(0.f, -largest(max(zero - a, zero - b)));
    if (std::isinf(range[g]) || std::isinf(least[g])) return false;
    lowest = std::min(lowest, least[g]);
  }
  lowest /= 255.f;
  for (int64_t g = 0; g < groups; ++g) {
    const float minimum = in_bytes(least[g], lowest);
    to[8 + g * Int4::kRaw + 1] = uint8_t(minimum);
    least[g] = minimum * lowest;
    range[g] = std::max(0.f, (range[g] - least[g]) / 15.f);
    widest = std::max(widest, range[g]);
  }
  widest /= 255.f;
  std::memcpy(to, &widest, 4);
  std::memcpy(to + 4, &lowest, 4);
  to += 8;
  for (int64_t g = 0; g < groups; ++g, x += kGroupSize, to += Int4::kRaw) {
    const float scale = in_bytes(range[g], widest);
    to[0] = uint8_t(scale);
    int8_t codes[kGroupSize];
    for (int half = 0; half < kGroupSize; half += kLanes)
      store_bytes(codes + half, nearest(load(x + half) - splat(least[g]), scale * widest, 0.f, 15.f));
    for (int i = 0; i < kLanes; ++i) to[2 + i] = uint8_t(codes[i] | codes[kLanes + i] << 4);
  }
  return true;
}

// Rows of a matrix that are not one after the other: where each lies, or null for a row of zeros, and its kind.
struct Row {
  const uint8_t* at;
  int64_t kind;
};

// Lays 16 rows of any kinds out as a panel of kind F, to which they are rounded. Returns whether all numbers are finite.
template <class F>
inline bool round_panel(const Row* rows, int64_t inputs, uint8_t* to) {
  const int64_t groups = (inputs + kGroupSize - 1) / kGroupSize, bytes = F::kRow + groups * F::kRaw;
  std::vector<float> wide(groups * kGroupSize);
  std::vector<uint8_t> rounded(kLanes * bytes);
  const uint8_t* from[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    from[lane] = nullptr;
    if (!rows[lane].at) continue;
    with_kind(rows[lane].kind, [&](auto kind) { dequantize_row<decltype(kind)>(rows[lane].at, inputs, wide.data()); });
    if (!round_row(F(), wide.data(), groups, rounded.data() + lane * bytes)) return false;
    from[lane] = rounded.data() + lane * bytes;
  }
  lay_panel<F>(from, groups, to);
  return true;
}

// Lays 16 rows out as a block of prepacked numbers, see cpu.h. `scale`: of 8 bits, one per row.
template <class W>
inline void lay_numbers(const Row* rows, int64_t inputs, float* scale, W* to) {
  constexpr int64_t kPair = std::is_same_v<W, float> ? 1 : 2;
  const int64_t units = (inputs + kPair - 1) / kPair;
  const int64_t apart = units * kPair + 64 / int64_t(sizeof(W));  // rows of 2^n bytes would share few lines of the cache
  std::vector<float> wide(inputs);
  std::vector<W> narrowed(kLanes * apart);  // zeros
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    W* own = narrowed.data() + lane * apart;
    if (!rows[lane].at) continue;
    constexpr int64_t kSame = std::is_same_v<W, float> ? F32::kNumber : std::is_same_v<W, bf16> ? Bf16::kNumber : -1;
    if (rows[lane].kind == kSame) {
      std::memcpy(own, rows[lane].at, inputs * sizeof(W));
      continue;
    }
    with_kind(rows[lane].kind, [&](auto kind) { dequantize_row<decltype(kind)>(rows[lane].at, inputs, wide.data()); });
    if constexpr (std::is_same_v<W, int8_t>) {
      float most = 0;
      for (const float x : wide) most = std::max(most, std::fabs(x));
      scale[lane] = std::max(most, std::numeric_limits<float>::min()) / 127.f;
      for (int64_t i = 0; i < inputs; ++i) own[i] = int8_t(std::nearbyint(wide[i] / scale[lane]));
    } else if constexpr (std::is_same_v<W, bf16>) {
      for (int64_t i = 0; i < inputs; ++i) own[i] = narrow(wide[i]);
    } else {
      std::memcpy(own, wide.data(), inputs * sizeof(W));
    }
  }
  for (int64_t unit = 0; unit < units; ++unit)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      std::memcpy(to + (unit * kLanes + lane) * kPair, narrowed.data() + lane * apart + unit * kPair, kPair * sizeof(W));
}

}  // namespace arbordraft
