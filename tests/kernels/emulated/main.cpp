// Checks the kernels without PyTorch; test_emulated.py builds it for other processors and runs it in an emulator.
//
// The reference is scalar code in double precision, or in integers where these are exact. The program prints numbers
// that can be compared between builds.
#include "attention.h"
#include "lanes.h"
#include "layers.h"
#include "linears.h"
#include "noise.h"
#include "recurrent.h"

int main(int count, char** words) {
  fault = count > 1 && std::string(words[1]) == "--fault";
  std::printf("isa %s\n", kIsa);
  check_lanes();
  check_halves();
  check_powers();
  for (int64_t kind = 0; kind < 12; ++kind)
    with_kind(kind, [](auto type) {
      if constexpr (!kFloats<decltype(type)>) check_bytes<decltype(type)>();
    });
  for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{33, 18}, {96, 64}}) {
    check_linear<float, float>(outputs, inputs);
    check_linear<bf16, float>(outputs, inputs);
    check_linear<int8_t, float>(outputs, inputs);
#if defined(ARBORDRAFT_DOT_BF16)
    check_linear<bf16, bf16>(outputs, inputs);
    check_linear<int8_t, bf16>(outputs, inputs);
#endif
    for (int64_t kind = -1; kind < 15; ++kind) check_blocks(kind, outputs, (inputs + 255) / 256 * 256);
  }
  for (int64_t group : {1, 3, 5}) {
    check_attention<float>(64, 48, group, 130, group == 3);
    check_attention<bf16>(64, 80, group, 130, group == 3);
    check_attention<bf16>(16, 16, group, 3, true);
  }
  check_layers<bf16, bf16>();
  check_noise();
  print_recurrent();
  std::printf("checks %d\nfailures %d\n", checks, failures);
  return failures > 0;
}
