// Recurrent mixers in the place of a layer's attention: gated short convolutions, Mamba-2 and gated delta nets.
//
// A node's bits follow from its path, by the definitions of ../recurrent_tree. Threads share channels, rows and heads, and
// meet in between.
#pragma once

#include "../recurrent_tree/cpu.h"
#include "norms.h"

namespace arbordraft {

enum class Mixing : int64_t { attention = 0, convolution = 1, selective = 2, delta = 3 };

constexpr int64_t kWidest = 16;       // width of a convolution
constexpr float kLengthEpsilon = 1e-6f;  // of normalised queries and keys, see recurrent_tree/__init__.py

// The rows of a forward among all uncommitted rows of its samples; see Paths in recurrent_tree/paths.py. A scan runs all of
// these again, from committed states, or if `resumed` the forward's rows alone, from states of their parents.
struct Lineage {
  int64_t rows = 0, samples = 0, scratch = 0, ahead = 0;  // rows that are scanned; windows that are computed ahead
  bool resumed = false;
  const int64_t* places = nullptr;                        // [T] of the forward's rows
  const int64_t* history = nullptr;                       // [rows][W - 1]
  const int64_t *ends = nullptr, *slots = nullptr;        // [ahead][W - 1], [ahead]
  const int64_t *first = nullptr, *read = nullptr, *write = nullptr;  // see Schedule
};

template <class T>
struct Recurrence {
  Mixing kind = Mixing::attention;
  int64_t heads = 0, key_heads = 0, keys = 0, values = 0, width = 0, channels = 0, group = 0;  // group: channels of a norm
  const float *taps = nullptr, *bias = nullptr;                              // [W][C], [C] or null
  const float *rates = nullptr, *step_bias = nullptr, *skip = nullptr;       // [H]
  const float* norm = nullptr;                                               // [H V], or [V] for all heads, or null
  float epsilon = 0.f, shortest = 0.f, longest = 0.f, strongest = 1.f;       // of the norm; bounds of step sizes and strengths
  int64_t slots = 0;        // S
  T* windows = nullptr;     // [S][W - 1][C]
  float* states = nullptr;  // [S][H][K][V]
  // Of all uncommitted rows; those of earlier forwards are filled in.
  T *inputs = nullptr, *convolved = nullptr;  // [rows][C]
  float* gates = nullptr;                     // [rows][2 H] step sizes, or strengths of corrections; then log-decays

  explicit operator bool() const { return kind != Mixing::attention; }
  bool scans() const { return kind == Mixing::selective || kind == Mixing::delta; }
  int64_t size() const { return scans() ? heads * values : channels; }  // channels that a row's output has
  // Numbers of a row that the projection makes: B, C and x; or z, channels of the convolution, and one or two per head.
  int64_t projected() const { return scans() ? size() + channels + (kind == Mixing::delta ? 2 : 1) * heads : 3 * channels; }
};

// Buffers that all threads share, for all uncommitted rows; `local` has `own` numbers for each thread.
struct ScanSpace {
  float *query, *key, *value, *decay, *strength, *out, *local;
  int64_t own;
};

// Sizes of the buffers that some mixers need together, for each row and for each thread.
struct ScanSizes {
  int64_t shared = 0, scanned = 0, heads = 0, own = 0;

  template <class T>
  void fit(const Recurrence<T>& m, int64_t scratch) {
    if (!m.scans()) return;
    shared = std::max(shared, m.key_heads * m.keys);
    scanned = std::max(scanned, m.size());
    heads = std::max(heads, m.heads);
    own = std::max(own, (scratch + 1) * m.keys * kLanes);
  }
  void reserve(auto& arena, ScanSpace& space, int64_t rows, int threads) {
    for (float** part : {&space.query, &space.key}) arena.reserve(*part, rows * shared);
    for (float** part : {&space.value, &space.out}) arena.reserve(*part, rows * scanned);
    for (float** part : {&space.decay, &space.strength}) arena.reserve(*part, rows * heads);
    arena.reserve(space.local, own * threads);
    space.own = own;
  }
};

// Convolves channels `range` of all rows along their paths, and hands the sums of sixteen channels to `put`.
template <class T>
inline void convolve_paths(const Recurrence<T>& m, const Lineage& paths, int64_t rows, Range range, const auto& put) {
  const int64_t behind = m.width - 1;
  const auto at = [&](int64_t index) {
    return index >= 0 ? m.inputs + index * m.channels : m.windows + (-1 - index) * m.channels;
  };
  const T* inputs[kWidest];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t place = paths.places[r];
    for (int64_t w = 0; w < behind; ++w) inputs[w] = at(paths.history[place * behind + w]);
    inputs[behind] = m.inputs + place * m.channels;
    convolve_row(inputs, m.width, m.taps, m.bias, range, m.channels, [&](int64_t i, f32x16 total) { put(r, i, total); });
  }
  for (int64_t e = 0; e < paths.ahead; ++e)
    for (int64_t w = 0; w < behind; ++w)
      std::copy_n(
          at(paths.ends[e * behind + w]) + range.begin, range.end - range.begin,
          m.windows + (paths.slots[e] * behind + w) * m.channels + range.begin);
}

// Computes the step sizes or strengths of a row, and its log-decays.
template <class T>
inline void gate_heads(const Recurrence<T>& m, const float* from, float* to) {
  for (int64_t h = 0; h < m.heads; h += kLanes) {
    const int64_t lanes = m.heads - h;
    const bool delta = m.kind == Mixing::delta;
    f32x16 steps = load(from + h + (delta ? m.heads : 0), lanes);
    if (m.step_bias) steps = steps + load(m.step_bias + h, lanes);
    steps = gated(steps, Gate::softplus);
    if (!delta) steps = max(splat(m.shortest), min(splat(m.longest), steps));
    store(to + h, delta ? splat(m.strongest) * gated(load(from + h, lanes), Gate::sigmoid) : steps, lanes);
    store(to + m.heads + h, steps * load(m.rates + h, lanes), lanes);
  }
}

// Prepares a row for the scan from the inputs at some place among the kept ones.
template <class T>
inline void prepare_scan(const Recurrence<T>& m, const ScanSpace& space, int64_t row, int64_t place) {
  const bool delta = m.kind == Mixing::delta;
  const int64_t shared = m.key_heads * m.keys, size = m.size();
  const T* from = m.convolved + place * m.channels;
  const T *values = from + (delta ? 2 * shared : 0), *keys = from + (delta ? shared : size);
  const T* queries = delta ? from : from + size + shared;
  const float *gates = m.gates + place * 2 * m.heads, *decays = gates + m.heads;
  for (int64_t i = 0; i < shared; i += kLanes) {
    store(space.query + row * shared + i, load(queries + i, shared - i), shared - i);
    store(space.key + row * shared + i, load(keys + i, shared - i), shared - i);
  }
  for (int64_t h = 0; delta && h < m.key_heads; ++h) {
    float *query = space.query + row * shared + h * m.keys, *key = space.key + row * shared + h * m.keys;
    scale_head(query, m.keys, 1.f / std::sqrt(float(m.keys)), kLengthEpsilon, query);
    scale_head(key, m.keys, 1.f, kLengthEpsilon, key);
  }
  std::copy_n(gates, m.heads, space.strength + row * m.heads);
  for (int64_t h = 0; h < m.heads; h += kLanes)
    store(space.decay + row * m.heads + h, unfused_exp(load(decays + h, m.heads - h)), m.heads - h);
  for (int64_t h = 0; h < m.heads; ++h)
    for (int64_t i = h * m.values; i < (h + 1) * m.values; i += kLanes)
      store(space.value + row * size + i, delta ? load(values + i) : load(values + i) * splat(gates[h]));
}

// Does a thread's part of the scan of prepared rows.
template <class T>
inline void scan_rows(const Recurrence<T>& m, const Lineage& paths, const ScanSpace& space, int thread, int threads) {
  const Scan s{
      m.states, paths.first, paths.read, paths.write, paths.samples, m.heads, m.key_heads, m.keys, m.values,
      space.value, nullptr, nullptr, space.strength, space.query, space.key, space.decay, space.out};
  float* local = space.local + thread * space.own;
  m.kind == Mixing::delta ? scan<Decay::head, true>(s, local, paths.scratch, thread, threads)
                          : scan<Decay::head, false>(s, local, paths.scratch, thread, threads);
}

// Runs accepted rows of a mixer once more, from the committed state of each sample, and commits its windows. The places of
// rows are among the kept inputs; windows are indexed by rows. Ends with all threads.
template <class T>
inline void replay_rows(const Recurrence<T>& m, const Lineage& paths, const ScanSpace& space, int thread, int threads) {
  const Range range = share(m.channels, kLanes, thread, threads), mine = share(paths.rows, 1, thread, threads);
  const int64_t behind = m.width - 1;
  for (int64_t e = 0; e < paths.ahead; ++e)
    for (int64_t w = 0; w < behind; ++w) {  // the oldest first: inputs move towards the front
      const int64_t index = paths.ends[e * behind + w];
      const T* from = index >= 0 ? m.inputs + paths.places[index] * m.channels : m.windows + (-1 - index) * m.channels;
      T* to = m.windows + (paths.slots[e] * behind + w) * m.channels;
      std::copy(from + range.begin, from + range.end, to + range.begin);
    }
  if (!m.scans()) return;
  for (int64_t row = mine.begin; row < mine.end; ++row) prepare_scan(m, space, row, paths.places[row]);
  meet(threads);
  scan_rows(m, paths, space, thread, threads);
  meet(threads);
}

// Gates and norms the channels of one norm in a row's output of the scan.
template <class T, class X>
inline void finish_group(const Recurrence<T>& m, float* y, int64_t place, int64_t begin, const float* z, X* to) {
  const bool delta = m.kind == Mixing::delta;
  const T* x = m.convolved + place * m.channels;
  const auto gate = [&](int64_t i) { return gated(load(z + i), Gate::silu); };
  if (!delta)
    for (int64_t i = begin; i < begin + m.group; i += kLanes)
      store(y + i, (load(y + i) + load(x + i) * splat(m.skip[i / m.values])) * gate(i));
  if (m.norm) norm_row(y + begin, {m.norm + (delta ? 0 : begin)}, m.epsilon, m.group, y + begin);
  for (int64_t i = begin; i < begin + m.group; i += kLanes) store(to + i, delta ? load(y + i) * gate(i) : load(y + i));
}

// Computes the outputs of a mixer for `rows` projected rows, before the projection that leads back; ends with all threads.
template <class T, class X>
inline void mix_rows(
    const Recurrence<T>& m, const Lineage& paths, const float* projected, int64_t stride, int64_t rows, const ScanSpace& space,
    X* mixed, int thread, int threads) {
  const int64_t size = m.size();
  const Range range = share(m.channels, kLanes, thread, threads), mine = share(rows, 1, thread, threads);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = projected + r * stride;
    T* to = m.inputs + paths.places[r] * m.channels;
    for (int64_t i = range.begin; i < range.end; i += kLanes)
      store(to + i, m.scans() ? load(from + size + i) : load(from + i) * load(from + 2 * m.channels + i));
  }
  if (!m.scans()) {
    convolve_paths(m, paths, rows, range, [&](int64_t r, int64_t i, f32x16 total) {
      store(mixed + r * size + i, total * load(projected + r * stride + m.channels + i));
    });
    return meet(threads);
  }
  convolve_paths(m, paths, rows, range, [&](int64_t r, int64_t i, f32x16 total) {
    store(m.convolved + paths.places[r] * m.channels + i, gated(total, Gate::silu));
  });
  for (int64_t r = mine.begin; r < mine.end; ++r)
    gate_heads(m, projected + r * stride + size + m.channels, m.gates + paths.places[r] * 2 * m.heads);
  meet(threads);
  const Range all = share(paths.rows, 1, thread, threads);
  for (int64_t row = all.begin; row < all.end; ++row) prepare_scan(m, space, row, paths.resumed ? paths.places[row] : row);
  meet(threads);
  scan_rows(m, paths, space, thread, threads);
  meet(threads);
  const int64_t groups = size / m.group;
  const Range norms = share(rows * groups, 1, thread, threads);
  for (int64_t item = norms.begin; item < norms.end; ++item) {
    const int64_t r = item / groups, place = paths.places[r];
    finish_group(
        m, space.out + (paths.resumed ? r : place) * size, place, item % groups * m.group, projected + r * stride,
        mixed + r * size);
  }
  meet(threads);
}

}  // namespace arbordraft
