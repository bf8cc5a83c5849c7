// Products with prepacked weights, against double precision; rows among others, against rows alone.
#pragma once

#include "checking.h"
#include "prepacked_linear/packing.h"
#include "prepacked_linear/panels.h"

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

// Random blocks, of one kind or of all kinds by turns.
template <>
struct Weights<Panels> {
  Rows<Rows<uint8_t>> raw;  // of each output
  Rows<int64_t> kinds, places;  // of each panel
  Rows<uint8_t> packed;
  Rows<float> bias, scale;
  Prepacked<Panels> matrix;

  Weights(Chance& chance, int64_t outputs, int64_t inputs, int64_t kind = -1)
      : bias(chance.some<float>(outputs)), scale(chance.some<float>(outputs)) {
    const int64_t panels = (outputs + 15) / 16, groups = inputs / kGroupSize;
    for (int64_t panel = 0; panel < panels; ++panel) {
      kinds.push_back(kind < 0 ? panel * 7 % 15 : kind);
      with_kind(kinds.back(), [&](auto type) {
        using F = decltype(type);
        const uint8_t* rows[kLanes] = {};
        for (int64_t lane = 0; lane < kLanes && panel * kLanes + lane < outputs; ++lane) {
          raw.push_back(chance.some<uint8_t>(F::kRow + groups / F::kGroups * F::kRaw));
          if constexpr (kFloats<F>)  // about 1
            for (size_t i = F::kBits / 8 - 1; i < raw.back().size(); i += F::kBits / 8) raw.back()[i] = 0x3c | (raw.back()[i] & 0x81);
          for (size_t i = 3; i < F::kRow; i += 4) raw.back()[i] = 0x3c;
          for (int64_t block = 0; block < groups / F::kGroups; ++block) {
            uint8_t* from = raw.back().data() + F::kRow + block * F::kRaw;
            if constexpr (F::kNumber == Mxfp4::kNumber)
              from[0] = uint8_t(120 + from[0] % 8);
            else if constexpr (F::kNumber == Q6_K::kNumber)
              from[209] &= 0xbf;  // finite halves
            else if constexpr (!kFloats<F> && F::kRow == 0)
              from[1] &= 0xbf, from[3] &= F::kMinimum ? 0xbf : 0xff;
          }
          rows[lane] = raw.back().data();
        }
        places.push_back(int64_t(packed.size()) + F::kNumber);
        packed.resize(packed.size() + panel_bytes<F>(groups));
        lay_panel<F>(rows, groups, packed.data() + places.back() / 64 * 64);
      });
    }
    places.push_back(int64_t(packed.size()));
    matrix = {packed.data(), places.data(), scale.data(), bias.data(), outputs, inputs};
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

// The product of a row of blocks with a quantised row, or of a row of floats with the row itself, by scalar code.
template <class F>
float product(const uint8_t* row, const Rows<Eighth>& x, float y) {
  const uint8_t* raw = row + F::kRow;
  for (size_t g = 0; g < x.size(); g += F::kGroups, raw += F::kRaw) {
    if constexpr (kFloats<F>) {
      for (int i = 0; i < 32; ++i) y = y + F::value_at(raw + i * F::kBits / 8) * x[g].numbers[i];
    } else {
      uint8_t codes[32 * F::kGroups], fields[F::kFields];
      F::parse(raw, codes, fields);
      for (int j = 0; j < F::kGroups; ++j) {
        const Eighth& from = x[g + j];
        int32_t sums[2] = {};
        for (int i = 0; i < 32; ++i) sums[i * F::kParts / 32] += int32_t(F::value(codes[32 * j + i])) * from.codes[i];
        if constexpr (F::kParts == 2) {
          const int32_t whole = sums[0] * int8_t(fields[2 + 2 * j]) + sums[1] * int8_t(fields[3 + 2 * j]);
          y = y + float(whole) * (half_at(fields) * from.scale);
        } else {
          y = y + float(sums[0]) * (F::scale_of(row, fields, j) * from.scale);
          if constexpr (F::kMinimum) y = y + F::minimum_of(row, fields, j) * from.total;
        }
      }
    }
  }
  return y;
}

// Checks for the bits of scalar code, which every processor must have.
void check_blocks(int64_t kind, int64_t outputs, int64_t inputs, int64_t rows = 19) {
  Chance chance(uint64_t(outputs + inputs + kind));
  const Weights<Panels> weights(chance, outputs, inputs, kind);
  const int64_t groups = groups_of(inputs);
  const auto x = chance.some<float>(rows * inputs);
  Rows<Eighth> eighths(rows * groups);
  Rows<float> expected(rows * outputs);
  for (int64_t r = 0; r < rows; ++r) {
    to_eighths(x.data() + r * inputs, inputs, eighths.data() + r * groups);
    Rows<Eighth> row(groups);
    for (int64_t g = 0; g < groups; ++g) {
      const float* from = x.data() + r * inputs + g * 32;
      row[g].numbers = from;
      float most = 0;
      for (int i = 0; i < 32; ++i) most = std::max(most, std::abs(from[i]));
      int32_t total = 0;
      for (int i = 0; i < 32; ++i) total += row[g].codes[i] = int8_t(std::nearbyint(from[i] * (127.f / most)));
      row[g].scale = most / 127.f, row[g].total = row[g].scale * float(total);
    }
    for (int64_t o = 0; o < outputs; ++o)
      with_kind(weights.kinds[o / 16], [&](auto type) {
        expected[r * outputs + o] = product<decltype(type)>(weights.raw[o].data(), row, 0.f) * weights.scale[o] + weights.bias[o];
      });
  }
  const std::string what = "linear of blocks " + std::to_string(kind);
  same(multiplied(weights.matrix, eighths.data(), rows), expected, what);
  check_rows(weights.matrix, eighths.data(), rows, groups, what);
}
