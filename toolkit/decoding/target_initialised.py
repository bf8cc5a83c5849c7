"""Decoding with candidates that the target proposes: the wide mode of improved MCSD.

Shapes: B samples, R rows, V vocabulary, W candidates.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft.deciders import Decider
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.processing import draft_scores, target_rows
from arbordraft.decoding.sample_groups import SampleGroup
from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.decoding.step import Stepper
from arbordraft.drafters import Drafter
from arbordraft.sampling.laws import WithoutReplacement
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
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
        super().__init__(target, drafter, topology, coupling, decider, max_cache_tokens=max_cache_tokens, buckets=None)
        self.stepper = Stepper(
            self.parts,
            self.mask,
            candidates=TargetCandidates(self.target, topology),
            judge=LongestBranchJudge(coupling, topology.num_nodes),
        )
        warnings.warn(
            f"{self.width} target-initialised candidates change the output law; with width 1, or with the width below "
            "the root, decoding is lossless",
            stacklevel=2,
        )


class TargetCandidates:
    """Gives every root the tokens that the target's row behind the text prefers.

    Args:
        target: the target.
        topology: W children at the root.
    """

    def __init__(self, target: RaggedModel, topology: TreeTopology) -> None:
        self.target, self.children = target, list(topology.child_list[0])
        self.law = WithoutReplacement(len(self.children))

    def __call__(self, state: DecodeState, group: SampleGroup) -> list[tuple[list[int], Tensor] | None]:
        if begun := [sample for sample in group.samples if sample.following is None]:
            self._look(state, begun)
        candidates: list[tuple[list[int], Tensor] | None] = [None] * len(state.samples)
        for sample in group.samples:
            row, number = sample.following, sample.number
            assert row is not None
            if isinstance(group.noise, Noise):
                candidates[number] = self.law.draw(row, group.noise.draft[number, self.children].tolist()), row
            else:
                best = row.topk(min(len(self.children), len(row)))
                candidates[number] = best.indices[best.values > 0].tolist(), row
        return candidates

    def _look(self, state: DecodeState, samples: Sequence[Sample]) -> None:
        """Gives samples that have just begun the row behind their text."""
        handles = [sample.handle for sample in samples]
        batch = state.cache.lay_out(handles, [[0]] * len(handles))
        logits, _ = self.target.run(torch.tensor([sample.tokens[-1] for sample in samples]), batch, state.cache)
        state.cache.drop(handles)
        rows = draft_scores(state, logits, lambda row: (samples[row].number, ()), untruncated=False).softmax(dim=-1)
        for sample, row in zip(samples, rows, strict=True):
            sample.following = row


class LongestBranchJudge:
    """Judges by :class:`~arbordraft.verifiers.LongestBranch`, and keeps the row behind what is committed.

    Args:
        coupling: draws without replacement, judged by that verifier.
        nodes: those of the topology.
    """

    def __init__(self, coupling: Coupling, nodes: int) -> None:
        self.coupling, self.nodes = coupling, nodes

    def __call__(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        rows = target_rows(state, tree, logits, best).scores.softmax(dim=-1)
        if noise is None:  # tests are then about certainties
            certain = functional.one_hot(rows.argmax(dim=-1), rows.shape[-1]).to(rows.dtype)
            nothing = torch.zeros(len(tree.samples), self.nodes, dtype=torch.float64)
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
