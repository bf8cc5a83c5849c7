"""Rows of several samples, each put through its own sample's processors.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from arbordraft.sampling.processors import LogitsPipeline, widened
from arbordraft.sampling.stateful import PathState


class SampleError(Exception):
    """Failure of one sample, for example in its processors; the other samples can go on.

    Args:
        number: the sample's number.
        cause: the exception that was raised.
    """

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(f"sample {number}: {cause}")
        self.number, self.cause = number, cause


class RowOwner(Protocol):
    """A sample as its rows need it: the processors to apply and the text before them.

    Attributes:
        number: its place in the batch.
        tokens: committed tokens, prompt included.
        pipeline: its logits processors and temperature; samples that share one are processed together.
        path_state: its stateful processors after the committed tokens; ``None`` if it has none.
    """

    number: int
    tokens: list[int]
    pipeline: LogitsPipeline
    path_state: PathState | None

    def path(self, drafted: Sequence[int] = ()) -> list[int]:
        """Returns the committed tokens followed by drafted ones, as logits processors receive them."""

    def state(self, drafted: Sequence[int]) -> PathState:
        """Returns the stateful processors after drafted tokens."""


def draft_scores(
    logits: Tensor, owners: Sequence[RowOwner], drafted: Callable[[int], Sequence[int]], *, untruncated: bool
) -> Tensor:
    """Applies each sample's processors to its draft logits.

    Args:
        logits: ``[R, V]``.
        owners: the sample of each of the R rows.
        drafted: returns the drafted tokens before a row's prediction.
        untruncated: leave out top-k and top-p where tokens are drawn, since drafts are only guesses there.

    Returns:
        ``[R, V]`` scores.

    Raises:
        SampleError: if a processor fails.
    """

    def process(logits: Tensor, rows: Sequence[int], pipeline: LogitsPipeline) -> Tensor:
        processing = pipeline.untruncated if untruncated and pipeline.temperature else pipeline
        return processing(
            logits,
            lambda row: owners[rows[row]].path(drafted(rows[row])),
            lambda row: owners[rows[row]].state(drafted(rows[row])),
        )

    groups = by_pipeline(owners)
    if len(groups) == 1:
        return attributed(process, logits, range(len(owners)), owners)
    scores = widened(logits).clone()
    for rows in groups:
        scores[rows] = attributed(process, logits[rows], rows, owners)
    return scores


def by_pipeline(owners: Sequence[RowOwner]) -> list[list[int]]:
    """Groups rows whose samples share their processors."""
    groups: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        groups.setdefault(id(owner.pipeline), []).append(row)
    return list(groups.values())


def attributed(
    process: Callable[[Tensor, Sequence[int], LogitsPipeline], Any],
    logits: Tensor,
    rows: Sequence[int],
    owners: Sequence[RowOwner],
) -> Any:
    """Processes rows of one pipeline; if that fails, raises SampleError for the sample at fault."""
    rows, pipeline = list(rows), owners[rows[0]].pipeline
    try:
        return process(logits, rows, pipeline)
    except Exception as error:
        for number in sorted({owners[row].number for row in rows}):
            own = [place for place, row in enumerate(rows) if owners[row].number == number]
            try:
                process(logits[own], [rows[place] for place in own], pipeline)
            except Exception as cause:
                raise SampleError(number, cause) from cause
        raise SampleError(owners[rows[0]].number, error) from error


__all__ = ["RowOwner", "SampleError", "attributed", "by_pipeline", "draft_scores"]
