// The kinds of blocks: how a file keeps them, how a panel keeps them, and the values of both. blocks.py defines the same.
//
// A panel holds 16 outputs in blocks of one kind: the fields of their rows, those of block after block, padded to 64 bytes,
// then the codes of group after group of 32 inputs. A field of w bytes lies as [16][w]. Codes of 8 bits lie as [8][16][4]:
// four inputs are side by side as the dot-product instructions need them. Of narrower codes, the low 4 bits lie as [4][16][4],
// line n with the inputs 8n to 8n + 3 in low halves and the next four in high halves. The other bits follow as [16][4], or
// [2][16][4] for two, those of the first inputs lowest. Floats lie as [32][16].
#pragma once

#include <tuple>
#include <type_traits>

#include "bytes.h"

namespace arbordraft {

constexpr int64_t kGroupSize = 32;

// Codes of `Bits` bits, whose values are `Centre` less.
template <int Bits, int Centre>
struct Unsigned {
  static constexpr int kBits = Bits, kMost = (1 << Bits) - 1, kCentre = Centre;
  static constexpr bool kSigned = false;
  static float value(uint8_t code) { return float(int(code) - Centre); }
  // Loads the codes of 16 outputs and the inputs 4 Quad to 4 Quad + 3 of a group.
  template <int Quad>
  static u8x64 load(const uint8_t* p) {
    const u8x64 low = load_nibbles<Quad % 2>(p + 64 * (Quad / 2));
    constexpr int each = Bits - 4, quads = 8 / std::max(each, 1);
    if constexpr (each == 0)
      return low;
    else
      return with_bits<4 - Quad % quads * each, ((1 << each) - 1) << 4>(low, load_bytes(p + 256 + 64 * (Quad / quads)));
  }
};

struct Signed8 {
  static constexpr int kBits = 8, kMost = 128, kCentre = 128;
  static constexpr bool kSigned = true;
  static float value(uint8_t code) { return float(int(code) - 128); }
  template <int Quad>
  static u8x64 load(const uint8_t* p) {
    return signed_codes(load_bytes(p + 64 * Quad));
  }
};

// Values of codes that index a table. `Centre` is added to those that units multiply: see bytes.h.
struct alignas(16) Levels {
  int8_t of[16];
  constexpr Levels operator+(int centre) const {
    Levels more{};
    for (int i = 0; i < 16; ++i) more.of[i] = int8_t(uint8_t(of[i] + centre));
    return more;
  }
};
constexpr Levels kIq4 = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
constexpr Levels kE2m1 = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

template <const Levels& Table, int Most, int Centre, bool Signed>
struct FromTable {
  static constexpr int kBits = 4, kMost = Most, kCentre = Centre;
  static constexpr bool kSigned = Signed;
  static constexpr Levels kMultiplied = Table + (Signed && !kBiased ? 0 : Centre);
  static float value(uint8_t code) { return Table.of[code]; }
  template <int Quad>
  static u8x64 load(const uint8_t* p) {
    return look_up(kMultiplied.of, load_nibbles<Quad % 2>(p + 64 * (Quad / 2)));
  }
};
using Iq4Codes = FromTable<kIq4, 127, 128, true>;
using E2m1Codes = FromTable<kE2m1, 24, 12, false>;

// Scales of a group's weights, kept in fields of `kFields` bytes per block and `kRow` bytes per row. Group j of a block:
// scale(row, fields, j) and minimum(row, fields, j) of 16 outputs from a panel, scale_of and minimum_of of one output from
// its own bytes. kParts: parts of a group with a scale each.
struct Halves {
  static constexpr int kGroups = 1, kParts = 1, kFields = 2, kRow = 0;
  static constexpr bool kMinimum = false;
  static constexpr int width(int) { return 2; }
  static f32x16 scale(const uint8_t*, const uint8_t* p, int64_t) { return load_halves((const uint16_t*)p); }
  static float scale_of(const uint8_t*, const uint8_t* p, int) { return half_at(p); }
};

struct HalfPairs : Halves {
  static constexpr int kFields = 4;
  static constexpr bool kMinimum = true;
  static f32x16 minimum(const uint8_t*, const uint8_t* p, int64_t) { return load_halves((const uint16_t*)(p + 32)); }
  static float minimum_of(const uint8_t*, const uint8_t* p, int) { return half_at(p + 2); }
};

struct Powers {  // of 2, less 128
  static constexpr int kGroups = 1, kParts = 1, kFields = 1, kRow = 0;
  static constexpr bool kMinimum = false;
  static constexpr int width(int) { return 1; }
  static f32x16 scale(const uint8_t*, const uint8_t* p, int64_t) { return load_powers(p); }
  static float scale_of(const uint8_t*, const uint8_t* p, int) { return power(*p); }
};

struct BytesOfRow {
  static constexpr int kGroups = 1, kParts = 1, kFields = 2, kRow = 8;
  static constexpr bool kMinimum = true;
  static constexpr int width(int) { return 1; }
  static f32x16 scale(const uint8_t* row, const uint8_t* p, int64_t) { return load_counts(p) * load((const float*)row); }
  static f32x16 minimum(const uint8_t* row, const uint8_t* p, int64_t) {
    return load_counts(p + 16) * load((const float*)row + kLanes);
  }
  static float scale_of(const uint8_t* row, const uint8_t* p, int) { return float(p[0]) * float_at(row); }
  static float minimum_of(const uint8_t* row, const uint8_t* p, int) { return float(p[1]) * float_at(row + 4); }
};

struct BytesOfBlock {  // two halves, then a byte for the scale and one for the minimum of each group
  static constexpr int kGroups = 8, kParts = 1, kFields = 20, kRow = 0;
  static constexpr bool kMinimum = true;
  static constexpr int width(int place) { return place < 4 ? 2 : 1; }
  static f32x16 scale(const uint8_t*, const uint8_t* p, int64_t j) {
    return load_halves((const uint16_t*)p) * load_counts(p + 64 + 32 * j);
  }
  static f32x16 minimum(const uint8_t*, const uint8_t* p, int64_t j) {
    return load_halves((const uint16_t*)(p + 32)) * load_counts(p + 80 + 32 * j);
  }
  static float scale_of(const uint8_t*, const uint8_t* p, int j) { return half_at(p) * float(p[4 + 2 * j]); }
  static float minimum_of(const uint8_t*, const uint8_t* p, int j) { return half_at(p + 2) * float(p[5 + 2 * j]); }
};

struct SignedBytes {  // a half, then a signed byte for each group
  static constexpr int kGroups = 8, kParts = 1, kFields = 10, kRow = 0;
  static constexpr bool kMinimum = false;
  static constexpr int width(int place) { return place < 2 ? 2 : 1; }
  static f32x16 scale(const uint8_t*, const uint8_t* p, int64_t j) {
    return load_halves((const uint16_t*)p) * load((const int8_t*)p + 32 + 16 * j);
  }
  static float scale_of(const uint8_t*, const uint8_t* p, int j) { return half_at(p) * float(int8_t(p[2 + j])); }
};

struct SignedBytesOfHalves {  // a half, then a signed byte for each half of a group
  static constexpr int kGroups = 8, kParts = 2, kFields = 18, kRow = 0;
  static constexpr bool kMinimum = false;
  static constexpr int width(int place) { return place < 2 ? 2 : 1; }
  static f32x16 scale(const uint8_t*, const uint8_t* p, int64_t) { return load_halves((const uint16_t*)p); }
  static f32x16 part(const uint8_t* p, int64_t j, int half) { return load((const int8_t*)p + 32 + 32 * j + 16 * half); }
  static float scale_of(const uint8_t*, const uint8_t* p, int part) { return half_at(p) * float(int8_t(p[2 + part])); }
};

// Parsing a file's block: parse(raw, codes [32 kGroups], fields [kFields]). kRaw: its bytes.

inline void parse_nibbles(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) codes[i] = from[i] & 15, codes[i + count] = from[i] >> 4;
}
inline void parse_fifth(const uint8_t* from, uint8_t* codes) {  // one bit for each of 32 codes
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; ++i) codes[i] |= uint8_t((bits >> i & 1) << 4);
}
inline void parse_factors(const uint8_t* raw, uint8_t* fields) {  // of Q4_K and Q5_K
  std::memcpy(fields, raw, 4);
  fields[3] ^= 128;  // kernels add minima
  const uint8_t *low = raw + 4, *high = raw + 8, *rest = raw + 12;
  for (int j = 0; j < 4; ++j) {
    fields[4 + 2 * j] = low[j] & 63, fields[5 + 2 * j] = high[j] & 63;
    fields[12 + 2 * j] = uint8_t((rest[j] & 15) | low[j] >> 6 << 4), fields[13 + 2 * j] = uint8_t(rest[j] >> 4 | high[j] >> 6 << 4);
  }
}

template <class Codes, class Scales, int Raw>
struct Simple : Codes, Scales {  // blocks of 32: fields, fifth bits if there are any, 16 bytes of nibbles
  static constexpr int kRaw = Raw;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    std::memcpy(fields, raw, Scales::kFields);
    parse_nibbles(raw + Raw - 16, 16, codes);
    if constexpr (Codes::kBits == 5) parse_fifth(raw + Scales::kFields, codes);
  }
};

struct Int4 : Simple<Unsigned<4, 0>, BytesOfRow, 18> { static constexpr int kNumber = 0; };
struct Q8_0 : Signed8, Halves {
  static constexpr int kNumber = 1, kRaw = 34;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    std::memcpy(fields, raw, 2);
    for (int i = 0; i < 32; ++i) codes[i] = raw[2 + i] ^ 128;
  }
};
struct Q4_0 : Simple<Unsigned<4, 8>, Halves, 18> { static constexpr int kNumber = 2; };
struct Q4_1 : Simple<Unsigned<4, 0>, HalfPairs, 20> { static constexpr int kNumber = 3; };
struct Q5_0 : Simple<Unsigned<5, 16>, Halves, 22> { static constexpr int kNumber = 4; };
struct Q5_1 : Simple<Unsigned<5, 0>, HalfPairs, 24> { static constexpr int kNumber = 5; };
struct Iq4Nl : Simple<Iq4Codes, Halves, 18> { static constexpr int kNumber = 6; };
struct Mxfp4 : Simple<E2m1Codes, Powers, 17> { static constexpr int kNumber = 7; };
struct Q4_K : Unsigned<4, 0>, BytesOfBlock {
  static constexpr int kNumber = 8, kRaw = 144;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    parse_factors(raw, fields);
    for (int i = 0; i < 4; ++i) parse_nibbles(raw + 16 + 32 * i, 32, codes + 64 * i);
  }
};
struct Q5_K : Unsigned<5, 0>, BytesOfBlock {
  static constexpr int kNumber = 9, kRaw = 176;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    parse_factors(raw, fields);
    for (int i = 0; i < 4; ++i) parse_nibbles(raw + 48 + 32 * i, 32, codes + 64 * i);
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) codes[32 * j + i] |= uint8_t((raw[16 + i] >> j & 1) << 4);
  }
};
struct Q6_K : Unsigned<6, 32>, SignedBytesOfHalves {
  static constexpr int kNumber = 10, kRaw = 210;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    std::memcpy(fields, raw + 208, 2);
    std::memcpy(fields + 2, raw + 192, 16);
    for (int half = 0; half < 2; ++half) {
      parse_nibbles(raw + 64 * half, 64, codes + 128 * half);
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 32; ++i) codes[128 * half + 32 * j + i] |= uint8_t((raw[128 + 32 * half + i] >> 2 * j & 3) << 4);
    }
  }
};
struct Iq4Xs : Iq4Codes, SignedBytes {
  static constexpr int kNumber = 11, kRaw = 136;
  static void parse(const uint8_t* raw, uint8_t* codes, uint8_t* fields) {
    std::memcpy(fields, raw, 2);
    for (int j = 0; j < 8; ++j) {
      const int low = raw[4 + j / 2] >> j % 2 * 4 & 15, high = raw[2 + j / 4] >> j % 4 * 2 & 3;
      fields[2 + j] = uint8_t(int8_t((low | high << 4) - 32));
      parse_nibbles(raw + 8 + 16 * j, 16, codes + 32 * j);
    }
  }
};

template <int Bytes>
struct Floats {
  static constexpr int kBits = 8 * Bytes, kGroups = 1, kFields = 0, kRow = 0, kRaw = 32 * Bytes;
};
struct F32 : Floats<4> {
  static constexpr int kNumber = 12;
  static f32x16 load16(const uint8_t* p) { return load((const float*)p); }
  static float value_at(const uint8_t* p) { return float_at(p); }
};
struct F16 : Floats<2> {
  static constexpr int kNumber = 13;
  static f32x16 load16(const uint8_t* p) { return load_halves((const uint16_t*)p); }
  static float value_at(const uint8_t* p) { return half_at(p); }
};
struct Bf16 : Floats<2> {
  static constexpr int kNumber = 14;
  static f32x16 load16(const uint8_t* p) { return load((const bf16*)p); }
  static float value_at(const uint8_t* p) {
    bf16 x;
    std::memcpy(&x, p, 2);
    return widen(x);
  }
};

template <class F>
constexpr bool kFloats = F::kBits > 8;
template <class F>
constexpr int64_t kGroupBytes = kLanes * kGroupSize * F::kBits / 8;  // of codes

// Bytes of the fields of a panel of so many groups, and of the whole panel.
template <class F>
inline int64_t field_bytes(int64_t groups) {
  return (kLanes * (F::kRow + groups / F::kGroups * F::kFields) + 63) / 64 * 64;
}
template <class F>
inline int64_t panel_bytes(int64_t groups) {
  return field_bytes<F>(groups) + groups * kGroupBytes<F>;
}

// Calls the function with the kind of this number, and returns whether there is one.
template <class What, class... Kinds>
inline bool with_kind(int64_t number, const What& what, std::type_identity<std::tuple<Kinds...>>) {
  return ((Kinds::kNumber == number && (what(Kinds()), true)) || ...);
}
using AllKinds = std::type_identity<
    std::tuple<Int4, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Iq4Nl, Mxfp4, Q4_K, Q5_K, Q6_K, Iq4Xs, F32, F16, Bf16>>;
template <class What>
inline bool with_kind(int64_t number, const What& what) {
  return with_kind(number, what, AllKinds());
}

}  // namespace arbordraft
