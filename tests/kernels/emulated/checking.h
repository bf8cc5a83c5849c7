// Parts that the checks share: comparisons that are counted, and random numbers.
//
// `fault` alters every result before it is compared: all checks must then fail.
#pragma once

#include <cinttypes>
#include <cstdio>
#include <string>
#include <vector>

#include "native/simd.h"

using namespace arbordraft;

template <class T>
using Rows = std::vector<T>;

bool fault = false;
int checks = 0, failures = 0;

void expect(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  if (!fault) std::fprintf(stderr, "%s: failed: %s\n", kIsa, what.c_str());
}

template <class T>
void same(Rows<T> found, const Rows<T>& expected, const std::string& what) {
  if (fault) reinterpret_cast<uint8_t&>(found[found.size() / 2]) ^= 1;
  expect(
      found.size() == expected.size() && !std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)), what);
}

void near(Rows<float> found, const Rows<double>& exact, const Rows<double>& bound, const std::string& what) {
  if (fault) found[0] += 3 * bound[0] + 2e-6 * std::abs(exact[0]);
  bool good = found.size() == exact.size();
  for (size_t i = 0; good && i < exact.size(); ++i) good = std::abs(found[i] - exact[i]) <= bound[i];
  expect(good, what);
}

class Chance {
 public:
  explicit Chance(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return uint32_t(state_ >> 32);
  }
  int64_t below(int64_t n) { return bits() % n; }
  void to(float& x) { x = (float(bits() >> 8) - 0x1p23f) * 0x1p-23f; }
  void to(bf16& x) {
    float wide;
    to(wide);
    x = narrow(wide);
  }
  void to(int8_t& x) { x = int8_t(below(255) - 127); }
  void to(uint8_t& x) { x = uint8_t(bits()); }
  template <class T>
  Rows<T> some(int64_t count) {
    Rows<T> rows(count);
    for (T& x : rows) to(x);
    return rows;
  }

 private:
  uint64_t state_;
};

inline double wide(float x) { return x; }
inline double wide(bf16 x) { return widen(x); }
inline double wide(int8_t x) { return x; }

template <class T>
std::string name() {
  return std::is_same_v<T, float> ? "float" : std::is_same_v<T, bf16> ? "bf16" : std::is_same_v<T, int8_t> ? "int8" : "groups";
}

Rows<float> lanes_of(f32x16 x) {
  Rows<float> lanes(kLanes);
  store(lanes.data(), x);
  return lanes;
}
