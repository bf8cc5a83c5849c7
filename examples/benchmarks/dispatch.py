"""Measures the overhead of operator calls: ways to register an operator with torch, and our entry points.

    python examples/benchmarks/dispatch.py

Prints median microseconds over rounds in which all ways take turns, with problems of a row or two.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from arbordraft.kernels import choice, native
from arbordraft.kernels.gumbel import gumbel_argmax
from arbordraft.kernels.kv_cache import append, compact
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.kernels.verify import row_max

ROUNDS, CALLS = 51, 200
PROBE = torch.library.Library("arbordraft_probe", "DEF")  # its operators exist only as long as this object


def _nothing(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    return None


def calls() -> dict[str, Callable[[], object]]:
    """Returns every way by name; the registered operators take the arguments of ``append`` and do nothing."""
    PROBE.define("append(Tensor(a!) keys, Tensor(b!) values, Tensor new, Tensor others, Tensor slots) -> ()")
    PROBE.impl("append", _nothing, "CompositeExplicitAutograd")
    defined = torch.ops.arbordraft_probe.append.default
    custom = torch.library.custom_op("arbordraft_probe::append_custom", _nothing, mutates_args=("keys", "values"))

    scores, row, query = torch.randn(1, 64), torch.tensor([5]), torch.randn(1, 4, 16)
    pools = [torch.zeros(16, 2, 16) for _ in range(4)]
    rows = (*pools[:2], torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), torch.tensor([3]))
    batch = RaggedBatch([1], [0], [3], [[3]], row, row)
    cpp = torch.ops.arbordraft.gumbel_argmax.default
    return {
        "custom_op": lambda: custom(*rows),
        "Library.define and impl": lambda: defined(*rows),
        "C++ operator, a draw": lambda: cpp(scores, row, row, 1.0, None),
        "gumbel_argmax": lambda: gumbel_argmax(scores, row, row),
        "row_max": lambda: row_max(scores),
        "append": lambda: append(*rows),
        "compact": lambda: compact(pools, [[(5, 4), (6, 5)]]),
        "ragged_tree_attention": lambda: ragged_tree_attention(query, *pools[:2], batch, scale=0.25, use_native=True),
    }


def _microseconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    for _ in range(CALLS):
        call()
    return (perf_counter() - start) / CALLS * 1e6


@torch.inference_mode()
def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print("kernels:", native.isa() or native.problem())
    ways = calls()
    rounds = [{name: _microseconds(call) for name, call in ways.items()} for _ in range(ROUNDS)]
    for name in ways:
        times = [one[name] for one in rounds]
        print(f"{name:26} {median(times):7.2f} us, at best {min(times):.2f}")
    print(dict(choice.ran))


if __name__ == "__main__":
    main()
