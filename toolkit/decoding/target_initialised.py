"""Decoding with candidates that the target proposes: the wide mode of improved MCSD.

Shapes: B samples, R rows, V vocabulary, W candidates.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft.deciders import Decider
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.processing import draft_scores, target_rows
from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.drafters import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.sampling.laws import WithoutReplacement
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree, Verdict
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling
from arbordraft.verifiers.longest_branch import LongestBranch


class TargetInitialisedDecoder(SpeculativeDecoder):
    """Commits the longest of W branches that begin with tokens of the target's own choice. Lossy.

    The target's row behind the committed text gives the first level, its W most probable tokens in greedy decoding and
    W different draws otherwise; the drafter continues them. For what is kept see
    :class:`~arbordraft.verifiers.LongestBranch`. Not even greedy decoding gives the target's own text. Results say so:
    their ``stats.exactness`` is "lossy".

    The last committed token is read again as the root of the next tree: one row more than the reference needs.

    Args:
        target: the target.
        drafter: continues the candidates.
        topology: W children at the root.
        decider: stops samples early; the candidates are always there.
        max_cache_tokens: see :class:`~arbordraft.SpeculativeDecoder`.

    Raises:
        ValueError: if the drafter cannot go on from tokens that it did not choose, or the root has one child only: that
            is lossless without this class.

    Source: improved MCSD (Lu et al., 2024).
    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter,
        topology: TreeTopology,
        decider: Decider | None = None,
        *,
        max_cache_tokens: int | None = None,
    ) -> None:
        self.width = len(topology.child_list[0])
        if not drafter.takes_candidates:
            raise ValueError(
                f"{type(drafter).__name__} cannot go on from tokens that it did not choose; take a draft model, an "
                "EAGLE head or an early exit"
            )
        if self.width < 2:
            raise ValueError(
                "a single candidate is what every SpeculativeDecoder has, losslessly: its root is the target's own "
                "token; use SpeculativeDecoder, or builders.dynasd(width=1)"
            )
        widest = max(map(len, topology.child_list))
        coupling = Coupling(WithoutReplacement(widest), LongestBranch())
        super().__init__(target, drafter, topology, coupling, decider, max_cache_tokens=max_cache_tokens)
        warnings.warn(
            f"{self.width} target-initialised candidates change the output law; with width 1, or with the width below "
            "the root, decoding is lossless",
            stacklevel=2,
        )

    def _look(self, state: DecodeState, samples: Sequence[Sample]) -> None:
        """Gives samples that have just begun the row behind their text."""
        handles = [sample.handle for sample in samples]
        batch = state.cache.lay_out(handles, [[0]] * len(handles))
        logits, _ = self.target.run(torch.tensor([sample.tokens[-1] for sample in samples]), batch, state.cache)
        state.cache.drop(handles)
        rows = draft_scores(state, logits, lambda row: (samples[row].number, ()), untruncated=False).softmax(dim=-1)
        for sample, row in zip(samples, rows, strict=True):
            sample.following = row

    def _context(self, state: DecodeState, group: Sequence[Sample], noise: Noise | GumbelNoise | None) -> DraftContext:
        if begun := [sample for sample in group if sample.following is None]:
            self._look(state, begun)
        law, children = WithoutReplacement(self.width), list(self.topology.child_list[0])
        context = super()._context(state, group, noise)
        candidates: list[tuple[list[int], Tensor] | None] = [None] * len(state.samples)
        max_depth: list[int | None] = [None] * len(state.samples)
        for sample in group:
            row, number = sample.following, sample.number
            assert row is not None
            # Nothing is emitted behind the drafted levels, so these may use up the whole budget.
            max_depth[number] = sample.budget
            if isinstance(noise, Noise):
                candidates[number] = law.draw(row, noise.draft[number, children].tolist()), row
            else:
                best = row.topk(min(self.width, len(row)))
                candidates[number] = best.indices[best.values > 0].tolist(), row
        # What is drafted changes the text, so that nothing else may change what is drafted.
        return replace(context, max_depth=max_depth, candidates=candidates, plan=self._plan)

    def _judge(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        rows = target_rows(state, tree, logits, best).scores.softmax(dim=-1)
        if noise is None:  # tests are then about certainties
            certain = functional.one_hot(rows.argmax(dim=-1), rows.shape[-1]).to(rows.dtype)
            nothing = torch.zeros(len(tree.samples), self.topology.num_nodes, dtype=torch.float64)
            verdict = self.coupling(tree, certain, Noise(nothing, nothing, nothing))
        else:
            verdict = self.coupling(tree, rows, noise)
        verifier: LongestBranch = self.coupling.verifier  # type: ignore[assignment]
        for number, ((drafted, target), judged) in enumerate(zip(tree.split(rows), verdict.samples, strict=True)):
            if drafted is not None and judged is not None:
                end = (0, *judged.path)[-1]
                last = next((node for node in drafted.children(end) if drafted.tokens[node] == judged.token), end)
                greedy = noise is None
                state[number].following = target[last] if greedy else verifier.following(drafted, target, last)
        return verdict
