// Products with prepacked weights, against double precision; rows among others, against rows alone.
#pragma once

#include "checking.h"
#include "prepacked_linear/grouped.h"

template <class W>
struct Weights {
  Rows<W> dense, packed;
  Rows<float> scale, bias;
  Prepacked<W> matrix;

  Weights(Chance& chance, int64_t outputs, int64_t inputs, bool small = false)
      : dense(chance.some<W>(outputs * inputs)), packed((outputs + 15) / 16 * 16 * inputs), bias(chance.some<float>(outputs)) {
    constexpr int64_t lanes = std::is_same_v<W, float> ? 1 : 2;
    for (int64_t o = 0; o < outputs; ++o)
      for (int64_t i = 0; i < inputs; ++i)
        packed[(o / 16 * inputs + i / lanes * lanes) * 16 + o % 16 * lanes + i % lanes] = dense[o * inputs + i];
    if (std::is_same_v<W, int8_t> || small) scale.resize(outputs, (std::is_same_v<W, int8_t> ? 1.f / 127 : 1.f) / std::sqrt(float(inputs)));
    matrix = {packed.data(), scale.empty() ? nullptr : scale.data(), bias.data(), outputs, inputs};
  }
};

float half(uint16_t bits) {
  const float size = std::ldexp(float(1024 + (bits & 1023)), int(bits >> 10 & 31) - 25);
  return bits >> 15 ? -size : size;
}

// Groups of 4 bits may have scales and minima in bytes.
template <>
struct Weights<Grouped> {
  Rows<uint8_t> codes, bytes;
  Rows<uint16_t> scales;
  Rows<float> bias;
  Prepacked<Grouped> matrix;

  Weights(
      Chance& chance, int64_t outputs, int64_t inputs, bool small = false, bool four = true, bool in_bytes = false)
      : codes(chance.some<uint8_t>((outputs + 15) / 16 * 16 * inputs / (four ? 2 : 1))), bias(chance.some<float>(outputs)) {
    const int64_t blocks = (outputs + 15) / 16, groups = inputs / kGroupSize;
    for (int64_t i = 0; i < blocks * groups * 16 * (four ? 2 : 1); ++i) {
      const bool minimum = four && i / 16 % 2;  // about as large as the codes' part, and negative
      scales.push_back(uint16_t((chance.bits() & 0x3ff) + ((small ? (minimum ? 9 : 6) : (minimum ? 13 : 10)) << 10) + (minimum ? 0x8000 : 0)));
    }
    if (!four)
      for (auto& half : scales) half -= uint16_t(4 << 10);
    if (in_bytes)
      for (int64_t block = 0; block < blocks; ++block) {
        const auto factors = chance.some<float>(2 * kLanes);
        const auto* from = reinterpret_cast<const uint8_t*>(factors.data());
        bytes.insert(bytes.end(), from, from + kFactors<uint8_t>);
        const auto counts = chance.some<uint8_t>(groups * 2 * kLanes);
        bytes.insert(bytes.end(), counts.begin(), counts.end());
      }
    const void* scale = in_bytes ? static_cast<const void*>(bytes.data()) : scales.data();
    matrix = {codes.data(), scale, bias.data(), outputs, inputs, four, in_bytes};
  }

  // Returns the scale of an output's group, or its minimum.
  float scale_of(int64_t output, int64_t group, bool minimum) const {
    const int64_t block = output / kLanes, groups = matrix.groups(), lane = minimum * kLanes + output % kLanes;
    if (!matrix.bytes) return half(scales[(block * groups + group) * kLanes * (matrix.four ? 2 : 1) + lane]);
    const uint8_t* from = bytes.data() + block * (kFactors<uint8_t> + groups * 2 * kLanes);
    float factor;
    std::memcpy(&factor, from + lane * sizeof(float), sizeof(float));
    return float(from[kFactors<uint8_t> + group * 2 * kLanes + lane]) * factor;
  }
};

// Multiplies rows; each of `threads` threads computes its share of the blocks.
template <class W, class X>
Rows<float> multiplied(const Prepacked<W>& m, const X* x, int64_t rows, int threads = 1) {
  Rows<float> y(rows * m.outputs);
  for (int thread = 0; thread < threads; ++thread)
    multiply(
        m, x, rows, share((m.outputs + 15) / 16, 2, thread, threads),
        [&](int64_t r, int64_t block, const f32x16* acc, int n) {
          for (int b = 0; b < n; ++b)
            store(y.data() + r * m.outputs + (block + b) * 16, acc[b], m.outputs - (block + b) * 16);
        });
  return y;
}

template <class W, class X>
void check_rows(const Prepacked<W>& m, const X* x, int64_t rows, int64_t each, const std::string& what) {
  const auto together = multiplied(m, x, rows);
  for (int64_t some = 1; some < rows; some += some < 9 ? 1 : 5) {
    const int64_t first = (some * 7) % (rows - some + 1);
    const Rows<float> part(together.begin() + first * m.outputs, together.begin() + (first + some) * m.outputs);
    same(multiplied(m, x + first * each, some, int(some % 3) + 1), part, what + ": rows " + std::to_string(some));
  }
}

template <class W, class X>
void check_linear(int64_t outputs, int64_t inputs, int64_t rows = 19) {
  Chance chance(uint64_t(outputs + inputs));
  const std::string what = "linear of " + name<W>() + " by " + name<X>();
  const Weights<W> weights(chance, outputs, inputs);
  const auto x = chance.some<X>(rows * inputs);
  Rows<double> exact, bound;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      double found = 0, size = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const double product = wide(x[r * inputs + i]) * wide(weights.dense[o * inputs + i]);
        found += product, size += std::abs(product);
      }
      const double scale = weights.scale.empty() ? 1. : weights.scale[o];
      exact.push_back(found * scale + weights.bias[o]);
      bound.push_back(0x1p-23 * double(inputs + 4) * (size * scale + std::abs(weights.bias[o])));
    }
  near(multiplied(weights.matrix, x.data(), rows), exact, bound, what);
  check_rows(weights.matrix, x.data(), rows, inputs, what);
}

// Checks for the bits of scalar code, which every processor must have.
void check_groups(bool four, bool in_bytes, int64_t outputs, int64_t inputs, int64_t rows = 19) {
  Chance chance(uint64_t(outputs + inputs + four));
  const Weights<Grouped> weights(chance, outputs, inputs, false, four, in_bytes);
  const int64_t groups = groups_of(inputs);
  const auto x = chance.some<float>(rows * inputs);
  Rows<Eighth> eighths(rows * groups);
  Rows<float> expected(rows * outputs);
  for (int64_t r = 0; r < rows; ++r) {
    to_eighths(x.data() + r * inputs, inputs, eighths.data() + r * groups);
    for (int64_t o = 0; o < outputs; ++o) {
      float& y = expected[r * outputs + o];
      for (int64_t g = 0; g < groups; ++g) {
        const float* from = x.data() + r * inputs + g * 32;
        float most = 0;
        for (int i = 0; i < 32; ++i) most = std::max(most, std::abs(from[i]));
        const float steps = 127.f / most, step = most / 127.f;
        int32_t sum = 0, total = 0;
        for (int i = 0; i < 32; ++i) {
          const int32_t code = int32_t(std::nearbyint(from[i] * steps));
          const int64_t at = o / 16 * groups + g, quad = i / 4, line = four ? quad % 4 : quad;
          const uint8_t byte = weights.codes[((at * (four ? 4 : 8) + line) * 16 + o % 16) * 4 + i % 4];
          sum += code * (four ? (quad < 4 ? byte & 15 : byte >> 4) : byte - 128);
          total += code;
        }
        const float factor = weights.scale_of(o, g, false) * step, part = float(sum) * factor;
        y = y + part;
        if (four) y = y + weights.scale_of(o, g, true) * (step * float(total));
      }
      y = y + weights.bias[o];
    }
  }
  const std::string what = in_bytes ? "linear of 4 bits, scales in bytes" : four ? "linear of 4 bits" : "linear of 8 bits";
  same(multiplied(weights.matrix, eighths.data(), rows), expected, what);
  check_rows(weights.matrix, eighths.data(), rows, groups, what);
}
