// A mixture of experts: many MLPs, of which every row takes a few by its own scores. Experts that no row takes are not read.
//
// Row-invariant like all kernels here: a row chooses by itself, an expert's products have the same bits for any number of
// rows, and a row adds the outputs of its experts in the order of the experts.
#pragma once

#include <numeric>
#include <vector>

#include "../prepacked_linear/panels.h"

namespace arbordraft {

// The operand type of weights of type W for rows of type X, and the number of operands in a row of some width.
template <class W, class X>
using Multiplied = std::conditional_t<std::is_same_v<W, Panels>, Eighth, X>;
template <class W>
inline int64_t length_of(int64_t width) {
  return std::is_same_v<W, Panels> ? groups_of(width) : width;
}

// Choice among a layer's experts: routed experts, followed by shared ones, which every row takes. Weights of routed experts
// are a softmax over their scores, or the sigmoid of each.
template <class T>
struct Router {
  Prepacked<T> matrix;             // outputs: scores of routed experts, then one score of all shared ones if gated
  Prepacked<float> exact;          // in place of `matrix`, for a router in float32 before rows of another type
  int64_t routed, chosen, shared;  // routed 0: the layer has one MLP
  bool normalised;                 // whether the factors of a row's chosen experts add up to 1
  bool gated, sigmoid;
  const float* corrections = nullptr;  // [routed], added to weights for the choice alone, or null
  float factor = 1.f;                  // of routed experts' outputs

  int64_t taken() const { return chosen + shared; }
  int64_t outputs() const { return routed + gated; }
};

// Finds the experts that a row takes, in their order, and the factors of their outputs, times `residual`.
template <class T>
inline void choose(const float* scores, const Router<T>& router, float residual, int64_t* experts, float* factors) {
  const float most = *std::max_element(scores, scores + router.routed);
  const auto sigmoid = [](float x) { return 1.f / (1.f + std::exp(-x)); };
  std::vector<float> weights(router.routed), ranks(scores, scores + router.routed);
  for (int64_t e = 0; e < router.routed; ++e) {
    weights[e] = router.sigmoid ? sigmoid(scores[e]) : std::exp(scores[e] - most);
    if (router.corrections) ranks[e] = weights[e] + router.corrections[e];
  }
  std::vector<char> chosen(router.routed, false);
  for (int64_t n = 0; n < router.chosen; ++n) {
    int64_t best = -1;
    for (int64_t e = 0; e < router.routed; ++e)
      if (!chosen[e] && (best < 0 || ranks[e] > ranks[best])) best = e;
    chosen[best] = true;
  }
  float whole = router.sigmoid && !router.normalised ? 1.f : 0.f;
  for (int64_t e = 0; e < router.routed; ++e)
    if (router.normalised ? chosen[e] : !router.sigmoid) whole += weights[e];
  const float factor = router.factor * residual;
  for (int64_t e = 0; e < router.routed; ++e)
    if (chosen[e]) *experts++ = e, *factors++ = weights[e] / whole * factor;
  const float gate = router.gated ? sigmoid(scores[router.routed]) : 1.f;
  for (int64_t e = 0; e < router.shared; ++e) *experts++ = router.routed + e, *factors++ = gate * residual;
}

// sums += residual * outputs of the experts for rows `normed`; `operand` holds these rows in the form that the matrices multiply.
template <class W, class X>
inline void add_experts(
    const auto& layer, const auto& space, const X* normed, const Multiplied<W, X>* operand, int64_t rows, int64_t hidden,
    float* sums, float residual, int thread, int threads) {
  const auto& router = layer.router;
  const int64_t taken = router.taken(), all = router.routed + router.shared, outputs = router.outputs();
  const Range mine = share(rows, 1, thread, threads);
  const auto score = [&](const auto& matrix, const auto* from) {
    multiply(
        matrix, from, mine.end - mine.begin, {0, (outputs + kLanes - 1) / kLanes},
        [&](int64_t r, int64_t block, const f32x16* acc, int n) {
          for (int64_t o = block * kLanes, b = 0; b < n; ++b, o += kLanes)
            store(space.scores + (mine.begin + r) * outputs + o, acc[b], outputs - o);
        });
  };
  const X* own = normed + mine.begin * hidden;
  if (router.exact.weight) {
    std::vector<float> wide((mine.end - mine.begin) * hidden);
    for (int64_t i = 0; i < int64_t(wide.size()); i += kLanes) store(wide.data() + i, load(own + i));
    score(router.exact, wide.data());
  } else {
    score(router.matrix, own);
  }
  for (int64_t r = mine.begin; r < mine.end; ++r)
    choose(space.scores + r * outputs, router, residual, space.experts + r * taken, space.factors + r * taken);
  meet(threads);

  // Rows that take the same expert are gathered: those of expert e at places begin[e] to begin[e + 1] - 1.
  std::vector<int64_t> begin(all + 1), row_at(rows * taken);
  std::vector<float> factor_at(rows * taken);
  for (int64_t i = 0; i < rows * taken; ++i) ++begin[space.experts[i] + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> next = begin;
  const int64_t length = length_of<W>(hidden);
  for (int64_t i = 0; i < rows * taken; ++i) {
    const int64_t place = next[space.experts[i]]++, r = i / taken;
    row_at[place] = r;
    factor_at[place] = space.factors[i];
    if (mine.begin <= r && r < mine.end) std::copy_n(operand + r * length, length, space.gathered + place * length);
  }
  meet(threads);

  // Calls emit(place, block within the expert, accumulators, their number) for this thread's outputs of all experts.
  const auto multiply_taken = [&](const Prepacked<W>& m, const auto* from, int64_t width, int64_t count, const auto& emit) {
    const Range blocks = share(count / kLanes, 2, thread, threads);
    for (int64_t e = 0, first = 0; e < all; ++e, first += count / kLanes) {
      if (begin[e] == begin[e + 1]) continue;
      multiply(
          m, from + begin[e] * length_of<W>(width), begin[e + 1] - begin[e], {first + blocks.begin, first + blocks.end},
          [&](int64_t r, int64_t block, const f32x16* acc, int n) { emit(begin[e] + r, block - first, acc, n); });
    }
  };
  const int64_t inner = layer.inner;
  const int step = layer.gated ? 2 : 1;  // a block of gates precedes the block of its inputs
  multiply_taken(
      layer.gate_up, space.gathered, hidden, step * inner, [&](int64_t place, int64_t block, const f32x16* acc, int n) {
        X* to = space.inner + place * inner + block / step * kLanes;
        for (int b = 0; b < n; b += step, to += kLanes) {
          const f32x16 active = activate(acc[b], layer.activation);
          store(to, layer.gated ? active * acc[b + 1] : active);
        }
      });
  meet(threads);
  const Multiplied<W, X>* active;
  if constexpr (std::is_same_v<W, Panels>) {
    const Range places = share(rows * taken, 1, thread, threads);
    for (int64_t p = places.begin; p < places.end; ++p)
      to_eighths(space.inner + p * inner, inner, space.eighths + p * groups_of(inner));
    active = space.eighths;
    meet(threads);
  } else {
    active = space.inner;
  }
  multiply_taken(layer.down, active, inner, hidden, [&](int64_t place, int64_t block, const f32x16* acc, int n) {
    float* to = sums + row_at[place] * hidden + block * kLanes;
    for (int b = 0; b < n; ++b, to += kLanes) store(to, fma(splat(factor_at[place]), acc[b], load(to)));
  });
  meet(threads);
}

}  // namespace arbordraft
