// Recurrent layers along draft trees, whose bits must be the same in every build.
#pragma once

#include "checking.h"
#include "recurrent_tree/cpu.h"

inline Rows<float> spread(int64_t count, int64_t salt) {  // exact numbers from -2 to 2; see test_emulated.py
  Rows<float> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = float((i * 7919 + salt * 104729) % 2001 - 1000) / 512;
  return x;
}

inline void print_recurrent() {
  constexpr int64_t rows = 5, heads = 2, keys = 21, values = 19;
  const int64_t first[] = {0, rows}, read[] = {0, -1, -2, -1, -2}, write[] = {-2, -1, -2, -1, -1};
  uint64_t digest = 14695981039346656037ull;
  const auto add = [&](const Rows<float>& x) {
    for (float number : x) digest = (digest ^ std::bit_cast<uint32_t>(number)) * 1099511628211ull;
  };
  auto states = spread(heads * keys * values, 1);
  const auto query = spread(rows * keys, 2), key = spread(rows * keys, 3), value = spread(rows * heads * values, 4);
  auto steps = spread(rows * heads * values, 5);
  const auto rates = spread(heads * keys * values, 6), beta = spread(rows * heads, 7);
  Rows<float> queries(rows * keys), prepared(rows * keys), decays(rows * heads), out(rows * heads * values);
  Rows<float> local(2 * keys * kLanes), gates(steps.size());
  for (Gate kind : {Gate::softplus, Gate::sigmoid, Gate::silu}) {
    gate_row(steps.data(), nullptr, nullptr, kind, {0, int64_t(steps.size())}, int64_t(steps.size()), gates.data());
    add(gates);
  }
  Scan s{states.data(), first, read, write, 1, heads, 1, keys, values, value.data(), steps.data(),
         rates.data(), beta.data(), queries.data(), prepared.data(), decays.data(), out.data()};
  for (int64_t row = 0; row < rows; ++row) prepare_row(s, row, query.data(), key.data(), 0.25f, 1e-6f, heads);
  scan<Decay::head, true>(s, local.data(), 1, 0, 1);
  add(out);
  for (int64_t row = 0; row < rows; ++row) prepare_row(s, row, query.data(), key.data(), 0.25f, 0.f, 0);
  scan<Decay::element, false>(s, local.data(), 1, 0, 1);
  add(out);
  std::printf("recurrent %016" PRIx64 "\n", digest);
}
