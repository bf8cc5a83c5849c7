"""Checks the Triton kernels against float64, and measures them against their bounds and their peers.

``kernel_timing.py`` says how; without a GPU the kernels run in Triton's interpreter, and there are no times.
"""

from importlib.metadata import version
from typing import Annotated

import torch
import typer
from kernel_timing import Stopwatch, device, measured
from problems import chosen
from roofline import STEPPED, fitting_shapes, predictions, product

from arbordraft.bench.report import Report
from arbordraft.cli.options import BatchesOption, JsonOption, SeedOption, numbers, whole_numbers
from arbordraft.cli.program import run_script


def main(
    contexts: Annotated[
        str, typer.Option(callback=whole_numbers, help="Committed tokens of every sample.")
    ] = "512,2048,8192,32768",
    batches: BatchesOption = "1,8,32",
    trees: Annotated[str, typer.Option(callback=whole_numbers, help="Rows of every sample's tree.")] = "1,8,32,64",
    groups: Annotated[str, typer.Option(callback=whole_numbers, help="Query heads per key head.")] = "4,1,8",
    head_sizes: Annotated[str, typer.Option(callback=whole_numbers, help="Numbers of a head.")] = "128,64",
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens of the vocabulary.")] = 128256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 32,
    flex: Annotated[bool, typer.Option(help="Time FlexAttention too, which compiles for every shape.")] = True,
    milliseconds: Annotated[float, typer.Option(min=1, help="Spent on the timings of one call.")] = 50,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Check and time the Triton kernels against float64, their bounds and their peers.

    All contexts, batches and trees are taken with the first group and head size, the other ones with the last tree but
    one. FlexAttention is timed with that tree, the first group and the first head size. Without a GPU the kernels run
    in Triton's interpreter.
    """
    here = device()  # before anything imports Triton
    torch.manual_seed(seed)
    axes = {"contexts": contexts, "batches": batches, "trees": trees, "groups": groups, "head_sizes": head_sizes}
    options = axes | {"vocabulary": vocabulary, "layers": layers, "flex": flex, "milliseconds": milliseconds}
    shapes = product(*(numbers(each, int) for each in axes.values()))
    stepped = STEPPED._replace(vocabulary=vocabulary, layers=layers)
    on = {"dtype": "bfloat16", "device": here.type, "triton": version("triton"), "seed": seed}
    with Report(json, **options, **on) as report:
        say = report.console.print
        report.take(predictions(shapes, stepped))
        watch = None
        if here.type == "cuda":
            watch = Stopwatch(milliseconds)
            report.settings |= watch.settings()
            shapes = fitting_shapes(shapes, torch.cuda.get_device_properties(here).total_memory, say)
        else:
            say(
                "There is no GPU: the kernels run in Triton's interpreter, on tiny problems. That shows whether "
                "they are right; it says nothing about time, and none is given.",
                style="bold",
            )
        base = (numbers(trees, int)[-2:][0], numbers(groups, int)[0], numbers(head_sizes, int)[0])
        compiled = [shape for shape in shapes if flex and (shape.tree, shape.group, shape.size) == base]
        rows = report.take(measured(chosen(here, shapes, stepped, compiled), watch, say))
    if wrong := [row for row in rows if not row.correct]:
        say(f"{len(wrong)} of {len(rows)} results differ from float64 by more than rounding explains", style="red")
        raise typer.Exit(1)
    say(f"all {len(rows)} results agree with float64 as far as rounding allows")


if __name__ == "__main__":
    run_script(main)
