// Vectors of sixteen lanes, against scalar code.
#pragma once

#include "checking.h"
#include <numeric>

#include "prepacked_linear/formats.h"

template <class Of>
Rows<float> each(const Of& of) {
  Rows<float> lanes(kLanes);
  for (int i = 0; i < kLanes; ++i) lanes[i] = of(i);
  return lanes;
}

void check_lanes() {
  Chance chance(1);
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const auto a = chance.some<float>(16), b = chance.some<float>(16), c = chance.some<float>(16);
  const f32x16 x = load(a.data()), y = load(b.data()), z = load(c.data()), ten = splat(10.f);
  same(lanes_of(x + y), each([&](int i) { return a[i] + b[i]; }), "+");
  same(lanes_of(x - y), each([&](int i) { return a[i] - b[i]; }), "-");
  same(lanes_of(x * y), each([&](int i) { return a[i] * b[i]; }), "*");
  same(lanes_of(x / y), each([&](int i) { return a[i] / b[i]; }), "/");
  same(lanes_of(max(x, y)), each([&](int i) { return std::max(a[i], b[i]); }), "max");
  same(lanes_of(min(x, y)), each([&](int i) { return std::min(a[i], b[i]); }), "min");
  same(lanes_of(round(x * ten)), each([&](int i) { return std::nearbyint(a[i] * 10.f); }), "round");
  const bool fused = lanes_of(fma(splat(1 + 0x1p-12f), splat(1 + 0x1p-12f), splat(-1.f)))[0] != 0x1p-11f;
  same(
      lanes_of(fma(x, y, z)), each([&](int i) { return fused ? std::fma(a[i], b[i], c[i]) : a[i] * b[i] + c[i]; }), "fma");
  for (float n : {-140.f, -127.f, -1.f, 0.f, 30.f, 127.f})
    same(lanes_of(times_power_of_two(x, splat(n))), each([&](int i) { return std::ldexp(a[i], int(n)); }), "power of two");
  double total = 0;
  for (float lane : a) total += lane;
  near({sum(x)}, {total}, {16 * 0x1p-23}, "sum");
  same<float>({largest(x)}, {*std::max_element(a.begin(), a.end())}, "largest");
  const auto many = chance.some<float>(256);
  f32x16 vectors[16];
  Rows<double> totals(16), bounds(16, 16 * 0x1p-23);
  for (int i = 0; i < 256; ++i) totals[i / 16] += many[i];
  for (int i = 0; i < 16; ++i) vectors[i] = load(many.data() + 16 * i);
  near(lanes_of(sums(vectors)), totals, bounds, "sums");
  for (int place = 0; place < 16; ++place) {
    auto sick = a;
    sick[place] = nan;
    expect((any_nan(load(sick.data())) && !any_nan(x)) != fault, "any_nan");
    const auto relu = lanes_of(activate(load(sick.data()), Activation::relu));
    expect(std::isnan(relu[place]) != fault && std::isnan(lanes_of(exp(load(sick.data())))[place]) != fault, "NaN comes through");
  }
  Rows<double> exact, bound;
  Rows<float> found;
  for (float from = -86; from < 88; from += 0.37f) {
    found.push_back(lanes_of(exp(splat(from)))[3]);
    exact.push_back(std::exp(double(from)));
    bound.push_back(2 * 0x1p-23 * exact.back());
  }
  near(found, exact, bound, "exp");
  same(lanes_of(exp(splat(-infinity))), Rows<float>(16, 0.f), "exp of the lowest");

  Rows<float> narrowed = {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 1 + 0x1p-8f + 0x1p-20f, -infinity, 3.3e38f, 0.f, -1.7f, 1e-30f};
  narrowed.resize(16, 2.25f);
  Rows<bf16> halves(16), expected(16);
  store(halves.data(), load(narrowed.data()));
  std::transform(narrowed.begin(), narrowed.end(), expected.begin(), [](float f) { return narrow(f); });
  same(halves, expected, "rounded to bf16");
  store(halves.data(), splat(nan));
  expect(std::isnan(widen(halves[5])) != fault, "NaN as bf16");

  const auto bytes = chance.some<int8_t>(32);
  const auto pairs = chance.some<bf16>(32);
  f32x16 even, odd;
  load_pairs(bytes.data(), even, odd);
  same(lanes_of(even), each([&](int i) { return bytes[2 * i]; }), "even bytes");
  same(lanes_of(odd), each([&](int i) { return bytes[2 * i + 1]; }), "odd bytes");
  load_pairs(pairs.data(), even, odd);
  same(lanes_of(even), each([&](int i) { return widen(pairs[2 * i]); }), "even bf16");
  same(lanes_of(odd), each([&](int i) { return widen(pairs[2 * i + 1]); }), "odd bf16");
  same(lanes_of(load(bytes.data())), each([&](int i) { return bytes[i]; }), "bytes");
  same(lanes_of(load(pairs.data() + 7)), each([&](int i) { return widen(pairs[7 + i]); }), "bf16");
#if defined(ARBORDRAFT_DOT_BF16)
  const auto others = chance.some<bf16>(32);
  const auto product = [&](auto p, int i) { return wide(p[i]) * widen(others[i]); };
  const auto pair_sums = [&](auto numbers, const char* what) {
    Rows<double> exact(16), bound(16);
    for (int i = 0; i < 32; ++i) {
      exact[i / 2] += product(numbers, i);
      bound[i / 2] += 0x1p-22 * std::abs(product(numbers, i));
    }
    near(lanes_of(dot(load_dot(numbers.data()), load_dot(others.data()), splat(0.f))), exact, bound, what);
  };
  pair_sums(pairs, "dot of bf16");
  pair_sums(bytes, "dot of bytes and bf16");
#endif
}

void check_halves() {
  Rows<float> found(1 << 16), expected(1 << 16);
  Rows<uint16_t> halves(1 << 16);
  for (int h = 0; h < 1 << 16; ++h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double size = exponent == 31 ? (mantissa ? 0 : INFINITY) : exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    halves[h] = uint16_t(exponent == 31 && mantissa ? 0 : h);
    expected[h] = float(halves[h] >> 15 ? -size : size);
  }
  for (int h = 0; h < 1 << 16; h += kLanes) store(found.data() + h, load_halves(halves.data() + h));
  same(found, expected, "halves");
}

// Sums of a group's products, of codes among them the least and greatest.
template <class F>
void check_bytes() {
  Chance chance(2);
  for (int round = 0; round < 20; ++round) {
    auto packed = chance.some<uint8_t>(kGroupBytes<F>);
    auto x = chance.some<int8_t>(32);
    if (round < 4) std::fill(packed.begin(), packed.end(), round % 2 ? 255 : 0), std::fill(x.begin(), x.end(), round / 2 ? 127 : -127);
    const int32_t begins = begin<F, kBiased>(std::accumulate(x.begin(), x.end(), 0));
    auto sums = start<F>(begins);
    Rows<int32_t> whole(16);
    each<4>([&](auto line) {
      constexpr int kQuad = 2 * decltype(line)::value;
      const u8x64 first = F::template load<kQuad>(packed.data()), second = F::template load<kQuad + 1>(packed.data());
      const auto* four = (const uint8_t*)x.data() + 4 * kQuad;
      if constexpr (kTwice<F>)
        sums = dot_twice<F>(sums, first, second, read<int32_t>(four), read<int32_t>(four + 4));
      else
        sums = dot<F>(dot<F>(sums, first, read<int32_t>(four)), second, read<int32_t>(four + 4));
      for (int lane = 0; lane < 16; ++lane)
        for (int k = 0; k < 8; ++k) {
          const int quad = 2 * line + k / 4, at = 4 * lane + k % 4;
          int code = F::kBits == 8 ? packed[64 * quad + at] : packed[64 * line + at] >> k / 4 * 4 & 15;
          if (F::kBits == 5) code |= (packed[256 + at] >> quad & 1) << 4;
          if (F::kBits == 6) code |= (packed[256 + 64 * (quad / 4) + at] >> quad % 4 * 2 & 3) << 4;
          whole[lane] += int32_t(F::value(uint8_t(code))) * x[4 * quad + k % 4];
        }
    });
    same(lanes_of(to_float(total<F>(sums, begins))), Rows<float>(whole.begin(), whole.end()), "sums of kind " + std::to_string(F::kNumber));
  }
}

void check_powers() {
  Rows<float> found(256), expected(256);
  Rows<uint8_t> exponents(256);
  for (int e = 0; e < 256; ++e) exponents[e] = uint8_t(e), expected[e] = std::ldexp(1.f, e - 128);
  for (int e = 0; e < 256; e += kLanes) store(found.data() + e, load_powers(exponents.data() + e));
  same(found, expected, "powers of two");
}
