// What the kernels compute, checked without PyTorch: test_emulated.py builds this for other processors and emulates them.
//
// The truth is scalar code in double precision, or in integers where these are exact. With `--fault` every result is
// altered before it is compared: all checks must then fail. Printed are numbers that builds can compare.
#include <cinttypes>
#include <cstdio>
#include <string>
#include <vector>

#include "decoder_layers/cpu.h"
#include "gumbel/cpu.h"
#include "verify/cpu.h"

using namespace arbordraft;

template <class T>
using Rows = std::vector<T>;

bool fault = false;
int checks = 0, failures = 0;

void expect(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  if (!fault) std::fprintf(stderr, "%s: failed: %s\n", kIsa, what.c_str());
}

template <class T>
void same(Rows<T> found, const Rows<T>& expected, const std::string& what) {
  if (fault) reinterpret_cast<uint8_t&>(found[found.size() / 2]) ^= 1;
  expect(
      found.size() == expected.size() && !std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)), what);
}

void near(Rows<float> found, const Rows<double>& exact, const Rows<double>& bound, const std::string& what) {
  if (fault) found[0] += 3 * bound[0] + 2e-6 * std::abs(exact[0]);
  bool good = found.size() == exact.size();
  for (size_t i = 0; good && i < exact.size(); ++i) good = std::abs(found[i] - exact[i]) <= bound[i];
  expect(good, what);
}

class Chance {
 public:
  explicit Chance(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return uint32_t(state_ >> 32);
  }
  int64_t below(int64_t n) { return bits() % n; }
  void to(float& x) { x = (float(bits() >> 8) - 0x1p23f) * 0x1p-23f; }
  void to(bf16& x) {
    float wide;
    to(wide);
    x = narrow(wide);
  }
  void to(int8_t& x) { x = int8_t(below(255) - 127); }
  void to(uint8_t& x) { x = uint8_t(bits()); }
  template <class T>
  Rows<T> some(int64_t count) {
    Rows<T> rows(count);
    for (T& x : rows) to(x);
    return rows;
  }

 private:
  uint64_t state_;
};

inline double wide(float x) { return x; }
inline double wide(bf16 x) { return widen(x); }
inline double wide(int8_t x) { return x; }

template <class T>
std::string name() {
  return std::is_same_v<T, float> ? "float" : std::is_same_v<T, bf16> ? "bf16" : std::is_same_v<T, int8_t> ? "int8" : "groups";
}

Rows<float> lanes_of(f32x16 x) {
  Rows<float> lanes(kLanes);
  store(lanes.data(), x);
  return lanes;
}

// Lanes

template <class Of>
Rows<float> each(const Of& of) {
  Rows<float> lanes(kLanes);
  for (int i = 0; i < kLanes; ++i) lanes[i] = of(i);
  return lanes;
}

void check_lanes() {
  Chance chance(1);
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const auto a = chance.some<float>(16), b = chance.some<float>(16), c = chance.some<float>(16);
  const f32x16 x = load(a.data()), y = load(b.data()), z = load(c.data()), ten = splat(10.f);
  same(lanes_of(x + y), each([&](int i) { return a[i] + b[i]; }), "+");
  same(lanes_of(x - y), each([&](int i) { return a[i] - b[i]; }), "-");
  same(lanes_of(x * y), each([&](int i) { return a[i] * b[i]; }), "*");
  same(lanes_of(x / y), each([&](int i) { return a[i] / b[i]; }), "/");
  same(lanes_of(max(x, y)), each([&](int i) { return std::max(a[i], b[i]); }), "max");
  same(lanes_of(min(x, y)), each([&](int i) { return std::min(a[i], b[i]); }), "min");
  same(lanes_of(round(x * ten)), each([&](int i) { return std::nearbyint(a[i] * 10.f); }), "round");
  const bool fused = lanes_of(fma(splat(1 + 0x1p-12f), splat(1 + 0x1p-12f), splat(-1.f)))[0] != 0x1p-11f;
  same(
      lanes_of(fma(x, y, z)), each([&](int i) { return fused ? std::fma(a[i], b[i], c[i]) : a[i] * b[i] + c[i]; }), "fma");
  for (float n : {-140.f, -127.f, -1.f, 0.f, 30.f, 127.f})
    same(lanes_of(times_power_of_two(x, splat(n))), each([&](int i) { return std::ldexp(a[i], int(n)); }), "power of two");
  double total = 0;
  for (float lane : a) total += lane;
  near({sum(x)}, {total}, {16 * 0x1p-23}, "sum");
  same<float>({largest(x)}, {*std::max_element(a.begin(), a.end())}, "largest");
  const auto many = chance.some<float>(256);
  f32x16 vectors[16];
  Rows<double> totals(16), bounds(16, 16 * 0x1p-23);
  for (int i = 0; i < 256; ++i) totals[i / 16] += many[i];
  for (int i = 0; i < 16; ++i) vectors[i] = load(many.data() + 16 * i);
  near(lanes_of(sums(vectors)), totals, bounds, "sums");
  for (int place = 0; place < 16; ++place) {
    auto sick = a;
    sick[place] = nan;
    expect((any_nan(load(sick.data())) && !any_nan(x)) != fault, "any_nan");
    const auto relu = lanes_of(activate(load(sick.data()), Activation::relu));
    expect(std::isnan(relu[place]) != fault && std::isnan(lanes_of(exp(load(sick.data())))[place]) != fault, "NaN comes through");
  }
  Rows<double> exact, bound;
  Rows<float> found;
  for (float from = -86; from < 88; from += 0.37f) {
    found.push_back(lanes_of(exp(splat(from)))[3]);
    exact.push_back(std::exp(double(from)));
    bound.push_back(2 * 0x1p-23 * exact.back());
  }
  near(found, exact, bound, "exp");
  same(lanes_of(exp(splat(-infinity))), Rows<float>(16, 0.f), "exp of the lowest");

  Rows<float> narrowed = {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 1 + 0x1p-8f + 0x1p-20f, -infinity, 3.3e38f, 0.f, -1.7f, 1e-30f};
  narrowed.resize(16, 2.25f);
  Rows<bf16> halves(16), expected(16);
  store(halves.data(), load(narrowed.data()));
  std::transform(narrowed.begin(), narrowed.end(), expected.begin(), [](float f) { return narrow(f); });
  same(halves, expected, "rounded to bf16");
  store(halves.data(), splat(nan));
  expect(std::isnan(widen(halves[5])) != fault, "NaN as bf16");

  const auto bytes = chance.some<int8_t>(32);
  const auto pairs = chance.some<bf16>(32);
  f32x16 even, odd;
  load_pairs(bytes.data(), even, odd);
  same(lanes_of(even), each([&](int i) { return bytes[2 * i]; }), "even bytes");
  same(lanes_of(odd), each([&](int i) { return bytes[2 * i + 1]; }), "odd bytes");
  load_pairs(pairs.data(), even, odd);
  same(lanes_of(even), each([&](int i) { return widen(pairs[2 * i]); }), "even bf16");
  same(lanes_of(odd), each([&](int i) { return widen(pairs[2 * i + 1]); }), "odd bf16");
  same(lanes_of(load(bytes.data())), each([&](int i) { return bytes[i]; }), "bytes");
  same(lanes_of(load(pairs.data() + 7)), each([&](int i) { return widen(pairs[7 + i]); }), "bf16");
#if defined(ARBORDRAFT_DOT_BF16)
  const auto others = chance.some<bf16>(32);
  const auto product = [&](auto p, int i) { return wide(p[i]) * widen(others[i]); };
  const auto pair_sums = [&](auto numbers, const char* what) {
    Rows<double> exact(16), bound(16);
    for (int i = 0; i < 32; ++i) {
      exact[i / 2] += product(numbers, i);
      bound[i / 2] += 0x1p-22 * std::abs(product(numbers, i));
    }
    near(lanes_of(dot(load_dot(numbers.data()), load_dot(others.data()), splat(0.f))), exact, bound, what);
  };
  pair_sums(pairs, "dot of bf16");
  pair_sums(bytes, "dot of bytes and bf16");
#endif
}

void check_halves() {
  Rows<float> found(1 << 16), expected(1 << 16);
  Rows<uint16_t> halves(1 << 16);
  for (int h = 0; h < 1 << 16; ++h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double size = exponent == 31 ? (mantissa ? 0 : INFINITY) : exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    halves[h] = uint16_t(exponent == 31 && mantissa ? 0 : h);
    expected[h] = float(halves[h] >> 15 ? -size : size);
  }
  for (int h = 0; h < 1 << 16; h += kLanes) store(found.data() + h, load_halves(halves.data() + h));
  same(found, expected, "halves");
}

template <int Bits>
void check_bytes() {
  Chance chance(2);
  for (int round = 0; round < 20; ++round) {
    auto codes = chance.some<uint8_t>(64);
    auto x = chance.some<int8_t>(4);
    if (round < 4) std::fill(codes.begin(), codes.end(), round % 2 ? 255 : 0), std::fill(x.begin(), x.end(), round / 2 ? 127 : -127);
    if (Bits == 4)
      for (auto& code : codes) code &= 15;
    Rows<float> expected(16);
    int32_t four;
    std::memcpy(&four, x.data(), 4);
    for (int i = 0; i < 64; ++i) expected[i / 4] += float((codes[i] - kOffset<Bits>) * x[i % 4]);
    for (float& lane : expected) lane += 1000;
    same(lanes_of(to_float(dot<Bits>(splat_integer(1000), load_bytes(codes.data()), four))), expected, "dot of bytes");
  }
}

// Linears

template <class W>
struct Weights {
  Rows<W> dense, packed;
  Rows<float> scale, bias;
  Prepacked<W> matrix;

  Weights(Chance& chance, int64_t outputs, int64_t inputs, bool small = false)
      : dense(chance.some<W>(outputs * inputs)), packed((outputs + 15) / 16 * 16 * inputs), bias(chance.some<float>(outputs)) {
    constexpr int64_t lanes = std::is_same_v<W, float> ? 1 : 2;
    for (int64_t o = 0; o < outputs; ++o)
      for (int64_t i = 0; i < inputs; ++i)
        packed[(o / 16 * inputs + i / lanes * lanes) * 16 + o % 16 * lanes + i % lanes] = dense[o * inputs + i];
    if (std::is_same_v<W, int8_t> || small) scale.resize(outputs, (std::is_same_v<W, int8_t> ? 1.f / 127 : 1.f) / std::sqrt(float(inputs)));
    matrix = {packed.data(), scale.empty() ? nullptr : scale.data(), bias.data(), outputs, inputs};
  }
};

template <>
struct Weights<Grouped> {
  Rows<uint8_t> codes;
  Rows<uint16_t> scales;
  Rows<float> bias;
  Prepacked<Grouped> matrix;

  Weights(Chance& chance, int64_t outputs, int64_t inputs, bool small = false, bool four = true)
      : codes(chance.some<uint8_t>((outputs + 15) / 16 * 16 * inputs / (four ? 2 : 1))), bias(chance.some<float>(outputs)) {
    const int64_t blocks = (outputs + 15) / 16, groups = inputs / kGroupSize;
    for (int64_t i = 0; i < blocks * groups * 16 * (four ? 2 : 1); ++i) {
      const bool minimum = four && i / 16 % 2;  // which is about as large as the codes' part, and of either sign
      scales.push_back(uint16_t((chance.bits() & 0x3ff) + ((small ? (minimum ? 9 : 6) : (minimum ? 13 : 10)) << 10) + (minimum ? 0x8000 : 0)));
    }
    if (!four)
      for (auto& half : scales) half -= uint16_t(4 << 10);
    matrix = {codes.data(), scales.data(), bias.data(), outputs, inputs, four};
  }
};

// What a share of the blocks for each of `threads` threads gives, for some rows.
template <class W, class X>
Rows<float> multiplied(const Prepacked<W>& m, const X* x, int64_t rows, int threads = 1) {
  Rows<float> y(rows * m.outputs);
  for (int thread = 0; thread < threads; ++thread)
    multiply(
        m, x, rows, share((m.outputs + 15) / 16, 2, thread, threads),
        [&](int64_t r, int64_t block, const f32x16* acc, int n) {
          for (int b = 0; b < n; ++b)
            store(y.data() + r * m.outputs + (block + b) * 16, acc[b], m.outputs - (block + b) * 16);
        });
  return y;
}

template <class W, class X>
void check_rows(const Prepacked<W>& m, const X* x, int64_t rows, int64_t each, const std::string& what) {
  const auto together = multiplied(m, x, rows);
  for (int64_t some = 1; some < rows; some += some < 9 ? 1 : 5) {
    const int64_t first = (some * 7) % (rows - some + 1);
    const Rows<float> part(together.begin() + first * m.outputs, together.begin() + (first + some) * m.outputs);
    same(multiplied(m, x + first * each, some, int(some % 3) + 1), part, what + ": rows " + std::to_string(some));
  }
}

template <class W, class X>
void check_linear(int64_t outputs, int64_t inputs, int64_t rows = 19) {
  Chance chance(uint64_t(outputs + inputs));
  const std::string what = "linear of " + name<W>() + " by " + name<X>();
  const Weights<W> weights(chance, outputs, inputs);
  const auto x = chance.some<X>(rows * inputs);
  Rows<double> exact, bound;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      double found = 0, size = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const double product = wide(x[r * inputs + i]) * wide(weights.dense[o * inputs + i]);
        found += product, size += std::abs(product);
      }
      const double scale = weights.scale.empty() ? 1. : weights.scale[o];
      exact.push_back(found * scale + weights.bias[o]);
      bound.push_back(0x1p-23 * double(inputs + 4) * (size * scale + std::abs(weights.bias[o])));
    }
  near(multiplied(weights.matrix, x.data(), rows), exact, bound, what);
  check_rows(weights.matrix, x.data(), rows, inputs, what);
}

float half(uint16_t bits) {
  const float size = std::ldexp(float(1024 + (bits & 1023)), int(bits >> 10 & 31) - 25);
  return bits >> 15 ? -size : size;
}

// The same bits as scalar code, hence on every processor.
void check_groups(bool four, int64_t outputs, int64_t inputs, int64_t rows = 19) {
  Chance chance(uint64_t(outputs + inputs + four));
  const Weights<Grouped> weights(chance, outputs, inputs, false, four);
  const int64_t groups = groups_of(inputs);
  const auto x = chance.some<float>(rows * inputs);
  Rows<Eighth> eighths(rows * groups);
  Rows<float> expected(rows * outputs);
  for (int64_t r = 0; r < rows; ++r) {
    to_eighths(x.data() + r * inputs, inputs, eighths.data() + r * groups);
    for (int64_t o = 0; o < outputs; ++o) {
      float& y = expected[r * outputs + o];
      for (int64_t g = 0; g < groups; ++g) {
        const float* from = x.data() + r * inputs + g * 32;
        float most = 0;
        for (int i = 0; i < 32; ++i) most = std::max(most, std::abs(from[i]));
        const float steps = 127.f / most, step = most / 127.f;
        int32_t sum = 0, total = 0;
        for (int i = 0; i < 32; ++i) {
          const int32_t code = int32_t(std::nearbyint(from[i] * steps));
          const int64_t at = o / 16 * groups + g, quad = i / 4, line = four ? quad % 4 : quad;
          const uint8_t byte = weights.codes[((at * (four ? 4 : 8) + line) * 16 + o % 16) * 4 + i % 4];
          sum += code * (four ? (quad < 4 ? byte & 15 : byte >> 4) : byte - 128);
          total += code;
        }
        const uint16_t* scale = weights.scales.data() + (o / 16 * groups + g) * 16 * (four ? 2 : 1) + o % 16;
        const float factor = half(scale[0]) * step, part = float(sum) * factor;
        y = y + part;
        if (four) y = y + half(scale[16]) * (step * float(total));
      }
      y = y + weights.bias[o];
    }
  }
  const std::string what = four ? "linear of 4 bits" : "linear of 8 bits";
  same(multiplied(weights.matrix, eighths.data(), rows), expected, what);
  check_rows(weights.matrix, eighths.data(), rows, groups, what);
}

// Attention

template <class T>
Rows<T> attended(const Attention<T>& a, const Visible& visible, const Rows<T>& queries, int threads) {
  int64_t chunks = 1;
  const int64_t rows = int64_t(visible.rows.size());
  for (const auto& row : visible.rows) chunks = std::max(chunks, (row.keys - row.first + kChunk - 1) / kChunk);
  Rows<T> out(rows * a.kv_heads * a.group * a.value_dim);
  Rows<float> partials(rows * chunks * a.kv_heads * a.partial_size());
  omp_set_num_threads(threads);
  team(true, [&](int thread, int count) {
    attend(a, visible, queries.data(), out.data(), partials.data(), chunks, thread, count);
  });
  return out;
}

template <class T>
void check_attention(int64_t dim, int64_t value_dim, int64_t group, int64_t past, bool more) {
  Chance chance(uint64_t(dim + group));
  const int64_t heads = 2, slots = past + 40, rows = 12;
  const std::string what = "attention of " + name<T>() + " " + std::to_string(dim);
  auto keys = chance.some<T>(slots * heads * dim), values = chance.some<T>(slots * heads * value_dim);
  const auto queries = chance.some<T>(rows * heads * group * dim), sinks_t = chance.some<T>(heads * group);
  Rows<float> sinks;
  for (T x : sinks_t) sinks.push_back(float(wide(x)));
  const Attention<T> a{keys.data(), values.data(), heads, group, dim, value_dim, 0.3f, more ? 2.f : 0.f, more ? sinks.data() : nullptr};
  Visible tree;
  Rows<std::vector<int64_t>> paths(rows);
  for (int64_t r = 0; r < rows; ++r) {  // a binary tree behind the past
    if (r) paths[r] = paths[(r - 1) / 2];
    paths[r].push_back(past + 2 * r + 1);
    tree.add(0, past, paths[r]);
  }
  tree.close();
  const auto found = attended(a, tree, queries, 1);
  same(attended(a, tree, queries, 2), found, what + ": two threads");
  Rows<double> exact, bound;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads * group; ++h) {
      std::vector<int64_t> seen(past);
      for (int64_t k = 0; k < past; ++k) seen[k] = k;
      seen.insert(seen.end(), paths[r].begin(), paths[r].end());
      double total = more ? std::exp(double(sinks[h])) : 0, loudest = 0;
      std::vector<double> weights;
      for (int64_t k : seen) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d)
          score += wide(queries[(r * heads * group + h) * dim + d]) * wide(keys[(k * heads + h / group) * dim + d]);
        score *= double(0.3f);
        if (more) score = 2 * std::tanh(score / 2);
        loudest = std::max(loudest, std::abs(score));
        weights.push_back(std::exp(score));
        total += weights.back();
      }
      for (int64_t d = 0; d < value_dim; ++d) {
        double y = 0, loud = 0;
        for (size_t k = 0; k < seen.size(); ++k) {
          const double part = weights[k] / total * wide(values[(seen[k] * heads + h / group) * value_dim + d]);
          y += part, loud += std::abs(part);
        }
        const double step = std::is_same_v<T, float> ? 0x1p-24 : 0x1p-8;
        exact.push_back(y);
        bound.push_back(2 * step * (loud + std::abs(y)) + 0x1p-22 * (double(dim) + 16) * loud);
      }
    }
  Rows<float> flat;
  for (T x : found) flat.push_back(float(wide(x)));
  near(flat, exact, bound, what);
  const auto drafted_keys = keys, drafted_values = values;
  for (int64_t r = 0; r < rows; ++r) {  // what plain decoding computes once the row's path is committed
    const auto commit = [&](Rows<T>& pool, const Rows<T>& before, int64_t size) {
      pool = before;
      for (size_t i = 0; i < paths[r].size(); ++i)
        std::copy_n(before.data() + paths[r][i] * size, size, pool.data() + (past + int64_t(i)) * size);
    };
    commit(keys, drafted_keys, heads * dim);
    commit(values, drafted_values, heads * value_dim);
    Visible alone;
    alone.add(0, past + int64_t(paths[r].size()), {});
    alone.close();
    const int64_t size = heads * group;
    const Rows<T> query(queries.begin() + r * size * dim, queries.begin() + (r + 1) * size * dim);
    const Rows<T> expected(found.begin() + r * size * value_dim, found.begin() + (r + 1) * size * value_dim);
    same(attended(a, alone, query, 1 + int(r % 2)), expected, what + ": a row alone");
  }
}

// Layers

template <class W, class T>
class Layers {
 public:
  using X = std::conditional_t<
      std::is_same_v<W, Grouped>, float, std::conditional_t<kDotBf16 && std::is_same_v<T, bf16>, bf16, float>>;
  static constexpr int64_t kHidden = 64, kHeads = 4, kKvHeads = 2, kDim = 16, kInner = 96, kSlots = 200;
  static constexpr int64_t kLayers = 2, kPool = kSlots * kKvHeads * kDim;

  Layers()
      : chance_(7), qkv_(chance_, (kHeads + 2 * kKvHeads) * kDim, kHidden, true), out_(chance_, kHidden, kHeads * kDim, true),
        gate_up_(chance_, 2 * kInner, kHidden, true), down_(chance_, kHidden, kInner, true), norm_(chance_.some<float>(kHidden)),
        angles_(chance_.some<float>(kSlots * kDim)), embeddings_(chance_.some<float>(kSlots * kHidden)) {
    for (float& weight : norm_) weight = 1 + weight / 4;
  }

  // What comes out for `count` tokens, fed in portions of some sizes, and the keys that they leave.
  std::pair<Rows<float>, Rows<T>> run(int64_t count, const Rows<int64_t>& portions, int threads) {
    Rows<T> keys(kLayers * kPool), values(keys.size());
    Rows<float> outputs(embeddings_.begin(), embeddings_.begin() + count * kHidden);
    omp_set_num_threads(threads);
    for (int64_t done = 0, i = 0; done < count; ++i) {
      const int64_t rows = std::min(count - done, portions[i % int64_t(portions.size())]);
      feed(outputs.data() + done * kHidden, done, rows, keys, values);
      done += rows;
    }
    return {outputs, keys};
  }

 private:
  void feed(float* x, int64_t done, int64_t rows, Rows<T>& keys, Rows<T>& values) {
    Visible visible;
    Rows<int64_t> slots;
    Rows<float> cosines, sines;
    for (int64_t r = 0; r < rows; ++r) {
      visible.add(0, done + r + 1, {});
      slots.push_back(done + r);
      for (int64_t i = 0; i < kDim; ++i) {
        const float angle = angles_[(done + r) * kDim + i % (kDim / 2)];
        cosines.push_back(std::cos(angle)), sines.push_back(std::sin(angle));
      }
    }
    visible.close();
    const int64_t chunks = (done + rows + kChunk - 1) / kChunk;
    std::vector<Layer<W, X, T>> layers;
    for (int64_t n = 0; n < kLayers; ++n)
      layers.push_back(
          {norm_.data(), norm_.data(), nullptr, nullptr, nullptr, norm_.data(), nullptr, nullptr, qkv_.matrix, out_.matrix,
           gate_up_.matrix, down_.matrix, kHeads, kKvHeads, kDim, kInner, 0, Activation::silu, true, 1e-5f, 0.25f, 0.f,
           keys.data() + n * kPool, values.data() + n * kPool, &visible});
    Rows<X> normed(rows * kHidden), attended(rows * kHeads * kDim), gated(rows * kInner);
    Rows<T> queries(rows * kHeads * kDim);
    Rows<float> qkv(rows * (kHeads + 2 * kKvHeads) * kDim), sums(rows * kHidden);
    Rows<float> partials(rows * chunks * kHeads * (kDim + 2));
    Rows<Eighth> eighths(rows * groups_of(kInner));
    const Workspace<X, T> space{normed.data(), attended.data(), gated.data(), queries.data(), qkv.data(), sums.data(), partials.data(), eighths.data()};
    team(true, [&](int thread, int threads) {
      run_layers<W, X, T>(
          x, nullptr, 0, rows, kHidden, layers, space, cosines.data(), sines.data(), kDim, slots.data(), chunks, {}, thread,
          threads);
    });
  }

  Chance chance_;
  Weights<W> qkv_, out_, gate_up_, down_;
  Rows<float> norm_, angles_, embeddings_;
};

template <class W, class T>
void check_layers() {
  const std::string what = "layers of " + name<W>() + " and " + name<T>();
  const int64_t count = 140;
  Layers<W, T> layers;
  const auto [together, keys] = layers.run(count, {count}, 1);
  for (const auto& portions : {Rows<int64_t>{1}, {3, 1, 17}, {130, 2}}) {
    const auto [outputs, left] = layers.run(count, portions, 1 + int(portions.size() > 1));
    same(outputs, together, what + ": in portions");
    same(left, keys, what + ": keys of portions");
  }
  std::printf("layers");
  for (int64_t i = 0; i < count * 64; i += 64 * 10 + 1) std::printf(" %.9g", together[i]);
  std::printf("\n");
}

// Noise and maxima

void check_noise() {
  const NoiseKey key{0x12345678u, 0x9abcdef0u, 77};
  const int64_t size = 1000;
  Rows<double> noise((size + kGroup - 1) / kGroup * kGroup);
  gumbel_row(key, {0, int64_t(noise.size())}, size, noise.data());
  uint64_t digest = 14695981039346656037ull;
  for (int64_t i = 0; i < size; ++i) digest = (digest ^ std::bit_cast<uint64_t>(noise[i])) * 1099511628211ull;
  std::printf("noise %016" PRIx64 "\n", digest);

  Chance chance(9);
  const auto scores = chance.some<float>(size);
  for (float temperature : {0.3f, 1.f}) {
    int64_t expected = 0, token = 0;
    double best = 0;
    const auto total = [&](int64_t i) { return double(scores[i] / temperature) + noise[i]; };
    for (int64_t i = 0; i < size; ++i)
      if (total(i) > total(expected)) expected = i;
    gumbel_maximum(scores.data(), temperature, key, {0, size}, size, best, token);
    same<int64_t>({token}, {expected}, "highest with noise");
  }
  auto row = chance.some<bf16>(size);
  for (int64_t place : {3, 500, 999}) {
    row[place] = narrow(float(2 + place));
    float value;
    int64_t token;
    row_maximum(row.data(), size, value, token);
    same<int64_t>({token, int64_t(value)}, {place, int64_t(widen(row[place]))}, "highest");
  }
  row[700] = 0x7fc0;
  float value;
  int64_t token;
  row_maximum(row.data(), size, value, token);
  expect((std::isnan(value) && token == 0) != fault, "NaN among logits");
}

int main(int count, char** words) {
  fault = count > 1 && std::string(words[1]) == "--fault";
  std::printf("isa %s\n", kIsa);
  check_lanes();
  check_halves();
  check_bytes<8>();
  check_bytes<4>();
  for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{33, 18}, {96, 64}}) {
    check_linear<float, float>(outputs, inputs);
    check_linear<bf16, float>(outputs, inputs);
    check_linear<int8_t, float>(outputs, inputs);
#if defined(ARBORDRAFT_DOT_BF16)
    check_linear<bf16, bf16>(outputs, inputs);
    check_linear<int8_t, bf16>(outputs, inputs);
#endif
    for (bool four : {false, true}) check_groups(four, outputs, (inputs + 31) / 32 * 32);
  }
  for (int64_t group : {1, 3, 5}) {
    check_attention<float>(64, 48, group, 130, group == 3);
    check_attention<bf16>(64, 80, group, 130, group == 3);
    check_attention<bf16>(16, 16, group, 3, true);
  }
  check_layers<bf16, bf16>();
  check_noise();
  std::printf("checks %d\nfailures %d\n", checks, failures);
  return failures > 0;
}
