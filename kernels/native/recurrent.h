// Recurrent layers along draft trees, as operators.
#pragma once

#include "../recurrent_tree/cpu.h"
#include "tensors.h"

namespace arbordraft {
namespace {

Tensor recurrent_gate(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& scale, int64_t activation) {
  const int64_t size = x.size(-1), rows = x.numel() / std::max<int64_t>(1, size);
  TORCH_CHECK(!bias || bias->numel() == size, "expected a bias for each of ", size, " channels");
  TORCH_CHECK(!scale || scale->numel() == size, "expected a scale for each of ", size, " channels");
  Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const float *biases = floats(bias), *scales = floats(scale);
  float* to = data<float>(out);
  const auto run = [&](const auto* from) {
    team(rows * size >= kWorthATeam / 16, [&](int thread, int threads) {
      const Range mine = share(size, kLanes, thread, threads);
      for (int64_t r = 0; r < rows; ++r)
        gate_row(from + r * size, biases, scales, Gate(activation), mine, size, to + r * size);
    });
  };
  x.scalar_type() == at::kBFloat16 ? run(data<bf16>(x)) : run(data<float>(x));
  return out;
}

template <class T>
Tensor convolved(
    const Tensor& inputs, const Tensor& windows, const Tensor& history, const Tensor& weight, const OptionalTensor& bias,
    bool activate) {
  const int64_t rows = inputs.size(0), channels = inputs.size(1), width = weight.size(0), behind = width - 1;
  TORCH_CHECK(windows.dim() == 3 && windows.size(1) == behind && windows.size(2) == channels, "the windows do not fit");
  TORCH_CHECK(weight.size(1) == channels && (!bias || bias->numel() == channels), "weight or bias does not fit");
  TORCH_CHECK(history.numel() == rows * behind, "expected ", behind, " earlier inputs for each of ", rows, " rows");
  const T *own = data<T>(inputs), *committed = data<T>(windows);
  std::vector<const T*> places(rows * width);
  const int64_t *earlier = integers(history), all = windows.size(0) * behind;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t w = 0; w < behind; ++w) {
      const int64_t at = earlier[r * behind + w];
      TORCH_CHECK(at < rows && at >= -all, "row ", r, " has an input before it that is nowhere: ", at);
      places[r * width + w] = at >= 0 ? own + at * channels : committed + (-1 - at) * channels;
    }
    places[r * width + behind] = own + r * channels;
  }
  Tensor out = at::empty(inputs.sizes(), inputs.options());
  T* to = data<T>(out);
  const float *weights = data<float>(weight), *biases = floats(bias);
  team(rows * channels * width >= kWorthATeam, [&](int thread, int threads) {
    const Range mine = share(channels, kLanes, thread, threads);
    for (int64_t r = 0; r < rows; ++r)
      convolve_row(places.data() + r * width, width, weights, biases, mine, channels, [&](int64_t i, f32x16 total) {
        store(to + r * channels + i, activate ? gated(total, Gate::silu) : total, channels - i);
      });
  });
  return out;
}

Tensor tree_convolution(
    const Tensor& inputs, const Tensor& windows, const Tensor& history, const Tensor& weight, const OptionalTensor& bias,
    bool activate) {
  return inputs.scalar_type() == at::kBFloat16 ? convolved<bf16>(inputs, windows, history, weight, bias, activate)
                                               : convolved<float>(inputs, windows, history, weight, bias, activate);
}

// Rows run in order within a sample, and read only states that exist.
void check_schedule(const Scan& s, int64_t rows, int64_t states, int64_t scratch) {
  TORCH_CHECK(s.first[0] == 0 && s.first[s.samples] <= rows, "the samples have more than ", rows, " rows");
  for (int64_t b = 0; b < s.samples; ++b) {
    TORCH_CHECK(s.first[b] <= s.first[b + 1], "the rows of samples must ascend");
    TORCH_CHECK(s.first[b] == s.first[b + 1] || s.read[s.first[b]] != -1, "no row comes before the first of sample ", b);
  }
  for (const int64_t* places : {s.read, s.write})
    for (int64_t r = 0; r < rows; ++r)
      TORCH_CHECK(places[r] < states && places[r] >= -1 - scratch, "row ", r, " needs a state that does not exist");
}

Tensor tree_scan(
    const Tensor& states, const Tensor& first, const Tensor& read, const Tensor& write,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& log_decay, const OptionalTensor& rates,
    const OptionalTensor& beta, double scale, double epsilon, int64_t count) {
  const int64_t rows = value.size(0), heads = states.size(1), keys = states.size(2), values = states.size(3);
  const int64_t key_heads = key.size(1), decays = rates ? 0 : log_decay.numel() / std::max<int64_t>(1, rows);
  TORCH_CHECK(heads % key_heads == 0 && key.size(2) == keys && keys > 0, "keys do not fit the states");
  TORCH_CHECK(key.size(0) == rows && query.sizes() == key.sizes(), "expected a key and a query for each row");
  TORCH_CHECK(value.size(1) == heads && value.size(2) == values, "values do not fit the states");
  TORCH_CHECK(
      rates ? log_decay.numel() == value.numel() && rates->numel() == heads * keys * values
            : rows == 0 || decays == heads || decays == heads * keys,
      "decays do not fit the states");
  TORCH_CHECK(!beta || beta->numel() == rows * heads, "expected a beta for each row and head");
  TORCH_CHECK(first.numel() > 0 && read.numel() == rows && write.numel() == rows, "the schedule does not fit the rows");
  Tensor out = at::empty(value.sizes(), value.options());
  Scan s{data<float>(states), integers(first), integers(read), integers(write), first.numel() - 1,
         heads, key_heads, keys, values, data<float>(value), data<float>(log_decay), floats(rates), floats(beta),
         nullptr, nullptr, nullptr, data<float>(out)};
  check_schedule(s, rows, states.size(0), count);
  if (s.first[s.samples] < rows) out.narrow(0, s.first[s.samples], rows - s.first[s.samples]).zero_();
  const int64_t own = (count + 1) * keys * kLanes;  // numbers that a thread holds itself
  Arena arena;
  arena.reserve(s.query, key.numel());
  arena.reserve(s.key, key.numel());
  arena.reserve(s.decay, rows * decays);
  float* local;
  arena.reserve(local, own * at::get_num_threads());
  arena.allocate();
  const float *queries = data<float>(query), *from = data<float>(key);
  const auto run = [&](const auto& part) {
    team(rows * heads * keys * values >= kWorthATeam, [&](int thread, int threads) {
      const Range mine = share(rows, 1, thread, threads);
      for (int64_t r = mine.begin; r < mine.end; ++r)
        prepare_row(s, r, queries, from, float(scale), float(epsilon), decays);
      meet(threads);
      part(local + thread * own, thread, threads);
    });
  };
  const auto with = [&]<Decay D>() {
    const auto part = [&]<bool Delta>(std::bool_constant<Delta>) {
      run([&](float* mine, int thread, int threads) { scan<D, Delta>(s, mine, count, thread, threads); });
    };
    beta ? part(std::true_type()) : part(std::false_type());
  };
  if (rates)
    with.template operator()<Decay::element>();
  else if (decays == heads)
    with.template operator()<Decay::head>();
  else
    with.template operator()<Decay::key>();
  return out;
}

}  // namespace
}  // namespace arbordraft
