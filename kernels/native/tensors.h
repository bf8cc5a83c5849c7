// Shared by all operators: checked views of tensors, scratch memory, packed batches. Arguments are checked here, so
// kernels need no checks.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "../decoder_layers/cpu.h"
#include "../prepacked_linear/panels.h"
#include "../ragged_tree_attention/cpu.h"

namespace arbordraft {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Below this many multiplications waking the team costs more than it saves.
constexpr int64_t kWorthATeam = 1 << 16;

template <class T>
constexpr at::ScalarType kType = std::is_same_v<T, bf16>      ? at::kBFloat16
                                 : std::is_same_v<T, int8_t>  ? at::kChar
                                 : std::is_same_v<T, uint8_t> ? at::kByte
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

int64_t* mutable_integers(const Tensor& tensor) {
  integers(tensor);
  return tensor.mutable_data_ptr<int64_t>();
}

double* doubles(const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kDouble && tensor.is_contiguous(), "expected contiguous float64 numbers");
  return tensor.mutable_data_ptr<double>();
}
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

// Returns the four numbers before the places of a packed matrix: see blocks.py.
const int64_t* header_of(const Tensor& packed) {
  const auto* header = reinterpret_cast<const int64_t*>(data<uint8_t>(packed));
  TORCH_CHECK(
      packed.dim() == 1 && packed.numel() >= 8 * kHeader && header[0] == kLayout && header[3] == packed.numel(),
      "expected a matrix that pack_blocks returned, got ", packed.sizes());
  return header;
}

template <>
Prepacked<Panels> prepacked(
    const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias, int64_t outputs) {
  const int64_t* header = header_of(weight);
  TORCH_CHECK(
      header[1] == (outputs + kLanes - 1) / kLanes, "weights are not prepacked for ", outputs, " outputs, but for ",
      header[1], " panels of 16");
  TORCH_CHECK(!scale || scale->numel() == outputs, "expected one scale per output");
  TORCH_CHECK(!bias || bias->numel() == outputs, "expected one bias per output");
  return {data<uint8_t>(weight), header + kHeader, floats(scale), floats(bias), outputs, header[2] * kGroupSize};
}

// The outputs that a prepacked matrix has, padded to 16.
int64_t outputs_of(const Tensor& weight) {
  return (weight.scalar_type() == at::kByte ? header_of(weight)[1] : weight.size(0)) * kLanes;
}

// The operand type of weights of type W, in forwards whose rows have type T.
template <class W, class T>
using Operand = std::conditional_t<
    std::is_same_v<W, Panels>, Eighth, std::conditional_t<kDotBf16 && std::is_same_v<T, bf16>, bf16, float>>;

// Rows converted to type X and padded with zeros to `inputs`; the rows themselves if they fit already.
template <class X, class In>
const X* as_numbers(const In* x, int64_t rows, int64_t size, int64_t inputs, Arena& arena) {
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

// Converts rows of type T to float.
template <class T>
void widen_rows(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i), count - i);
}

// Rows in the form that the kernels multiply: of type X, padded with zeros to `inputs`.
template <class X, class In>
const X* as_inputs(const In* x, int64_t rows, int64_t size, int64_t inputs, Arena& arena) {
  if constexpr (std::is_same_v<X, Eighth>) {
    Eighth* y;
    float* wide;
    const int64_t groups = inputs / kGroupSize;
    arena.reserve(y, rows * groups);
    arena.reserve(wide, std::is_same_v<In, float> ? 0 : rows * size);
    arena.allocate();
    team(rows * size >= kWorthATeam, [&](int thread, int threads) {
      const Range mine = share(rows, 1, thread, threads);
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        const float* row;
        if constexpr (std::is_same_v<In, float>) {
          row = x + r * size;
        } else {
          widen_rows(x + r * size, size, wide + r * size);
          row = wide + r * size;
        }
        to_eighths(row, size, y + r * groups);
      }
    });
    return y;
  } else {
    return as_numbers<X>(x, rows, size, inputs, arena);
  }
}

int64_t most_chunks(const Visible& visible) {
  int64_t most = 1;
  for (const auto& row : visible.rows) most = std::max(most, (row.keys - row.first + kChunk - 1) / kChunk);
  return most;
}
int64_t partials_size(int64_t rows, int64_t kv_heads, int64_t chunks, int64_t size) {
  return attention_is_split(rows, at::get_num_threads()) ? rows * kv_heads * chunks * size : 0;
}

// The tensors that describe a packed forward, checked once: layout [4, B + 1], positions [T], words [T, W], region of
// RaggedBatch in ragged_tree_attention/batch.py.
struct Batch {
  std::vector<int64_t> samples;  // [4][B] rows, first pool row, committed keys and keys of the tree region
  const int64_t *positions, *words, *region;
  int64_t batch, rows, word_count;

  Batch(
      const Tensor& layout_, const OptionalTensor& region_, const Tensor& positions_, const OptionalTensor& words_,
      int64_t rows_)
      : positions(integers(positions_)), words(integers(words_)), region(integers(region_)), batch(layout_.size(-1) - 1),
        rows(rows_), word_count(words_ ? words_->size(1) : 0) {
    TORCH_CHECK(layout_.dim() == 2 && layout_.size(0) == 4 && batch >= 0, "expected a layout of shape [4, B + 1]");
    const int64_t* first_row = integers(layout_);
    const int64_t *start = first_row + batch + 1, *past = start + batch + 1, *first_key = past + batch + 1;
    samples.resize(4 * batch);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t count = first_row[b + 1] - first_row[b], tree = first_key[b + 1] - first_key[b];
      TORCH_CHECK(0 <= count && count <= tree, "a sample has more rows than uncommitted keys");
      TORCH_CHECK(!words || word_count * 64 >= tree, "too few ancestor words");
      samples[b] = count, samples[batch + b] = start[b], samples[2 * batch + b] = past[b], samples[3 * batch + b] = tree;
    }
    const int64_t counted = first_row[batch] - first_row[0], keys = first_key[batch] - first_key[0];
    TORCH_CHECK(counted == rows && positions_.numel() == rows, "the batch describes ", counted, " rows, got ", rows);
    TORCH_CHECK(!words || words_->size(0) == rows, "expected one row of ancestor words per packed row");
    TORCH_CHECK(!region || region_->numel() == keys, "expected a position for each of ", keys, " uncommitted keys");
  }
  Visible visible(int64_t window) const {
    TORCH_CHECK(window <= 0 || region, "a sliding window needs the positions of the uncommitted keys");
    Visible found(samples.data(), batch, positions, words, word_count, region, window);
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


}  // namespace
}  // namespace arbordraft
