// Recurrent layers along draft trees by the definition in reference.py, whose bits are the same on every instruction set: no
// product is fused with a sum, exponentials are ours, and sums have one order.
//
// A thread computes sixteen values of one head for all rows of a sample, in order. Columns of a state do not depend on each
// other, so threads never wait, and the state of the row before is still in the innermost cache.
#pragma once

#include "../gumbel/cpu.h"

namespace arbordraft {

inline f32x16 unfused_exp(f32x16 x) {  // see arithmetic.py
  const f32x16 c = max(splat(-110.f), min(splat(89.f), x));  // in this order NaN comes through
  const f32x16 n = round(c * splat(1.44269504f));
  const f32x16 r = c - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + (r + splat(1.f));
  return times_power_of_two(p, n);
}

enum class Gate : int64_t { softplus = 0, sigmoid = 1, silu = 2 };

inline f32x16 gated(f32x16 x, Gate kind) {
  const f32x16 zero = splat(0.f), one = splat(1.f);
  if (kind == Gate::sigmoid) return one / (unfused_exp(zero - x) + one);
  if (kind == Gate::silu) return x / (unfused_exp(zero - x) + one);
  float e[kLanes];
  store(e, unfused_exp(zero - max(x, zero - x)));
  for (float& lane : e) lane = lane < 0x1p-24f ? lane : float(logarithm(1.0 + double(lane)));
  return max(zero, x) + load(e);
}

// Computes the gates of channels `range` of one row.
template <class T>
inline void gate_row(
    const T* x, const float* bias, const float* scale, Gate kind, Range range, int64_t size, float* out) {
  for (int64_t i = range.begin; i < range.end; i += kLanes) {
    const int64_t lanes = size - i;
    f32x16 y = load(x + i, lanes);
    if (bias) y = y + load(bias + i, lanes);
    y = gated(y, kind);
    if (scale) y = y * load(scale + i, lanes);
    store(out + i, y, lanes);
  }
}

// Convolves channels `range` of one row and hands the sums of sixteen channels to `put`. `inputs` are those of its path, the
// oldest first, its own last.
template <class T>
inline void convolve_row(
    const T* const* inputs, int64_t width, const float* weight, const float* bias, Range range, int64_t channels,
    const auto& put) {
  for (int64_t i = range.begin; i < range.end; i += kLanes) {
    const int64_t lanes = channels - i;
    f32x16 total = bias ? load(bias + i, lanes) : splat(0.f);
    for (int64_t w = 0; w < width; ++w) total = total + load(inputs[w] + i, lanes) * load(weight + w * channels + i, lanes);
    put(i, total);
  }
}

template <int64_t N, class Of>
[[gnu::always_inline]] inline auto sum_of(int64_t first, const Of& of) {
  if constexpr (N == 1)
    return of(first);
  else
    return sum_of<N / 2>(first, of) + sum_of<N / 2>(first + N / 2, of);
}

// Sums of(0), of(1), ..., neighbours in pairs, then neighbouring pairs, and so on; an odd last one stays alone. Calls each once.
template <class Of>
[[gnu::always_inline]] inline auto pairwise_sum(int64_t count, const Of& of) {
  using Number = decltype(of(int64_t(0)));
#if defined(__AVX512F__)
  constexpr int64_t kBlock = 16;
#else  // half as many registers of half the size
  constexpr int64_t kBlock = 4;
#endif
  Number waiting[40];  // waiting[i]: the sum of 2^i blocks, if bit i of the number of blocks is set
  int64_t blocks = 0;
  for (; (blocks + 1) * kBlock <= count; ++blocks) {
    Number total = sum_of<kBlock>(blocks * kBlock, of);
    int level = 0;
    for (; (blocks >> level) & 1; ++level) total = waiting[level] + total;
    waiting[level] = total;
  }
  const int64_t rest = count - blocks * kBlock;
  Number few[kBlock];
  for (int64_t i = 0; i < rest; ++i) few[i] = of(blocks * kBlock + i);
  for (int64_t n = rest; n > 1; n = (n + 1) / 2) {
    for (int64_t i = 0; i < n / 2; ++i) few[i] = few[2 * i] + few[2 * i + 1];
    if (n % 2) few[n / 2] = few[n - 1];
  }
  bool found = rest > 0;
  for (int level = 0; blocks >> level; ++level) {
    if (!((blocks >> level) & 1)) continue;
    few[0] = found ? waiting[level] + few[0] : waiting[level];
    found = true;
  }
  return few[0];
}

enum class Decay { head, key, element };

struct Scan {
  float* states;                     // [S][H][K][V]; threads hold scratch states
  const int64_t *first, *read, *write;  // see Schedule in paths.py
  int64_t samples, heads, key_heads, keys, values;
  const float *value;                // [T][H][V]
  const float *log_decay, *rates, *beta;
  float *query, *key;                // [T][G][K], prepared
  float *decay;                      // [T][H] or [T][H][K], prepared
  float *out;                        // [T][H][V]

  // Sixteen values of a head in a state: row k is `stride` numbers behind row k - 1.
  struct Place {
    float* values;
    int64_t stride;
  };
  // Finds a state by its index, and without one the last of the thread's own `local` states [count + 1][K][16].
  Place place(int64_t index, int64_t head, int64_t begin, float* local, int64_t count) const {
    if (index >= 0) return {states + (index * heads + head) * keys * values + begin, values};
    if (index == -1) return {local + count * keys * kLanes, kLanes};
    return {local + (-2 - index) * keys * kLanes, kLanes};
  }
};

// Multiplies the keys or queries of a head by a factor, after giving them the length 1 if epsilon is positive.
inline void scale_head(const float* from, int64_t keys, float factor, float epsilon, float* to) {
  float inverse = 1.f;
  if (epsilon > 0) inverse = 1.f / std::sqrt(pairwise_sum(keys, [&](int64_t k) { return from[k] * from[k]; }) + epsilon);
  for (int64_t k = 0; k < keys; ++k) to[k] = from[k] * inverse * factor;
}

// Prepares a row's queries, keys and decays, which all values of a head share.
inline void prepare_row(
    const Scan& s, int64_t row, const float* query, const float* key, float scale, float epsilon, int64_t decays) {
  for (int64_t i = row * s.key_heads; i < (row + 1) * s.key_heads; ++i) {
    scale_head(query + i * s.keys, s.keys, scale, epsilon, s.query + i * s.keys);
    scale_head(key + i * s.keys, s.keys, 1.f, epsilon, s.key + i * s.keys);
  }
  for (int64_t i = 0; i < decays; i += kLanes) {
    const int64_t at = row * decays + i, lanes = decays - i;
    store(s.decay + at, unfused_exp(load(s.log_decay + at, lanes)), lanes);
  }
}

// Runs a row for values begin..begin+15 of one head. Local: both strides are sixteen, so addresses are constants.
template <Decay D, bool Delta, bool Whole, bool Local>
[[gnu::always_inline]] inline void scan_row(const Scan& s, int64_t row, int64_t head, int64_t begin, Scan::Place from, Scan::Place to) {
  const int64_t lanes = s.values - begin, keys = s.keys, at = row * s.heads + head;
  const int64_t shared = (row * s.key_heads + head / (s.heads / s.key_heads)) * keys;
  const float *key = s.key + shared, *query = s.query + shared;
  const float* rates = D == Decay::element ? s.rates + head * keys * s.values + begin : nullptr;
  const auto take = [&](const float* p) { return Whole ? load(p) : load(p, lanes); };
  const auto put = [&](float* p, f32x16 x) { Whole ? store(p, x) : store(p, x, lanes); };
  const auto state = [&](Scan::Place place, int64_t k) { return place.values + k * (Local ? kLanes : place.stride); };
  f32x16 factor = splat(0.f);  // of a head; of an element, its step size
  if constexpr (D == Decay::head) factor = splat(s.decay[at]);
  if constexpr (D == Decay::element) factor = take(s.log_decay + at * s.values + begin);
  const auto decayed = [&](int64_t k) {
    const f32x16 x = take(state(from, k));
    if constexpr (D == Decay::key) return x * splat(s.decay[at * keys + k]);
    if constexpr (D == Decay::element) return x * unfused_exp(factor * take(rates + k * s.values));
    return x * factor;
  };
  f32x16 added = take(s.value + at * s.values + begin);
  if constexpr (Delta) {
    const f32x16 known = pairwise_sum(keys, [&](int64_t k) { return decayed(k) * splat(key[k]); });
    added = (added - known) * splat(s.beta[at]);
  }
  const f32x16 found = pairwise_sum(keys, [&](int64_t k) {
    const f32x16 x = decayed(k) + splat(key[k]) * added;
    put(state(to, k), x);
    return x * splat(query[k]);
  });
  put(s.out + at * s.values + begin, found);
}

// Runs a sample's rows for values begin..begin+15 of one head; see Scan::place. Meanwhile fetches a part of the next head.
template <Decay D, bool Delta, bool Whole>
void scan_values(const Scan& s, int64_t sample, int64_t head, int64_t begin, int64_t next, float* local, int64_t count) {
  const int64_t first = s.first[sample], end = s.first[sample + 1];
  // States lie in memory, not in a cache: in the order of their addresses, and while rows are computed, they come in time.
  const int64_t committed[] = {s.read[first], s.write[end - 1]}, part = next * s.keys * s.values + begin * s.keys;
  int64_t fetched = 0;
  Scan::Place from{};
  for (int64_t row = first; row < end; ++row) {
    for (const int64_t until = s.keys * (row + 1 - first) / (end - first); fetched < until; ++fetched)
      for (int64_t index : committed)
        if (index >= 0) __builtin_prefetch(s.states + index * s.heads * s.keys * s.values + part + fetched * kLanes);
    if (s.read[row] != -1) from = s.place(s.read[row], head, begin, local, count);
    const Scan::Place to = s.place(s.write[row], head, begin, local, count);
    from.stride == kLanes && to.stride == kLanes ? scan_row<D, Delta, Whole, true>(s, row, head, begin, from, to)
                                                 : scan_row<D, Delta, Whole, false>(s, row, head, begin, from, to);
    from = to;
  }
}

// Does one thread's part; `local` [count + 1][K][16] is its own, for `count` scratch states.
template <Decay D, bool Delta>
void scan(const Scan& s, float* local, int64_t count, int thread, int threads) {
  constexpr int64_t kTogether = 128;  // values whose rows lie side by side in a state
  const int64_t groups = (s.values + kTogether - 1) / kTogether;
  for (int64_t item = thread; item < s.heads * groups; item += threads) {
    const int64_t head = item / groups, first = item % groups * kTogether, end = std::min(s.values, first + kTogether);
    const int64_t next = (item + threads) / groups;
    for (int64_t sample = 0; sample < s.samples; ++sample) {
      if (s.first[sample] == s.first[sample + 1]) continue;
      for (int64_t begin = first; begin < end; begin += kLanes)
        begin + kLanes <= s.values ? scan_values<D, Delta, true>(s, sample, head, begin, next, local, count)
                                   : scan_values<D, Delta, false>(s, sample, head, begin, next, local, count);
    }
  }
}

}  // namespace arbordraft
