"""Prepares target rows: drops samples with NaN or infinite logits, applies each sample's own processors.

Shapes: T packed rows, R selected rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.kernels.next_tokens import runs_natively
from arbordraft.kernels.verify import row_max
from arbordraft.sampling.drawn_rows import DrawnRows
from arbordraft.sampling.owned_rows import alike, attributed
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.rows import MixedRows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree


def finite_rows(state: DecodeState, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Ends samples with NaN or infinite logits, so that the rest of the batch can go on.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.

    Returns:
        The remaining samples, and the most probable token of each of the T rows.
    """
    highest, best = row_max(logits)
    # NaN and +inf reach the maximum; -inf marks a banned token. On a CPU plain numbers are faster than an operator.
    if best.is_cpu:
        finite, tokens = [math.isfinite(value) for value in highest.tolist()], best.tolist()
    else:  # in one download
        finite, tokens = torch.stack([highest.isfinite(), best]).tolist()
    if all(finite):
        return tree.living, tokens
    failed = {int(number) for number, good in zip(tree.owner, finite, strict=True) if not good}
    state.give_up(sorted(failed))
    return [number for number in tree.living if number not in failed], tokens


def target_rows(
    state: DecodeState, tree: DraftTree, logits: Tensor, best: Sequence[int], *, shared: bool = False
) -> SoftmaxRows:
    """Returns the target's rows; processors are applied when a row is read, along the path of its node.

    Args:
        state: the batch.
        tree: the drafts.
        logits: ``[T, V]``.
        best: the most probable token of each of the T rows.
        shared: whether tokens are drawn with noise that target and drafter share, so that no law is needed.
    """
    living = [state[number] for number in tree.living]
    if len(alike(living)) == 1 and (temperature := living[0].pipeline.temperature) is not None:  # nearly always
        return SoftmaxRows(logits, temperature=temperature, best=best if living[0].greedy else None)
    owners = [state[number] for number in tree.owner.tolist()]
    native, vocabulary = runs_natively(logits), logits.shape[1]

    def drafted(row: int) -> list[int]:
        return tree.token[tree.path(row)[1:]].tolist() if tree.depth[row] else []

    kinds: dict[tuple[int, bool] | None, list[int]] = {}  # None: rows that kernels draw
    for key, rows in alike(owners).items():
        one = owners[rows[0]]
        known = native and (shared or one.greedy) and one.pipeline.is_known(vocabulary, greedy=one.greedy)
        kinds.setdefault(None if known else key, []).extend(rows)
    made = [
        DrawnRows(logits, best, owners, drafted, lambda row: _rows_of(owners, drafted, owners[row], logits, best))
        if key is None
        else _rows_of(owners, drafted, owners[rows[0]], logits, best)
        for key, rows in kinds.items()
    ]
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
    """Returns all rows, processed as those of this sample."""
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
                scores[row] = 0.0  # a dead end: no token drawn from this row is committed
            return processed

        return lambda logits, rows: attributed(process, logits, rows, owners)

    return SoftmaxRows(logits, along_paths(pipeline), along_paths(pipeline.trimmed), best=best_of)
