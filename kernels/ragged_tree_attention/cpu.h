// Ragged tree attention: each packed row attends to the committed keys of its sample and to its own ancestors.
//
// A row's keys are numbered along its own path: first the committed ones, then its ancestors from shallow to deep, then
// itself. The kernel works through them in chunks of kChunk in that numbering. A tree node therefore adds up the same
// numbers in the same order as plain decoding will once its path is committed: equal bits for any tree, batch and number of
// threads.
#pragma once

#include <utility>
#include <vector>

#include "../native/simd.h"

namespace arbordraft {

constexpr int64_t kChunk = 128;

// The keys that every row sees, as pool rows.
struct Visible {
  struct Row {
    int64_t first;     // index of its first key; above 0 under a sliding window
    int64_t straight;  // keys first..straight-1 lie in consecutive pool rows from `start + first` on
    int64_t keys;      // one past its last key
    int64_t start;     // pool row of key 0
    const int64_t* others;  // pool rows of keys straight..keys-1
  };
  std::vector<Row> rows;
  std::vector<int64_t> pool;  // the array that `others` points into

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

  // Adds row by row instead. A row sees keys 0..past-1 of a slab from pool row `start` on, and then the pool rows of its path,
  // except keys outside the sliding window, 0 for none.
  Visible() = default;
  void add(int64_t start, int64_t past, const std::vector<int64_t>& path, int64_t window) {
    const int64_t keys = past + int64_t(path.size()), hidden = window > 0 ? std::max<int64_t>(0, keys - window) : 0;
    const int64_t passed = std::max<int64_t>(0, hidden - past);  // of the path
    rows.push_back({std::min(past, hidden), past, keys - passed, start, nullptr});
    pool.insert(pool.end(), path.begin() + passed, path.end());
  }
  void close() {  // call after the last add()
    const int64_t* others = pool.data();
    for (auto& row : rows) {
      row.others = others;
      others += row.keys - row.straight;
    }
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

  // Computes the unnormalised result of keys begin..end-1 of one row and key head: for each query head of the group its
  // maximum, its sum of weights and its weighted values.
  [[gnu::noinline]] void chunk(const T* query, const Visible::Row& row, int64_t head, int64_t begin, int64_t end, float* partial) const {
    const int64_t n = end - begin, stride = kv_heads * dim, value_stride = kv_heads * value_dim;
    const T* key_rows[kChunk];
    const T* value_rows[kChunk + 1];
    const T *own_keys = keys + head * dim, *own_values = values + head * value_dim;
    const int64_t straight = std::clamp<int64_t>(row.straight - begin, 0, n), first = row.start + begin;
    for (int64_t k = 0; k < straight; ++k) key_rows[k] = own_keys + (first + k) * stride;
    for (int64_t k = 0; k < straight; ++k) value_rows[k] = own_values + (first + k) * value_stride;
    for (int64_t k = straight; k < n; ++k) {
      const int64_t slot = row.others[begin + k - row.straight];
      key_rows[k] = own_keys + slot * stride;
      value_rows[k] = own_values + slot * value_stride;
    }
    value_rows[n] = value_rows[n - 1];  // pairs with an odd last one, with weight 0
    for (int64_t g = 0; g < group; g += kHeads) {
      const int64_t some = std::min(kHeads, group - g);
      alignas(64) T weights[kHeads][kChunk];
      for (int64_t h = 0; h < some; ++h) {
        const T* const* next = g + h ? nullptr : value_rows;
        const T* from = query + (g + h) * dim;
        float* found = partial + (g + h) * (value_dim + 2);
        switch (dim) {
          case 64: score<64>(from, key_rows, next, n, weights[h], found); break;
          case 128: score<128>(from, key_rows, next, n, weights[h], found); break;
          default: score<0>(from, key_rows, next, n, weights[h], found); break;
        }
      }
      float* out = partial + g * (value_dim + 2) + 2;
      switch (some) {
        case 1: weigh<1>(weights, value_rows, n, out); break;
        case 2: weigh<2>(weights, value_rows, n, out); break;
        case 3: weigh<3>(weights, value_rows, n, out); break;
        default: weigh<4>(weights, value_rows, n, out); break;
      }
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
      if (sinks) {  // one more logit that takes probability and has no value
        const float sink = sinks[head * group + g], maximum = std::max(partial[0], sink);
        factor = std::exp(partial[0] - maximum);
        total = std::fma(total, factor, std::exp(sink - maximum));
      }
      const f32x16 share = splat(factor / total);
      for (int64_t d = 0; d < value_dim; d += kLanes) store(out + d, load(partial + 2 + d) * share);
    }
  }

 private:
  static constexpr int64_t kHeads = 4;  // query heads that share a pass over the values

  // Computes the weights of n keys for one query head, zeros up to a whole vector; found[0] and found[1]: the maximum score
  // and the sum of the rounded weights. Prefetches later keys, and the values if they are given. D is the head size if the
  // compiler knows it and can unroll, otherwise 0.
  template <int64_t D>
  void score(const T* query, const T* const* rows, const T* const* next, int64_t n, T* weights, float* found) const {
    alignas(64) float scores[kChunk];
    f32x16 top = splat(-std::numeric_limits<float>::infinity());
    for (int64_t k = 0; k < n; k += kLanes) {
      const int64_t some = std::min<int64_t>(kLanes, n - k);
      if (next)
        for (int64_t j = k; j < k + some; ++j) {
          fetch(next[j], value_dim);
          fetch(rows[std::min(n - 1, j + kLanes)], dim);
        }
      f32x16 products[kLanes];
      if (some == kLanes) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) products[j] = dot<D>(query, rows[k + j]);
      } else {
        for (int64_t j = 0; j < some; ++j) products[j] = dot<D>(query, rows[k + j]);
        for (int64_t j = some; j < kLanes; ++j) products[j] = splat(0.f);
      }
      f32x16 score = sums(products) * splat(scale);
      if (softcap > 0) score = splat(softcap) * tanh(score * splat(1.f / softcap));
      store(scores + k, score);
      for (int64_t j = some; j < kLanes; ++j) scores[k + j] = -std::numeric_limits<float>::infinity();
      top = max(top, load(scores + k));
    }
    const float maximum = largest(top);
    f32x16 total = splat(0.f);
    for (int64_t k = 0; k < n; k += kLanes) {
      store(weights + k, exp(load(scores + k) - splat(maximum)));
      total += load(weights + k);
    }
    found[0] = maximum;
    found[1] = sum(total);
  }

  static void fetch(const T* row, int64_t size) {
    for (int64_t i = 0; i < size; i += int64_t(64 / sizeof(T))) __builtin_prefetch(row + i);
  }

  template <int64_t D>
  f32x16 dot(const T* query, const T* key) const {
    const int64_t size = D ? D : dim;
    f32x16 found = splat(0.f);
    int64_t d = 0;
#if defined(ARBORDRAFT_DOT_BF16)
    if constexpr (std::is_same_v<T, bf16>)
      for (; d + 2 * kLanes <= size; d += 2 * kLanes)
        found = arbordraft::dot(load_dot(query + d), load_dot(key + d), found);
#endif
    for (; d < size; d += kLanes) found = fma(load(query + d), load(key + d), found);
    return found;
  }

  // out[h] = sum over keys of weight times value, for G query heads that lie value_dim + 2 apart.
  template <int G>
  void weigh(const T (*weights)[kChunk], const T* const* rows, int64_t n, float* out) const {
    int64_t d = 0;
#if defined(ARBORDRAFT_DOT_BF16)
    if constexpr (std::is_same_v<T, bf16>)
      for (; d + 32 <= value_dim; d += 32) weigh_pairs<G>(weights, rows, n, d, out);
#endif
    for (; d + 2 * kLanes <= value_dim; d += 2 * kLanes) weigh_some<G, 2>(weights, rows, n, d, out);
    for (; d < value_dim; d += kLanes) weigh_some<G, 1>(weights, rows, n, d, out);
  }
  template <int G, int N>
  void weigh_some(const T (*weights)[kChunk], const T* const* rows, int64_t n, int64_t d, float* out) const {
    f32x16 found[G][N];
    for (auto& head : found) std::fill(head, head + N, splat(0.f));
    for (int64_t k = 0; k < n; ++k) {
      f32x16 value[N];
      for (int i = 0; i < N; ++i) value[i] = load(rows[k] + d + i * kLanes);
      for (int h = 0; h < G; ++h) {
        const f32x16 weight = splat(widen(weights[h][k]));
        for (int i = 0; i < N; ++i) found[h][i] = fma(value[i], weight, found[h][i]);
      }
    }
    for (int h = 0; h < G; ++h)
      for (int i = 0; i < N; ++i) store(out + h * (value_dim + 2) + d + i * kLanes, found[h][i]);
  }
#if defined(ARBORDRAFT_DOT_BF16)
  // 32 channels of two keys at a time: the dot product adds up pairs.
  template <int G>
  void weigh_pairs(const bf16 (*weights)[kChunk], const bf16* const* rows, int64_t n, int64_t d, float* out) const {
    f32x16 low[G], high[G];
    for (int h = 0; h < G; ++h) low[h] = high[h] = splat(0.f);
    for (int64_t k = 0; k < n; k += 2) {
      bf16x32 first, second;
      zip(rows[k] + d, rows[k + 1] + d, first, second);
      for (int h = 0; h < G; ++h) {
        const bf16x32 weight = splat_pair(&weights[h][k]);
        low[h] = arbordraft::dot(first, weight, low[h]);
        high[h] = arbordraft::dot(second, weight, high[h]);
      }
    }
    for (int h = 0; h < G; ++h) store_unzipped(out + h * (value_dim + 2) + d, low[h], high[h]);
  }
#endif
};

// attend() does one thread's part of the attention of all rows. Its caller lets the team meet before, when all keys are
// written, and after, when all results are ready. With few rows the team shares the chunks of each row, and merges `partials`
// afterwards, in the same order. Rows are dealt to threads in turn, because neighbouring rows see about as many keys.
inline bool attention_is_split(int64_t rows, int threads) { return rows < 4 * threads; }

constexpr int64_t kMostTogether = 8;  // rows that pass over the keys together, while these are in the inner caches

template <class T, class Out>
[[gnu::noinline]] void attend(
    const Attention<T>& a, const Visible& visible, const T* queries, Out* out, float* partials, int64_t most_chunks,
    int thread, int threads) {
  const int64_t rows = int64_t(visible.rows.size()), size = a.partial_size(), heads = a.kv_heads;
  const auto query = [&](int64_t r, int64_t head) { return queries + (r * heads + head) * a.group * a.dim; };
  const auto result = [&](int64_t r, int64_t head) { return out + (r * heads + head) * a.group * a.value_dim; };
  if (!attention_is_split(rows, threads)) {
    const int64_t together = std::min(kMostTogether, (rows + threads - 1) / threads);
    std::vector<float> local((together + 1) * heads * size);
    float* later = local.data() + together * heads * size;
    for (int64_t begin = thread * together; begin < rows; begin += threads * together) {
      const int64_t end = std::min(rows, begin + together);
      for (int64_t c = 0; c < most_chunks; ++c)
        for (int64_t r = begin; r < end; ++r) {
          const Visible::Row& row = visible.rows[r];
          const int64_t from = row.first + c * kChunk, to = std::min(row.keys, from + kChunk);
          for (int64_t head = 0; from < to && head < heads; ++head) {  // a key's heads are contiguous
            float* earlier = local.data() + ((r - begin) * heads + head) * size;
            a.chunk(query(r, head), row, head, from, to, c ? later : earlier);
            if (c) a.merge(earlier, later);
          }
        }
      for (int64_t r = begin; r < end; ++r)
        for (int64_t head = 0; head < heads; ++head)
          a.finish(local.data() + ((r - begin) * heads + head) * size, head, result(r, head));
    }
    return;
  }
  // By chunks, then rows, then heads. With many chunks, a thread takes each chunk with all its rows and heads.
  const int64_t items = most_chunks * rows * heads, together = most_chunks >= 4 * threads ? rows * heads : 1;
  for (int64_t begin = thread * together; begin < items; begin += threads * together)
    for (int64_t item = begin; item < begin + together; ++item) {
      const int64_t head = item % heads, r = item / heads % rows, c = item / heads / rows;
      const Visible::Row& row = visible.rows[r];
      const int64_t from = row.first + c * kChunk, to = std::min(row.keys, from + kChunk);
      float* partial = partials + ((r * most_chunks + c) * heads + head) * size;
      if (from < to) a.chunk(query(r, head), row, head, from, to, partial);
    }
  meet(threads);
  for (int64_t item = thread; item < rows * heads; item += threads) {
    const int64_t head = item % heads, r = item / heads;
    const Visible::Row& row = visible.rows[r];
    float* earlier = partials + (r * most_chunks * heads + head) * size;
    for (int64_t c = 1; row.first + c * kChunk < row.keys; ++c) a.merge(earlier, earlier + c * heads * size);
    a.finish(earlier, head, result(r, head));
  }
}

}  // namespace arbordraft
