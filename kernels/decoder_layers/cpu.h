// Runs consecutive pre- and post-normed decoder layers in one call. Each has grouped-query attention or a recurrent mixer, and
// one MLP or several, or one of both. The residual stays in float, and the team of threads is woken once for all layers.
#pragma once

#include "../ragged_tree_attention/cpu.h"
#include "experts.h"
#include "norms.h"
#include "recurrences.h"

namespace arbordraft {

// Rotates the first `rotary` channels of one head; channels i and i + rotary / 2 are a pair.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = std::fma(a, cosine[i], -b * sine[i]);
    x[i + half] = std::fma(b, cosine[i + half], a * sine[i + half]);
  }
}

// W: prepacked weights; X: rows that they multiply, which weights in panels take as Eighths; T: keys and values.
template <class W, class X, class T>
struct Layer {
  Norm pre_attention, query_norm, key_norm, post_attention, pre_mlp, post_mlp, beside_norm;
  const float* sinks;  // or null
  Prepacked<W> qkv, out, gate_up, down;
  int64_t query_heads, kv_heads, dim, inner, window;
  Activation activation;
  int64_t table;  // index of the rotary table, or -1
  bool parallel;  // whether the first block reads the normed rows of the layer before
  bool gated, joint;  // joint: the norms of queries and keys are over all heads together
  bool closing;  // whether queries, keys and values are followed by gates of the attention's output
  float epsilon, scale, softcap, residual = 1.f;  // residual: factor of what blocks add
  T *keys, *values;
  const Visible* visible;
  Router<T> router;
  Recurrence<T> recurrence;

  int64_t projected() const { return (qkv.outputs + kLanes - 1) / kLanes * kLanes; }  // numbers of a row, padded
  bool mixes() const { return recurrence || query_heads > 0; }
  int64_t mixed() const { return recurrence ? recurrence.size() : query_heads * dim; }
};

// Buffers that all threads share, for T rows.
template <class W, class X, class T>
struct Workspace {
  X *normed, *attended, *inner;
  T* queries;
  float *qkv, *sums, *partials;
  Eighth* eighths;  // for weights in panels
  bool own;         // whether every thread has its own `normed` and `eighths`
  int64_t widest;   // groups of a row of `eighths`
  // For mixtures of experts:
  Multiplied<W, X>* gathered;
  float *scores, *factors;
  int64_t* experts;
  ScanSpace scan;  // for recurrent mixers
};

// beside: rows of `beside_size` floats that precede the hidden states if a layer has a norm for them, or null.
// cosine, sine: [rows][tables][rotary].
template <class W, class X, class T>
inline void run_layers(
    float* x, const float* beside, int64_t beside_size, int64_t rows, int64_t hidden,
    const std::vector<Layer<W, X, T>>& layers, const Workspace<W, X, T>& space, const float* cosine, const float* sine, int64_t rotary, int64_t tables, const int64_t* slots, int64_t most_chunks,
    const Lineage& paths, const std::vector<std::pair<int64_t, T*>>& taps, int thread, int threads) {
  const Range mine = share(rows, 1, thread, threads);
  // Every thread computes a single row by itself, which takes less time than meeting the thread that has computed it.
  const Range made = space.own ? Range{0, rows} : mine;
  X* const normed_rows = space.normed + (space.own ? thread * rows * (beside_size + hidden) : 0);
  Eighth* const eighths = space.eighths + (space.own ? thread * rows * space.widest : 0);
  const auto meet_makers = [&] {
    if (!space.own) meet(threads);
  };
  // Returns the rows in the form that a matrix multiplies, after all threads have met. Each thread converts its share.
  const auto operand = [&](const X* from, int64_t width) {
    if constexpr (std::is_same_v<W, Panels>) {
      const int64_t groups = groups_of(width);
      for (int64_t r = made.begin; r < made.end; ++r) to_eighths(from + r * width, width, eighths + r * groups);
      meet_makers();
      return eighths;
    } else {
      return from;
    }
  };
  const auto norm_rows = [&](const Norm& norm, float epsilon, const Norm& beside_norm = {}) {
    const int64_t before = beside_norm ? beside_size : 0, width = before + hidden;
    for (int64_t r = made.begin; r < made.end; ++r) {
      X* to = normed_rows + r * width;
      if (beside_norm) norm_row(beside + r * before, beside_norm, epsilon, before, to);
      if (norm)
        norm_row(x + r * hidden, norm, epsilon, hidden, to + before);
      else
        for (int64_t i = 0; i < hidden; i += kLanes) store(to + before + i, load(x + r * hidden + i));
    }
    if constexpr (!std::is_same_v<W, Panels>) meet_makers();
    return operand(normed_rows, width);
  };
  // x += residual * norm(sums).
  const auto add_normed = [&](const Norm& norm, float epsilon, f32x16 residual) {
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      float* from = space.sums + r * hidden;
      norm_row(from, norm, epsilon, hidden, from);
      for (int64_t i = 0; i < hidden; i += kLanes) store(x + r * hidden + i, load(x + r * hidden + i) + residual * load(from + i));
    }
    if (space.own) meet(threads);
  };
  // x += residual * y W^T, or its norm if the block ends with one.
  const auto add_rows = [&](const Prepacked<W>& m, const X* from, int64_t width, const Norm& norm, float epsilon, f32x16 residual) {
    const auto* y = operand(from, width);
    const Range blocks = share((m.outputs + kLanes - 1) / kLanes, 2, thread, threads);
    float* sums = norm ? space.sums : x;
    multiply(m, y, rows, blocks, [&](int64_t r, int64_t block, const f32x16* acc, int n) {
      float* to = sums + r * hidden + block * kLanes;
      for (int b = 0; b < n; ++b, to += kLanes) store(to, norm ? acc[b] : load(to) + residual * acc[b]);
    });
    meet(threads);
    if (norm) add_normed(norm, epsilon, residual);
  };

  // Attends with queries, keys and values of `width` numbers; ends with all threads.
  const auto attend_rows = [&](const Layer<W, X, T>& layer, int64_t width) {
    const int64_t dim = layer.dim, heads = layer.query_heads + 2 * layer.kv_heads;
    // Heads that are normed together belong to one thread.
    const Range items = layer.joint ? Range{mine.begin * heads, mine.end * heads} : share(rows * heads, 1, thread, threads);
    for (int64_t item = items.begin; item < items.end; ++item) {
      const int64_t r = item / heads, head = item % heads;
      float* from = space.qkv + r * width + head * dim;
      const int64_t kv = head - layer.query_heads;
      const Norm norm = kv < 0 ? layer.query_norm : kv < layer.kv_heads ? layer.key_norm : Norm{};
      const int64_t together = !layer.joint ? 1 : kv < 0 ? layer.query_heads : layer.kv_heads;
      if (norm && (!layer.joint || head == 0 || kv == 0)) norm_row(from, norm, layer.epsilon, together * dim, from);
      if (const int64_t at = (r * tables + layer.table) * rotary; layer.table >= 0 && kv < layer.kv_heads)
        rotate(from, cosine + at, sine + at, rotary);
      T* to = kv < 0                 ? space.queries + (r * layer.query_heads + head) * dim
              : kv < layer.kv_heads ? layer.keys + (slots[r] * layer.kv_heads + kv) * dim
                                     : layer.values + (slots[r] * layer.kv_heads + kv - layer.kv_heads) * dim;
      for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(from + i));
    }
    meet(threads);
    const Attention<T> attention{
        layer.keys,    layer.values, layer.kv_heads, layer.query_heads / layer.kv_heads, dim, dim, layer.scale,
        layer.softcap, layer.sinks};
    attend(attention, *layer.visible, space.queries, space.attended, space.partials, most_chunks, thread, threads);
    meet(threads);
    if (!layer.closing) return;
    const int64_t size = layer.query_heads * dim;
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const float* gates = space.qkv + r * width + heads * dim;
      X* y = space.attended + r * size;
      for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(y + i) * gated(load(gates + i), Gate::sigmoid));
    }
    meet(threads);
  };

  for (size_t n = 0; n < layers.size(); ++n) {
    const Layer<W, X, T>& layer = layers[n];
    for (const auto& [tapped, to] : taps)  // rounds a copy: the residual itself is never rounded
      if (tapped == int64_t(n))
        for (int64_t i = mine.begin * hidden; i < mine.end * hidden; i += kLanes) store(to + i, load(x + i));
    const int64_t width = layer.projected();
    const f32x16 residual = splat(layer.residual);
    const auto first_rows = [&](const Norm& norm) {
      return layer.parallel ? operand(normed_rows, hidden) : norm_rows(norm, layer.epsilon, layer.beside_norm);
    };
    if (layer.mixes()) {
      const auto* normed = first_rows(layer.pre_attention);
      multiply(
          layer.qkv, normed, rows, share(width / kLanes, 2, thread, threads),
          [&](int64_t r, int64_t block, const f32x16* acc, int n) {
            for (int b = 0; b < n; ++b) store(space.qkv + r * width + (block + b) * kLanes, acc[b]);
          });
      meet(threads);
      if (layer.recurrence)
        mix_rows(layer.recurrence, paths, space.qkv, width, rows, space.scan, space.attended, thread, threads);
      else
        attend_rows(layer, width);
      add_rows(layer.out, space.attended, layer.mixed(), layer.post_attention, layer.epsilon, residual);
    }
    if (!layer.inner) continue;
    const auto* normed = layer.mixes() ? norm_rows(layer.pre_mlp, layer.epsilon) : first_rows(layer.pre_mlp);
    if (layer.router.routed) {
      if (layer.post_mlp) std::fill(space.sums + mine.begin * hidden, space.sums + mine.end * hidden, 0.f);
      add_experts<W, X>(
          layer, space, normed_rows, normed, rows, hidden, layer.post_mlp ? space.sums : x,
          layer.post_mlp ? 1.f : layer.residual, thread, threads);
      if (layer.post_mlp) add_normed(layer.post_mlp, layer.epsilon, residual);
      continue;
    }
    multiply(
        layer.gate_up, normed, rows, share(layer.gate_up.outputs / kLanes, 2, thread, threads),
        [&](int64_t r, int64_t block, const f32x16* acc, int n) {
          const int step = layer.gated ? 2 : 1;  // a block of gates precedes the block of its inputs
          X* to = space.inner + r * layer.inner + block / step * kLanes;
          for (int b = 0; b < n; b += step, to += kLanes) {
            const f32x16 active = activate(acc[b], layer.activation);
            store(to, layer.gated ? active * acc[b + 1] : active);
          }
        });
    meet(threads);
    add_rows(layer.down, space.inner, layer.inner, layer.post_mlp, layer.epsilon, residual);
  }
}

}  // namespace arbordraft
