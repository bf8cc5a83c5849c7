"""Measures the choice of ``arbordraft tune`` against its whole grid; give it prompts that tuning did not see."""

from pathlib import Path
from typing import Annotated

import typer

from arbordraft.bench.report import Report
from arbordraft.bench.tuned import Tuned
from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel
from arborlab.tuning import grid


def against_grid(target: RaggedModel, drafter: Drafter, tuned: Tuned, batch: int) -> dict[str, SpeculativeDecoder]:
    """Builds the setting that tuning chose for a drafter and a batch size, and every other setting of its grid.

    On prompts that tuning did not see, no speed-up should be above 1.
    """
    chosen = tuned.choice(batch).setting
    decoders = {f"chosen: {chosen}": tuned.decoder(target, batch, drafter)}
    for setting in grid(drafter):
        if setting != chosen:
            decoders[str(setting)] = setting.decoder(target, drafter, tuned.costs, batch)
    return decoders


def main(
    file: Annotated[Path, typer.Argument(help="The file that 'arbordraft tune' has written.")],
    drafter: Annotated[str | None, typer.Option(help="By default the one it was tuned for.")] = None,
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 96,
    batches: BatchesOption = "1,8",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure the choice of 'arbordraft tune' against its whole grid; give it prompts that tuning did not see."""
    choice = Tuned.load(file)
    at = str(choice.temperature)
    sizes = workloads(prompts, limit, batches, at, new_tokens=new_tokens, repeats=repeats, seed=seed)
    with Report(json, png, drafter=drafter or choice.drafter, file=file) as report:
        target = report.load(model, dtype)
        proposer = drafter_named(drafter or choice.drafter, target)
        for workload in sizes:
            report.decode(target, against_grid(target, proposer, choice, workload.batch), workload)


if __name__ == "__main__":
    run_script(main)
