// Whole drafts in one call: a small model is fed with the tokens that it has missed, then with its own, level by level.
#pragma once

#include <map>

#include "../draft_tree/cpu.h"
#include "stack.h"

namespace arbordraft {
namespace {

NoiseKey noise_key(const Tensor& seeds, const Tensor& positions, int64_t row, int64_t ahead = 0) {
  const uint64_t seed = uint64_t(integers(seeds)[row]);
  return {uint32_t(seed), uint32_t(seed >> 32), uint32_t(integers(positions)[row] + ahead)};
}

// The arguments of growing trees, checked.
struct Growing {
  Shape shape;
  Limits limits;
  int64_t samples;
  at::IntArrayRef slots;
  int64_t* token;
  double *chance, *reach;
  int64_t budget;
  at::ArrayRef<double> costs;
  int64_t whole = 0;
  const int64_t* vocabulary;  // target token of each score of a row, or null
  const Tensor *seeds, *positions;  // of shared noise, or null
  at::ArrayRef<double> temperatures;  // divisors of scores; 0 draws without noise
  const Truncation* truncations;      // by sample
  const Correction* corrections;      // of scores: those of sample s are corrected[s]..corrected[s + 1] - 1
  at::IntArrayRef corrected;          // empty if there are none
  const Tensor* allowed;              // by sample, a bit for each token that may come at the depth `masked`, or null
  at::IntArrayRef masked;             // -1 for a sample whose tokens may all come

  Growing(
      int64_t samples_, int64_t outputs, const OptionalTensor& words, const Tensor& token_, const Tensor& chance_,
      const Tensor& reach_, at::IntArrayRef slots_, at::IntArrayRef offsets, at::IntArrayRef children,
      at::IntArrayRef levels, at::ArrayRef<double> calibration, at::ArrayRef<double> expected,
      at::ArrayRef<double> costs_, int64_t budget_, const OptionalTensor& seeds_, const OptionalTensor& positions_,
      at::ArrayRef<double> temperatures_, at::ArrayRef<double> truncations_, const OptionalTensor& corrections_,
      at::IntArrayRef corrected_, const OptionalTensor& allowed_, at::IntArrayRef masked_)
      : samples(samples_), slots(slots_), token(mutable_integers(token_)), chance(doubles(chance_)), reach(doubles(reach_)),
        budget(budget_), costs(costs_),
        vocabulary(integers(words)), seeds(seeds_ ? &*seeds_ : nullptr),
        positions(positions_ ? &*positions_ : nullptr), temperatures(temperatures_),
        truncations(reinterpret_cast<const Truncation*>(truncations_.data())),
        corrections(corrections_ ? reinterpret_cast<const Correction*>(doubles(*corrections_)) : nullptr),
        corrected(corrected_), allowed(allowed_ ? &*allowed_ : nullptr), masked(masked_) {
    const int64_t nodes = int64_t(offsets.size()) - 1, all = int64_t(levels.size());
    const int64_t known = int64_t(calibration.size()) / std::max<int64_t>(1, all);
    TORCH_CHECK(
        nodes >= 1 && int64_t(children.size()) == nodes - 1 && offsets.back() == nodes - 1 &&
            token_.dim() == 2 && token_.size(0) == all && int64_t(calibration.size()) == all * known && known >= 1 &&
            expected.size() == calibration.size() && int64_t(slots.size()) == samples && costs.size() == 2,
        "the shape or the limits of the trees do not fit");
    for (const Tensor* array : {&token_, &chance_, &reach_})
      TORCH_CHECK(
          array->dim() == 2 && array->size(0) == token_.size(0) && array->size(1) == nodes && array->is_contiguous(),
          "trees need arrays of one shape, with a column for each of ", nodes, " nodes");
    for (const int64_t slot : slots)
      TORCH_CHECK(slot >= 0 && slot < token_.size(0) && token[slot * nodes] >= 0, "slot ", slot, " has no root");
    TORCH_CHECK(!seeds || (positions && seeds->numel() == samples && positions->numel() == samples), "noise needs places");
    TORCH_CHECK(!words || words->numel() == outputs, "expected a token for each of ", outputs, " outputs");
    TORCH_CHECK(!seeds || int64_t(temperatures.size()) == samples, "noise needs a temperature for every sample");
    TORCH_CHECK(!seeds || int64_t(truncations_.size()) == 3 * samples, "noise needs a truncation for every sample");
    TORCH_CHECK(
        bool(corrections_) == !corrected.empty() &&
            (!corrections_ || (int64_t(corrected.size()) == samples + 1 && corrected[0] == 0 && corrections_->is_contiguous() &&
                               corrections_->numel() == 5 * corrected.back())),
        "corrections need five numbers each, and bounds for every sample");
    for (size_t s = 1; s < corrected.size(); ++s) TORCH_CHECK(corrected[s - 1] <= corrected[s], "bounds must ascend");
    TORCH_CHECK(
        bool(allowed_) == !masked.empty() &&
            (!allowed_ || (int64_t(masked.size()) == samples && allowed_->is_contiguous() && allowed_->dim() == 2 &&
                           allowed_->size(0) == samples && allowed_->scalar_type() == at::kByte)),
        "allowed tokens need a row of bytes and a depth for every sample");
    for (const double temperature : temperatures)
      TORCH_CHECK(temperature >= 0, "temperatures must not be negative, got ", temperature);
    shape = {offsets.data(), children.data(), nodes};
    limits = {levels.data(), calibration.data(), expected.data(), known, nullptr, 1, costs.data(), costs.data() + 1, &budget, &whole};
  }

  Forest forest() const { return Forest(shape, limits, slots.data(), samples, token, chance, reach); }

  // Results of drawing a level: the children of every node, the best scores of every part of its row, and the bounds of the
  // noise of every sample, which its nodes share.
  struct Level {
    Level(const Growing& growing, const std::vector<Place>& frontier, int64_t outputs)
        : drawn(frontier.size()), parts(frontier.size() * kParts), bounds(growing.samples) {
      for (const Place& at : frontier)
        if (growing.noisy(at.sample)) bounds[at.sample].resize(outputs);
    }
    std::vector<std::vector<std::pair<int64_t, float>>> drawn;
    std::vector<Part> parts;
    std::vector<std::vector<float>> bounds;
  };

  bool noisy(int64_t s) const { return seeds && temperatures[s] > 0; }
  NoiseKey key(int64_t s, int64_t depth) const { return noise_key(*seeds, *positions, s, depth); }

  bool truncated(int64_t s) const {
    if (!noisy(s)) return false;
    const Truncation& kept = truncations[s];
    return kept.top_k > 0 || kept.top_p < 1 || kept.min_p > 0;
  }

  // Returns a token's score after a sample's corrections.
  float correct(int64_t s, int64_t depth, int64_t token, float score) const {
    for (int64_t i = corrected.empty() ? 0 : corrected[s]; !corrected.empty() && i < corrected[s + 1]; ++i)
      if (int64_t(corrections[i].token) == token && corrections[i].at(depth)) score = corrections[i](score);
    return score;
  }

  // Corrects a row of scores, masks and truncates it.
  void prepare(int64_t s, int64_t depth, float* row, int64_t outputs) const {
    for (int64_t i = corrected.empty() ? 0 : corrected[s]; !corrected.empty() && i < corrected[s + 1]; ++i) {
      if (!corrections[i].at(depth)) continue;
      int64_t place = int64_t(corrections[i].token);
      if (vocabulary) {
        const int64_t* found = std::lower_bound(vocabulary, vocabulary + outputs, place);
        place = found < vocabulary + outputs && *found == place ? found - vocabulary : -1;
      }
      if (place >= 0 && place < outputs) row[place] = corrections[i](row[place]);
    }
    if (allowed && masked[s] == depth) {
      const int64_t width = allowed->size(1);
      const uint8_t* bits = allowed->const_data_ptr<uint8_t>() + s * width;
      for (int64_t i = 0; i < outputs; ++i) {
        const int64_t token = vocabulary ? vocabulary[i] : i;
        if (token >= 8 * width || !(bits[token >> 3] >> (token & 7) & 1)) row[i] = kBanned;
      }
    }
    if (truncated(s)) truncate(row, outputs, float(temperatures[s]), truncations[s]);
  }

  // Does a thread's part of drawing the children of a level, from rows of scores that it may overwrite. Draws at
  // least `least` candidates per node, if there are as many tokens.
  void draw(
      const Forest& forest, const std::vector<Place>& frontier, int64_t depth, float* scores, int64_t outputs, Level& level,
      int64_t least, int thread, int threads) const {
    const int64_t rows = int64_t(frontier.size());
    const auto count = [&](int64_t r) { return std::min(std::max(least, forest.children(frontier[r])), outputs); };
    for (int64_t r = thread; r < rows; r += threads) prepare(frontier[r].sample, depth, scores + r * outputs, outputs);
    int64_t item = 0;
    for (int64_t r = 0; r < rows; ++r) {  // a sample's nodes are consecutive
      const int64_t s = frontier[r].sample;
      if (!noisy(s) || (r && frontier[r - 1].sample == s)) continue;
      for (int64_t p = 0; p < kParts; ++p)
        if (item++ % threads == thread)
          noise_bounds(vocabulary, part_of(outputs, p), key(s, depth), level.bounds[s].data());
    }
    meet(threads);
    for (int64_t i = thread; i < rows * kParts; i += threads) {
      const int64_t r = i / kParts, s = frontier[r].sample;
      const Range range = part_of(outputs, i % kParts);
      float* row = scores + r * outputs;
      level.parts[i] = noisy(s) ? highest(row, range, count(r), vocabulary, key(s, depth), float(temperatures[s]),
                                          level.bounds[s].data())
                                : highest(row, range, count(r));
    }
    meet(threads);
    for (int64_t r = thread; r < rows; r += threads) {
      level.drawn[r] = likeliest(level.parts.data() + r * kParts, count(r));
      if (vocabulary)
        for (auto& [token, chance] : level.drawn[r]) token = vocabulary[token];
    }
  }
};

// y [rows][outputs] = x W^T, or y += x W^T if `add`; computes a thread's share.
template <class W, class X>
void times(const Prepacked<W>& m, const X* x, int64_t rows, float* y, bool add, int thread, int threads) {
  const Range blocks = share((m.outputs + kLanes - 1) / kLanes, 2, thread, threads);
  multiply(m, x, rows, blocks, [&](int64_t r, int64_t block, const f32x16* acc, int n) {
    for (int b = 0; b < n; ++b) {
      const int64_t output = (block + b) * kLanes, some = m.outputs - output;
      float* to = y + r * m.outputs + output;
      store(to, add ? load(to, some) + acc[b] : acc[b], some);
    }
  });
}

// y [rows][width] = the outputs of some blocks of x W^T, side by side; computes a thread's share.
template <class W, class X>
void times(
    const Prepacked<W>& m, const X* x, int64_t rows, const std::vector<int64_t>& blocks, float* y, int64_t width, int thread,
    int threads) {
  const Range mine = share(int64_t(blocks.size()), 2, thread, threads);
  for (int64_t first = mine.begin, last; first < mine.end; first = last) {
    for (last = first + 1; last < mine.end && blocks[last] == blocks[last - 1] + 1;) ++last;
    multiply(m, x, rows, Range{blocks[first], blocks[last - 1] + 1}, [&](int64_t r, int64_t block, const f32x16* acc, int n) {
      for (int b = 0; b < n; ++b) {
        const int64_t output = (first + block + b - blocks[first]) * kLanes;
        store(y + r * width + output, acc[b], width - output);
      }
    });
  }
}

constexpr int64_t kScreened = 16;  // tokens of a row that an exact head ranks anew

// The parts before and after the layers.
template <class W, class T>
struct Ends {
  using X = typename Stack<W, T>::X;
  const T* embedding;
  int64_t embeddings, width;
  std::optional<Prepacked<W>> fuse;  // of the target's states, if the drafter reads them
  Norm norm;
  Prepacked<W> head;
  std::optional<Prepacked<T>> exact;              // ranks the best tokens of `head` anew, if it consists of numbers
  std::optional<Prepacked<Panels>> exact_panels;  // the same in panels; there is at most one of both
  float epsilon;
  const float* frequencies;  // [tables][rotary / 2]
  int64_t rotary, tables;
  const double* factors;  // of every table's cosines and sines
  float scale;  // of embeddings
  Norm input;        // of the layers' input if that is not the embedding, or none
  bool norm_output;  // whether the output is kept after the last norm
  std::vector<int64_t> blocks;  // of the head's outputs, those that are scored; none for all
  int64_t scored;               // number of these outputs
};

// Packed rows of one forward and the keys that they see: keys 0..past-1 of the slab at `start`, and the slots of their path.
struct Fed {
  std::vector<int64_t> tokens, slots;
  std::vector<float> cosines, sines;
  std::map<int64_t, Visible> visible;  // per sliding window

  Fed(const std::set<int64_t>& windows) {
    for (int64_t window : windows) visible[window];
  }

  template <class Ends>
  void add(
      const Ends& ends, int64_t token, int64_t position, int64_t slot, int64_t start, int64_t past,
      const std::vector<int64_t>& path) {
    TORCH_CHECK(token >= 0 && token < ends.embeddings, "token ", token, " has no embedding");
    tokens.push_back(token);
    slots.push_back(slot);
    const int64_t half = ends.rotary / 2;
    for (int64_t t = 0; t < ends.tables; ++t)
      for (int64_t i = 0; i < ends.rotary; ++i) {
        const float angle = float(position) * ends.frequencies[t * half + i % half];
        cosines.push_back(std::cos(angle) * float(ends.factors[t]));
        sines.push_back(std::sin(angle) * float(ends.factors[t]));
      }
    for (auto& [window, seen] : visible) seen.add(start, past, path, window);
  }
};

template <class W, class T>
class Drafting {
 public:
  using X = typename Ends<W, T>::X;

  Drafting(const Ends<W, T>& ends, Stack<W, T>& stack, int64_t size, const int64_t* slabs, int64_t samples)
      : ends_(ends), stack_(stack), size_(size), samples_(samples), starts_(slabs), committed_(slabs + samples),
        missing_(slabs + 2 * samples) {}

  // Feeds the missing committed tokens; `states` are the target's, or null. Keeps the output of each sample's last row.
  void catch_up(const int64_t* tokens, const T* states, int64_t width) {
    Fed fed(stack_.windows());
    std::vector<int64_t> last;
    for (int64_t s = 0, row = 0; s < samples_; ++s) {
      TORCH_CHECK(missing_[s] > 0 && committed_[s] >= 0 && starts_[s] >= 0, "sample ", s, " lacks nothing");
      for (int64_t i = 0; i < missing_[s]; ++i, ++row) {
        const int64_t position = committed_[s] + i;
        fed.add(ends_, tokens[row], position, starts_[s] + position, starts_[s], position + 1, {});
      }
      last.push_back(row - 1);
    }
    const int64_t rows = int64_t(fed.tokens.size());
    std::vector<float> x(rows * size_);
    if (states) {
      Arena arena;
      const auto* from = as_inputs<Operand<W, T>>(states, rows, width, ends_.fuse->inputs, arena);
      team(rows * width * size_ >= kWorthATeam, [&](int thread, int threads) {
        times(*ends_.fuse, from, rows, x.data(), false, thread, threads);
      });
    }
    run(fed, x, states != nullptr);
    for (int64_t row : last) outputs_.insert(outputs_.end(), x.begin() + row * size_, x.begin() + (row + 1) * size_);
  }

  // Grows the trees. Writes the place of each fed node among its sample's fed ones, and returns the number of broken rows.
  int64_t grow(Forest& forest, const Growing& growing, bool states, int64_t* fed) {
    const Shape& shape = growing.shape;
    int64_t broken = 0;
    std::vector<std::vector<int64_t>> paths(samples_ * shape.nodes);  // slots from below the root down to a fed node
    std::vector<int64_t> output(samples_ * shape.nodes, -1), count(samples_, 0), parent(shape.nodes, -1);
    for (int64_t n = 0; n < shape.nodes; ++n)
      for (int64_t i = shape.offsets[n]; i < shape.offsets[n + 1]; ++i) parent[shape.children[i]] = n;
    for (int64_t s = 0; s < samples_; ++s) output[s * shape.nodes] = s;
    for (int64_t depth = 0;; ++depth) {
      std::vector<Place> frontier = forest.frontier(depth);
      // Forced nodes are there from the start, even below a level that does not pay. They follow only parents that were fed.
      if (depth)
        std::erase_if(frontier, [&](const Place& at) { return output[at.sample * shape.nodes + parent[at.node]] < 0; });
      if (frontier.empty()) return broken;
      if (depth) feed(forest, shape, frontier, depth, parent, paths, output, count, states, fed);
      if (const std::vector<Place> open = forest.open(frontier); !open.empty())
        broken += expand(forest, growing, open, depth, output);
    }
  }

 private:
  void feed(
      const Forest& forest, const Shape& shape, const std::vector<Place>& frontier, int64_t depth,
      const std::vector<int64_t>& parent, std::vector<std::vector<int64_t>>& paths, std::vector<int64_t>& output,
      std::vector<int64_t>& count, bool states, int64_t* fed) {
    Fed rows(stack_.windows());
    std::vector<float> x(frontier.size() * size_);
    for (size_t r = 0; r < frontier.size(); ++r) {
      const auto [s, n] = frontier[r];
      const int64_t here = s * shape.nodes + n, above = s * shape.nodes + parent[n], known = committed_[s] + missing_[s];
      const int64_t slot = starts_[s] + known + count[s];
      fed[forest.at(frontier[r])] = count[s]++;
      paths[here] = paths[above];
      paths[here].push_back(slot);
      rows.add(ends_, forest.token(frontier[r]), known - 1 + depth, slot, starts_[s], known, paths[here]);
      if (states) std::copy_n(outputs_.begin() + output[above] * size_, size_, x.begin() + r * size_);
      output[here] = int64_t(outputs_.size()) / size_ + int64_t(r);
    }
    run(rows, x, states);
    outputs_.insert(outputs_.end(), x.begin(), x.end());
  }

  int64_t expand(
      Forest& forest, const Growing& growing, const std::vector<Place>& frontier, int64_t depth,
      const std::vector<int64_t>& output) {
    const int64_t rows = int64_t(frontier.size()), outputs = ends_.scored;
    constexpr bool in_panels = std::is_same_v<W, Panels>;
    const int64_t groups = groups_of(size_);
    Arena arena;
    X* normed;
    Eighth* eighths;
    float* logits;
    arena.reserve(normed, rows * size_);
    arena.reserve(eighths, in_panels ? rows * groups : 0);
    arena.reserve(logits, rows * outputs);
    arena.allocate();
    Growing::Level level(growing, frontier, outputs);
    team(true, [&](int thread, int threads) {
      const Range mine = share(rows, 1, thread, threads);
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        const auto [s, n] = frontier[r];
        const float* from = outputs_.data() + output[s * growing.shape.nodes + n] * size_;
        if (ends_.norm_output)
          for (int64_t i = 0; i < size_; i += kLanes) store(normed + r * size_ + i, load(from + i));
        else
          norm_row(from, ends_.norm, ends_.epsilon, size_, normed + r * size_);
        if constexpr (in_panels) to_eighths(normed + r * size_, size_, eighths + r * groups);
      }
      meet(threads);
      const auto score = [&](const auto* from) {
        if (ends_.blocks.empty()) times(ends_.head, from, rows, logits, false, thread, threads);
        else times(ends_.head, from, rows, ends_.blocks, logits, outputs, thread, threads);
      };
      if constexpr (in_panels) score(eighths);
      else score(normed);
      meet(threads);
      growing.draw(forest, frontier, depth, logits, outputs, level, screens() ? kScreened : 0, thread, threads);
    });
    for (int64_t r = 0; r < rows && screens(); ++r) {
      const int64_t children = forest.children(frontier[r]);
      if (ends_.exact) rescore(*ends_.exact, normed + r * size_, growing, frontier[r], depth, children, level.drawn[r]);
      else rescore(*ends_.exact_panels, normed + r * size_, growing, frontier[r], depth, children, level.drawn[r]);
    }
    return forest.add(frontier, depth, level.drawn);
  }

  bool screens() const { return ends_.exact || ends_.exact_panels; }

  // Sorts the drawn children by the exact head, and keeps the first ones.
  template <class E>
  void rescore(
      const Prepacked<E>& exact, const X* row, const Growing& growing, Place at, int64_t depth, int64_t children,
      std::vector<std::pair<int64_t, float>>& drawn) {
    Arena arena;
    const auto* x = as_inputs<Operand<E, T>>(row, 1, size_, exact.inputs, arena);
    double mass = 0, total = 0;
    std::vector<std::pair<double, int64_t>> values;
    for (const auto& [token, chance] : drawn) {
      double value = 0;
      const int64_t block = token / kLanes;
      multiply(exact, x, 1, Range{block, block + 1}, [&](int64_t, int64_t, const f32x16* acc, int) {
        float scores[kLanes];
        store(scores, acc[0]);
        value = growing.correct(at.sample, depth, token, scores[token % kLanes]);
      });
      if (growing.noisy(at.sample))
        value = value / growing.temperatures[at.sample] + noise_of(token, growing.key(at.sample, depth));
      values.emplace_back(value, token);
      mass += chance;
    }
    std::stable_sort(values.begin(), values.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [value, token] : values) total += std::exp(value - values[0].first);
    drawn.clear();
    for (int64_t i = 0; i < std::min<int64_t>(children, int64_t(values.size())); ++i)
      drawn.emplace_back(values[i].second, float(mass * std::exp(values[i].first - values[0].first) / total));
  }

  // Runs the layers. With `states` x holds their input, with the embeddings beside it; otherwise x is filled with these.
  void run(Fed& fed, std::vector<float>& x, bool states) {
    const int64_t rows = int64_t(fed.tokens.size());
    std::vector<float> beside(states ? rows * ends_.width : 0);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = states ? beside.data() + r * ends_.width : x.data() + r * size_;
      widen_rows(ends_.embedding + fed.tokens[r] * ends_.width, ends_.width, to);
      if (ends_.scale != 1.f)
        for (int64_t i = 0; i < ends_.width; ++i) to[i] *= ends_.scale;
    }
    for (auto& [window, seen] : fed.visible) seen.close();
    stack_.check_slots(fed.slots.data(), rows);
    stack_.look([&](int64_t window) -> const Visible& { return fed.visible.at(window); });
    const auto norm_all = [&](const Norm& norm) {
      for (int64_t r = 0; r < rows; ++r)
        norm_row(x.data() + r * size_, norm, ends_.epsilon, size_, x.data() + r * size_);
    };
    if (states && ends_.input) norm_all(ends_.input);
    stack_.run(x.data(), beside.data(), rows, fed.cosines.data(), fed.sines.data(), fed.slots.data());
    if (ends_.norm_output) norm_all(ends_.norm);
  }

  const Ends<W, T>& ends_;
  Stack<W, T>& stack_;
  int64_t size_, samples_;
  const int64_t *starts_, *committed_, *missing_;
  std::vector<float> outputs_;  // of the layers: every sample's last committed token, then every fed node
};

// See arbordraft.kernels.draft_tree.DraftRun.
int64_t draft_tree(
    const Tensor& tokens, const OptionalTensor& states, const Tensor& embedding, c10::List<OptionalTensor> ends,
    c10::List<OptionalTensor> parameters, at::IntArrayRef ints, at::ArrayRef<double> scalars, at::TensorList keys,
    at::TensorList values, const OptionalTensor& vocabulary, const OptionalTensor& blocks, const Tensor& frequencies,
    const Tensor& slabs, const Tensor& fed, const Tensor& token, const Tensor& chance, const Tensor& reach, at::IntArrayRef slots,
    at::IntArrayRef offsets, at::IntArrayRef children, at::IntArrayRef levels, at::ArrayRef<double> calibration,
    at::ArrayRef<double> expected, at::ArrayRef<double> costs, int64_t budget, const OptionalTensor& seeds,
    const OptionalTensor& positions, at::ArrayRef<double> temperatures, at::ArrayRef<double> truncations,
    const OptionalTensor& corrections, at::IntArrayRef corrected, const OptionalTensor& allowed, at::IntArrayRef masked,
    at::ArrayRef<double> numbers) {
  const int64_t samples = slabs.size(1), width = embedding.size(1), rows = tokens.numel();
  const int64_t* slab = integers(slabs);
  TORCH_CHECK(slabs.dim() == 2 && slabs.size(0) == 3, "expected slabs of shape [3, S]");
  TORCH_CHECK(
      ends.size() == 12 && frequencies.dim() == 2 && int64_t(numbers.size()) == 4 + frequencies.size(0),
      "expected 12 tensors, 4 numbers, and one for every rotary table");
  const int64_t outputs = int64_t(numbers[1]);
  OptionalTensor words = vocabulary;
  std::vector<int64_t> scored;
  if (blocks) {
    TORCH_CHECK(!vocabulary && blocks->numel(), "blocks are of all tokens, and there is at least one");
    scored.assign(integers(blocks), integers(blocks) + blocks->numel());
    for (size_t i = 0; i < scored.size(); ++i)
      TORCH_CHECK(scored[i] > (i ? scored[i - 1] : -1) && scored[i] * kLanes < outputs, "blocks of the head must ascend");
    const int64_t last = std::min((scored.back() + 1) * kLanes, outputs);
    words = at::empty({int64_t(scored.size() - 1) * kLanes + last - scored.back() * kLanes}, blocks->options());
    int64_t* word = mutable_integers(*words);
    for (const int64_t block : scored)
      for (int64_t token = block * kLanes; token < std::min((block + 1) * kLanes, outputs); ++token) *word++ = token;
  }
  const int64_t among = blocks ? words->numel() : outputs;
  const Growing growing(
      samples, among, words, token, chance, reach, slots, offsets, children, levels, calibration, expected, costs,
      budget, seeds, positions, temperatures, truncations, corrections, corrected, allowed, masked);
  TORCH_CHECK(fed.sizes() == token.sizes() && fed.is_contiguous(), "expected a place for every node of the trees");
  int64_t missing = 0;
  for (int64_t s = 0; s < samples; ++s) missing += slab[2 * samples + s];
  TORCH_CHECK(rows == missing && (!states || states->size(0) == rows), "expected ", missing, " rows, got ", rows);
  const OptionalTensor head = ends.get(5);
  TORCH_CHECK(head, "there is no head");
  return with_all_types(*head, embedding, [&](auto weight, auto row) {
    using W = decltype(weight);
    using T = decltype(row);
    const OptionalTensor fuse = ends.get(0), norm = ends.get(3), offset = ends.get(4);
    const int64_t size = norm->numel();
    TORCH_CHECK(!offset || offset->numel() == size, "the norm's offset has the wrong size");
    Ends<W, T> around{
        data<T>(embedding), embedding.size(0), width, std::nullopt, {floats(norm), floats(offset)},
        prepacked<W>(*head, ends.get(6), ends.get(7), outputs), std::nullopt, std::nullopt, float(numbers[0]), data<float>(frequencies),
        2 * frequencies.size(1), frequencies.size(0), numbers.data() + 4, float(numbers[2]),
        {floats(ends.get(11)), nullptr}, numbers[3] != 0, scored, among};
    TORCH_CHECK(!around.input || ends.get(11)->numel() == size, "the norm of what is read has the wrong size");
    if (const OptionalTensor exact = ends.get(8)) {
      TORCH_CHECK(!vocabulary, "an exact head knows all tokens");
      if (exact->scalar_type() == at::kByte)
        around.exact_panels = prepacked<Panels>(*exact, ends.get(9), ends.get(10), outputs);
      else
        around.exact = prepacked<T>(*exact, ends.get(9), ends.get(10), outputs);
    }
    if (fuse) around.fuse = prepacked<W>(*fuse, ends.get(1), ends.get(2), size);
    TORCH_CHECK(bool(fuse) == bool(states) && (states || width == size), "a drafter reads states, or its embeddings alone");
    Stack<W, T> stack({parameters, ints, scalars, keys, values}, size, states ? width : 0, around.rotary, around.tables);
    Drafting<W, T> drafting(around, stack, size, slab, samples);
    drafting.catch_up(integers(tokens), states ? data<T>(*states) : nullptr, states ? states->size(1) : 0);
    Forest forest = growing.forest();
    return drafting.grow(forest, growing, bool(states), mutable_integers(fed));
  });
}

// See arbordraft.kernels.draft_tree.draft_from_rows.
int64_t draft_from_rows(
    const Tensor& scores, const OptionalTensor& table, const OptionalTensor& correction, const OptionalTensor& gates,
    const OptionalTensor& vocabulary, const Tensor& token, const Tensor& chance, const Tensor& reach,
    at::IntArrayRef slots, at::IntArrayRef offsets, at::IntArrayRef children, at::IntArrayRef levels,
    at::ArrayRef<double> calibration, at::ArrayRef<double> expected, at::ArrayRef<double> costs, int64_t budget,
    const OptionalTensor& seeds, const OptionalTensor& positions, at::ArrayRef<double> temperatures,
    at::ArrayRef<double> truncations, const OptionalTensor& corrections, at::IntArrayRef corrected,
    const OptionalTensor& allowed, at::IntArrayRef masked) {
  TORCH_CHECK(scores.dim() == 3, "expected rows [S, K, D]");
  TORCH_CHECK(bool(table) == bool(correction), "a correction needs its table of tokens");
  const int64_t samples = scores.size(0), depths = scores.size(1), outputs = scores.size(2);
  const Growing growing(
      samples, outputs, vocabulary, token, chance, reach, slots, offsets, children, levels, calibration, expected, costs,
      budget, seeds, positions, temperatures, truncations, corrections, corrected, allowed, masked);
  for (const int64_t slot : slots) TORCH_CHECK(levels[slot] <= depths, "there are rows for ", depths, " depths only");
  const float* from = data<float>(scores);
  Forest forest = growing.forest();
  int64_t broken = 0;
  for (int64_t depth = 0;; ++depth) {
    const std::vector<Place> reached = forest.frontier(depth), frontier = forest.open(reached);
    if (reached.empty()) return broken;
    if (frontier.empty()) continue;
    const int64_t rows = int64_t(frontier.size());
    std::vector<float> own(rows * outputs);
    Growing::Level level(growing, frontier, outputs);
    const auto expand = [&](const auto& correct) {
      team(rows * outputs >= kWorthATeam / 4, [&](int thread, int threads) {
        for (int64_t r = thread; r < rows; r += threads)
          std::copy_n(from + (frontier[r].sample * depths + depth) * outputs, outputs, own.data() + r * outputs);
        meet(threads);
        correct(thread, threads);
        meet(threads);
        growing.draw(forest, frontier, depth, own.data(), outputs, level, 0, thread, threads);
      });
    };
    if (!table) {
      expand([](int, int) {});
    } else {
      with_types(*correction, *table, [&](auto weight, auto row) {
        using W = decltype(weight);
        using T = decltype(row);
        using X = typename Stack<W, T>::X;
        const Prepacked<W> m = prepacked<W>(*correction, std::nullopt, std::nullopt, outputs);
        const int64_t rank = table->size(1);
        std::vector<T> parents(rows * rank);
        TORCH_CHECK(
            gates && gates->size(0) == samples && gates->size(1) == depths && gates->size(2) == rank,
            "expected gates for every depth of a sample");
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t token = forest.token(frontier[r]);
          TORCH_CHECK(token >= 0 && token < table->size(0), "token ", token, " has no row in the table");
          const T *known = data<T>(*table) + token * rank, *gate = data<T>(*gates) + (frontier[r].sample * depths + depth) * rank;
          for (int64_t i = 0; i < rank; i += kLanes)
            store(parents.data() + r * rank + i, load(known + i, rank - i) * load(gate + i, rank - i), rank - i);
        }
        Arena arena;
        const X* x = as_inputs<X>(parents.data(), rows, rank, m.inputs, arena);
        expand([&](int thread, int threads) { times(m, x, rows, own.data(), true, thread, threads); });
      });
    }
    broken += forest.add(frontier, depth, level.drawn);
  }
}

}  // namespace
}  // namespace arbordraft
