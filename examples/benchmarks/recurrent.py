"""Measures targets with recurrent layers and random weights against their bounds, attention and transformers.

    python examples/benchmarks/recurrent.py --shapes lfm2-350m,granite-4-h-micro

The two sides of every case take turns, so a busy machine slows both.
"""

from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

from arbordraft import NoDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import BOTH, DtypesOption, JsonOption, RepeatsOption, SeedOption
from arbordraft.cli.program import run_script
from arbordraft.drafters.feeding import feed
from arbordraft.drafters.native_models import native_model
from arbordraft.kernels import native
from arbordraft.kernels.draft_tree import Limits, TreesToGrow
from arbordraft.kernels.verify import row_max
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import ancestor_words
from arborlab.gpu.hybrids import HYBRIDS, attention_settings, random_model
from arborlab.gpu.oracle import OracleDrafter, Recorded
from arborlab.pairs import paired

CONTEXT = 64  # tokens before the rows: few, as attention has other bounds
SIDE = 1024  # of the matrices whose products are timed
ROWS = (1, 8, 16)  # of forwards
ACCEPTANCE = 0.8  # of the oracle's drafts
CHAIN = TreeTopology.chain(4)
TREE = TreeTopology.from_parents([-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 8, 9, 10, 12])
PATH = [0, 1, 4, 8]  # accepted nodes of the tree


def attention_model(target: RaggedModel, dtype: torch.dtype) -> RaggedModel:
    """Returns a model whose layers all attend, with weights of about as many bytes."""
    model = random_model("Llama", attention_settings(target.model), dtype)
    return RaggedModel(model, kernels="native", weights=target.weights)


def drafting_for_itself(target: RaggedModel) -> Callable[[], object]:
    """Returns a call that drafts a chain after a short text, with the target's weights in 4 bits and its states."""
    copy = RaggedModel(target.model, kernels="native", weights="int4", head_of=target, self_test=False)
    run, cache = native_model(copy, screen=True), RaggedKVCache()
    assert run is not None
    handle = cache.open(2 * CONTEXT)
    target.prefill({handle: torch.randint(target.vocab_size, (CONTEXT,)).tolist()}, cache)

    def draft() -> None:
        forest = Forest.of_roots(CHAIN, [0], [None])
        forest.reach[:, 0] = 1
        limits = Limits.everything([CHAIN.max_depth])
        trees = TreesToGrow(forest, [0], CHAIN.child_offsets, CHAIN.child_order, limits)
        feed(run, cache, {handle: ([0], None)}, trees, CHAIN, np.full_like(forest.token, -1), commit=False)

    return draft


class Stepping:
    """A cache after a short text, and the steps of a tree or of a row.

    Args:
        target: the model.
        rows: number of first nodes of the tree that a step has.
    """

    def __init__(self, target: RaggedModel, rows: int) -> None:
        self._target, self._rows = target, rows
        self._cache = RaggedKVCache()
        self._handle = self._cache.open(3 * CONTEXT)
        target.prefill({self._handle: torch.randint(target.vocab_size, (CONTEXT,)).tolist()}, self._cache)
        self._tokens = torch.randint(target.vocab_size, (rows,))
        self._words = ancestor_words(TREE.visible.cpu())[:rows]

    def forward(self) -> None:
        """Runs the rows and drops them."""
        self._run()
        self._cache.drop([self._handle])

    def step(self) -> None:
        """Runs the rows and commits a path; cuts the text to its beginning once it is long."""
        self._run()
        self._cache.commit({self._handle: PATH})
        if self._cache.length(self._handle) > 2 * CONTEXT:
            self._cache.shorten(self._handle, CONTEXT)

    def _run(self) -> None:
        depths = TREE.depth_list[: self._rows]
        self._target(self._tokens, self._cache.lay_out([self._handle], [depths], self._words), self._cache)


def bound(target: RaggedModel, rows: int) -> tuple[str, Callable[[], object]]:
    """Returns the greater bound of a forward: reading all weights, or multiplying all rows by them.

    Without instructions for bfloat16, products are in float32.
    """
    assert target.prepacking is not None
    threads = torch.get_num_threads()
    memory = torch.zeros(threads, target.prepacking.nbytes // 4 // threads)
    dtype = target.model.dtype if native.fast_bfloat16() else torch.float32
    left, right = torch.rand(2, SIDE, SIDE).to(dtype)
    model: nn.Module = target.model
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    times = weights * rows / SIDE**3
    if times < 1:  # rows of part of the matrix
        left = left[: max(1, round(SIDE * times))]

    def reading() -> None:
        row_max(memory)

    def multiplying() -> None:
        for _ in range(max(1, round(times))):
            left @ right

    return max(
        (("reading", reading), ("multiplying", multiplying)),
        key=lambda each: paired("", "", each[1], each[1], Workload(repeats=3)).ours,
    )


def measurements(
    name: str, target: RaggedModel, workload: Workload, count: int, on_progress: ProgressCallback = quiet
) -> Iterator[Measurement]:
    """Yields the figures of one model.

    Args:
        name: name of the shape.
        target: the model.
        workload: sets the number of rounds.
        count: number of tokens that are decoded.
        on_progress: see :func:`~arborlab.pairs.paired`.
    """
    case = f"{name}, {precision(target.model)}, {target.weights or 'own'} weights"
    for rows in ROWS:
        kind, reference = bound(target, rows)
        run = Stepping(target, rows).forward
        yield paired("forward", f"{case}, {rows} rows, {kind}", run, reference, workload, on_progress, reach="<= 1.30")
    other = attention_model(target, target.model.dtype)
    steps = [Stepping(each, len(TREE.parents)).step for each in (target, other)]
    yield paired("step", f"{case}, tree of 16", *steps, workload, on_progress, reach="<= 1.15")
    prompt = torch.randint(target.vocab_size, (1, CONTEXT))
    plain = SpeculativeDecoder(target, NoDrafter())

    def decoded(decoder: SpeculativeDecoder) -> list[int]:
        found: list[int] = decoder.generate(prompt, max_new_tokens=count, do_sample=False)[0].tolist()
        return found

    def transformers_own() -> None:
        target.model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)  # type: ignore[operator]

    yield paired(
        "plain",
        f"{case}, {count} tokens against transformers",
        lambda: decoded(plain),
        transformers_own,
        workload,
        on_progress,
        reach=">= 1.30",
        speed_up=True,
    )
    forward = Stepping(target, 1).forward
    yield paired(
        "self",
        f"{case}, chain of {CHAIN.max_depth} in 4 bits against as many forwards",
        drafting_for_itself(target),
        lambda: [forward() for _ in range(CHAIN.max_depth)],
        workload,
        on_progress,
    )
    recorded = Recorded([decoded(plain)], ACCEPTANCE, target.vocab_size)
    drafting = SpeculativeDecoder(target, OracleDrafter(recorded), CHAIN)
    yield paired(
        "drafts",
        f"{case}, chain of 4 of acceptance {ACCEPTANCE} against plain",
        lambda: decoded(drafting),
        lambda: decoded(plain),
        workload,
        on_progress,
        speed_up=True,
    )


def main(
    shapes: Annotated[str, typer.Option(help=f"Shapes of models, of {', '.join(HYBRIDS)}.")] = "lfm2-350m",
    dtype: DtypesOption = BOTH,
    weights: Annotated[str, typer.Option(help="Bits of the weights, as in own,int8,int4.")] = "own",
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens that are decoded.")] = 32,
    repeats: RepeatsOption = 5,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure models with recurrent layers against their bounds, against attention and against transformers."""
    torch.manual_seed(seed)
    settings = {"shapes": shapes, "dtype": dtype, "weights": weights, "new_tokens": new_tokens, "seed": seed}
    with Report(json, **settings, repeats=repeats) as report:
        for name in shapes.split(","):
            if name not in HYBRIDS:
                raise ValueError(f"there is no shape {name!r}; choose of {', '.join(HYBRIDS)}")
            for each in dtype:
                model = random_model(*HYBRIDS[name], getattr(torch, each.value))
                for kind in weights.split(","):
                    target = RaggedModel(model, kernels="native", weights=None if kind == "own" else kind)
                    report.take(measurements(name, target, Workload(repeats=repeats), new_tokens, report.on_progress))


if __name__ == "__main__":
    run_script(main)
