// The CPU kernels as PyTorch operators.
#include "../gumbel/cpu.h"
#include "../next_tokens/cpu.h"
#include "../prepacked_linear/packing.h"
#include "../verify/cpu.h"
#include "drafts.h"
#include "recurrent.h"
#include "stack.h"
#include "tensors.h"

namespace arbordraft {
namespace {

template <class W, class T>
Tensor linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, int64_t outputs,
    int64_t activation) {
  using X = Operand<W, T>;
  const Prepacked<W> m = prepacked<W>(weight, scale, bias, outputs);
  const int64_t size = x.size(-1), rows = x.numel() / std::max<int64_t>(1, size);
  const int64_t padding = weight.dim() == 1 ? kGroupSize - 1 : weight.dim() == 4 ? 1 : 0;
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
    multiply(m, from, rows, blocks, [&](int64_t r, int64_t block, const f32x16* acc, int n) {
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
  return with_all_types(weight, x, [&](auto w, auto row) {
    return linear<decltype(w), decltype(row)>(x, weight, scale, bias, outputs, activation);
  });
}

// The inputs of rows of these bytes.
int64_t inputs_of(int64_t kind, int64_t bytes) {
  int64_t inputs = -1;
  const bool known = with_kind(kind, [&](auto type) {
    using F = decltype(type);
    const int64_t unit = kFloats<F> ? F::kBits / 8 : F::kRaw;
    TORCH_CHECK((bytes - F::kRow) % unit == 0, "rows of ", bytes, " bytes are no whole blocks of ", int(F::kRaw), " bytes");
    inputs = (bytes - F::kRow) / unit * (kFloats<F> ? 1 : kGroupSize * F::kGroups);
  });
  TORCH_CHECK(known, "there is no kind of blocks with number ", kind);
  return inputs;
}

// The rows that a packed matrix takes from several, by their places in these one after the other; -1 for padding. All have
// the same number of inputs.
struct Taken {
  std::vector<Row> rows;
  int64_t inputs = -1;

  Taken(at::TensorList raws, at::IntArrayRef kinds, const Tensor& places) {
    TORCH_CHECK(raws.size() == kinds.size() && places.numel() % kLanes == 0, "expected a kind of each matrix, and whole panels");
    std::vector<Row> all;
    for (size_t n = 0; n < raws.size(); ++n) {
      TORCH_CHECK(raws[n].dim() == 2, "expected rows of blocks");
      const int64_t bytes = raws[n].size(1), found = inputs_of(kinds[n], bytes);
      TORCH_CHECK(inputs < 0 || inputs == found, "the rows of a packed matrix must have the same number of inputs");
      inputs = found;
      const uint8_t* from = data<uint8_t>(raws[n]);
      for (int64_t r = 0; r < raws[n].size(0); ++r) all.push_back({from + r * bytes, kinds[n]});
    }
    const int64_t* place = integers(places);
    for (int64_t i = 0; i < places.numel(); ++i) rows.push_back(place[i] < 0 ? Row{nullptr, -1} : all.at(place[i]));
  }
  int64_t panels() const { return int64_t(rows.size()) / kLanes; }

  // Runs work(panel, its rows) for all panels.
  template <class What>
  void each_panel(const What& work) const {
    team(inputs * int64_t(rows.size()) >= kWorthATeam, [&](int thread, int threads) {
      const Range mine = share(panels(), 1, thread, threads);
      for (int64_t panel = mine.begin; panel < mine.end; ++panel) work(panel, rows.data() + panel * kLanes);
    });
  }
};

// See pack_blocks in prepacked_linear/__init__.py; kind: that to which rows are rounded, or -1 to keep theirs.
void pack_blocks(at::TensorList raws, at::IntArrayRef kinds, const Tensor& places, int64_t kind, const Tensor& packed) {
  const Taken taken(raws, kinds, places);
  const int64_t panels = taken.panels(), header = (8 * (kHeader + panels + 1) + 63) / 64 * 64;
  const int64_t groups = groups_of(taken.inputs);
  TORCH_CHECK(kind < 0 ? taken.inputs % kGroupSize == 0 : kind == Int4::kNumber || kind == Q8_0::kNumber, "blocks of kind ", kind, " are not made here");
  std::vector<int64_t> table;
  int64_t end = header;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const Row* row = taken.rows.data() + panel * kLanes;
    const int64_t own = kind < 0 ? row[0].kind : kind;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      TORCH_CHECK(kind >= 0 || !row[lane].at || row[lane].kind == own, "the 16 rows of a panel must be blocks of one kind");
    table.push_back(end + own);
    TORCH_CHECK(
        with_kind(own, [&](auto type) { end += panel_bytes<decltype(type)>(groups); }), "there is no kind of blocks with number ", own);
  }
  table.push_back(end);
  uint8_t* to = data<uint8_t>(packed);
  TORCH_CHECK(packed.numel() == end, "the packed matrix takes ", end, " bytes, got ", packed.numel());
  std::memset(to, 0, header);
  const int64_t about[kHeader] = {kLayout, panels, groups, end};
  std::memcpy(to, about, sizeof about);
  std::memcpy(to + sizeof about, table.data(), table.size() * sizeof(int64_t));
  std::atomic<bool> sound = true;
  taken.each_panel([&](int64_t panel, const Row* row) {
    uint8_t* own = to + table[panel] / 64 * 64;
    with_kind(table[panel] % 64, [&](auto type) {
      using F = decltype(type);
      if constexpr (kRounded<F>)
        if (kind >= 0) {
          if (!round_panel<F>(row, taken.inputs, own)) sound = false;
          return;
        }
      const uint8_t* from[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) from[lane] = row[lane].at;
      lay_panel<F>(from, groups, own);
    });
  });
  TORCH_CHECK_VALUE(sound, "weights that are infinite, NaN or too large cannot be kept in groups of ", kind == Int4::kNumber ? 4 : 8, " bits");
}

template <class W>
void lay_all(const Taken& taken, const Tensor& packed, const OptionalTensor& scale) {
  constexpr int64_t kPair = std::is_same_v<W, float> ? 1 : 2;
  constexpr bool kScaled = std::is_same_v<W, int8_t>;
  W* to = data<W>(packed);
  float* scales = scale ? data<float>(*scale) : nullptr;
  const int64_t size = (taken.inputs + kPair - 1) / kPair * kPair * kLanes;
  TORCH_CHECK(packed.numel() == taken.panels() * size, "the prepacked matrix has ", packed.numel(), " numbers instead of ", taken.panels() * size);
  TORCH_CHECK(bool(scale) == kScaled, "numbers of 8 bits have scales, others have none");
  TORCH_CHECK(!scale || scale->numel() == int64_t(taken.rows.size()), "expected a scale of each row, padding included");
  taken.each_panel([&](int64_t panel, const Row* row) {
    lay_numbers(row, taken.inputs, scales ? scales + panel * kLanes : nullptr, to + panel * size);
  });
}

// See pack_numbers in prepacked_linear/__init__.py.
void pack_numbers(
    at::TensorList raws, at::IntArrayRef kinds, const Tensor& places, const Tensor& packed, const OptionalTensor& scale) {
  const Taken taken(raws, kinds, places);
  switch (packed.scalar_type()) {
    case at::kChar: return lay_all<int8_t>(taken, packed, scale);
    case at::kBFloat16: return lay_all<bf16>(taken, packed, scale);
    default: return lay_all<float>(taken, packed, scale);
  }
}

// Writes the weights of rows of blocks as float32 or bfloat16.
void dequantize_blocks(const Tensor& raw, int64_t kind, const Tensor& numbers) {
  TORCH_CHECK(raw.dim() == 2 && numbers.dim() == 2, "expected rows of blocks and of numbers");
  const int64_t rows = raw.size(0), bytes = raw.size(1), inputs = inputs_of(kind, bytes);
  TORCH_CHECK(numbers.size(0) == rows && numbers.size(1) == inputs, "blocks of ", rows, " x ", inputs, " numbers, got ", numbers.sizes());
  const uint8_t* from = data<uint8_t>(raw);
  const bool half = numbers.scalar_type() == at::kBFloat16;
  float* wide = half ? nullptr : data<float>(numbers);
  bf16* narrowed = half ? data<bf16>(numbers) : nullptr;
  with_kind(kind, [&](auto type) {
    team(rows * bytes >= kWorthATeam, [&](int thread, int threads) {
      const Range mine = share(rows, 1, thread, threads);
      std::vector<float> row(half ? inputs : 0);
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        float* to = half ? row.data() : wide + r * inputs;
        dequantize_row<decltype(type)>(from + r * bytes, inputs, to);
        for (int64_t i = 0; half && i < inputs; ++i) narrowed[r * inputs + i] = narrow(row[i]);
      }
    });
  });
}

template <class T>
Tensor norm_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& offset, double epsilon) {
  const int64_t size = weight.numel(), rows = x.numel() / std::max<int64_t>(1, size);
  TORCH_CHECK(x.size(-1) == size && size % kLanes == 0, "expected rows of ", size, " channels, a multiple of 16");
  Tensor y = at::empty(x.sizes(), x.options());
  const T* from = data<T>(x);
  TORCH_CHECK(!offset || offset->numel() == size, "expected an offset for each of ", size, " channels");
  const Norm norm{data<float>(weight), floats(offset)};
  T* to = data<T>(y);
  team(rows * size >= kWorthATeam, [&](int thread, int threads) {
    std::vector<float> wide(size);
    const Range mine = share(rows, 1, thread, threads);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      for (int64_t i = 0; i < size; i += kLanes) store(wide.data() + i, load(from + r * size + i));
      norm_row(wide.data(), norm, float(epsilon), size, to + r * size);
    }
  });
  return y;
}

Tensor norm(const Tensor& x, const Tensor& weight, const OptionalTensor& offset, double epsilon) {
  return x.scalar_type() == at::kBFloat16 ? norm_rows<bf16>(x, weight, offset, epsilon)
                                          : norm_rows<float>(x, weight, offset, epsilon);
}

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
    const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& layout, const OptionalTensor& region,
    const Tensor& positions, const OptionalTensor& words, double scale, int64_t window, double softcap,
    const OptionalTensor& sinks, int64_t, int64_t, bool, const OptionalTensor&) {  // the last four concern GPUs alone
  const Batch batch(layout, region, positions, words, query.size(0));
  const OptionalTensor wide = sinks ? OptionalTensor(sinks->to(at::kFloat).contiguous()) : sinks;
  return query.scalar_type() == at::kBFloat16 ? attention<bf16>(query, keys, values, batch, scale, window, softcap, wide)
                                              : attention<float>(query, keys, values, batch, scale, window, softcap, wide);
}

template <class W, class T>
std::tuple<Tensor, Tensor> layers_of(
    const Tensor& hidden, const StackTensors& given, const Tensor& cosine, const Tensor& sine, const Batch& batch,
    const Tensor& slots, at::IntArrayRef taps, const OptionalTensor& beside, const LineageTensors& lineage) {
  const int64_t size = hidden.size(-1), rows = batch.rows, count = int64_t(given.keys.size()), rotary = cosine.size(-1);
  const int64_t extra = beside ? beside->size(-1) : 0;
  TORCH_CHECK(slots.numel() == rows && cosine.numel() == rows * rotary && sine.numel() == rows * rotary, "rows differ");
  TORCH_CHECK(!beside || beside->numel() == rows * extra, "expected something beside each of ", rows, " rows");
  Stack<W, T> stack(given, size, extra, rotary, 1);
  if (stack.pool() >= 0) {
    batch.check_pool(stack.pool());
    stack.check_slots(integers(slots), rows);
  }
  stack.follow(lineage, rows);
  std::vector<std::pair<int64_t, Visible>> views;  // one per window
  views.reserve(count);
  stack.look([&](int64_t window) -> const Visible& {
    auto view = std::find_if(views.begin(), views.end(), [&](const auto& v) { return v.first == window; });
    if (view != views.end()) return view->second;
    return views.emplace_back(window, batch.visible(window)).second;
  });

  Arena arena;
  float *x, *cosines, *sines, *others = nullptr;
  arena.reserve(x, rows * size);
  arena.reserve(cosines, rows * rotary);
  arena.reserve(sines, rows * rotary);
  arena.reserve(others, rows * extra);
  arena.allocate();
  widen_rows(data<T>(hidden), rows * size, x);
  if (beside) widen_rows(data<T>(*beside), rows * extra, others);
  for (const auto& [from, to] : {std::pair(&cosine, cosines), std::pair(&sine, sines)})  // these may be in float
    from->scalar_type() == at::kFloat ? widen_rows(data<float>(*from), rows * rotary, to)
                                      : widen_rows(data<T>(*from), rows * rotary, to);
  Tensor tapped = at::empty({int64_t(taps.size()), rows, size}, hidden.options());
  std::vector<std::pair<int64_t, T*>> copies;
  for (size_t i = 0; i < taps.size(); ++i) {
    TORCH_CHECK(0 <= taps[i] && taps[i] < count, "there is no layer ", taps[i], " to tap in a run of ", count);
    copies.emplace_back(taps[i], data<T>(tapped) + int64_t(i) * rows * size);
  }
  stack.run(x, others, rows, cosines, sines, integers(slots), copies);
  Tensor out = at::empty(hidden.sizes(), hidden.options());
  T* to = data<T>(out);
  for (int64_t i = 0; i < rows * size; i += kLanes) store(to + i, load(x + i));
  return {out, tapped};
}

std::tuple<Tensor, Tensor> decoder_layers(
    const Tensor& hidden, c10::List<OptionalTensor> parameters, at::IntArrayRef ints, at::ArrayRef<double> scalars,
    at::TensorList keys, at::TensorList values, const Tensor& cosine, const Tensor& sine, const Tensor& layout,
    const OptionalTensor& region, const Tensor& positions, const OptionalTensor& words, const Tensor& slots, at::IntArrayRef taps,
    const OptionalTensor& beside, at::TensorList paths, at::TensorList kept, int64_t scratch) {
  const Batch batch(layout, region, positions, words, hidden.numel() / hidden.size(-1));
  TORCH_CHECK(!keys.empty() && parameters.size() > kGateUp, "no layers");
  const OptionalTensor qkv = parameters.get(kQkv), gate_up = parameters.get(kGateUp);
  TORCH_CHECK(qkv || gate_up, "the first layer has neither a mixer nor an MLP");
  const StackTensors given{parameters, ints, scalars, keys, values};
  return with_all_types(qkv ? *qkv : *gate_up, hidden, [&](auto weight, auto row) {
    return layers_of<decltype(weight), decltype(row)>(hidden, given, cosine, sine, batch, slots, taps, beside, {paths, kept, scratch});
  });
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

std::tuple<Tensor, Tensor> row_max(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "expected rows of logits");
  const Tensor x = logits.contiguous();
  Tensor values = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  Tensor tokens = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  x.scalar_type() == at::kBFloat16 ? row_maxima<bf16>(x, values, tokens) : row_maxima<float>(x, values, tokens);
  return {values, tokens};
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

Tensor gumbel_argmax(
    const Tensor& scores, const Tensor& seeds, const Tensor& positions, double temperature, const OptionalTensor& lowest) {
  TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, "expected rows of scores");
  const int64_t rows = scores.size(0), size = scores.size(1);
  TORCH_CHECK(seeds.numel() == rows && positions.numel() == rows, "expected a seed and a position for every row");
  TORCH_CHECK(!lowest || lowest->numel() == rows, "expected a lowest score for every row");
  const float* least = floats(lowest);
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
            from + r * size, float(temperature), noise_key(seeds, positions, r), {range.begin, range.end}, size, best, place,
            least ? least[r] : -std::numeric_limits<float>::infinity());
      }
    });
  };
  scores.scalar_type() == at::kBFloat16 ? search(data<bf16>(scores)) : search(data<float>(scores));
  for (int64_t r = 0; r < rows; ++r) {
    std::pair<double, int64_t> best = found[r * most];  // shares are in the order of tokens, so the first one wins
    for (int64_t t = 1; t < most; ++t)
      if (found[r * most + t].first > best.first) best = found[r * most + t];
    token[r] = best.second;
  }
  return tokens;
}

// Draws the token after some rows of logits; see kernels/next_tokens. `kUndecided` marks rows that only the reference decides.
Tensor next_tokens(
    const Tensor& logits, at::IntArrayRef rows, at::IntArrayRef seeds, at::IntArrayRef positions,
    at::ArrayRef<double> temperatures, at::ArrayRef<double> kept, const Tensor& changes, at::IntArrayRef bounds) {
  const int64_t count = int64_t(rows.size()), size = logits.size(1);
  TORCH_CHECK(logits.dim() == 2 && size > 0, "expected rows of logits");
  TORCH_CHECK(
      seeds.size() == rows.size() && positions.size() == rows.size() && temperatures.size() == rows.size() &&
          kept.size() == 3 * rows.size() && bounds.size() == rows.size() + 1,
      "expected settings of every row");
  for (const int64_t row : rows) TORCH_CHECK(0 <= row && row < logits.size(0), "there is no row ", row);
  for (const double temperature : temperatures) TORCH_CHECK(temperature >= 0, "temperatures must not be negative");
  TORCH_CHECK(changes.numel() == 3 * bounds.back() && bounds[0] == 0, "changes need three numbers each");
  for (int64_t r = 0; r < count; ++r) TORCH_CHECK(bounds[r] <= bounds[r + 1], "bounds must ascend");
  const ScoreChange* change = reinterpret_cast<const ScoreChange*>(doubles(changes));
  Tensor tokens = at::empty({count}, logits.options().dtype(at::kLong));
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  const int most = at::get_num_threads();
  std::vector<RowPart> parts(count * most);
  std::vector<NextToken> row(count);
  Arena arena;
  float* scores;
  arena.reserve(scores, count * size);
  arena.allocate();
  const auto sums = [&](int64_t r, int threads) {
    RowPart all = parts[r * most];  // parts are in the order of tokens, so the first one wins
    for (int t = 1; t < threads; ++t) {
      const RowPart& part = parts[r * most + t];
      if (part.best > all.best) all.best = part.best, all.token = part.token;
      all.top = std::max(all.top, part.top);
      all.above += part.above, all.mass += part.mass, all.count += part.count;
    }
    return all;
  };
  const auto draw = [&](const auto* from) {
    team(count * size >= kWorthATeam / 4, [&](int thread, int threads) {
      const Range range = share(size, kGroup, thread, threads);
      for (int64_t r = 0; r < count; ++r) {
        const float temperature = float(temperatures[r]);
        const uint64_t seed = uint64_t(seeds[r]);
        const NextToken own{
            scores + r * size, size, temperature == 0, {uint32_t(seed), uint32_t(seed >> 32), uint32_t(positions[r])},
            {kept[3 * r], kept[3 * r + 1], kept[3 * r + 2]}};
        change_scores(
            from + rows[r] * size, range, change + bounds[r], bounds[r + 1] - bounds[r], own.greedy ? 1.f : temperature,
            scores + r * size);
        parts[r * most + thread] = draw_part(own, range);
        if (thread == 0) row[r] = own;
      }
      meet(threads);
      for (int64_t r = thread; r < count; r += threads) {
        const RowPart all = sums(r, threads);
        token[r] = row[r].token = all.token;
        row[r].top = all.top;
      }
      meet(threads);
      for (int64_t r = 0; r < count; ++r)
        if (row[r].truncated() && row[r].token >= 0) sum_part(row[r], range, parts[r * most + thread]);
      meet(threads);
      for (int64_t r = thread; r < count; r += threads) {
        if (!row[r].truncated() || row[r].token < 0) continue;
        const RowPart all = sums(r, threads);
        if (!surely_kept(row[r], all)) token[r] = draw_kept(row[r], all.mass);
      }
    });
  };
  logits.scalar_type() == at::kBFloat16 ? draw(data<bf16>(logits)) : draw(data<float>(logits));
  return tokens;
}

// Makes the moves, a source and a destination each, one after the other in every pool.
void move_rows(at::TensorList pools, at::IntArrayRef moves) {
  TORCH_CHECK(moves.size() % 2 == 0, "a move has a source and a destination");
  for (const Tensor& pool : pools) {
    TORCH_CHECK(pool.is_contiguous() && pool.is_cpu() && pool.dim() > 0, "expected contiguous pools on the CPU");
    for (int64_t row : moves) TORCH_CHECK(0 <= row && row < pool.size(0), "row ", row, " lies outside its pool");
    char* rows = static_cast<char*>(pool.data_ptr());
    const int64_t size = pool.stride(0) * pool.element_size();
    for (size_t i = 0; i < moves.size(); i += 2) std::memmove(rows + moves[i + 1] * size, rows + moves[i] * size, size);
  }
}

// Called in a process that was forked before it loaded this library.
void work_alone() { forked() = true; }

}  // namespace

// Python defines the operators that have arguments: kernels/dispatch.py.
TORCH_LIBRARY_FRAGMENT(arbordraft, m) {
  forked();  // notices forks from now on
  m.def("isa() -> str", []() { return std::string(isa()); });
  m.def("work_alone() -> ()", &work_alone);
}

TORCH_LIBRARY_IMPL(arbordraft, CPU, m) {
  m.impl("prepacked_linear", &prepacked_linear);
  m.impl("pack_blocks", &pack_blocks);
  m.impl("pack_numbers", &pack_numbers);
  m.impl("dequantize_blocks", &dequantize_blocks);
  m.impl("norm", &norm);
  m.impl("ragged_tree_attention", &ragged_tree_attention);
  m.impl("decoder_layers", &decoder_layers);
  m.impl("row_max", &row_max);
  m.impl("draft_tree", &draft_tree);
  m.impl("draft_from_rows", &draft_from_rows);
  m.impl("move_rows", &move_rows);
  m.impl("gumbel", &gumbel);
  m.impl("gumbel_argmax", &gumbel_argmax);
  m.impl("next_tokens", &next_tokens);
  m.impl("recurrent_gate", &recurrent_gate);
  m.impl("tree_convolution", &tree_convolution);
  m.impl("tree_scan", &tree_scan);
  m.impl("replay_layers", &replay_layers);
}

}  // namespace arbordraft
