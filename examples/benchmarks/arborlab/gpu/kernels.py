"""The phases that check and time the Triton kernels, and the problems that both share with the compilation.

A maker makes one problem, or several that share their inputs. It is called only when its turn comes, as problems may be
large.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from arbordraft.kernels.verify.reference import CHUNK
from arborlab.gpu import layer_problems, problems, recurrent_problems, score_problems
from arborlab.gpu.problem import KernelRow, Problem, check, named, timed
from arborlab.gpu.roofline import STEPPED, Prediction, Shape, Stepped, fitting_shapes, predictions
from arborlab.gpu.setting import Item, Setting

Maker = tuple[str, Callable[[], Iterator[Problem]]]

TYPES = (torch.bfloat16, torch.float32, torch.float16)  # first the type of most models
RAGGED = [2085, 0, 700, 1, 130, 64]  # committed keys of the samples of a batch
HEADS = [(32, 4, 128), (14, 7, 80), (9, 3, 64)]  # query heads, query heads per key head, head size
CHECKED = Stepped(4, (3, 2, 1), 2 * CHUNK + 1031, layers=3, context=24, level=2)
WIDE = Stepped(1, (3, 1), 128256, layers=1, context=24, level=2)  # the vocabulary of Llama 3
SHAPES = [
    Shape(32768, 1, 16, 4, 128),
    Shape(4096, 2, 64, 4, 128),
    Shape(700, 3, 20, 3, 64, 9),
    Shape(4096, 1, 16, 4, 128, row_invariant=True),
]
TINY = Stepped(
    2, (2, 1), CHUNK + 130, 2, 12, kv_heads=2, size=8, level=1, heads=4, hidden=40, inner=24
)  # small enough for the interpreter
TIMED = [
    *(Shape(4096, 1, tree, 4, 128) for tree in (16, 1, 64)),
    *(Shape(32768, 1, tree, 4, 128) for tree in (16, 1)),
    *(Shape(4096, 8, tree, 4, 128) for tree in (16, 1, 64)),
    *(Shape(4096, 1, tree, 4, 128, row_invariant=True) for tree in (1, 16)),
    *(Shape(512, 1, tree, 4, 128) for tree in (16, 1)),
    *(Shape(32768, 8, tree, 4, 128) for tree in (16, 64)),
]


def makers(device: torch.device) -> list[Maker]:
    """Returns makers of all problems of every kernel in every type, the most telling first."""
    if device.type == "cpu":
        return list(_tiny(device))
    found: list[Maker] = []
    for dtype in TYPES:
        found += [("plain, " + named(dtype), partial(_options, "plain", RAGGED, HEADS[0], dtype, device))]
        found += _stepped(CHECKED._replace(dtype=dtype), device)
    for heads in HEADS:
        for dtype in TYPES:
            for name in problems.OPTIONS:
                if (name, heads) != ("plain", HEADS[0]):
                    found.append((f"{name}, {named(dtype)}", partial(_options, name, RAGGED, heads, dtype, device)))
    for shape in SHAPES:
        found.append((str(shape), partial(_shape, shape, device)))
    return found + _stepped(WIDE, device)


def _tiny(device: torch.device) -> Iterator[Maker]:
    for dtype, name in zip(TYPES, ("plain", "all options", "prompts"), strict=True):
        yield f"{name}, {named(dtype)}", partial(_options, name, [70, 0, 37], (4, 2, 24), dtype, device)
        for maker in _stepped(TINY._replace(dtype=dtype), device):
            if dtype == TYPES[0] or not maker[0].startswith(("thresholds", "draws")):  # slow to interpret
                yield maker


def _stepped(stepped: Stepped, device: torch.device) -> list[Maker]:
    """Returns makers for the kernels other than attention."""
    parts: dict[str, Callable[[], Iterator[Problem]]] = {
        "layers": partial(layer_problems.layers, stepped, device),
        "append": lambda: iter([problems.kv_append(stepped, device), problems.kv_compacted(stepped, device)]),
        "passes": partial(score_problems.passes, stepped, device),
        "recurrence": partial(recurrent_problems.recurrence, stepped, device),
        "trees": partial(score_problems.verification, stepped, device),
        "paths": partial(score_problems.paths, stepped, device),
        "thresholds": partial(score_problems.truncation, stepped, device),
        "children": lambda: iter([score_problems.expansion(stepped, device), score_problems.growth(stepped, device)]),
        "draws": lambda: iter([*score_problems.drawing(stepped, device), score_problems.noise(stepped, device)]),
    }
    return [(f"{name}, {named(stepped.dtype)}, V={stepped.vocabulary}", part) for name, part in parts.items()]


def _options(
    name: str, past: Sequence[int], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[Problem]:
    yield problems.attention_options(name, past, *heads, problems.OPTIONS[name], device, dtype)


def _shape(shape: Shape, device: torch.device) -> Iterator[Problem]:
    yield problems.attention(shape, device)


def checks(setting: Setting) -> list[Item]:
    """Returns phase ``kernels``: every kernel and type against float64, with poisoned outputs and guard bands."""

    def solved(make: Callable[[], Iterator[Problem]]) -> Iterator[KernelRow]:
        torch.manual_seed(setting.seed)
        yield from map(check, make())

    return [Item(name, partial(solved, make)) for name, make in makers(setting.device)]


def bounds(setting: Setting) -> list[Item]:
    """Returns phase ``roofline``: times against a copy and peers; least times by the data sheets of three GPUs."""
    stepped = STEPPED

    def predicted() -> Iterator[Prediction]:
        yield from predictions(TIMED, stepped)

    if setting.watch is None:
        return [Item("bounds by data sheets", predicted)]
    watch = setting.watch

    def measured(make: Callable[[], Iterator[Problem]]) -> Iterator[KernelRow]:
        torch.manual_seed(setting.seed)
        for problem in make():
            if problem.work is not None:
                yield timed(problem, watch, setting.log)
        setting.free()

    memory = torch.cuda.get_device_properties(setting.device).total_memory
    shapes: list[Maker] = [
        (str(shape), partial(_shape, shape, setting.device)) for shape in fitting_shapes(TIMED, memory, setting.log)
    ]
    parts = _stepped(stepped, setting.device)
    chain = stepped._replace(samples=1, tree=(1,) * 7)  # its passes wait for each other
    alone = "a chain of one sample", partial(score_problems.verification, chain, setting.device)
    ordered: list[Maker] = [*shapes[:4], alone, *parts, *shapes[4:]]
    return [*(Item(name, partial(measured, make)) for name, make in ordered), Item("bounds by data sheets", predicted)]
