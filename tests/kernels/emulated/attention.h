// Rows of a tree, against double precision and against plain decoding.
#pragma once

#include "checking.h"
#include "ragged_tree_attention/cpu.h"

template <class T>
Rows<T> attended(const Attention<T>& a, const Visible& visible, const Rows<T>& queries, int threads) {
  int64_t chunks = 1;
  const int64_t rows = int64_t(visible.rows.size());
  for (const auto& row : visible.rows) chunks = std::max(chunks, (row.keys - row.first + kChunk - 1) / kChunk);
  Rows<T> out(rows * a.kv_heads * a.group * a.value_dim);
  Rows<float> partials(rows * chunks * a.kv_heads * a.partial_size());
  omp_set_num_threads(threads);
  team(true, [&](int thread, int count) {
    attend(a, visible, queries.data(), out.data(), partials.data(), chunks, thread, count);
  });
  return out;
}

template <class T>
void check_attention(int64_t dim, int64_t value_dim, int64_t group, int64_t past, bool more) {
  Chance chance(uint64_t(dim + group));
  const int64_t heads = 2, slots = past + 40, rows = 12;
  const std::string what = "attention of " + name<T>() + " " + std::to_string(dim);
  auto keys = chance.some<T>(slots * heads * dim), values = chance.some<T>(slots * heads * value_dim);
  const auto queries = chance.some<T>(rows * heads * group * dim), sinks_t = chance.some<T>(heads * group);
  Rows<float> sinks;
  for (T x : sinks_t) sinks.push_back(float(wide(x)));
  const Attention<T> a{keys.data(), values.data(), heads, group, dim, value_dim, 0.3f, more ? 2.f : 0.f, more ? sinks.data() : nullptr};
  Visible tree;
  Rows<std::vector<int64_t>> paths(rows);
  for (int64_t r = 0; r < rows; ++r) {  // a binary tree after the past
    if (r) paths[r] = paths[(r - 1) / 2];
    paths[r].push_back(past + 2 * r + 1);
    tree.add(0, past, paths[r], 0);
  }
  tree.close();
  const auto found = attended(a, tree, queries, 1);
  same(attended(a, tree, queries, 2), found, what + ": two threads");
  Rows<double> exact, bound;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads * group; ++h) {
      std::vector<int64_t> seen(past);
      for (int64_t k = 0; k < past; ++k) seen[k] = k;
      seen.insert(seen.end(), paths[r].begin(), paths[r].end());
      double total = more ? std::exp(double(sinks[h])) : 0, loudest = 0;
      std::vector<double> weights;
      for (int64_t k : seen) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d)
          score += wide(queries[(r * heads * group + h) * dim + d]) * wide(keys[(k * heads + h / group) * dim + d]);
        score *= double(0.3f);
        if (more) score = 2 * std::tanh(score / 2);
        loudest = std::max(loudest, std::abs(score));
        weights.push_back(std::exp(score));
        total += weights.back();
      }
      for (int64_t d = 0; d < value_dim; ++d) {
        double y = 0, loud = 0;
        for (size_t k = 0; k < seen.size(); ++k) {
          const double part = weights[k] / total * wide(values[(seen[k] * heads + h / group) * value_dim + d]);
          y += part, loud += std::abs(part);
        }
        const double step = std::is_same_v<T, float> ? 0x1p-24 : 0x1p-8;
        exact.push_back(y);
        bound.push_back(2 * step * (loud + std::abs(y)) + 0x1p-22 * (double(dim) + 16) * loud);
      }
    }
  Rows<float> flat;
  for (T x : found) flat.push_back(float(wide(x)));
  near(flat, exact, bound, what);
  const auto drafted_keys = keys, drafted_values = values;
  for (int64_t r = 0; r < rows; ++r) {  // plain decoding after the row's path is committed
    const auto commit = [&](Rows<T>& pool, const Rows<T>& before, int64_t size) {
      pool = before;
      for (size_t i = 0; i < paths[r].size(); ++i)
        std::copy_n(before.data() + paths[r][i] * size, size, pool.data() + (past + int64_t(i)) * size);
    };
    commit(keys, drafted_keys, heads * dim);
    commit(values, drafted_values, heads * value_dim);
    Visible alone;
    alone.add(0, past + int64_t(paths[r].size()), {}, 0);
    alone.close();
    const int64_t size = heads * group;
    const Rows<T> query(queries.begin() + r * size * dim, queries.begin() + (r + 1) * size * dim);
    const Rows<T> expected(found.begin() + r * size * value_dim, found.begin() + (r + 1) * size * value_dim);
    same(attended(a, alone, query, 1 + int(r % 2)), expected, what + ": a row alone");
  }
}
