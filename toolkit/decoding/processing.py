"""The rows of a batch: those that are no numbers are dropped, others put through their own sample's processors.

Shapes: T packed rows, R of them, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.kernels.verify import row_max
from arbordraft.sampling.owned_rows import alike, blamed
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.rows import MixedRows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree


def finite_rows(state: DecodeState, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Gives up samples whose logits are not numbers, so that they cannot disturb or lose the others.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.

    Returns:
        The samples that are left, and T most probable tokens, which came up on the way.
    """
    highest, best = row_max(logits)
    # NaN and +inf reach the maximum; -inf alone is a banned token. Plain numbers: an operator takes longer.
    if best.is_cpu:
        sound, tokens = [math.isfinite(value) for value in highest.tolist()], best.tolist()
    else:  # in one download
        sound, tokens = torch.stack([highest.isfinite(), best]).tolist()
    if all(sound):
        return tree.living, tokens
    failed = {int(number) for number, good in zip(tree.owner, sound, strict=True) if not good}
    state.give_up(sorted(failed))
    return [number for number in tree.living if number not in failed], tokens


def target_rows(state: DecodeState, tree: DraftTree, logits: Tensor, best: Sequence[int]) -> SoftmaxRows:
    """The target's rows, put through processors where they are read, each along its own path.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.
        best: T most probable tokens.
    """
    living = [state[number] for number in tree.living]
    if len(alike(living)) == 1 and (temperature := living[0].pipeline.temperature) is not None:  # nearly always
        return SoftmaxRows(logits, temperature=temperature, best=best if living[0].greedy else None)
    owners = [state[number] for number in tree.owner.tolist()]
    kinds = alike(owners)

    def drafted(row: int) -> list[int]:
        return tree.token[tree.path(row)[1:]].tolist()

    made = [_rows_of(owners, drafted, owners[rows[0]], logits, best) for rows in kinds.values()]
    if len(made) == 1:
        return made[0]
    kind_of = [0] * len(owners)
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

        return lambda logits, rows: blamed(process, logits, rows, owners)

    return SoftmaxRows(logits, along_paths(pipeline), along_paths(pipeline.trimmed), best=best_of)
