"""The problems on which the Triton kernels are checked and timed.

Shapes: T packed rows, B samples, R rows of scores, N nodes, V vocabulary, P pool rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from kernel_timing import ATTENTION, Goal, Problem, largest_error
from packed import Packed, flash, flex, sdpa
from roofline import Shape, Stepped
from score_problems import drawing, expansion, passes, truncation, verification
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.kv_cache import append, append_reference, compact_reference, compact_rows
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.trees.topology import TreeTopology

ROUNDING = 2.0**-7  # a step of bfloat16: the interpreter cuts off, a GPU rounds but rounds the weights too
TINY_SHAPES = [Shape(70, 2, 5, 2, 16, 4), Shape(300, 1, 3, 4, 16, 4)]
TINY_STEPPED = Stepped(2, (2, 1), CHUNK + 130, layers=2, context=12, kv_heads=2, size=8, level=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 33},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all options": {"window": 40, "softcap": 3.0, "sinks": True},
    "prompts": {"causal": True},
    "splits of 64": {"split_size": 64},
}


def chosen(
    device: torch.device, shapes: Sequence[Shape], stepped: Stepped, compiled: Sequence[Shape]
) -> Iterator[Problem]:
    """The problems that are asked for on a GPU, and tiny ones in the interpreter; one by one, as they may be large.

    FlexAttention, which compiles for every shape, takes part for those in ``compiled``.
    """
    heads, ragged = [(32, 4, 128), (14, 7, 80)], [2085, 0, 700, 1, 130, 64]
    if device.type == "cpu":
        shapes, stepped, heads, ragged = TINY_SHAPES, TINY_STEPPED, [(7, 7, 24)], [130, 0, 37]
    for counts in heads:
        for name, options in OPTIONS.items():
            past = ragged[:2] if "split_size" in options else ragged  # a program for every row is slow to interpret
            yield attention_options(name, past, *counts, options, device)
    for shape in shapes:
        yield attention(shape, device, flexible=shape in compiled)
    yield kv_append(stepped, device)
    yield kv_compacted(stepped, device)
    yield from passes(stepped, device)
    yield from truncation(stepped, device)
    yield expansion(stepped, device)
    yield drawing(stepped, device)
    yield from verification(stepped, device)


def attention(shape: Shape, device: torch.device, *, flexible: bool = False) -> Problem:
    """Equal trees behind equal prefixes; only the last sample is checked."""
    tree = TreeTopology.from_parents([(node - 1) // 2 if node else -1 for node in range(shape.tree)])
    packed = Packed.random(
        [shape.context] * shape.batch,
        [tree] * shape.batch,
        heads=shape.heads,
        group=shape.group,
        size=shape.size,
        device=device,
    )
    run = _attention(packed)
    peers: dict[str, Callable[[], Callable[[], object]]]
    peers = {"sdpa": partial(sdpa, packed), "flash": partial(flash, packed)}
    if flexible:
        peers["flex"] = partial(flex, packed)
    return Problem(
        ATTENTION,
        str(shape),
        run,
        lambda: largest_error(run()[-shape.tree :], packed.exact(shape.batch - 1)),
        ROUNDING,
        shape.work(),
        Goal("of copy", 0.7) if shape.context >= 2048 else None,
        peers,
    )


def attention_options(
    name: str,
    past: Sequence[int],
    heads: int,
    group: int,
    size: int,
    options: dict[str, Any],
    device: torch.device,
) -> Problem:
    """Ragged prefixes and trees, with one option or another; every row is checked."""
    options = dict(options)
    causal, split_size = options.pop("causal", False), options.pop("split_size", 0)
    shapes = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(0), TreeTopology.chain(70)]
    trees = [shapes[sample % len(shapes)] for sample in range(len(past))]
    packed = Packed.random(past, trees, heads=heads, group=group, size=size, device=device, causal=causal)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, heads).to(device)
    run = _attention(packed, split_size=split_size, **options)
    case = f"{name}, {len(past)} samples of 0 to {max(past)} keys, {heads}/{heads // group} heads of {size}"
    return Problem(
        ATTENTION,
        case,
        run,
        lambda: largest_error(run(), torch.cat([packed.exact(sample, **options) for sample in range(len(past))])),
        ROUNDING,
    )


def _attention(packed: Packed, **options: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with choice.use("triton"):
            return ragged_tree_attention(
                packed.query, packed.keys, packed.values, packed.batch, scale=packed.scale, **options
            )

    return run


def kv_append(stepped: Stepped, device: torch.device) -> Problem:
    """The rows of all trees, written to every layer."""
    rows, layers = stepped.rows, range(stepped.layers)
    shape = (stepped.kv_heads, stepped.size)
    pools, new = (
        [[torch.randn(count, *shape, device=device).bfloat16() for _ in range(2)] for _ in layers]
        for count in (stepped.samples * stepped.context + rows, rows)
    )
    slots = torch.randperm(len(pools[0][0]), generator=torch.Generator().manual_seed(0))[:rows].to(device)

    def run(path: str = "triton") -> None:
        with choice.use(path):
            for layer in layers:
                (keys, values), (new_keys, new_values) = pools[layer], new[layer]
                append(keys, values, new_keys, new_values, slots)

    def error() -> float:
        expected = [[pool.clone() for pool in pair] for pair in pools]
        for (keys, values), (new_keys, new_values) in zip(expected, new, strict=True):
            append_reference(keys, values, new_keys, new_values, slots)
        run()
        return _differing(pools, expected)

    return stepped.problem("kv_append", run, error, 0.0, peer=partial(run, "reference"))


def kv_compacted(stepped: Stepped, device: torch.device) -> Problem:
    """Every other row of each tree moves towards the front, in every layer."""
    shape = (stepped.samples * stepped.context, stepped.kv_heads, stepped.size)
    pools = [torch.randn(shape, device=device).bfloat16() for _ in range(2 * stepped.layers)]
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
        return _differing([pools], [expected])

    by_torch = partial(compact_reference, pools, source, destination, first)
    return stepped.problem("kv_compact", run, error, 0.0, peer=by_torch)


def _differing(results: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> float:
    pairs = [pair for many in zip(results, expected, strict=True) for pair in zip(*many, strict=True)]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)
