// Grows draft trees level by level: chooses the nodes that get children, and their tokens. See reference.py for the rule.
#pragma once

#include <utility>
#include <vector>

#include "../gumbel/cpu.h"

namespace arbordraft {

// A tree's shape: node n has the children children[offsets[n]..offsets[n + 1] - 1]; nodes are numbered level by level.
struct Shape {
  const int64_t *offsets, *children;
  int64_t nodes;
};

// Limits of trees. `calibration` and `expected` hold `known` numbers for every slot, the last ones for all deeper levels.
// The samples of a group decide together; what a group pays and may draft is listed by group.
struct Limits {
  const int64_t* levels;
  const double *calibration, *expected;
  int64_t known;
  const int64_t* group;  // by slot, or null for a single group
  int64_t groups;
  const double *level_cost, *row_cost;
  const int64_t* budget;  // drafts, 0 or less for any number
  const int64_t* whole;   // whether trees are ended as a whole, not pruned
};

struct Place {
  int64_t sample, node;
};

// The trees of some slots while they grow, in arrays that belong to the caller: [slots][nodes] each. Their roots are there.
class Forest {
 public:
  Forest(
      const Shape& shape, const Limits& limits, const int64_t* slots, int64_t samples, int64_t* token, double* chance,
      double* reach)
      : shape_(shape), limits_(limits), slots_(slots), samples_(samples), token_(token), chance_(chance), reach_(reach) {
    starts_ = {0, 1};
  }

  // Returns the nodes of a level that get children: those that gain, in groups that are worth the level's time.
  std::vector<Place> frontier(int64_t depth) {
    while (int64_t(starts_.size()) < depth + 2) open_level();
    std::vector<double> worth(limits_.groups, 0.), floor(limits_.groups, 0.);
    for (int64_t g = 0; g < limits_.groups; ++g)
      if (depth && limits_.budget[g] > 0) floor[g] = least_reach(g);
    std::vector<Place> able;
    for (int64_t s = 0; s < samples_; ++s) {
      const int64_t slot = slots_[s], g = group(s);
      if (depth >= limits_.levels[slot]) continue;
      const double expected = limits_.expected[slot * limits_.known + std::min(depth, limits_.known - 1)];
      for (int64_t n = starts_[depth]; n < starts_[depth + 1]; ++n) {
        const double reach = reach_[at({s, n})], gain = reach * expected - limits_.row_cost[g];
        if (reach < 0 || shape_.offsets[n] == shape_.offsets[n + 1] || reach < floor[g]) continue;
        if (gain < 0 && !limits_.whole[g]) continue;
        worth[g] += gain;
        able.push_back({s, n});
      }
    }
    std::vector<Place> found;
    for (const Place& place : able)
      if (const double total = worth[group(place.sample)]; total >= 0 && total >= limits_.level_cost[group(place.sample)])
        found.push_back(place);
    return found;
  }

  int64_t children(Place place) const { return shape_.offsets[place.node + 1] - shape_.offsets[place.node]; }
  int64_t token(Place place) const { return token_[at(place)]; }
  // Whether a node has its children already, as nodes have that a grammar forces.
  bool filled(Place place) const {
    return children(place) && token_[at({place.sample, shape_.children[shape_.offsets[place.node]]})] >= 0;
  }
  int64_t at(Place place) const { return slots_[place.sample] * shape_.nodes + place.node; }

  // Returns those nodes of a frontier that have no children yet.
  std::vector<Place> open(const std::vector<Place>& frontier) const {
    std::vector<Place> found;
    for (const Place& place : frontier)
      if (!filled(place)) found.push_back(place);
    return found;
  }

  // Adds a child of a node at a depth.
  void add(Place parent, int64_t depth, int64_t rank, int64_t token, double chance) {
    const int64_t node = at({parent.sample, shape_.children[shape_.offsets[parent.node] + rank]});
    const double calibration = limits_.calibration[slots_[parent.sample] * limits_.known + std::min(depth, limits_.known - 1)];
    token_[node] = token;
    chance_[node] = chance;
    reach_[node] = reach_[at(parent)] * std::clamp(calibration * chance, 0., 1.);
  }

  // Gives every node of a frontier its children, the likeliest first; returns how many nodes got none.
  int64_t add(
      const std::vector<Place>& frontier, int64_t depth, const std::vector<std::vector<std::pair<int64_t, float>>>& drawn) {
    int64_t barren = 0;
    for (size_t r = 0; r < frontier.size(); ++r) {
      barren += drawn[r].empty();
      for (size_t i = 0; i < drawn[r].size(); ++i)
        add(frontier[r], depth, int64_t(i), drawn[r][i].first, double(drawn[r][i].second));
    }
    return barren;
  }

 private:
  int64_t group(int64_t s) const { return limits_.group ? limits_.group[slots_[s]] : 0; }

  // Returns the reach of the last draft of a group that fits into its budget so far.
  double least_reach(int64_t g) const {
    std::vector<double> all;
    for (int64_t s = 0; s < samples_; ++s)
      for (int64_t n = 1; group(s) == g && n < shape_.nodes; ++n)
        if (const double reach = reach_[at({s, n})]; reach >= 0) all.push_back(reach);
    const int64_t budget = limits_.budget[g];
    if (int64_t(all.size()) < budget) return 0;
    std::nth_element(all.begin(), all.begin() + budget - 1, all.end(), std::greater<>());
    return all[budget - 1];
  }

  // Appends the end of the next level's nodes.
  void open_level() {
    int64_t end = starts_.back();
    for (int64_t n = starts_[starts_.size() - 2]; n < starts_.back(); ++n)
      for (int64_t i = shape_.offsets[n]; i < shape_.offsets[n + 1]; ++i) end = std::max(end, shape_.children[i] + 1);
    starts_.push_back(end);
  }

  Shape shape_;
  Limits limits_;
  const int64_t* slots_;
  int64_t samples_;
  std::vector<int64_t> starts_;  // first node of every level reached, and one past the last
  int64_t* token_;   // -1 if there is no node
  double* chance_;   // draft probability given the parent
  double* reach_;    // chance that the path to a node is accepted, times the sample's weight; -1 if there is no node
};

// Trees that a host grows level by level: the addresses of numpy arrays. See kernels/draft_tree/rule.py.
struct HostTrees {
  int64_t* token;
  double *chance, *reach;
  const int64_t* slots;
  int64_t samples;
  const int64_t *offsets, *children;
  int64_t nodes;
  const int64_t* levels;
  const double *calibration, *expected;
  int64_t known;
  const int64_t* group;
  int64_t groups;
  const double *level_cost, *row_cost;
  const int64_t *budget, *whole;

  Forest forest() const {
    return Forest(
        {offsets, children, nodes},
        {levels, calibration, expected, known, group, groups, level_cost, row_cost, budget, whole}, slots, samples, token,
        chance, reach);
  }
};

// The highest of several numbers with their places; among equal ones the first places.
class Highest {
 public:
  explicit Highest(int64_t count) : count_(count) { found.reserve(count + 1); }
  double bar() const { return int64_t(found.size()) < count_ ? -std::numeric_limits<double>::infinity() : found.back().first; }
  void offer(double value, int64_t place) {  // places ascend
    if (!(value > bar())) return;
    auto at = found.end();
    while (at != found.begin() && value > (at - 1)->first) --at;
    found.insert(at, {value, place});
    if (int64_t(found.size()) > count_) found.pop_back();
  }
  std::vector<std::pair<double, int64_t>> found;

 private:
  int64_t count_;
};

// A part of a row of scores: its best scores, and its mass: the sum of exp(score - best[0]).
struct Part {
  std::vector<std::pair<double, int64_t>> best;
  double mass = 0;
  bool sound = true;
};

// Parts of a row; they do not depend on the number of threads.
constexpr int64_t kParts = 8;
inline Range part_of(int64_t size, int64_t part) {
  const int64_t each = (size + kParts * kGroup - 1) / (kParts * kGroup) * kGroup;
  return {std::min(size, part * each), std::min(size, (part + 1) * each)};
}

// Finds the `count` highest scores of a part.
inline Part highest(const float* scores, Range range, int64_t count) {
  Highest best(count);
  Part part;
  for (int64_t i = range.begin; i < range.end; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, range.end - i);
    if (some == kLanes) {
      const f32x16 x = load(scores + i);
      part.sound &= !any_nan(x);
      if (!(largest(x) > best.bar())) continue;
    }
    for (int64_t j = i; j < i + some; ++j) {
      part.sound &= scores[j] == scores[j];
      best.offer(scores[j], j);
    }
  }
  part.best = std::move(best.found);
  if (part.best.empty() || !std::isfinite(part.best[0].first)) return part;
  const float top = float(part.best[0].first);
  f32x16 total = splat(0.f);
  int64_t i = range.begin;
  for (; i + kLanes <= range.end; i += kLanes) total += exp(load(scores + i) - splat(top));
  part.mass = sum(total);
  for (; i < range.end; ++i) part.mass += std::exp(scores[i] - top);
  return part;
}

// Returns the `count` highest of a row's parts with their probabilities; none if the row holds NaN or no finite maximum.
inline std::vector<std::pair<int64_t, float>> likeliest(const Part* parts, int64_t count) {
  Highest best(count);
  bool sound = true;
  for (int64_t p = 0; p < kParts; ++p) {
    sound &= parts[p].sound;
    for (const auto& [score, place] : parts[p].best) best.offer(score, place);
  }
  std::vector<std::pair<int64_t, float>> drawn;
  if (!sound || best.found.empty() || !std::isfinite(best.found[0].first)) return drawn;
  const double top = best.found[0].first;
  double mass = 0;
  for (int64_t p = 0; p < kParts; ++p)
    if (!parts[p].best.empty()) mass += parts[p].mass * std::exp(parts[p].best[0].first - top);
  for (const auto& [score, place] : best.found)
    if (const double chance = std::exp(score - top) / mass; chance > 0)
      drawn.emplace_back(place, float(std::min(1., chance)));
  return drawn;
}

constexpr float kBanned = -1e20f;  // the score of a banned token: finite, so that sums with noise and divisions are numbers
constexpr float kBannedDivided = -1e12f;  // above a banned score divided by any temperature, and below all others

// A change of a token's score, at nodes of depth first..last - 1: positive scores are divided by the factor, others multiplied
// with it, and then the bias is added.
struct Correction {
  double token, factor, bias, first, last;

  bool at(int64_t depth) const { return double(depth) >= first && double(depth) < last; }
  float operator()(float score) const {
    return std::max(kBanned, (score > 0 ? score / float(factor) : score * float(factor)) + float(bias));
  }
};

// What a request leaves of a law: the `top_k` most probable tokens, those that make up `top_p`, and those that are at least
// `min_p` times as probable as the first one. 0, 1 and 0 leave all.
struct Truncation {
  double top_k, top_p, min_p;
};

constexpr int32_t kBinsPerUnit = 16, kBins = 16 * kBinsPerUnit;  // of scores below the highest; tokens further below are cut

// Bans the tokens of a row that truncation leaves out. It cuts between bins of scores, without sorting: drafts are guesses.
inline void truncate(float* row, int64_t size, float temperature, const Truncation& kept) {
  f32x16 highest = splat(kBanned);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) highest = max(highest, load(row + i));
  float top = largest(highest);
  for (; i < size; ++i) top = std::max(top, row[i]);
  const float scale = float(kBinsPerUnit) / temperature;
  int32_t bins = kBins;
  if (kept.top_k > 0 || kept.top_p < 1) {
    std::vector<int32_t> counts(kBins + 1, 0);  // the last bin holds all that are further below
    int32_t bin[kLanes];
    for (i = 0; i < size; i += kLanes) {
      const int64_t some = std::min<int64_t>(kLanes, size - i);
      for (int64_t j = 0; j < some; ++j) bin[j] = int32_t(std::min(float(kBins), std::max(0.f, (top - row[i + j]) * scale)));
      for (int64_t j = 0; j < some; ++j) ++counts[bin[j]];
    }
    const auto cut = [&](double wanted, const auto& amount) {
      double seen = 0;
      for (int32_t b = 0; b < bins; ++b)
        if ((seen += amount(b)) >= wanted) bins = b + 1;
    };
    const auto mass = [&](int32_t b) { return counts[b] * std::exp(-(b + 0.5) / kBinsPerUnit); };
    if (kept.top_k > 0) cut(kept.top_k, [&](int32_t b) { return counts[b]; });
    if (kept.top_p < 1) {
      double all = 0;
      for (int32_t b = 0; b < bins; ++b) all += mass(b);
      cut(kept.top_p * all, mass);
    }
  }
  if (kept.min_p > 0) bins = std::min(bins, int32_t(std::min(double(kBins), -std::log(kept.min_p) * kBinsPerUnit)) + 1);
  const float floor = top - float(bins) / scale;
  for (i = 0; i < size; ++i) row[i] = row[i] < floor ? kBanned : row[i];
}

constexpr float kBoundExcess = 0.015f;  // average distance of the bound above the noise

// Computes bounds of the noise of a part's tokens; `vocabulary` lists them, ascending, or is null for 0..size-1.
inline void noise_bounds(const int64_t* vocabulary, Range range, NoiseKey key, float* bounds) {
  const auto token = [&](int64_t i) { return vocabulary ? vocabulary[i] : i; };
  uint32_t words[kGroup];
  for (int64_t i = range.begin; i < range.end;) {
    const int64_t first = token(i) / kGroup * kGroup;
    philox(key, first, 0, words);
    for (; i < range.end && token(i) >= first && token(i) < first + kGroup; ++i) bounds[i] = std::bit_cast<float>(words[token(i) - first]);
  }
  for (int64_t i = range.begin; i < range.end; ++i) bounds[i] = gumbel_bound(std::bit_cast<uint32_t>(bounds[i]));
}

inline double noise_of(int64_t token, NoiseKey key) {
  uint32_t upper[kGroup], lower[kGroup];
  const int64_t first = token / kGroup * kGroup;
  philox(key, first, 0, upper);
  philox(key, first, 1, lower);
  return gumbel_of(upper[token - first], lower[token - first]);
}

// Finds the highest of scores / temperature + noise, given `bounds` of the noise. The mass of all other tokens is a float
// estimate: no law depends on it.
inline Part highest(
    float* scores, Range range, int64_t count, const int64_t* vocabulary, NoiseKey key, float temperature,
    const float* bounds) {
  const auto token = [&](int64_t i) { return vocabulary ? vocabulary[i] : i; };
  std::vector<float> noise(range.end - range.begin);
  uint32_t words[kGroup], lower[kGroup];
  Highest best(count);
  Part part;
  for (int64_t i = range.begin; i < range.end; ++i) {
    scores[i] /= temperature;
    part.sound &= scores[i] == scores[i];
    const float bound = scores[i] + bounds[i] + std::abs(scores[i]) * 1e-6f + 1e-3f;
    noise[i - range.begin] = scores[i] < kBannedDivided ? -std::numeric_limits<float>::infinity() : bound;
  }
  int64_t group = -1;
  for (int64_t i = range.begin; i < range.end; ++i) {
    if (!(noise[i - range.begin] > best.bar())) continue;
    const int64_t first = token(i) / kGroup * kGroup;
    if (first != group) {
      philox(key, first, 0, words);
      philox(key, first, 1, lower);
      group = first;
    }
    const int64_t at = token(i) - first;
    best.offer(scores[i] + gumbel_of(words[at], lower[at]), i);
  }
  part.best = std::move(best.found);
  if (part.best.empty() || !std::isfinite(part.best[0].first)) return part;
  f32x16 total = splat(0.f);
  const float above = float(part.best[0].first) + kBoundExcess;
  int64_t i = 0;
  for (; i + kLanes <= int64_t(noise.size()); i += kLanes)
    total += exp(min(splat(0.f), load(noise.data() + i) - splat(above)));
  part.mass = sum(total);
  for (; i < int64_t(noise.size()); ++i) part.mass += std::exp(std::min(0.f, noise[i] - above));
  return part;
}

}  // namespace arbordraft

// Writes the samples, nodes and tokens of the nodes of a depth that get children, in ascending order, `room` of each;
// returns how many there are.
extern "C" __attribute__((visibility("default"))) int64_t arbordraft_going(
    const arbordraft::HostTrees* trees, int64_t depth, int64_t* found, int64_t room) {
  int64_t count = 0;
  arbordraft::Forest forest = trees->forest();
  for (const arbordraft::Place& place : forest.frontier(depth)) {
    found[count] = trees->slots[place.sample];
    found[room + count] = place.node;
    found[2 * room + count++] = forest.token(place);
  }
  return count;
}

// Adds the children of nodes of a depth: `width` tokens for each node, -1 for none.
extern "C" __attribute__((visibility("default"))) void arbordraft_add(
    const arbordraft::HostTrees* trees, int64_t depth, int64_t count, const int64_t* sample, const int64_t* node,
    const int64_t* token, const double* chance, int64_t width) {
  arbordraft::Forest forest = trees->forest();
  for (int64_t r = 0; r < count; ++r) {
    const arbordraft::Place parent{sample[r], node[r]};
    for (int64_t i = 0; i < std::min(width, forest.children(parent)); ++i)
      if (token[r * width + i] >= 0) forest.add(parent, depth, i, token[r * width + i], chance[r * width + i]);
  }
}
