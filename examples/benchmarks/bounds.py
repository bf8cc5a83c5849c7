"""Measures forwards of few and many rows against their bounds on this CPU: reading all weights once, and multiplying.

Set `ARBORDRAFT_ISA=avx2`, for example, to measure the kernels of a processor that has no more than AVX2.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from timeit import repeat
from typing import Annotated, ClassVar

import torch
import typer

from arbordraft.bench.measure import precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, quiet
from arbordraft.cli.options import (
    BOTH,
    DtypesOption,
    JsonOption,
    ModelOption,
    RepeatsOption,
    SeedOption,
    numbers,
    whole_numbers,
)
from arbordraft.cli.program import run_script
from arbordraft.kernels import native
from arbordraft.kernels.verify import row_max
from arbordraft.loading import load_target
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.utils.choices import Kernels

CONTEXT = 64  # tokens before the rows: few, as attention has other bounds
SIDE = 1024  # of the matrices that measure peak throughput


@dataclass(frozen=True)
class BoundRow:
    """A forward and its two bounds, in milliseconds.

    Args:
        weights: bits of the weights, ``own`` for the model's.
        rows: tokens of one forward, all of which get logits.
        milliseconds: time of the forward, median of the rounds.
        reading: time to read all weights once, as fast as this machine reads.
        multiplying: time to multiply all weights by all rows, as fast as torch multiplies large matrices in float32.
            Kernels for integers may be faster.
        ratio: ``milliseconds`` over the greater bound.
    """

    table: ClassVar[str] = "forwards against their bounds, times in milliseconds"

    isa: str
    dtype: str
    weights: str
    rows: int
    milliseconds: float
    reading: float
    multiplying: float
    ratio: float


def forward(target: RaggedModel, rows: int) -> Callable[[], None]:
    """Returns a forward of random tokens after a context that leaves the cache unchanged."""
    cache = RaggedKVCache()
    handle = cache.open(CONTEXT + rows)
    target.prefill({handle: torch.randint(target.vocab_size, (CONTEXT,)).tolist()}, cache)
    tokens = torch.randint(target.vocab_size, (rows,))

    def run() -> None:
        target(tokens, cache.lay_out([handle], [range(rows)]), cache)
        cache.drop([handle])

    return run


def median(run: Callable[[], object], repeats: int) -> float:
    """Returns the median milliseconds of a call, after a warm-up call."""
    run()
    return 1e3 * statistics.median(repeat(run, number=1, repeat=repeats))


def against_bounds(
    target: RaggedModel, sizes: list[int], repeats: int, on_progress: ProgressCallback = quiet
) -> Iterator[BoundRow]:
    """Yields a result for every number of rows.

    Raises:
        ValueError: if the target has no native kernels.
    """
    if target.prepacking is None:
        raise ValueError(f"bounds are those of native kernels, and this model has {target.chosen}")
    size = target.prepacking.nbytes
    threads = torch.get_num_threads()
    memory = torch.zeros(threads, size // 4 // threads)
    left, right = torch.rand(2, SIDE, SIDE)
    model: torch.nn.Module = target.model
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    for done, rows in enumerate(sizes):
        kind = target.weights or "own"
        on_progress(f"{precision(target.model)}, {kind} weights, {rows} rows", done, len(sizes))
        took = median(forward(target, rows), repeats)
        reading = median(lambda: row_max(memory), repeats)
        multiplying = median(lambda: left @ right, repeats) * weights * rows / SIDE**3
        bound = max(reading, multiplying)
        isa = str(native.isa())
        yield BoundRow(isa, precision(target.model), kind, rows, took, reading, multiplying, took / bound)


def main(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    weights: Annotated[str, typer.Option(help="Bits of the weights, as in own,int8,int4.")] = "own,int8,int4",
    rows: Annotated[
        str, typer.Option(callback=whole_numbers, help="Tokens of a forward, as in 1,16.")
    ] = "1,4,8,16,64,512",
    repeats: RepeatsOption = 9,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure forwards of few and many rows against reading all weights once, and against multiplying them."""
    torch.manual_seed(seed)
    with Report(json, model=model, dtype=dtype, weights=weights, rows=rows, repeats=repeats, seed=seed) as report:
        for each in dtype:
            for kind in weights.split(","):
                target, _ = load_target(model, each, Kernels.native, None if kind == "own" else kind)
                report.take(against_bounds(target, numbers(rows, int), repeats, report.on_progress))


if __name__ == "__main__":
    run_script(main)
