"""Data of a step, as drafters read them.

Shapes: B samples, R nodes of a depth, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from arbordraft.drafters.vocabulary import TextVocabulary
from arbordraft.sampling.corrections import Changes
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import RowOwner
from arbordraft.sampling.stateful import Allowed
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeTopology


class ContextSample(RowOwner, Protocol):
    """A sample as drafters see it.

    Attributes:
        prompt: length of its prompt.
        memory: the decider's memory of it.
        max_drafts: most drafts that it may have in a step; ``None`` for any number.
        prediction: tokens that its answer is expected to contain, for lookups.
        vocabulary: the tokens that its drafts are chosen from if there are many.
    """

    prompt: int
    memory: Any
    max_drafts: int | None
    prediction: Sequence[int]

    @property
    def vocabulary(self) -> TextVocabulary: ...

    def corrections(self) -> Changes:
        """Returns the ``[n, 5]`` changes of draft scores that its processors make after the committed tokens."""


@dataclass(frozen=True)
class DraftContext:
    """All that a drafter may know about a step: columns with an entry for each of B samples.

    Args:
        samples: the samples of the batch; ``None`` at a free number.
        max_depth: greatest useful depth of each sample's tree; ``None`` for a sample that takes no part.
        topology: the planned shape of the trees.
        law: the coupling's draft law.
        certain_law: the law of drafts that are chosen without noise, as many as ``law`` gives.
        shared: whether target and drafter share their noise.
        noise: uniforms of this step, or shared noise that is added to draft scores; ``None`` if all temperatures are 0.
        expected_batch: batch size that a sampled request assumes; all samples of that batch count as equal.
        candidates: children that each root has already, with the ``[V]`` row that they were drawn from; ``None`` if the
            drafter proposes the roots' children.
        vocab_size: V of the target, to which draft logits are fitted; ``None`` leaves them as they are.
        fixed_batch: whether no further sample joins the batch, so that it matters which one ends last.
        resting: whether samples whose texts do not depend on drafts draft only forced tokens in this step.
        extra_rows: rows of the target's forward for samples that take no part.
    """

    samples: Sequence[ContextSample | None]
    max_depth: Sequence[int | None]
    topology: TreeTopology
    law: DraftLaw
    certain_law: DraftLaw
    shared: bool = False
    noise: Noise | GumbelNoise | None = None
    expected_batch: int = 1
    candidates: Sequence[tuple[Sequence[int], Tensor] | None] | None = None
    vocab_size: int | None = None
    fixed_batch: bool = False
    resting: bool = False
    extra_rows: int = 0

    @cached_property
    def alive(self) -> list[int]:
        """Numbers of the samples that take part."""
        return [sample for sample, max_depth in enumerate(self.max_depth) if max_depth is not None]

    @cached_property
    def bounds(self) -> dict[int, int]:
        """Most drafts of each sample that has such a bound."""
        bounds = {sample: self[sample].max_drafts for sample in self.alive}
        return {sample: bound for sample, bound in bounds.items() if bound is not None}

    def __getitem__(self, sample: int) -> ContextSample:
        """Returns a sample that takes part."""
        found = self.samples[sample]
        assert found is not None
        return found

    @cached_property
    def roots(self) -> list[int | None]:
        """Last committed token of each of B samples; ``None`` for a sample that takes no part."""
        taking = zip(self.samples, self.max_depth, strict=True)
        return [sample.tokens[-1] if sample and depth is not None else None for sample, depth in taking]

    def tokens(self, sample: int) -> list[int]:
        """Returns the committed tokens of a sample that takes part, prompt included."""
        return self[sample].tokens

    def law_of(self, sample: int, certain: bool) -> DraftLaw:
        """Returns the law of a sample's children; ``certain`` if the drafter chooses them without noise."""
        return self.certain_law if certain or not self.temperature(sample) else self.law

    def pathwise(self, sample: int) -> bool:
        """Tells whether drafts cannot change a sample's text, so that they may depend on anything.

        This holds at temperature 0, and if target and drafter share their noise.
        """
        return self.shared or not self.temperature(sample)

    def temperature(self, sample: int) -> float:
        """Returns the divisor of a sample's draft scores; 0 if its drafts are the most probable tokens."""
        return self[sample].pipeline.temperature


class Frontier:
    """The R nodes of one depth that get children, in ascending order of sample and node.

    Args:
        context: the step.
        forest: the trees so far.
        depth: depth of these nodes; 0 for roots.
        samples: ``[R]`` sample of each node.
        nodes: ``[R]`` topology node of each.
        tokens: ``[R]`` token of each.

    Attributes:
        places: sample and node of each.
    """

    def __init__(
        self, context: DraftContext, forest: Forest, depth: int, samples: list[int], nodes: list[int], tokens: list[int]
    ) -> None:
        self.context, self.forest, self.depth = context, forest, depth
        self.samples, self.nodes, self.tokens = samples, nodes, tokens
        self.places = list(zip(samples, nodes, strict=True))

    def __len__(self) -> int:
        """Returns R."""
        return len(self.nodes)

    @property
    def by_sample(self) -> dict[int, list[int]]:
        """Nodes by sample."""
        nodes: dict[int, list[int]] = {}
        for sample, node in self.places:
            nodes.setdefault(sample, []).append(node)
        return nodes

    def path(self, row: int) -> list[int]:
        """Returns the drafted tokens from below the root down to the node of a row."""
        return self.forest.path(self.samples[row], self.nodes[row]) if self.depth else []

    def text(self, row: int) -> list[int]:
        """Returns the committed and drafted tokens down to the node of a row, that node included."""
        return [*self.context.tokens(self.samples[row]), *self.path(row)]

    def allowed(self, row: int) -> Allowed | None:
        """Returns the tokens that constraints allow after the node of a row; ``None`` for all, or if unknown."""
        state = self.context[self.samples[row]].path_state
        return None if state is None else state.allowed(self.path(row))


__all__ = ["ContextSample", "DraftContext", "Frontier"]
