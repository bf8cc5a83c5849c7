// Layers that read a text at once, against layers that read it in portions.
#pragma once

#include "linears.h"
#include "decoder_layers/cpu.h"

template <class W, class T>
class Layers {
 public:
  using X = std::conditional_t<
      std::is_same_v<W, Panels>, float, std::conditional_t<kDotBf16 && std::is_same_v<T, bf16>, bf16, float>>;
  static constexpr int64_t kHidden = 64, kHeads = 4, kKvHeads = 2, kDim = 16, kInner = 96, kSlots = 200;
  static constexpr int64_t kLayers = 2, kPool = kSlots * kKvHeads * kDim;

  Layers()
      : chance_(7), qkv_(chance_, (kHeads + 2 * kKvHeads) * kDim, kHidden, true), out_(chance_, kHidden, kHeads * kDim, true),
        gate_up_(chance_, 2 * kInner, kHidden, true), down_(chance_, kHidden, kInner, true), norm_(chance_.some<float>(kHidden)),
        angles_(chance_.some<float>(kSlots * kDim)), embeddings_(chance_.some<float>(kSlots * kHidden)) {
    for (float& weight : norm_) weight = 1 + weight / 4;
  }

  // Returns the outputs for `count` tokens, fed in these portions, and the keys that they leave.
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
      visible.add(0, done + r + 1, {}, 0);
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
      layers.push_back({
          .pre_attention = {norm_.data()}, .query_norm = {norm_.data()}, .key_norm = {norm_.data()},
          .pre_mlp = {norm_.data(), norm_.data()}, .post_mlp = {norm_.data()}, .qkv = qkv_.matrix, .out = out_.matrix,
          .gate_up = gate_up_.matrix, .down = down_.matrix, .query_heads = kHeads, .kv_heads = kKvHeads, .dim = kDim, .inner = kInner,
          .activation = Activation::silu, .table = 0, .gated = true, .epsilon = 1e-5f, .scale = 0.25f,
          .keys = keys.data() + n * kPool, .values = values.data() + n * kPool, .visible = &visible});
    const bool own = rows == 1;
    const int64_t copies = own ? omp_get_max_threads() : rows;
    Rows<X> normed(copies * kHidden), attended(rows * kHeads * kDim), inner(rows * kInner);
    Rows<T> queries(rows * kHeads * kDim);
    Rows<float> qkv(rows * (kHeads + 2 * kKvHeads) * kDim), sums(rows * kHidden);
    Rows<float> partials(rows * chunks * kHeads * (kDim + 2));
    Rows<Eighth> eighths(copies * groups_of(kInner));
    const Workspace<W, X, T> space{
        .normed = normed.data(), .attended = attended.data(), .inner = inner.data(), .queries = queries.data(),
        .qkv = qkv.data(), .sums = sums.data(), .partials = partials.data(), .eighths = eighths.data(), .own = own,
        .widest = groups_of(kInner)};
    team(true, [&](int thread, int threads) {
      run_layers<W, X, T>(
          x, nullptr, 0, rows, kHidden, layers, space, cosines.data(), sines.data(), kDim, 1, slots.data(), chunks, {}, {}, thread,
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
