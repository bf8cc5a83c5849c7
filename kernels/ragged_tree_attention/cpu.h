// Ragged tree attention: each packed row attends to the committed keys of its sample and to its own ancestors.
//
// A row's keys are numbered along its own path: first the committed ones, then its ancestors from shallow to deep, then
// itself. The kernel works through them in chunks of kChunk in that numbering. A tree node therefore adds up the same
// numbers in the same order as plain decoding will once its path is committed: equal bits, whatever the tree, the batch
// or the number of threads.
#pragma once

#include <utility>
#include <vector>

#include "../native/simd.h"

namespace arbordraft {

constexpr int64_t kChunk = 128;

// What every row sees, as pool rows.
struct Visible {
  struct Row {
    int64_t first;     // number of its first key; above 0 under a sliding window
    int64_t straight;  // keys first..straight-1 lie in consecutive pool rows from `start + first` on
    int64_t keys;      // one past its last key
    int64_t start;     // pool row of key 0
    const int64_t* others;  // pool rows of keys straight..keys-1

    int64_t slot(int64_t key) const { return key < straight ? start + key : others[key - straight]; }
  };
  std::vector<Row> rows;
  std::vector<int64_t> pool;  // what `others` points into

  // samples: [4][B] number of rows, first pool row, committed keys, uncommitted keys; words: [T][W] or null for causal
  // order; tree_positions: positions of all samples' uncommitted keys, one sample after another.
  Visible(
      const int64_t* samples, int64_t batch, const int64_t* positions, const int64_t* words, int64_t word_count,
      const int64_t* tree_positions, int64_t window) {
    const int64_t *count = samples, *start = count + batch, *past = start + batch, *tree = past + batch;
    std::vector<int64_t> offsets;
    int64_t row = 0, region = 0;
    for (int64_t b = 0; b < batch; region += tree[b++])
      for (int64_t i = 0; i < count[b]; ++i, ++row) {
        Row seen{0, past[b], 0, start[b], nullptr};
        if (window > 0) seen.first = std::min(past[b], std::max<int64_t>(0, positions[row] - window + 1));
        offsets.push_back(int64_t(pool.size()));
        const int64_t last = tree[b] - count[b] + i;  // the row itself
        int64_t columns = words ? tree[b] : last + 1;
        if (!words && window <= 0) seen.straight += std::exchange(columns, 0);
        for (int64_t c = 0; c < columns; ++c) {
          if (words && !((uint64_t(words[row * word_count + c / 64]) >> (c % 64)) & 1)) continue;
          if (window > 0 && positions[row] - tree_positions[region + c] >= window) continue;
          if (seen.straight - past[b] == c && int64_t(pool.size()) == offsets.back())
            ++seen.straight;
          else
            pool.push_back(start[b] + past[b] + c);
        }
        seen.keys = seen.straight + int64_t(pool.size()) - offsets.back();
        rows.push_back(seen);
      }
    for (size_t r = 0; r < rows.size(); ++r) rows[r].others = pool.data() + offsets[r];
  }
};

template <class T>
struct Attention {
  const T* keys;  // [P][Hkv][D]
  const T* values;
  int64_t kv_heads, group, dim, value_dim;
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // [Hkv * group] or null

  int64_t partial_size() const { return group * (value_dim + 2); }

  // Unnormalised result of keys begin..end-1 of one row and key head: for each query head of the group its maximum,
  // its sum of weights and its weighted values.
  void chunk(const T* query, const Visible::Row& row, int64_t head, int64_t begin, int64_t end, float* partial) const {
    const int64_t n = end - begin, stride = kv_heads * dim, value_stride = kv_heads * value_dim;
    alignas(64) float weights[kChunk];
    const T* key_rows[kChunk];
    const T* value_rows[kChunk];
    for (int64_t k = 0; k < n; ++k) {
      const int64_t slot = row.slot(begin + k);
      key_rows[k] = keys + slot * stride + head * dim;
      value_rows[k] = values + slot * value_stride + head * value_dim;
    }
    for (int64_t g = 0; g < group; ++g) {
      float* found = partial + g * (value_dim + 2);
      f32x16 top = splat(-std::numeric_limits<float>::infinity());
      for (int64_t k = 0; k < n; k += kLanes) {
        f32x16 products[kLanes];
        const int64_t some = std::min<int64_t>(kLanes, n - k);
        for (int64_t j = 0; j < some; ++j) products[j] = dot(query + g * dim, key_rows[k + j]);
        for (int64_t j = some; j < kLanes; ++j) products[j] = splat(0.f);
        f32x16 score = sums(products) * splat(scale);
        if (softcap > 0) score = splat(softcap) * tanh(score * splat(1.f / softcap));
        store(weights + k, score);
        for (int64_t j = some; j < kLanes; ++j) weights[k + j] = -std::numeric_limits<float>::infinity();
        top = max(top, load(weights + k));
      }
      const float maximum = largest(top);
      f32x16 total = splat(0.f);
      for (int64_t k = 0; k < n; k += kLanes) {
        const f32x16 weight = exp(load(weights + k) - splat(maximum));
        store(weights + k, weight);
        total += weight;
      }
      found[0] = maximum;
      found[1] = sum(total);
      weigh(weights, value_rows, n, found + 2);
    }
  }

  // Adds a later chunk to an earlier one.
  void merge(float* earlier, const float* later) const {
    for (int64_t g = 0; g < group; ++g, earlier += value_dim + 2, later += value_dim + 2) {
      const float maximum = std::max(earlier[0], later[0]);
      const float a = std::exp(earlier[0] - maximum), b = std::exp(later[0] - maximum);
      earlier[0] = maximum;
      earlier[1] = std::fma(earlier[1], a, later[1] * b);
      for (int64_t d = 2; d < value_dim + 2; d += kLanes)
        store(earlier + d, fma(load(earlier + d), splat(a), load(later + d) * splat(b)));
    }
  }

  template <class Out>
  void finish(const float* partial, int64_t head, Out* out) const {
    for (int64_t g = 0; g < group; ++g, partial += value_dim + 2, out += value_dim) {
      float total = partial[1], factor = 1.f;
      if (sinks) {  // one more logit that takes probability and gives nothing
        const float sink = sinks[head * group + g], maximum = std::max(partial[0], sink);
        factor = std::exp(partial[0] - maximum);
        total = std::fma(total, factor, std::exp(sink - maximum));
      }
      const f32x16 share = splat(factor / total);
      for (int64_t d = 0; d < value_dim; d += kLanes) store(out + d, load(partial + 2 + d) * share);
    }
  }

 private:
  f32x16 dot(const T* query, const T* key) const {
    f32x16 found = splat(0.f);
    int64_t d = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      for (; d + 32 <= dim; d += 32)
        found.v = _mm512_dpbf16_ps(
            found.v, (__m512bh)_mm512_loadu_si512(query + d), (__m512bh)_mm512_loadu_si512(key + d));
    }
#endif
    for (; d < dim; d += kLanes) found = fma(load(query + d), load(key + d), found);
    return found;
  }

  // out = sum over keys of weight times value, 64 channels at a time.
  void weigh(const float* weights, const T* const* rows, int64_t n, float* out) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= value_dim; d += 4 * kLanes) weigh_some<4>(weights, rows, n, d, out);
    for (; d < value_dim; d += kLanes) weigh_some<1>(weights, rows, n, d, out);
  }
  template <int N>
  void weigh_some(const float* weights, const T* const* rows, int64_t n, int64_t d, float* out) const {
    f32x16 found[N];
    for (int i = 0; i < N; ++i) found[i] = splat(0.f);
    for (int64_t k = 0; k < n; ++k) {
      const f32x16 weight = splat(weights[k]);
      for (int i = 0; i < N; ++i) found[i] = fma(load(rows[k] + d + i * kLanes), weight, found[i]);
    }
    for (int i = 0; i < N; ++i) store(out + d + i * kLanes, found[i]);
  }
};

// One thread's part of the attention of all rows. Whoever calls it lets the team meet before (all keys are written) and
// after (all results are there). With few rows the chunks of one row are spread over the team and `partials`, large
// enough for all of them, is merged by whoever calls attend_merge() next; the order of merging is the same either way.
inline bool attention_is_split(int64_t rows, int64_t kv_heads, int threads) { return rows * kv_heads < 4 * threads; }

template <class T, class Out>
inline void attend(
    const Attention<T>& a, const Visible& visible, const T* queries, Out* out, float* partials, int64_t most_chunks,
    int thread, int threads) {
  const int64_t rows = int64_t(visible.rows.size()), size = a.partial_size();
  const int64_t width = a.kv_heads * a.group;
  const bool split = attention_is_split(rows, a.kv_heads, threads);
  std::vector<float> local(split ? 0 : 2 * size);
  const int64_t chunks = split ? most_chunks : 1;
  // Threads take turns: neighbours see about as many keys, distant rows may not.
  for (int64_t item = thread; item < rows * a.kv_heads * chunks; item += threads) {
    const int64_t c = item % chunks, head = item / chunks % a.kv_heads, r = item / chunks / a.kv_heads;
    const Visible::Row& row = visible.rows[r];
    const T* query = queries + (r * width + head * a.group) * a.dim;
    if (split) {
      const int64_t begin = row.first + c * kChunk, end = std::min(row.keys, begin + kChunk);
      if (begin < end) a.chunk(query, row, head, begin, end, partials + item * size);
      continue;
    }
    a.chunk(query, row, head, row.first, std::min(row.keys, row.first + kChunk), local.data());
    for (int64_t begin = row.first + kChunk; begin < row.keys; begin += kChunk) {
      a.chunk(query, row, head, begin, std::min(row.keys, begin + kChunk), local.data() + size);
      a.merge(local.data(), local.data() + size);
    }
    a.finish(local.data(), head, out + (r * width + head * a.group) * a.value_dim);
  }
  if (!split) return;
  meet(threads);
  const Range heads = share(rows * a.kv_heads, 1, thread, threads);
  for (int64_t item = heads.begin; item < heads.end; ++item) {
    const int64_t head = item % a.kv_heads, r = item / a.kv_heads;
    const Visible::Row& row = visible.rows[r];
    float* first = partials + item * chunks * size;
    for (int64_t c = 1; row.first + c * kChunk < row.keys; ++c) a.merge(first, first + c * size);
    a.finish(first, head, out + (r * width + head * a.group) * a.value_dim);
  }
}

}  // namespace arbordraft
