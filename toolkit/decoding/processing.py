"""The rows of a batch: those that are no numbers are dropped, others put through their own sample's processors.

Shapes: T packed rows, R of them, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.decoding.state import DecodeState, Sample, SampleError
from arbordraft.kernels.verify import row_max
from arbordraft.sampling.processors import LogitsPipeline, widened
from arbordraft.sampling.rows import MixedRows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree


def draft_scores(
    state: DecodeState,
    logits: Tensor,
    place_of: Callable[[int], tuple[int, Sequence[int]]],
    untruncated: bool,
) -> Tensor:
    """Draft logits, put through processors.

    Args:
        state: the batch.
        logits: ``[R, V]``.
        place_of: of every row the sample's number and the drafted tokens before the prediction.
        untruncated: leave out top-k and top-p where tokens are drawn, since drafts are but guesses there.

    Raises:
        SampleError: if a processor fails.
    """
    owners = [state[place_of(row)[0]] for row in range(len(logits))]

    def process(logits: Tensor, rows: Sequence[int], pipeline: LogitsPipeline) -> Tensor:
        processing = pipeline.untruncated if untruncated and not owners[rows[0]].greedy else pipeline
        return processing(
            logits,
            lambda row: owners[rows[row]].path(place_of(rows[row])[1]),
            lambda row: owners[rows[row]].state(place_of(rows[row])[1]),
        )

    kinds = _alike(owners)
    if len(kinds) == 1:
        return _blamed(process, logits, range(len(owners)), owners)
    scores = widened(logits).clone()
    for rows in kinds.values():
        scores[rows] = _blamed(process, logits[rows], rows, owners)
    return scores


def finite_rows(
    state: DecodeState, tree: DraftTree, logits: Tensor, hidden: Tensor
) -> tuple[DraftTree, Tensor, Tensor, Tensor]:
    """Gives up samples whose logits are not numbers, so that they cannot disturb or lose the others.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.
        hidden: ``[T, F]`` the target's states, F of them side by side.

    Returns:
        What is left of the tree, its logits and hidden states, and ``[T]`` most probable tokens on the host, which came
        up on the way.
    """
    highest, best = row_max(logits)
    # NaN and +inf reach the maximum; -inf alone is a banned token. Plain numbers: an operator takes longer.
    if best.is_cpu:
        sound = [math.isfinite(value) for value in highest.tolist()]
    else:  # in one download
        finite, best = torch.stack([highest.isfinite(), best]).cpu()
        sound = finite.bool().tolist()
    if all(sound):
        return tree, logits, hidden, best
    owner = [number for number, _, _ in tree.rows()]
    failed = {number for number, good in zip(owner, sound, strict=True) if not good}
    state.give_up(sorted(failed))
    kept = torch.tensor([number not in failed for number in owner])
    samples = (None if number in failed else sample for number, sample in enumerate(tree.samples))
    return DraftTree(tuple(samples)), logits[kept], hidden[kept], best[kept]


def target_rows(state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor) -> SoftmaxRows:
    """The target's rows, put through processors where they are read, each along its own path.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.
        best: ``[T]`` their most probable tokens.
    """
    living = [state[number] for number, drafted in enumerate(tree.samples) if drafted]
    if len(_alike(living)) == 1 and (temperature := living[0].pipeline.temperature) is not None:  # nearly always
        return SoftmaxRows(logits, temperature=temperature, best=best.tolist() if living[0].greedy else None)
    places = list(tree.rows())
    owners = [state[number] for number, _, _ in places]
    kinds = _alike(owners)

    def drafted(row: int) -> list[int]:
        number, node, _ = places[row]
        return tree.samples[number].path(node)  # type: ignore[union-attr]

    likeliest = best.tolist()
    made = [_rows_of(owners, drafted, owners[rows[0]], logits, likeliest) for rows in kinds.values()]
    if len(made) == 1:
        return made[0]
    kind_of = [0] * len(places)
    for kind, rows in enumerate(kinds.values()):
        for row in rows:
            kind_of[row] = kind
    return MixedRows(made, kind_of)


def _rows_of(
    owners: Sequence[Sample], drafted: Callable[[int], list[int]], sample: Sample, logits: Tensor, best: Sequence[int]
) -> SoftmaxRows:
    """All rows as this sample's are processed."""
    pipeline, best_of = sample.pipeline, best if sample.greedy else None
    if (temperature := pipeline.temperature) is not None:
        return SoftmaxRows(logits, temperature=temperature, best=best_of)

    def along_paths(processing: Callable[..., Any]) -> Callable[[Tensor, Sequence[int]], Any]:
        def process(logits: Tensor, rows: Sequence[int], _: LogitsPipeline) -> Any:
            processed = processing(
                logits,
                lambda row: owners[rows[row]].path(drafted(rows[row])),
                lambda row: owners[rows[row]].state(drafted(rows[row])),
            )
            scores = processed[0] if isinstance(processed, tuple) else processed
            for row in (scores.amax(dim=1) == -math.inf).nonzero().flatten().tolist() if pipeline.stateful else ():
                owners[rows[row]].state(drafted(rows[row])).fail(
                    ValueError("no token may come next: some processor forbids what another one demands")
                )
                scores[row] = 0.0  # behind a draft that cannot be gone on from: nothing drawn here is committed
            return processed

        return lambda logits, rows: _blamed(process, logits, rows, owners)

    return SoftmaxRows(logits, along_paths(pipeline), along_paths(pipeline.trimmed), best=best_of)


def _alike(owners: Sequence[Sample]) -> dict[tuple[int, bool], list[int]]:
    """Rows whose samples want the same done to them."""
    kinds: dict[tuple[int, bool], list[int]] = {}
    for row, sample in enumerate(owners):
        kinds.setdefault((id(sample.pipeline), sample.greedy), []).append(row)
    return kinds


def _blamed(
    process: Callable[[Tensor, Sequence[int], LogitsPipeline], Any],
    logits: Tensor,
    rows: Sequence[int],
    owners: Sequence[Sample],
) -> Any:
    """Processes rows of samples that are alike; finds out which of them it is if that fails."""
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
