"""Decoding with target-initialised candidates: the wide mode of improved MCSD.

Shapes: B samples, R rows, V vocabulary, W candidates.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from arbordraft.deciders import Decider
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.judging import target_rows
from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.decoding.step import Stepper
from arbordraft.drafters import Drafter
from arbordraft.sampling.laws import WithoutReplacement
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers.coupling import Coupling
from arbordraft.verifiers.longest_branch import LongestBranch


class TargetInitialisedDecoder(SpeculativeDecoder):
    """Commits the longest of W branches whose first tokens the target itself proposes. Lossy.

    The target's row after the committed text gives the candidates of the first level. In greedy decoding these are its
    W most probable tokens, otherwise W different draws. The drafter continues them, and
    :class:`~arbordraft.verifiers.LongestBranch` decides which branch is committed. Even in greedy decoding the text
    differs from the target's own. So ``stats.exactness`` of results is "lossy".

    The last committed token is read again as the root of the next tree: one row more than in the reference.

    Args:
        target: the target.
        drafter: continues the candidates.
        topology: tree with W children at the root.
        decider: stops drafting early; the candidates are always drafted.
        max_cache_tokens: see :class:`~arbordraft.SpeculativeDecoder`.

    Raises:
        ValueError: if the drafter cannot continue tokens that it did not choose, or if W is 1, since
            :class:`~arbordraft.SpeculativeDecoder` then decodes losslessly.

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
                "a single candidate needs no TargetInitialisedDecoder: every SpeculativeDecoder begins with the "
                "target's own token, losslessly; use SpeculativeDecoder, or builders.dynasd(width=1)"
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
    """Chooses the children of each root from the target's row after the committed text.

    Args:
        target: the target.
        topology: tree with W children at the root.
    """

    def __init__(self, target: RaggedModel, topology: TreeTopology) -> None:
        self.target, self.children = target, list(topology.child_list[0])
        self.law = WithoutReplacement(len(self.children))

    def __call__(
        self, state: DecodeState, active: Sequence[Sample], noise: Noise | GumbelNoise | None
    ) -> list[tuple[list[int], Tensor] | None]:
        if begun := [sample for sample in active if sample.following is None]:
            self._look(state, begun)
        candidates: list[tuple[list[int], Tensor] | None] = [None] * len(state.samples)
        for sample in active:
            row, number = sample.following, sample.number
            assert row is not None
            if isinstance(noise, Noise) and sample.pipeline.temperature:
                candidates[number] = self.law.draw(row, noise.draft[number, self.children].tolist()), row
            else:
                best = row.topk(min(len(self.children), len(row)))
                candidates[number] = best.indices[best.values > 0].tolist(), row
        return candidates

    def _look(self, state: DecodeState, samples: Sequence[Sample]) -> None:
        """Computes the target row after the text of samples that have just begun."""
        handles = [sample.handle for sample in samples]
        batch = state.cache.lay_out(handles, [[0]] * len(handles))
        logits, _ = self.target.run(torch.tensor([sample.tokens[-1] for sample in samples]), batch, state.cache)
        state.cache.drop(handles)
        rows = draft_scores(logits, samples, lambda _: (), untruncated=False).softmax(dim=-1)
        for sample, row in zip(samples, rows, strict=True):
            sample.following = row


class LongestBranchJudge:
    """Verifies with :class:`~arbordraft.verifiers.LongestBranch`, and keeps the row after the committed tokens.

    Args:
        coupling: pairs draws without replacement with that verifier.
        nodes: number of nodes of the topology.
    """

    def __init__(self, coupling: Coupling, nodes: int) -> None:
        self.coupling, self.nodes = coupling, nodes

    def __call__(
        self,
        state: DecodeState,
        tree: DraftTree,
        logits: Tensor,
        best: Sequence[int],
        noise: Noise | GumbelNoise | None,
        samples: Sequence[int],
    ) -> Verdict:
        target = target_rows(state, tree, logits, best)
        rows, verifier = target.scores.softmax(dim=-1), self.coupling.verifier
        assert isinstance(verifier, LongestBranch)
        if noise is None:  # at temperature 0 every acceptance test is certain
            noise = Noise.of([None] * len(tree), self.nodes)
        verdict: Verdict = verifier(tree, target.probabilities, noise, samples)
        for sample in samples:
            end, token = verdict.paths[sample][-1], verdict.tokens[sample]
            last = next((row for row in tree.children[end] if tree.token[row] == token), end)
            own = state[sample]
            certain = target.certain(last)
            own.following = rows[last] if certain else verifier.following(tree[sample], rows, last)
        return verdict
