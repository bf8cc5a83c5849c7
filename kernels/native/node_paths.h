// Recurrent layers on trees that are drafted level by level: a node goes on from the windows and states of its parent.
#pragma once

#include "stack.h"

namespace arbordraft {
namespace {

// A node that is fed: its place among the fed nodes of its sample, and its parent's; -1 if that is the root.
struct Descendant {
  int64_t sample, place, above;
};

// Inputs of recurrent layers for nodes, and places of their states: see NodeMemory in decoder_layers/recurrences.py.
struct NodeTensors {
  at::TensorList kept;
  OptionalTensor slots;
};

// The paths of fed nodes. Nodes of a level hold a state each, and the last child of a node takes over its parent's.
class NodePaths {
 public:
  // roots: place of each sample's windows and states after its last committed token, which its nodes only read; width: of the
  // convolutions.
  NodePaths(std::vector<int64_t> roots, const NodeTensors& given, int64_t width)
      : kept_(given.kept), roots_(std::move(roots)), behind_(width - 1) {
    const int64_t samples = int64_t(roots_.size()), all = kept_.empty() ? 0 : kept_[0].size(0);
    TORCH_CHECK(samples > 0 && all % samples == 0, "expected as many rows of inputs for every sample");
    TORCH_CHECK(given.slots && given.slots->dim() == 2 && given.slots->size(0) == samples, "expected states for every sample");
    rows_ = all / samples;
    const int64_t *slots = integers(given.slots), each = given.slots->size(1);
    for (int64_t s = 0; s < samples; ++s) free_.emplace_back(slots + s * each, slots + (s + 1) * each);
    history_.resize(all * behind_), state_.resize(all, -1);
  }

  at::TensorList kept() const { return kept_; }
  int64_t rows() const { return int64_t(state_.size()); }
  const std::vector<std::vector<int64_t>>& states() const { return free_; }

  // Returns the paths of the nodes of the next level, sample after sample; they stay valid until the level after.
  Lineage level(const std::vector<Descendant>& nodes, bool scans) {
    std::vector<int64_t> waiting(state_.size(), 0);  // children of a fed node that have not been given a state
    for (const Descendant& node : nodes)
      if (node.above >= 0) ++waiting[node.sample * rows_ + node.above];
    for (const int64_t place : places_)
      if (scans && !waiting[place]) free_[place / rows_].push_back(state_[place]);
    places_.clear(), first_.clear(), read_.clear(), write_.clear();
    for (size_t r = 0; r < nodes.size(); ++r) {
      const auto [s, own, over] = nodes[r];
      TORCH_CHECK(own < rows_, "sample ", s, " has room for the inputs of ", rows_, " nodes");
      const int64_t place = s * rows_ + own, above = over < 0 ? -1 : s * rows_ + over;
      if (!r || nodes[r - 1].sample != s) first_.push_back(int64_t(r));
      for (int64_t w = 0; w < behind_; ++w)
        history_[place * behind_ + w] = above < 0         ? -1 - (roots_[s] * behind_ + w)
                                        : w + 1 < behind_ ? history_[above * behind_ + w + 1]
                                                          : above;
      if (scans) state_[place] = above >= 0 && !--waiting[above] ? state_[above] : take(s);
      places_.push_back(place), read_.push_back(above < 0 ? roots_[s] : state_[above]), write_.push_back(state_[place]);
    }
    first_.push_back(int64_t(nodes.size()));
    return {
        .rows = int64_t(nodes.size()), .samples = int64_t(first_.size()) - 1, .resumed = true, .places = places_.data(),
        .history = history_.data(), .first = first_.data(), .read = read_.data(), .write = write_.data()};
  }

 private:
  int64_t take(int64_t s) {
    TORCH_CHECK(!free_[s].empty(), "sample ", s, " has fewer states than nodes in a level");
    const int64_t found = free_[s].back();
    free_[s].pop_back();
    return found;
  }

  at::TensorList kept_;
  std::vector<int64_t> roots_;
  int64_t behind_, rows_;
  std::vector<std::vector<int64_t>> free_;  // by sample
  std::vector<int64_t> history_, state_;    // by fed node: see Lineage; its state
  std::vector<int64_t> places_, first_, read_, write_;  // of the last level
};

}  // namespace
}  // namespace arbordraft
