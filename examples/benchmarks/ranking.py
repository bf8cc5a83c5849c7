"""Ranks draft laws and verifiers by files of ``arbordraft bench verifiers``, with the errors of their differences."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from arbordraft.bench.report import Report
from arbordraft.cli.options import JsonOption
from arbordraft.cli.program import run_script
from arborlab.plots import read_rows
from arborlab.verifiers import NodeRow, TreeRow
from arborlab.verifiers.positions import difference

NEGLIGIBLE = 1e-3  # difference of rules that are equal but for rounding


@dataclass(frozen=True)
class RankRow:
    """One draft law and verifier beside the best of its setting.

    Args:
        setting: children of one node, or shape and nodes of a tree.
        figure: acceptance of a node, or tokens per forward of a tree.
        behind: difference to the best of the setting.
        error: standard error of ``behind``; prompts are independent.
        as_good: whether the difference is within two errors, or negligible.
    """

    table: ClassVar[str] = "draft laws and verifiers, from the best of a setting down"

    drafter: str
    temperature: float
    setting: str
    law: str
    verifier: str
    figure: float
    behind: float
    error: float
    as_good: bool


def ranks(rows: Sequence[NodeRow | TreeRow]) -> Iterator[RankRow]:
    """Yields the rows of every setting from the best down.

    Raises:
        ValueError: if rows lack the figures of each prompt.
    """
    settings: dict[tuple[str, float, str], list[Any]] = defaultdict(list)
    for row in rows:
        if not row.by_prompt:
            raise ValueError("the file lacks the figures of each prompt: measure again with this version")
        setting = f"{row.k} children" if isinstance(row, NodeRow) else f"{row.topology}, {row.nodes} nodes"
        settings[row.drafter, row.temperature, setting].append(row)
    for (drafter, temperature, setting), alike in settings.items():
        alike.sort(key=_figure, reverse=True)
        for row in alike:
            behind, error = difference(alike[0].by_prompt, row.by_prompt)
            verifier = row.rule if isinstance(row, NodeRow) else row.verifier
            as_good = row is alike[0] or behind <= max(2 * error, NEGLIGIBLE)
            yield RankRow(drafter, temperature, setting, row.law, verifier, _figure(row), behind, error, as_good)


def _figure(row: NodeRow | TreeRow) -> float:
    return row.acceptance if isinstance(row, NodeRow) else row.tau


def main(
    files: Annotated[list[Path], typer.Argument(help="Files of 'arbordraft bench verifiers --json'.")],
    trees: Annotated[bool, typer.Option(help="Rank whole trees instead of single nodes.")] = False,
    json: JsonOption = None,
) -> None:
    """Rank draft laws and verifiers, with the errors of their differences."""
    kind = TreeRow if trees else NodeRow
    rows = [row for file in files for row in read_rows(file) if isinstance(row, kind)]
    with Report(json, files=files, trees=trees) as report:
        report.take(ranks(rows))


if __name__ == "__main__":
    run_script(main)
