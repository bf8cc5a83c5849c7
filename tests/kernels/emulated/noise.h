// Noise, whose bits must be the same in every build, and the highest tokens.
#pragma once

#include "checking.h"
#include "gumbel/cpu.h"
#include "verify/cpu.h"

void check_noise() {
  const NoiseKey key{0x12345678u, 0x9abcdef0u, 77};
  const int64_t size = 1000;
  Rows<double> noise((size + kGroup - 1) / kGroup * kGroup);
  gumbel_row(key, {0, int64_t(noise.size())}, size, noise.data());
  uint64_t digest = 14695981039346656037ull;
  for (int64_t i = 0; i < size; ++i) digest = (digest ^ std::bit_cast<uint64_t>(noise[i])) * 1099511628211ull;
  std::printf("noise %016" PRIx64 "\n", digest);

  Chance chance(9);
  const auto scores = chance.some<float>(size);
  for (float temperature : {0.3f, 1.f}) {
    int64_t expected = 0, token = 0;
    double best = 0;
    const auto total = [&](int64_t i) { return double(scores[i] / temperature) + noise[i]; };
    for (int64_t i = 0; i < size; ++i)
      if (total(i) > total(expected)) expected = i;
    gumbel_maximum(scores.data(), temperature, key, {0, size}, size, best, token);
    same<int64_t>({token}, {expected}, "highest with noise");
  }
  auto row = chance.some<bf16>(size);
  for (int64_t place : {3, 500, 999}) {
    row[place] = narrow(float(2 + place));
    float value;
    int64_t token;
    row_maximum(row.data(), size, value, token);
    same<int64_t>({token, int64_t(value)}, {place, int64_t(widen(row[place]))}, "highest");
  }
  row[700] = 0x7fc0;
  float value;
  int64_t token;
  row_maximum(row.data(), size, value, token);
  expect((std::isnan(value) && token == 0) != fault, "NaN among logits");
}
