"""Measures products with every kind of blocks against a plain read of as many bytes.

    python examples/benchmarks/blocks.py --kinds Q4_K,Q6_K,Q8_0 --rows 1,8

Products and plain reads take turns, over matrices that no cache can hold together. A single thread is timed by its own
clock, which stands still while other processes run. Set `ARBORDRAFT_ISA=avx2`, for example, to measure the kernels of a
processor that has no more than AVX2.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Annotated, ClassVar

import torch
import typer
from torch import Tensor

from arbordraft.bench.report import Report
from arbordraft.cli.options import JsonOption, RepeatsOption, SeedOption, numbers, whole_numbers
from arbordraft.cli.program import run_script
from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear import BLOCKS, pack_blocks, prepacked_linear, quantize_groups
from arbordraft.kernels.verify import row_max


@dataclass(frozen=True)
class BlocksRow:
    """Products of one kind of blocks.

    Args:
        kind: kind of the blocks.
        bits: bits per packed weight, scales included.
        rows: rows of a product.
        milliseconds: median time of one product.
        gigabytes: packed gigabytes per second.
        operations: additions and multiplications per second, in 10^9.
        ratio: this time over the median time of a plain read of as many bytes.
        packing: gigabytes of blocks packed per second.
        load: processes that wanted to run, as the system counts them over a minute.
    """

    table: ClassVar[str] = "products with blocks against a plain read"

    isa: str
    threads: int
    kind: str
    bits: float
    rows: int
    milliseconds: float
    gigabytes: float
    operations: float
    ratio: float
    packing: float
    load: float


def random_blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Returns ``[O, bytes]`` random blocks with scales of ordinary size."""
    known = BLOCKS[kind]
    if kind == "INT4":
        return quantize_groups(torch.randn(outputs, inputs), 4)
    if known.dtype is not None:
        return torch.randn(outputs, inputs).to(known.dtype).view(torch.uint8)
    raw = torch.randint(256, (outputs, inputs // known.weights, known.nbytes), dtype=torch.uint8)
    for place in known.halves:
        raw[..., place : place + 2] = (0.01 * torch.randn(*raw.shape[:2], 1)).half().view(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 120
    return raw.flatten(1)


def seconds(call: Callable[[], object]) -> float:
    """Returns the time of one call; that of the processor for a single thread."""
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    start = clock()
    call()
    return clock() - start


def main(
    kinds: Annotated[str, typer.Option(help="Kinds of blocks, as in Q4_K,Q6_K.")] = ",".join(BLOCKS),
    rows: Annotated[str, typer.Option(callback=whole_numbers, help="Rows of a product, as in 1,8.")] = "1,4,8,16,64",
    outputs: Annotated[int, typer.Option(min=16, help="Outputs of a matrix.")] = 8960,
    inputs: Annotated[int, typer.Option(min=256, help="Inputs of a matrix, a multiple of 256.")] = 1536,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of all matrices of a kind: more than the caches.")] = 192,
    repeats: RepeatsOption = 15,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure products with blocks of GGUF files against a plain read of as many bytes."""
    torch.manual_seed(seed)
    sizes = numbers(rows, int)
    threads = torch.get_num_threads()
    with Report(json, kinds=kinds, outputs=outputs, inputs=inputs, repeats=repeats, seed=seed) as report:
        for kind in kinds.split(","):
            report.on_progress(f"packing {kind}", 0, 1)
            raw = random_blocks(kind, outputs, inputs)
            pack_blocks([raw], [kind])
            took = seconds(lambda raw=raw, kind=kind: pack_blocks([raw], [kind]))  # type: ignore[misc]
            count = max(1, (megabytes << 20) // raw.nbytes)
            packed = [pack_blocks([raw], [kind]) for _ in range(count)]
            size = packed[0].nbytes
            memory = [torch.zeros(threads, size // 4 // threads) for _ in range(count)]
            found: dict[int, list[tuple[float, float]]] = {number: [] for number in sizes}
            for done in range(repeats):
                for number in sizes:
                    report.on_progress(f"{kind}, {number} rows", done, repeats)
                    x = torch.randn(number, inputs)
                    for matrix, plain in zip(packed, memory, strict=True):
                        product = seconds(lambda x=x, m=matrix: prepacked_linear(x, m, outputs=outputs))  # type: ignore[misc]
                        found[number].append((product, seconds(lambda plain=plain: row_max(plain))))  # type: ignore[misc]
            for number, times in found.items():
                each, read = (median(column) for column in zip(*times, strict=True))
                row = BlocksRow(
                    isa=str(native.isa()),
                    threads=threads,
                    kind=kind,
                    bits=8 * size / (outputs * inputs),
                    rows=number,
                    milliseconds=1e3 * each,
                    gigabytes=size / each / 1e9,
                    operations=2 * outputs * inputs * number / each / 1e9,
                    ratio=each / read,
                    packing=raw.nbytes / took / 1e9,
                    load=os.getloadavg()[0],
                )
                report.take([row])


if __name__ == "__main__":
    run_script(main)
