// The CPU kernels as PyTorch operators. Everything is checked here, so that the kernels need not be.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "../decoder_layers/cpu.h"
#include "../gumbel/cpu.h"
#include "../prepacked_linear/cpu.h"
#include "../ragged_tree_attention/cpu.h"
#include "../verify/cpu.h"

namespace arbordraft {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Below this many multiplications waking the team costs more than it saves.
constexpr int64_t kWorthATeam = 1 << 16;

template <class T>
constexpr at::ScalarType kType = std::is_same_v<T, bf16>     ? at::kBFloat16
                                 : std::is_same_v<T, int8_t> ? at::kChar
                                                             : at::kFloat;
template <class T>
T* data(const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == kType<T>, "expected ", kType<T>, ", got ", tensor.scalar_type());
  TORCH_CHECK(tensor.is_contiguous() && tensor.is_cpu(), "expected a contiguous tensor on the CPU");
  return static_cast<T*>(tensor.data_ptr());
}
const int64_t* integers(const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous() && tensor.is_cpu(), "expected int64 on the CPU");
  return tensor.const_data_ptr<int64_t>();
}
const int64_t* integers(const OptionalTensor& tensor) { return tensor ? integers(*tensor) : nullptr; }
const float* floats(const OptionalTensor& tensor) { return tensor ? data<float>(*tensor) : nullptr; }

// Scratch memory of one call.
class Arena {
 public:
  template <class T>
  void reserve(T*& pointer, int64_t count) {
    offsets_.emplace_back(reinterpret_cast<void**>(&pointer), size_);
    size_ += (count * int64_t(sizeof(T)) + 127) / 64 * 64;
  }
  void allocate() {
    memory_ = at::empty({size_ + 64}, at::kByte);
    char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data_ptr()) + 63) / 64 * 64);
    for (auto& [pointer, offset] : offsets_) *pointer = base + offset;
  }

 private:
  std::vector<std::pair<void**, int64_t>> offsets_;
  int64_t size_ = 0;
  Tensor memory_;
};

template <class W>
Prepacked<W> prepacked(const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, int64_t outputs) {
  constexpr int64_t lanes = std::is_same_v<W, float> ? 1 : 2;
  const int64_t blocks = (outputs + kLanes - 1) / kLanes;
  TORCH_CHECK(
      weight.dim() == (lanes == 1 ? 3 : 4) && weight.size(0) == blocks && weight.size(2) == kLanes &&
          (lanes == 1 || weight.size(3) == lanes),
      "weights are not prepacked for ", outputs, " outputs: ", weight.sizes());
  TORCH_CHECK(!scale || scale->numel() == outputs, "expected one scale per output");
  TORCH_CHECK(!bias || bias->numel() == outputs, "expected one bias per output");
  return {data<W>(weight), floats(scale), floats(bias), outputs, weight.size(1) * lanes};
}

// Rows as the kernels multiply them: of type X, padded with zeros to `inputs`.
template <class X, class In>
const X* as_inputs(const In* x, int64_t rows, int64_t size, int64_t inputs, Arena& arena) {
  if constexpr (std::is_same_v<X, In>)
    if (size == inputs) return x;
  X* y;
  arena.reserve(y, rows * inputs);
  arena.allocate();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; i += kLanes) store(y + r * inputs + i, load(x + r * size + i, size - i), size - i);
    std::fill(y + r * inputs + size, y + (r + 1) * inputs, X(0));
  }
  return y;
}

template <class W, class T>
Tensor linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, int64_t outputs,
    int64_t activation) {
  using X = std::conditional_t<kDotBf16 && std::is_same_v<T, bf16>, bf16, float>;
  const Prepacked<W> m = prepacked<W>(weight, scale, bias, outputs);
  const int64_t size = x.size(-1), rows = x.numel() / std::max<int64_t>(1, size);
  const int64_t padding = weight.dim() == 4 ? 1 : 0;
  TORCH_CHECK(size <= m.inputs && size >= m.inputs - padding, "x has ", size, " channels, the weights ", m.inputs);
  const bool gated = activation >= 0;
  TORCH_CHECK(!gated || outputs % (2 * kLanes) == 0, "a gated activation needs halves of whole blocks");
  auto shape = x.sizes().vec();
  const int64_t width = shape.back() = gated ? outputs / 2 : outputs;
  Tensor y = at::empty(shape, x.options());
  Arena arena;
  const X* from = as_inputs<X>(data<T>(x), rows, size, m.inputs, arena);
  T* to = data<T>(y);
  team(rows * outputs * size >= kWorthATeam, [&](int thread, int threads) {
    const Range blocks = share((outputs + kLanes - 1) / kLanes, 2, thread, threads);
    multiply(m, from, m.inputs, rows, blocks, [&](int64_t r, int64_t block, const f32x16* acc, int n) {
      if (gated) {
        for (int b = 0; b < n; b += 2)
          store(to + r * width + (block + b) / 2 * kLanes, activate(acc[b], Activation(activation)) * acc[b + 1]);
        return;
      }
      for (int b = 0; b < n; ++b) {
        const int64_t output = (block + b) * kLanes;
        store(to + r * width + output, acc[b], outputs - output);
      }
    });
  });
  return y;
}

Tensor prepacked_linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, int64_t outputs,
    int64_t activation) {
  const bool half = x.scalar_type() == at::kBFloat16;
  switch (weight.scalar_type()) {
    case at::kChar:
      return half ? linear<int8_t, bf16>(x, weight, scale, bias, outputs, activation)
                  : linear<int8_t, float>(x, weight, scale, bias, outputs, activation);
    case at::kBFloat16: return linear<bf16, bf16>(x, weight, scale, bias, outputs, activation);
    default: return linear<float, float>(x, weight, scale, bias, outputs, activation);
  }
}

template <class T>
Tensor norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const int64_t size = weight.numel(), rows = x.numel() / std::max<int64_t>(1, size);
  TORCH_CHECK(x.size(-1) == size && size % kLanes == 0, "expected rows of ", size, " channels, a multiple of 16");
  Tensor y = at::empty(x.sizes(), x.options());
  const T* from = data<T>(x);
  const float* factors = data<float>(weight);
  T* to = data<T>(y);
  team(rows * size >= kWorthATeam, [&](int thread, int threads) {
    std::vector<float> wide(size);
    const Range mine = share(rows, 1, thread, threads);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      for (int64_t i = 0; i < size; i += kLanes) store(wide.data() + i, load(from + r * size + i));
      rms_norm(wide.data(), factors, float(epsilon), size, to + r * size);
    }
  });
  return y;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double epsilon) {
  return x.scalar_type() == at::kBFloat16 ? norm<bf16>(x, weight, epsilon) : norm<float>(x, weight, epsilon);
}

int64_t most_chunks(const Visible& visible) {
  int64_t most = 1;
  for (const auto& row : visible.rows) most = std::max(most, (row.keys - row.first + kChunk - 1) / kChunk);
  return most;
}
int64_t partials_size(int64_t rows, int64_t kv_heads, int64_t chunks, int64_t size) {
  return attention_is_split(rows, at::get_num_threads()) ? rows * kv_heads * chunks * size : 0;
}

// The tensors that describe a packed forward, checked once.
struct Batch {
  const int64_t *samples, *positions, *words, *tree_positions;
  int64_t batch, rows, word_count;

  Batch(
      const Tensor& samples_, const Tensor& positions_, const OptionalTensor& words_, const OptionalTensor& tree_, int64_t t)
      : samples(integers(samples_)), positions(integers(positions_)), words(integers(words_)),
        tree_positions(integers(tree_)), batch(samples_.size(1)), rows(t), word_count(words_ ? words_->size(1) : 0) {
    TORCH_CHECK(samples_.dim() == 2 && samples_.size(0) == 4, "expected samples of shape [4, B]");
    int64_t counted = 0, region = 0;
    for (int64_t b = 0; b < batch; ++b) {
      counted += samples[b];
      region += samples[3 * batch + b];
      TORCH_CHECK(samples[b] <= samples[3 * batch + b], "a sample has more rows than uncommitted keys");
      TORCH_CHECK(!words || word_count * 64 >= samples[3 * batch + b], "too few ancestor words");
    }
    TORCH_CHECK(counted == rows && positions_.numel() == rows, "the batch describes ", counted, " rows, got ", rows);
    TORCH_CHECK(!words || words_->size(0) == rows, "expected one row of ancestor words per packed row");
    TORCH_CHECK(!tree_positions || tree_->numel() == region, "expected a position for each of ", region, " keys");
  }
  Visible visible(int64_t window) const {
    TORCH_CHECK(window <= 0 || tree_positions, "a sliding window needs the positions of the uncommitted keys");
    Visible found(samples, batch, positions, words, word_count, tree_positions, window);
    for (const auto& row : found.rows) TORCH_CHECK(row.first < row.keys, "a row sees no key, not even its own");
    return found;
  }
  void check_pool(int64_t pool) const {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t first = samples[batch + b], keys = samples[2 * batch + b] + samples[3 * batch + b];
      TORCH_CHECK(first >= 0 && first + keys <= pool, "sample ", b, " lies outside the pool of ", pool, " rows");
    }
  }
};

template <class T>
Tensor attention(
    const Tensor& query, const Tensor& keys, const Tensor& values, const Batch& batch, double scale, int64_t window,
    double softcap, const OptionalTensor& sinks) {
  const int64_t heads = query.size(1), dim = query.size(2), kv_heads = keys.size(1), value_dim = values.size(2);
  TORCH_CHECK(keys.size(2) == dim && heads % kv_heads == 0 && values.size(1) == kv_heads, "shapes do not fit");
  TORCH_CHECK(dim % kLanes == 0 && value_dim % kLanes == 0, "head sizes must be multiples of 16");
  TORCH_CHECK(!sinks || sinks->numel() == heads, "expected one sink per query head");
  batch.check_pool(keys.size(0));
  const Attention<T> a{data<T>(keys), data<T>(values), kv_heads,       heads / kv_heads, dim,
                       value_dim,     float(scale),    float(softcap), floats(sinks)};
  const Visible visible = batch.visible(window);
  const int64_t chunks = most_chunks(visible);
  Tensor out = at::empty({batch.rows, heads, value_dim}, query.options());
  Arena arena;
  float* partials;
  arena.reserve(partials, partials_size(batch.rows, kv_heads, chunks, a.partial_size()));
  arena.allocate();
  const T* queries = data<T>(query);
  T* to = data<T>(out);
  team(batch.rows * heads * dim * chunks * kChunk >= kWorthATeam, [&](int thread, int threads) {
    attend(a, visible, queries, to, partials, chunks, thread, threads);
  });
  return out;
}

Tensor ragged_tree_attention(
    const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& samples, const Tensor& positions,
    const OptionalTensor& words, const OptionalTensor& tree_positions, double scale, int64_t window, double softcap,
    const OptionalTensor& sinks) {
  const Batch batch(samples, positions, words, tree_positions, query.size(0));
  return query.scalar_type() == at::kBFloat16
             ? attention<bf16>(query, keys, values, batch, scale, window, softcap, sinks)
             : attention<float>(query, keys, values, batch, scale, window, softcap, sinks);
}

constexpr int64_t kParameters = 19, kIntegers = 7, kScalars = 3;

template <class W, class T>
std::tuple<Tensor, Tensor> layers_of(
    const Tensor& hidden, c10::List<OptionalTensor> parameters, at::IntArrayRef ints, at::ArrayRef<double> scalars,
    at::TensorList keys, at::TensorList values, const Tensor& cosine, const Tensor& sine, const Batch& batch,
    const Tensor& slots, at::IntArrayRef taps) {
  using X = std::conditional_t<kDotBf16 && std::is_same_v<T, bf16>, bf16, float>;
  const int64_t size = hidden.size(-1), rows = batch.rows, count = int64_t(keys.size()), rotary = cosine.size(-1);
  TORCH_CHECK(size % kLanes == 0, "the hidden size must be a multiple of 16");
  TORCH_CHECK(
      int64_t(parameters.size()) == count * kParameters && int64_t(ints.size()) == count * kIntegers &&
          int64_t(scalars.size()) == count * kScalars && int64_t(values.size()) == count,
      "expected parameters of ", count, " layers");
  TORCH_CHECK(slots.numel() == rows && cosine.numel() == rows * rotary && sine.numel() == rows * rotary, "rows differ");

  std::vector<Layer<W, X, T>> layers;
  layers.reserve(count);
  std::vector<std::pair<int64_t, Visible>> views;  // by window
  views.reserve(count);
  int64_t chunks = 1, widest = 0, heads = 0, inner = 0, partials = 0;
  const int64_t* slot = integers(slots);
  for (int64_t n = 0; n < count; ++n) {
    const auto tensor = [&](int64_t i) -> OptionalTensor { return parameters.get(n * kParameters + i); };
    const auto norm_weight = [&](int64_t i, int64_t length) {
      const OptionalTensor found = tensor(i);
      TORCH_CHECK(!found || found->numel() == length, "a norm has the wrong size");
      return floats(found);
    };
    const int64_t *integer = ints.data() + n * kIntegers, window = integer[5];
    const double* scalar = scalars.data() + n * kScalars;
    const int64_t query_heads = integer[0], kv_heads = integer[1], dim = integer[2], width = integer[3];
    TORCH_CHECK(dim % kLanes == 0 && width % kLanes == 0 && rotary <= dim && rotary % 2 == 0, "sizes must be multiples of 16");
    TORCH_CHECK(query_heads % kv_heads == 0, "query heads must be a multiple of key heads");
    const auto matrix = [&](int64_t i, int64_t outputs, int64_t inputs) {
      const OptionalTensor weight = tensor(i);
      TORCH_CHECK(weight, "a matrix is missing");
      const Prepacked<W> m = prepacked<W>(*weight, tensor(i + 1), tensor(i + 2), outputs);
      TORCH_CHECK(m.inputs == inputs, "a matrix has ", m.inputs, " inputs instead of ", inputs);
      return m;
    };
    for (const Tensor& pool : {keys[n], values[n]}) {
      TORCH_CHECK(pool.dim() == 3 && pool.size(1) == kv_heads && pool.size(2) == dim, "a pool has the wrong shape");
      batch.check_pool(pool.size(0));
      for (int64_t r = 0; r < rows; ++r) TORCH_CHECK(slot[r] >= 0 && slot[r] < pool.size(0), "a slot lies outside its pool");
    }
    auto view = std::find_if(views.begin(), views.end(), [&](const auto& v) { return v.first == window; });
    if (view == views.end()) {
      views.emplace_back(window, batch.visible(window));
      view = views.end() - 1;
      chunks = std::max(chunks, most_chunks(view->second));
    }
    Layer<W, X, T> layer{
        norm_weight(0, size), norm_weight(4, dim), norm_weight(5, dim), floats(tensor(6)), norm_weight(10, size),
        norm_weight(11, size), norm_weight(18, size),
        matrix(1, (query_heads + 2 * kv_heads) * dim, size), matrix(7, size, query_heads * dim),
        matrix(12, 2 * width, size), matrix(15, size, width),
        query_heads, kv_heads, dim, width, window, Activation(integer[4]), integer[6] != 0,
        float(scalar[0]), float(scalar[1]), float(scalar[2]), data<T>(keys[n]), data<T>(values[n]), &view->second};
    layers.push_back(layer);
    widest = std::max(widest, (query_heads + 2 * kv_heads) * dim);
    heads = std::max(heads, query_heads * dim);
    inner = std::max(inner, width);
    partials = std::max(partials, partials_size(rows, kv_heads, 1, query_heads / kv_heads * (dim + 2)));
  }

  Arena arena;
  Workspace<X, T> space;
  float *x, *cosines, *sines;
  arena.reserve(x, rows * size);
  arena.reserve(cosines, rows * rotary);
  arena.reserve(sines, rows * rotary);
  arena.reserve(space.normed, rows * size);
  arena.reserve(space.attended, rows * heads);
  arena.reserve(space.gated, rows * inner);
  arena.reserve(space.queries, rows * heads);
  arena.reserve(space.qkv, rows * widest);
  arena.reserve(space.sums, rows * size);
  arena.reserve(space.partials, partials * chunks);
  arena.allocate();
  const auto widen_all = [](const Tensor& from, float* to) {
    const auto copy = [&](const auto* source) {
      for (int64_t i = 0; i < from.numel(); i += kLanes) store(to + i, load(source + i, from.numel() - i), from.numel() - i);
    };
    // Some models keep their rotation in float.
    from.scalar_type() == at::kFloat ? copy(data<float>(from)) : copy(data<T>(from));
  };
  widen_all(hidden, x);
  widen_all(cosine, cosines);
  widen_all(sine, sines);
  Tensor tapped = at::empty({int64_t(taps.size()), rows, size}, hidden.options());
  std::vector<std::pair<int64_t, T*>> copies;
  for (size_t i = 0; i < taps.size(); ++i) {
    TORCH_CHECK(0 <= taps[i] && taps[i] < count, "there is no layer ", taps[i], " to tap in a run of ", count);
    copies.emplace_back(taps[i], data<T>(tapped) + int64_t(i) * rows * size);
  }
  team(true, [&](int thread, int threads) {
    run_layers(x, rows, size, layers, space, cosines, sines, rotary, slot, chunks, copies, thread, threads);
  });
  Tensor out = at::empty(hidden.sizes(), hidden.options());
  T* to = data<T>(out);
  for (int64_t i = 0; i < rows * size; i += kLanes) store(to + i, load(x + i));
  return {out, tapped};
}

std::tuple<Tensor, Tensor> decoder_layers(
    const Tensor& hidden, c10::List<OptionalTensor> parameters, at::IntArrayRef ints, at::ArrayRef<double> scalars,
    at::TensorList keys, at::TensorList values, const Tensor& cosine, const Tensor& sine, const Tensor& samples,
    const Tensor& positions, const Tensor& slots, const OptionalTensor& words, const OptionalTensor& tree_positions,
    at::IntArrayRef taps) {
  const Batch batch(samples, positions, words, tree_positions, hidden.numel() / hidden.size(-1));
  TORCH_CHECK(!keys.empty() && parameters.size() > 1, "no layers");
  const bool half = hidden.scalar_type() == at::kBFloat16;
  switch (OptionalTensor(parameters.get(1))->scalar_type()) {
    case at::kChar:
      return half ? layers_of<int8_t, bf16>(hidden, parameters, ints, scalars, keys, values, cosine, sine, batch, slots, taps)
                  : layers_of<int8_t, float>(hidden, parameters, ints, scalars, keys, values, cosine, sine, batch, slots, taps);
    case at::kBFloat16:
      return layers_of<bf16, bf16>(hidden, parameters, ints, scalars, keys, values, cosine, sine, batch, slots, taps);
    default: return layers_of<float, float>(hidden, parameters, ints, scalars, keys, values, cosine, sine, batch, slots, taps);
  }
}

template <class T>
void row_maxima(const Tensor& x, Tensor& values, Tensor& tokens) {
  const int64_t rows = x.size(0), size = x.size(1);
  const T* from = data<T>(x);
  float* value = data<float>(values);
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  team(rows * size >= kWorthATeam, [&](int thread, int threads) {
    for (int64_t r = thread; r < rows; r += threads) row_maximum(from + r * size, size, value[r], token[r]);
  });
}

std::tuple<Tensor, Tensor> row_max(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "expected rows of logits");
  Tensor values = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  Tensor tokens = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  x.scalar_type() == at::kBFloat16 ? row_maxima<bf16>(x, values, tokens) : row_maxima<float>(x, values, tokens);
  return {values, tokens};
}

NoiseKey noise_key(const Tensor& seeds, const Tensor& positions, int64_t row) {
  const uint64_t seed = uint64_t(integers(seeds)[row]);
  return {uint32_t(seed), uint32_t(seed >> 32), uint32_t(integers(positions)[row])};
}

Tensor gumbel(const Tensor& seeds, const Tensor& positions, int64_t vocabulary) {
  const int64_t rows = seeds.numel();
  TORCH_CHECK(positions.numel() == rows && vocabulary > 0, "expected a seed and a position for every row");
  Tensor out = at::empty({rows, vocabulary}, seeds.options().dtype(at::kDouble));
  double* to = out.mutable_data_ptr<double>();
  team(rows * vocabulary >= kWorthATeam / 4, [&](int thread, int threads) {
    const Range range = share(vocabulary, kGroup, thread, threads);
    for (int64_t r = 0; r < rows; ++r) gumbel_row(noise_key(seeds, positions, r), range, vocabulary, to + r * vocabulary);
  });
  return out;
}

Tensor gumbel_argmax(const Tensor& scores, const Tensor& seeds, const Tensor& positions, double temperature) {
  TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, "expected rows of scores");
  const int64_t rows = scores.size(0), size = scores.size(1);
  TORCH_CHECK(seeds.numel() == rows && positions.numel() == rows, "expected a seed and a position for every row");
  TORCH_CHECK(temperature > 0, "the temperature must be positive, got ", temperature);
  Tensor tokens = at::empty({rows}, scores.options().dtype(at::kLong));
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  const int most = at::get_num_threads();
  std::vector<std::pair<double, int64_t>> found(rows * most, {-std::numeric_limits<double>::infinity(), -1});
  const auto search = [&](const auto* from) {
    team(rows * size >= kWorthATeam / 4, [&](int thread, int threads) {
      const Range range = share(size, kGroup, thread, threads);
      for (int64_t r = 0; r < rows; ++r) {
        auto& [best, place] = found[r * most + thread];
        gumbel_maximum(
            from + r * size, float(temperature), noise_key(seeds, positions, r), {range.begin, range.end}, size, best, place);
      }
    });
  };
  scores.scalar_type() == at::kBFloat16 ? search(data<bf16>(scores)) : search(data<float>(scores));
  for (int64_t r = 0; r < rows; ++r) {
    std::pair<double, int64_t> best = found[r * most];  // shares are in the order of tokens: the first one wins
    for (int64_t t = 1; t < most; ++t)
      if (found[r * most + t].first > best.first) best = found[r * most + t];
    token[r] = best.second;
  }
  return tokens;
}

std::string isa() { return kIsa; }

// For a process that was forked before it loaded this library.
void work_alone() { forked() = true; }

}  // namespace

TORCH_LIBRARY(arbordraft, m) {
  forked();  // notices forks from now on
  m.def("isa() -> str", &isa);
  m.def("work_alone() -> ()", &work_alone);
  m.def("prepacked_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int outputs, int activation) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("ragged_tree_attention(Tensor query, Tensor keys, Tensor values, Tensor samples, Tensor positions, "
        "Tensor? words, Tensor? tree_positions, float scale, int window, float softcap, Tensor? sinks) -> Tensor");
  m.def("decoder_layers(Tensor hidden, Tensor?[] parameters, int[] ints, float[] scalars, Tensor(a!)[] keys, "
        "Tensor(b!)[] values, Tensor cosine, Tensor sine, Tensor samples, Tensor positions, Tensor slots, "
        "Tensor? words, Tensor? tree_positions, int[] taps) -> (Tensor, Tensor)");
  m.def("row_max(Tensor x) -> (Tensor, Tensor)");
  m.def("gumbel(Tensor seeds, Tensor positions, int vocabulary) -> Tensor");
  m.def("gumbel_argmax(Tensor scores, Tensor seeds, Tensor positions, float temperature) -> Tensor");
}

TORCH_LIBRARY_IMPL(arbordraft, CPU, m) {
  m.impl("prepacked_linear", &prepacked_linear);
  m.impl("rms_norm", &rms_norm_op);
  m.impl("ragged_tree_attention", &ragged_tree_attention);
  m.impl("decoder_layers", &decoder_layers);
  m.impl("row_max", &row_max);
  m.impl("gumbel", &gumbel);
  m.impl("gumbel_argmax", &gumbel_argmax);
}

}  // namespace arbordraft
