// The next token of every row under the settings of its request. See reference.py for the definition.
//
// A row is truncated without sorting it: a token is drawn from the whole row first. Mostly it is among the tokens that are
// kept, whatever the last bits of a sum are. Otherwise only the likely tokens are sorted. Where rounding could decide, the
// kernel says so, and the reference decides.
#pragma once

#include <algorithm>
#include <vector>

#include "../gumbel/cpu.h"
#include "../verify/cpu.h"

namespace arbordraft {

constexpr int64_t kUndecided = -2;
constexpr double kRounding = 1e-4;  // far above the rounding errors of sums of probabilities

// A change of a token's score: a negative score is multiplied with `factor`, any other one divided; then `bias` is added.
struct ScoreChange {
  double token, factor, bias;

  float operator()(float score) const {
    return (score < 0 ? score * float(factor) : score / float(factor)) + float(bias);
  }
};

// What a request keeps of a law, applied in this order; 0, 1 and 0 keep all.
struct KeptTokens {
  double top_k, top_p, min_p;
};

// A row while its token is drawn; `scores` are changed and divided.
struct NextToken {
  const float* scores;
  int64_t size;
  bool greedy;
  NoiseKey key;
  KeptTokens kept;
  int64_t token = -1;
  float top = 0;  // its highest score, where it is truncated

  bool truncated() const { return !greedy && !(kept.top_k <= 0 && kept.top_p >= 1 && kept.min_p <= 0); }
};

// A part of a row: its highest score, its best draw, and what is above the drawn token.
struct RowPart {
  float top = -std::numeric_limits<float>::infinity();
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  double above = 0, mass = 0;  // probability of tokens not below the drawn one, and of all, relative to the highest token
  int64_t count = 0;           // tokens not below the drawn one, itself included
};

// Copies a range of a row, changes the scores of some tokens, and divides.
template <class T>
inline void change_scores(
    const T* from, Range range, const ScoreChange* changes, int64_t count, float temperature, float* to) {
  for (int64_t i = range.begin; i < range.end; i += kLanes) store(to + i, load(from + i, range.end - i), range.end - i);
  for (const ScoreChange* change = changes; change < changes + count; ++change) {
    const int64_t token = int64_t(change->token);
    if (token >= range.begin && token < range.end) to[token] = (*change)(to[token]);
  }
  if (temperature == 1) return;
  for (int64_t i = range.begin; i < range.end; i += kLanes)
    store(to + i, load(to + i, range.end - i) / splat(temperature), range.end - i);
}

// Finds the highest score of a range and its best draw.
inline RowPart draw_part(const NextToken& row, Range range) {
  RowPart part;
  if (row.greedy && range.begin < range.end) {
    row_maximum(row.scores + range.begin, range.end - range.begin, part.top, part.token);
    part.best = part.top;
    part.token += range.begin;
  }
  if (row.greedy) return part;
  gumbel_maximum(row.scores, 1.f, row.key, range, row.size, part.best, part.token);
  if (!row.truncated()) return part;
  f32x16 top = splat(part.top);
  int64_t i = range.begin;
  for (; i + kLanes <= range.end; i += kLanes) top = max(top, load(row.scores + i));
  part.top = largest(top);
  for (; i < range.end; ++i) part.top = std::max(part.top, row.scores[i]);
  return part;
}

// Sums what lies above the drawn token in a range.
inline void sum_part(const NextToken& row, Range range, RowPart& part) {
  constexpr int64_t kStretch = 64 * kLanes;  // summed in float; stretches are summed in double
  const float drawn = row.scores[row.token];
  for (int64_t begin = range.begin; begin < range.end; begin += kStretch) {
    float mass[kLanes] = {}, above[kLanes] = {}, chances[kLanes];
    int32_t count[kLanes] = {};
    const int64_t end = std::min(begin + kStretch, range.end);
    for (int64_t i = begin; i < end; i += kLanes) {
      const int64_t some = std::min<int64_t>(kLanes, end - i);
      float scores[kLanes];
      std::fill(scores, scores + kLanes, -std::numeric_limits<float>::infinity());
      std::copy(row.scores + i, row.scores + i + some, scores);
      store(chances, exp(load(scores) - splat(row.top)));
      for (int lane = 0; lane < kLanes; ++lane) {
        mass[lane] += chances[lane];
        above[lane] += scores[lane] >= drawn ? chances[lane] : 0.f;
        count[lane] += scores[lane] >= drawn;
      }
    }
    for (int lane = 0; lane < kLanes; ++lane)
      part.mass += mass[lane], part.above += above[lane], part.count += count[lane];
  }
}

// Returns whether a drawn token is kept however its row is sorted and summed. `row` holds the sums over all parts.
inline bool surely_kept(const NextToken& row, const RowPart& sums) {
  const double own = std::exp(double(row.scores[row.token]) - row.top);
  const double before = std::max(0., sums.above - own);  // at most the mass of tokens ahead of it
  if (row.kept.top_k > 0 && sums.count > row.kept.top_k) return false;
  // Top-p follows top-k, whose tokens have at least the mass of this one and of those ahead of it.
  const double mass = row.kept.top_k > 0 ? sums.above : sums.mass;
  if (row.kept.top_p < 1 && !(before < (row.kept.top_p - kRounding) * mass)) return false;
  return own >= row.kept.min_p * (1 + kRounding);
}

// Draws again among the tokens that truncation keeps; `kUndecided` where rounding could decide.
inline int64_t draw_kept(const NextToken& row, double mass) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int64_t most = int64_t(row.kept.top_k);
  const float top = row.top;
  float surely = -kInfinity, perhaps = -kInfinity;  // lowest scores that are kept for sure, and that may be
  std::vector<float> found;
  for (const float depth : {4.f, 8.f, 16.f, kInfinity}) {
    found.clear();
    for (int64_t i = 0; i < row.size; ++i)
      if (row.scores[i] >= top - depth && row.scores[i] > -kInfinity) found.push_back(row.scores[i]);
    if (most > 0) {
      if (int64_t(found.size()) < most && depth < kInfinity) continue;
      if (int64_t(found.size()) >= most) {
        std::nth_element(found.begin(), found.begin() + (most - 1), found.end(), std::greater<>());
        surely = perhaps = found[most - 1];
        std::erase_if(found, [&](float x) { return x < surely; });
      }
      mass = 0;
      for (const float x : found) mass += std::exp(double(x) - top);
    }
    if (row.kept.top_p >= 1) break;
    std::sort(found.begin(), found.end(), std::greater<>());
    double above = 0;  // probability of the tokens with higher scores
    bool cut = false;
    surely = kInfinity;
    for (size_t i = 0, next; i < found.size() && !cut; i = next) {
      for (next = i + 1; next < found.size() && found[next] == found[i];) ++next;
      const double each = std::exp(double(found[i]) - top);
      cut = above >= (row.kept.top_p + kRounding) * mass;
      if (!cut) perhaps = found[i];
      if (above + double(next - i - 1) * each < (row.kept.top_p - kRounding) * mass) surely = found[i];
      above += double(next - i) * each;
    }
    if (cut || most > 0) break;
  }
  if (row.kept.min_p > 0) {
    const float least = top + float(std::log(row.kept.min_p)), rounding = float(kRounding);
    surely = std::max(surely, std::min(top, least + rounding));
    perhaps = std::max(perhaps, least - rounding);
  }
  double best;
  int64_t token;
  gumbel_maximum(row.scores, 1.f, row.key, {0, row.size}, row.size, best, token, perhaps);
  return token >= 0 && row.scores[token] >= surely ? token : kUndecided;
}

}  // namespace arbordraft
