// A stack of decoder layers, read from tensors once and run on any number of rows.
#pragma once

#include <set>

#include "recurrent.h"
#include "tensors.h"

namespace arbordraft {
namespace {

// The layout of a stack's tensors: see LayerWeights in decoder_layers/reference.py.
constexpr int64_t kParameters = 37, kIntegers = 23, kScalars = 9, kQkv = 2, kGateUp = 17;

struct StackTensors {
  c10::List<OptionalTensor> parameters;
  at::IntArrayRef integers;
  at::ArrayRef<double> scalars;
  at::TensorList keys, values;  // of recurrent layers, their windows and states
};

// The rows of a forward among all uncommitted rows, and inputs of recurrent layers for all of these: see RecurrentRows in
// decoder_layers/reference.py.
struct LineageTensors {
  at::TensorList paths, kept;
  int64_t scratch;
};

// Reads the sizes of a mixer: see Recurrence.integers.
template <class T>
Recurrence<T> sized(const int64_t* integer) {
  return {Mixing(integer[0]), integer[1], integer[2], integer[3], integer[4], integer[5], integer[6], integer[7]};
}

// Points a mixer to its windows and states.
template <class T>
void remember(Recurrence<T>& m, const Tensor& windows, const Tensor& states) {
  TORCH_CHECK(m.channels % kLanes == 0 && 0 < m.width && m.width <= kWidest, "channels must be a multiple of 16");
  m.slots = windows.size(0);
  TORCH_CHECK(windows.numel() == m.slots * (m.width - 1) * m.channels, "windows have the wrong shape");
  m.windows = data<T>(windows);
  if (!m.scans()) return;
  TORCH_CHECK(m.key_heads > 0 && m.heads % m.key_heads == 0, "heads must be a multiple of key heads");
  TORCH_CHECK(m.channels == m.size() + 2 * m.key_heads * m.keys && m.values % kLanes == 0, "channels do not fit the heads");
  TORCH_CHECK(states.numel() == m.slots * m.heads * m.keys * m.values, "states have the wrong shape");
  m.states = data<float>(states);
}

// Points a mixer to the inputs that are kept for `rows` rows.
template <class T>
void keep(Recurrence<T>& m, const Tensor& inputs, const Tensor& convolved, const Tensor& gates, int64_t rows) {
  const int64_t scanned = m.scans() ? rows : 0;
  TORCH_CHECK(
      inputs.numel() == rows * m.channels && convolved.numel() == scanned * m.channels &&
          gates.numel() == scanned * 2 * m.heads,
      "the memory for inputs of a recurrent layer has another size");
  m.inputs = data<T>(inputs), m.convolved = data<T>(convolved), m.gates = data<float>(gates);
}

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

  // Sets the paths of a forward's rows through recurrent layers, and the memory for their inputs; these must outlive the run.
  void follow(const LineageTensors& given, int64_t rows) {
    if (given.paths.empty()) return;
    TORCH_CHECK(given.paths.size() == 7, "expected seven tensors about paths, got ", given.paths.size());
    const Tensor &places = given.paths[0], &read = given.paths[2], &slots = given.paths[4], &history = given.paths[5];
    paths_ = {
        read.numel(), given.paths[1].numel() - 1, given.scratch, slots.numel(), false, integers(places), integers(history),
        integers(given.paths[6]), integers(slots), integers(given.paths[1]), integers(read), integers(given.paths[3])};
    TORCH_CHECK(places.numel() == rows && paths_.samples >= 0 && given.paths[3].numel() == paths_.rows, "rows differ");
    for (int64_t r = 0; r < rows; ++r)
      TORCH_CHECK(0 <= paths_.places[r] && paths_.places[r] < paths_.rows, "row ", r, " is none of ", paths_.rows, " rows");
    keep_inputs(given.kept, paths_.rows);
    for (auto& layer : layers_) {
      const Recurrence<T>& m = layer.recurrence;
      if (!m) continue;
      const int64_t behind = m.width - 1;
      TORCH_CHECK(
          history.numel() == paths_.rows * behind && given.paths[6].numel() == paths_.ahead * behind,
          "the paths do not fit a convolution of width ", m.width);
      for (int64_t i = 0; i < history.numel(); ++i) check_input(m, paths_.history[i]);
      for (int64_t i = 0; i < given.paths[6].numel(); ++i) check_input(m, paths_.ends[i]);
      for (int64_t e = 0; e < paths_.ahead; ++e)
        TORCH_CHECK(0 <= paths_.slots[e] && paths_.slots[e] < m.slots, "there is no window ", paths_.slots[e]);
      if (!m.scans()) continue;
      check_schedule({.first = paths_.first, .read = paths_.read, .write = paths_.write, .samples = paths_.samples}, paths_.rows, m.slots, paths_.scratch);
    }
  }

  // Goes on with `rows` rows below those of the last forward, by paths that the caller has checked with `check_state`.
  void follow(const Lineage& paths, at::TensorList kept, int64_t rows) {
    keep_inputs(kept, rows);
    paths_ = paths;
  }

  const Lineage& paths() const { return paths_; }

  // Width of the convolutions, 0 without recurrent layers.
  int64_t width() const {
    for (const auto& layer : layers_)
      if (layer.recurrence) return layer.recurrence.width;
    return 0;
  }
  bool scans() const {
    return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer.recurrence.scans(); });
  }
  void check_state(int64_t slot) const {
    for (const auto& layer : layers_)
      TORCH_CHECK(!layer.recurrence || (0 <= slot && slot < layer.recurrence.slots), "there is no state ", slot);
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
    ScanSizes scans;
    for (const auto& layer : layers_) {
      widest = std::max(widest, layer.projected());
      heads = std::max(heads, layer.mixed());
      const int64_t mlps = layer.router.routed ? layer.router.taken() : 1;  // taken by a row
      inner = std::max(inner, mlps * layer.inner);
      for (const auto* m : {&layer.qkv, &layer.out, &layer.gate_up}) groups = std::max(groups, groups_of(m->inputs));
      groups = std::max(groups, mlps * groups_of(layer.inner));
      taken = std::max(taken, layer.router.routed ? mlps : 0);
      scores = std::max(scores, layer.router.routed ? layer.router.outputs() : 0);
      if (const auto& m = layer.recurrence) {
        TORCH_CHECK(m.inputs, "recurrent layers need the paths of their rows");
        scans.fit(m, paths_.scratch);
        continue;
      }
      if (!layer.mixes()) continue;
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
    scans.reserve(arena, space.scan, paths_.rows, at::get_num_threads());
    arena.allocate();
    team(true, [&](int thread, int threads) {
      run_layers(
          x, beside, beside_, rows, size_, layers_, space, cosines, sines, rotary_, tables_, slots, chunks_, paths_, taps, thread,
          threads);
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
    const Recurrence<T> m = recurrence(given, n);
    TORCH_CHECK(width % kLanes == 0 && rotary_ % 2 == 0, "sizes must be multiples of 16");
    const bool mixes = m || query_heads > 0;
    TORCH_CHECK(m || !mixes || (dim % kLanes == 0 && rotary_ <= dim), "head sizes must be multiples of 16");
    TORCH_CHECK(0 <= integer[6] && integer[6] <= tables_, "a layer rotates by a table that is not there");
    TORCH_CHECK(m || !mixes || (kv_heads > 0 && query_heads % kv_heads == 0), "query heads must be a multiple of key heads");
    const auto matrix_of = [&]<class Weight>(Weight, int64_t i, int64_t outputs, int64_t inputs) {
      const OptionalTensor weight = tensor(i);
      TORCH_CHECK(weight, "a matrix is missing");
      const Prepacked<Weight> m = prepacked<Weight>(*weight, tensor(i + 1), tensor(i + 2), outputs);
      const int64_t padded = std::is_same_v<Weight, Panels> ? groups_of(inputs) * kGroupSize : inputs;
      TORCH_CHECK(m.inputs == padded, "a matrix has ", m.inputs, " inputs instead of ", padded);
      return m;
    };
    const auto matrix = [&](int64_t i, int64_t outputs, int64_t inputs) { return matrix_of(W(), i, outputs, inputs); };
    Router<T> router{{}, {}, integer[8], integer[9], integer[10], integer[11] != 0, integer[12] != 0, integer[13] != 0};
    if (router.routed) {
      TORCH_CHECK(0 < router.chosen && router.chosen <= router.routed && router.shared >= 0, "no such choice of experts");
      if (const OptionalTensor weight = tensor(27); weight && weight->scalar_type() == at::kFloat)
        router.exact = matrix_of(float(), 27, router.outputs(), size_);
      else
        router.matrix = matrix_of(T(), 27, router.outputs(), size_);
      router.corrections = floats(tensor(30)), router.factor = float(scalar[4]);
      TORCH_CHECK(
          !router.corrections || (router.sigmoid && tensor(30)->numel() == router.routed),
          "expected a correction of every expert's sigmoid");
    }
    const int64_t mlps = router.routed ? router.routed + router.shared : 1;
    for (const Tensor& pool : {given.keys[n], given.values[n]}) {
      if (m || !mixes) break;
      TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kv_heads && pool.size(2) == dim, "a pool has the wrong shape");
      TORCH_CHECK(pool_ < 0 || pool.size(0) == pool_, "the pools have different sizes");
      pool_ = pool.size(0);
    }
    const Norm beside_norm = norm(25, beside_);
    TORCH_CHECK(!beside_norm || beside_, "nothing stands beside the hidden states");
    const bool parallel = integer[7] != 0;
    TORCH_CHECK(!parallel || (n > 0 && !layers_.back().beside_norm && layers_.back().mixes() != (layers_.back().inner > 0)),
                "a layer beside another needs one of one block before it, which reads hidden states alone");
    TORCH_CHECK(!parallel || !(beside_norm || tensor(mixes ? 0 : 15)), "a layer beside another reads what that reads");
    const auto channels = [&](int64_t i) { return tensor(i) ? tensor(i)->numel() : dim; };
    const bool joint = channels(5) != dim || channels(7) != dim;
    const bool closing = integer[14] != 0;
    const int64_t projected = m ? m.projected() : ((1 + closing) * query_heads + 2 * kv_heads) * dim;
    const auto part = [&](bool there, int64_t i, int64_t outputs, int64_t inputs) {
      return there ? matrix(i, outputs, inputs) : Prepacked<W>{};
    };
    const bool gated = tensor(kGateUp) && outputs_of(*tensor(kGateUp)) == mlps * 2 * width;
    return {
        norm(0, size_), norm(5, (joint ? query_heads : 1) * dim), norm(7, (joint ? kv_heads : 1) * dim), norm(13, size_),
        norm(15, size_), norm(23, size_), beside_norm, floats(tensor(9)),
        part(mixes, kQkv, projected, size_ + (beside_norm ? beside_ : 0)),
        part(mixes, 10, size_, m ? m.size() : query_heads * dim),
        part(width > 0, kGateUp, mlps * (gated ? 2 : 1) * width, size_), part(width > 0, 20, mlps * size_, width),
        query_heads, kv_heads, dim, width, integer[5], Activation(integer[4]), integer[6] - 1, parallel, gated, joint,
        closing, float(scalar[0]), float(scalar[1]), float(scalar[2]), float(scalar[3]),
        m || !mixes ? nullptr : data<T>(given.keys[n]), m || !mixes ? nullptr : data<T>(given.values[n]), nullptr, router, m};
  }

  Recurrence<T> recurrence(const StackTensors& given, int64_t n) const {
    const auto tensor = [&](int64_t i) -> OptionalTensor { return given.parameters.get(n * kParameters + i); };
    const int64_t* integer = given.integers.data() + n * kIntegers + 15;
    const double* scalar = given.scalars.data() + n * kScalars + 5;
    Recurrence<T> m = sized<T>(integer);
    if (!m) return m;
    m.taps = floats(tensor(31)), m.bias = floats(tensor(32));
    m.rates = floats(tensor(33)), m.step_bias = floats(tensor(34)), m.skip = floats(tensor(35)), m.norm = floats(tensor(36));
    m.epsilon = float(scalar[0]), m.shortest = float(scalar[1]), m.longest = float(scalar[2]), m.strongest = float(scalar[3]);
    const auto fits = [&](int64_t i, int64_t length) { return tensor(i) && tensor(i)->numel() == length; };
    remember(m, given.keys[n], given.values[n]);
    TORCH_CHECK(fits(31, m.width * m.channels) && (!m.bias || fits(32, m.channels)), "the convolution has the wrong size");
    if (!m.scans()) return m;
    const bool delta = m.kind == Mixing::delta;
    if (delta) m.group = m.values;
    TORCH_CHECK(m.group > 0 && m.group % kLanes == 0 && m.size() % m.group == 0, "a norm has the wrong size");
    TORCH_CHECK(fits(33, m.heads) && (!m.step_bias || fits(34, m.heads)), "rates and biases are numbers of heads");
    TORCH_CHECK(delta || fits(35, m.heads), "expected a factor of every head's input");
    TORCH_CHECK((!delta && !m.norm) || fits(36, delta ? m.values : m.size()), "a norm has the wrong size");
    return m;
  }

  // Points recurrent layers to the inputs that are kept for `rows` rows.
  void keep_inputs(at::TensorList kept, int64_t rows) {
    size_t next = 0;
    for (auto& layer : layers_) {
      if (!layer.recurrence) continue;
      TORCH_CHECK(next + 3 <= kept.size(), "expected memory for the inputs of every recurrent layer");
      keep(layer.recurrence, kept[next], kept[next + 1], kept[next + 2], rows);
      next += 3;
    }
  }

  void check_input(const Recurrence<T>& m, int64_t index) const {
    TORCH_CHECK(index < paths_.rows && index >= -m.slots * (m.width - 1), "there is no input ", index, " before a row");
  }

  int64_t size_, beside_, rotary_, tables_, pool_ = -1, chunks_ = 1;
  std::vector<Layer<W, X, T>> layers_;
  Lineage paths_;
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

template <class T>
void replay_of(
    at::IntArrayRef ints, at::TensorList windows, at::TensorList states, at::TensorList kept, const Lineage& paths) {
  std::vector<Recurrence<T>> layers;
  ScanSizes scans;
  for (size_t n = 0; n < windows.size(); ++n) {
    Recurrence<T> m = sized<T>(ints.data() + 8 * n);
    remember(m, windows[n], states[n]);
    const int64_t rows = kept[3 * n].size(0), all = m.slots * (m.width - 1);
    keep(m, kept[3 * n], kept[3 * n + 1], kept[3 * n + 2], rows);
    for (int64_t r = 0; r < paths.rows; ++r)
      TORCH_CHECK(0 <= paths.places[r] && paths.places[r] < rows, "row ", r, " is none of ", rows, " kept rows");
    for (int64_t i = 0; i < paths.ahead * (m.width - 1); ++i)
      TORCH_CHECK(paths.ends[i] < paths.rows && paths.ends[i] >= -all, "there is no input ", paths.ends[i], " before a row");
    for (int64_t e = 0; e < paths.ahead; ++e)
      TORCH_CHECK(0 <= paths.slots[e] && paths.slots[e] < m.slots, "there is no window ", paths.slots[e]);
    check_schedule({.first = paths.first, .read = paths.read, .write = paths.write, .samples = paths.samples}, paths.rows, m.slots, 0);
    scans.fit(m, 0);
    layers.push_back(m);
  }
  Arena arena;
  ScanSpace space;
  scans.reserve(arena, space, paths.rows, at::get_num_threads());
  arena.allocate();
  team(true, [&](int thread, int threads) {
    for (const auto& m : layers) replay_rows(m, paths, space, thread, threads);
  });
}

// See replay_layers in decoder_layers/recurrences.py.
void replay_layers(
    at::IntArrayRef ints, at::TensorList windows, at::TensorList states, at::TensorList kept, const Tensor& rows,
    const Tensor& first, const Tensor& read, const Tensor& write, const Tensor& slots, const Tensor& ends) {
  TORCH_CHECK(
      !windows.empty() && states.size() == windows.size() && kept.size() == 3 * windows.size() &&
          ints.size() == 8 * windows.size(),
      "expected windows, states and inputs of every layer");
  TORCH_CHECK(
      read.numel() == rows.numel() && write.numel() == rows.numel() && first.numel() > 0 && slots.dim() == 1 &&
          ends.dim() == 2 && ends.size(0) == slots.size(0),
      "the paths do not fit the rows");
  for (size_t n = 0; n < windows.size(); ++n)
    TORCH_CHECK(ends.size(1) == ints[8 * n + 5] - 1, "the paths do not fit a convolution of width ", ints[8 * n + 5]);
  const Lineage paths{
      .rows = rows.numel(), .samples = first.numel() - 1, .ahead = slots.numel(), .places = integers(rows),
      .ends = integers(ends), .slots = integers(slots), .first = integers(first), .read = integers(read),
      .write = integers(write)};
  windows[0].scalar_type() == at::kBFloat16 ? replay_of<bf16>(ints, windows, states, kept, paths)
                                            : replay_of<float>(ints, windows, states, kept, paths);
}

}  // namespace
}  // namespace arbordraft
