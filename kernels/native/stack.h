// A stack of decoder layers, read from tensors once and run on any number of rows.
#pragma once

#include <set>

#include "tensors.h"

namespace arbordraft {
namespace {

// The layout of a stack's tensors: see LayerWeights in decoder_layers/reference.py.
constexpr int64_t kParameters = 30, kIntegers = 13, kScalars = 3, kQkv = 2;

struct StackTensors {
  c10::List<OptionalTensor> parameters;
  at::IntArrayRef integers;
  at::ArrayRef<double> scalars;
  at::TensorList keys, values;
};

template <class W, class T>
class Stack {
 public:
  using X = std::conditional_t<std::is_same_v<W, Panels>, float, Operand<W, T>>;

  // size: H; beside: E, or 0 without an input beside the hidden states; rotary: rotated channels of a head, by one of
  // `tables` tables.
  Stack(const StackTensors& given, int64_t size, int64_t beside, int64_t rotary, int64_t tables)
      : size_(size), beside_(beside), rotary_(rotary), tables_(tables) {
    const int64_t count = int64_t(given.keys.size());
    TORCH_CHECK(size % kLanes == 0 && beside % kLanes == 0, "the hidden size must be a multiple of 16");
    TORCH_CHECK(
        int64_t(given.parameters.size()) == count * kParameters && int64_t(given.integers.size()) == count * kIntegers &&
            int64_t(given.scalars.size()) == count * kScalars && int64_t(given.values.size()) == count,
        "expected parameters of ", count, " layers");
    layers_.reserve(count);
    for (int64_t n = 0; n < count; ++n) layers_.push_back(layer(given, n));
  }

  // Sets the keys that the rows of a forward see under each layer's window, 0 for none; they must outlive the run.
  template <class VisibleOf>
  void look(const VisibleOf& visible_of) {
    chunks_ = 1;
    for (auto& layer : layers_) {
      layer.visible = &visible_of(layer.window);
      chunks_ = std::max(chunks_, most_chunks(*layer.visible));
    }
  }

  std::set<int64_t> windows() const {
    std::set<int64_t> found;
    for (const auto& layer : layers_) found.insert(layer.window);
    return found;
  }

  void check_slots(const int64_t* slots, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) TORCH_CHECK(slots[r] >= 0 && slots[r] < pool_, "a slot lies outside its pool");
  }
  int64_t pool() const { return pool_; }

  // Runs all layers on x [rows][H] in place; `beside` [rows][E], cosines and sines [rows][tables][rotary].
  void run(
      float* x, const float* beside, int64_t rows, const float* cosines, const float* sines, const int64_t* slots,
      const std::vector<std::pair<int64_t, T*>>& taps = {}) const {
    int64_t widest = 0, heads = 0, inner = 0, partials = 0, groups = 0, taken = 0, scores = 0;
    for (const auto& layer : layers_) {
      widest = std::max(widest, (layer.query_heads + 2 * layer.kv_heads) * layer.dim);
      heads = std::max(heads, layer.query_heads * layer.dim);
      const int64_t mlps = layer.router.routed ? layer.router.taken() : 1;  // taken by a row
      inner = std::max(inner, mlps * layer.inner);
      for (const auto* m : {&layer.qkv, &layer.out, &layer.gate_up}) groups = std::max(groups, groups_of(m->inputs));
      groups = std::max(groups, mlps * groups_of(layer.inner));
      taken = std::max(taken, layer.router.routed ? mlps : 0);
      scores = std::max(scores, layer.router.matrix.outputs);
      const int64_t size = layer.query_heads / layer.kv_heads * (layer.dim + 2);
      partials = std::max(partials, partials_size(rows, layer.kv_heads, chunks_, size));
    }
    Arena arena;
    Workspace<W, X, T> space;
    space.own = rows == 1;
    space.widest = groups;
    const int64_t copies = space.own ? at::get_num_threads() : 1;
    arena.reserve(space.normed, copies * rows * (size_ + beside_));
    arena.reserve(space.attended, rows * heads);
    arena.reserve(space.inner, rows * inner);
    arena.reserve(space.queries, rows * heads);
    arena.reserve(space.qkv, rows * widest);
    arena.reserve(space.sums, rows * size_);
    arena.reserve(space.partials, partials);
    arena.reserve(space.eighths, std::is_same_v<W, Panels> ? copies * rows * groups : 0);
    arena.reserve(space.gathered, rows * taken * length_of<W>(size_));
    arena.reserve(space.scores, rows * scores);
    arena.reserve(space.factors, rows * taken);
    arena.reserve(space.experts, rows * taken);
    arena.allocate();
    team(true, [&](int thread, int threads) {
      run_layers(
          x, beside, beside_, rows, size_, layers_, space, cosines, sines, rotary_, tables_, slots, chunks_, taps, thread, threads);
    });
  }

 private:
  Layer<W, X, T> layer(const StackTensors& given, int64_t n) {
    const auto tensor = [&](int64_t i) -> OptionalTensor { return given.parameters.get(n * kParameters + i); };
    const auto norm = [&](int64_t i, int64_t length) {
      for (const OptionalTensor& found : {tensor(i), tensor(i + 1)})
        TORCH_CHECK(!found || found->numel() == length, "a norm has the wrong size");
      return Norm{floats(tensor(i)), floats(tensor(i + 1))};
    };
    const int64_t* integer = given.integers.data() + n * kIntegers;
    const double* scalar = given.scalars.data() + n * kScalars;
    const int64_t query_heads = integer[0], kv_heads = integer[1], dim = integer[2], width = integer[3];
    TORCH_CHECK(dim % kLanes == 0 && width % kLanes == 0 && rotary_ <= dim && rotary_ % 2 == 0, "sizes must be multiples of 16");
    TORCH_CHECK(0 <= integer[6] && integer[6] <= tables_, "a layer rotates by a table that is not there");
    TORCH_CHECK(query_heads % kv_heads == 0, "query heads must be a multiple of key heads");
    const auto matrix_of = [&]<class Weight>(Weight, int64_t i, int64_t outputs, int64_t inputs) {
      const OptionalTensor weight = tensor(i);
      TORCH_CHECK(weight, "a matrix is missing");
      const Prepacked<Weight> m = prepacked<Weight>(*weight, tensor(i + 1), tensor(i + 2), outputs);
      const int64_t padded = std::is_same_v<Weight, Panels> ? groups_of(inputs) * kGroupSize : inputs;
      TORCH_CHECK(m.inputs == padded, "a matrix has ", m.inputs, " inputs instead of ", padded);
      return m;
    };
    const auto matrix = [&](int64_t i, int64_t outputs, int64_t inputs) { return matrix_of(W(), i, outputs, inputs); };
    Router<T> router{{}, integer[8], integer[9], integer[10], integer[11] != 0, integer[12] != 0};
    if (router.routed) {
      TORCH_CHECK(0 < router.chosen && router.chosen <= router.routed && router.shared >= 0, "no such choice of experts");
      router.matrix = matrix_of(T(), 27, router.routed + router.gated, size_);
    }
    const int64_t mlps = router.routed ? router.routed + router.shared : 1;
    for (const Tensor& pool : {given.keys[n], given.values[n]}) {
      TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kv_heads && pool.size(2) == dim, "a pool has the wrong shape");
      TORCH_CHECK(pool_ < 0 || pool.size(0) == pool_, "the pools have different sizes");
      pool_ = pool.size(0);
    }
    const Norm beside_norm = norm(25, beside_);
    TORCH_CHECK(!beside_norm || beside_, "nothing stands beside the hidden states");
    const bool parallel = integer[7] != 0;
    TORCH_CHECK(!parallel || !(beside_norm || tensor(15)), "an MLP beside the attention reads what that reads");
    const auto channels = [&](int64_t i) { return tensor(i) ? tensor(i)->numel() : dim; };
    const bool joint = channels(5) != dim || channels(7) != dim;
    const bool gated = tensor(17) && outputs_of(*tensor(17)) == mlps * 2 * width;
    TORCH_CHECK(gated || !router.routed, "experts have gates");
    return {
        norm(0, size_), norm(5, (joint ? query_heads : 1) * dim), norm(7, (joint ? kv_heads : 1) * dim), norm(13, size_),
        norm(15, size_), norm(23, size_), beside_norm, floats(tensor(9)),
        matrix(kQkv, (query_heads + 2 * kv_heads) * dim, size_ + (beside_norm ? beside_ : 0)),
        matrix(10, size_, query_heads * dim), matrix(17, mlps * (gated ? 2 : 1) * width, size_),
        matrix(20, mlps * size_, width),
        query_heads, kv_heads, dim, width, integer[5], Activation(integer[4]), integer[6] - 1, parallel, gated, joint,
        float(scalar[0]), float(scalar[1]), float(scalar[2]), data<T>(given.keys[n]), data<T>(given.values[n]), nullptr, router};
  }

  int64_t size_, beside_, rotary_, tables_, pool_ = -1, chunks_ = 1;
  std::vector<Layer<W, X, T>> layers_;
};

// Calls the function with W() and T(): the types of prepacked weights and of the rows that they multiply.
template <class What>
auto with_types(const Tensor& weight, const Tensor& rows, const What& what) {
  const bool half = rows.scalar_type() == at::kBFloat16;
  switch (weight.scalar_type()) {
    case at::kChar: return half ? what(int8_t(), bf16()) : what(int8_t(), float());
    case at::kBFloat16: return what(bf16(), bf16());
    default: return what(float(), float());
  }
}

// Like with_types, also for weights in panels.
template <class What>
auto with_all_types(const Tensor& weight, const Tensor& rows, const What& what) {
  if (weight.scalar_type() != at::kByte) return with_types(weight, rows, what);
  return rows.scalar_type() == at::kBFloat16 ? what(Panels(), bf16()) : what(Panels(), float());
}

}  // namespace
}  // namespace arbordraft
