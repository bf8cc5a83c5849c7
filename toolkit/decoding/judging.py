"""Verifies the drafts of a step: drops samples with NaN or infinite logits, processes rows, asks the coupling.

Shapes: T packed rows, V vocabulary.
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
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import SampleError, attributed, by_pipeline
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.rows import MixedRows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers.coupling import Coupling

Judge = Callable[[DecodeState, DraftTree, Tensor, Sequence[int], Noise | GumbelNoise | None, Sequence[int]], Verdict]
"""Verifies the drafts of a step: ``judge(state, tree, logits, best, noise, samples)``, see :class:`CouplingJudge`."""


class CouplingJudge:
    """Verifies trees by a coupling."""

    def __init__(self, coupling: Coupling) -> None:
        self.coupling = coupling

    def __call__(
        self,
        state: DecodeState,
        tree: DraftTree,
        logits: Tensor,
        best: Sequence[int],
        noise: Noise | GumbelNoise | None,
        samples: Sequence[int],
    ) -> Verdict:
        """Verifies the trees of some samples.

        Args:
            state: the batch.
            tree: the drafts.
            logits: ``[T, V]``.
            best: the most probable token of each of the T rows.
            noise: noise of the step; ``None`` if all samples have temperature 0.
            samples: numbers of the samples to verify.

        Raises:
            SampleError: if a sample's processors fail, or leave no token to draw.
        """
        rows = target_rows(state, tree, logits, best, shared=isinstance(noise, GumbelNoise))
        try:
            return self.coupling(tree, rows, noise, samples)
        except ValueError as error:  # some sample has no token to draw: verify one by one, with the same noise
            for sample in samples:
                try:
                    self.coupling(tree, rows, noise, [sample])
                except ValueError as failure:
                    raise SampleError(sample, failure) from failure
            raise SampleError(samples[0], error) from error


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
    pipelines = [state[number].pipeline for number in tree.living]
    first = pipelines[0]
    if first.only_divides and pipelines.count(first) == len(pipelines):  # nearly always
        return SoftmaxRows(logits, temperature=first.temperature, best=best)
    owners = [state[number] for number in tree.owner.tolist()]
    native, vocabulary = runs_natively(logits), logits.shape[1]

    def drafted(row: int) -> list[int]:
        return tree.token[tree.path(row)[1:]].tolist() if tree.depth[row] else []

    def processed(row: int) -> SoftmaxRows:
        return _processed_by(owners[row].pipeline, owners, drafted, logits, best)

    ways: list[SoftmaxRows] = []
    way_of, drawn = [-1] * len(owners), DrawnRows(logits, best, owners, drafted, processed)
    for rows in by_pipeline(owners):
        pipeline = owners[rows[0]].pipeline
        known = native and (shared or not pipeline.temperature) and pipeline.is_known(vocabulary)
        way = drawn if known else processed(rows[0])
        if way not in ways:
            ways.append(way)
        for row in rows:
            way_of[row] = ways.index(way)
    return ways[0] if len(ways) == 1 else MixedRows(ways, way_of)


def _processed_by(
    pipeline: LogitsPipeline,
    owners: Sequence[Sample],
    drafted: Callable[[int], list[int]],
    logits: Tensor,
    best: Sequence[int],
) -> SoftmaxRows:
    """Returns all rows, processed by one pipeline."""
    if pipeline.only_divides:
        return SoftmaxRows(logits, temperature=pipeline.temperature, best=best)

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

    temperature = 1.0 if pipeline.temperature else 0.0  # the pipeline divides by any other
    return SoftmaxRows(logits, along_paths(pipeline), along_paths(pipeline.trimmed), temperature, best)


__all__ = ["CouplingJudge", "Judge", "finite_rows", "target_rows"]
