"""Problems of attention and of the KV cache for the Triton kernels.

Shapes: T packed rows, B samples, P pool rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from arbordraft.kernels.kv_cache import append, append_reference, compact_reference, compact_rows
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.trees.topology import TreeTopology
from arborlab.gpu.packed import Packed, flash, sdpa
from arborlab.gpu.problem import ATTENTION, Bands, Goal, Problem, largest_error, unequal
from arborlab.gpu.roofline import Shape, Stepped, in_triton

OPTIONS: dict[str, dict[str, Any]] = {
    "all options": {"window": 40, "softcap": 3.0, "sinks": True},
    "prompts": {"causal": True},
    "row by row": {"row_invariant": True},
    "plain": {},
    "window": {"window": 33},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
}


def explained(dtype: torch.dtype, size: int) -> float:
    """Returns the attention error that rounding explains, as a share of the largest value.

    The first term is one step of the type: weights and results are rounded to it, or truncated by the interpreter. The
    second term is the error of scores in float32, sums of ``size`` products. They are about ``sqrt(size)`` large and
    off by ``4 * sqrt(size)`` roundings.
    """
    return torch.finfo(dtype).eps + 4 * size * 2.0**-24


def attention(shape: Shape, device: torch.device) -> Problem:
    """Builds the problem of equal trees after equal prefixes; only the last sample is checked."""
    tree = TreeTopology.from_parents([(node - 1) // 2 if node else -1 for node in range(shape.tree)])
    packed = Packed.random(
        [shape.context] * shape.batch,
        [tree] * shape.batch,
        heads=shape.heads,
        group=shape.group,
        size=shape.size,
        device=device,
        dtype=shape.dtype,
    )
    run = _attention(packed, row_invariant=shape.row_invariant)
    return Problem(
        ATTENTION,
        str(shape),
        run,
        lambda: largest_error(run()[-shape.tree :], packed.exact(shape.batch - 1)),
        explained(shape.dtype, shape.size),
        shape.dtype,
        shape.work(),
        Goal("of copy", 0.7) if shape.context >= 2048 else None,
        {"sdpa": partial(sdpa, packed), "flash": partial(flash, packed)},
    )


def attention_options(
    name: str,
    past: Sequence[int],
    heads: int,
    group: int,
    size: int,
    options: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Builds the problem of ragged prefixes and trees with some options; every row is checked."""
    options = dict(options)
    causal, row_invariant = options.pop("causal", False), options.pop("row_invariant", False)
    shapes = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(0), TreeTopology.chain(70)]
    trees = [shapes[sample % len(shapes)] for sample in range(len(past))]
    packed = Packed.random(past, trees, heads=heads, group=group, size=size, device=device, causal=causal, dtype=dtype)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, heads).to(device)
    run = _attention(packed, row_invariant=row_invariant, **options)
    case = f"{name}, {len(past)} samples of 0 to {max(past)} keys, {heads}/{heads // group} heads of {size}"
    return Problem(
        ATTENTION,
        case,
        run,
        lambda: largest_error(run(), torch.cat([packed.exact(sample, **options) for sample in range(len(past))])),
        explained(dtype, size),
        dtype,
    )


def _attention(packed: Packed, **options: Any) -> Callable[[], Tensor]:
    return in_triton(
        lambda: ragged_tree_attention(
            packed.query, packed.keys, packed.values, packed.batch, scale=packed.scale, **options
        )
    )


def kv_append(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of writing the rows of all trees to every layer."""
    rows, layers, bands = stepped.rows, range(stepped.layers), Bands()
    heads = stepped.kv_heads, stepped.size
    new = [[torch.randn(rows, *heads, device=device).to(stepped.dtype) for _ in range(2)] for _ in layers]
    pools = [[_pool(bands, stepped.samples * stepped.context + rows, one) for one in pair] for pair in new]
    slots = torch.randperm(len(pools[0][0]), generator=torch.Generator().manual_seed(0))[:rows].to(device)

    def run(write: Callable[..., object] = append) -> None:
        for (keys, values), (new_keys, new_values) in zip(pools, new, strict=True):
            write(keys, values, new_keys, new_values, slots)

    def error() -> float:
        expected = [[pool.clone() for pool in pair] for pair in pools]
        for (keys, values), (new_keys, new_values) in zip(expected, new, strict=True):
            append_reference(keys, values, new_keys, new_values, slots)
        run()
        return _differing(list(chain(*pools)), list(chain(*expected)), bands)

    return stepped.problem("kv_append", run, error, 0.0, peer=partial(run, append_reference))


def kv_compacted(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of moving every other row of each tree towards the front, in every layer."""
    bands, rows = Bands(), stepped.samples * stepped.context
    drawn = [torch.randn(rows, stepped.kv_heads, stepped.size, device=device) for _ in range(2 * stepped.layers)]
    pools = [_pool(bands, rows, one.to(stepped.dtype)).copy_(one) for one in drawn]
    ends = [(sample + 1) * stepped.context - 2 * stepped.moves for sample in range(stepped.samples)]
    destination = torch.tensor([end + move for end in ends for move in range(stepped.moves)])
    source = torch.tensor([end + 1 + 2 * move for end in ends for move in range(stepped.moves)])
    first = torch.arange(0, len(source) + 1, stepped.moves)
    source, destination, first = (x.to(device) for x in (source, destination, first))

    def run() -> None:
        compact_rows(pools, source, destination, first)

    def error() -> float:
        expected = [pool.clone() for pool in pools]
        compact_reference(expected, source, destination, first)
        run()
        return _differing(pools, expected, bands)

    by_torch = partial(compact_reference, pools, source, destination, first)
    return stepped.problem("kv_compact", run, error, 0.0, peer=by_torch)


def _pool(bands: Bands, rows: int, like: Tensor) -> Tensor:
    """Returns a pool of heads like those of ``like``, NaN until rows are written."""
    return bands.empty(like, torch.Size((rows, *like.shape[1:])), dtype=like.dtype)


def _differing(results: Sequence[Tensor], expected: Sequence[Tensor], bands: Bands) -> float:
    worst = max(unequal(*pair) for pair in zip(results, expected, strict=True))
    return float("inf") if bands.overwritten() else worst
