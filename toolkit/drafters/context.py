"""What a drafter is told about the step that it drafts for: data alone.

Shapes: B samples, R nodes of a level, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import RowOwner, draft_temperature
from arbordraft.sampling.stateful import Allowed
from arbordraft.trees.topology import TreeTopology


class OneCallDrafts(Protocol):
    """Grows the trees of a step with a drafter's network, all levels at once.

    Attributes:
        rows: most tokens that a sample's cache may lack.
        alone: the same without the target's step behind it. Who changes what was drafted asks that one, or the step is
            done once more, with what it was changed to.
    """

    rows: int

    @property
    def alone(self) -> "OneCallDrafts": ...

    def __call__(
        self,
        network: Any,
        cache: Any,
        samples: Sequence[int],
        missing: Mapping[int, Any],
        growth: Growth,
        draws: Draws | None,
    ) -> Drafted:
        """Feeds what is missing, which is committed, and grows the trees.

        Args:
            network: a :class:`~arbordraft.drafters.model_drafter.DraftNetwork`.
            cache: the drafter's, which was made beside the target's.
            samples: the numbers of those that draft.
            missing: by handle, in the same order; see :data:`~arbordraft.drafters.model_drafter.Missing`.
            growth: how far trees go on.
            draws: how tokens are drawn.
        """


class ContextSample(RowOwner, Protocol):
    """A sample as drafters see it.

    Attributes:
        memory: what the decider remembers of it.
    """

    memory: Any


@dataclass(frozen=True)
class DraftContext:
    """All a drafter may know about the step it drafts for: columns with an entry for each of B samples.

    Args:
        samples: those of the batch; ``None`` where there is none.
        max_depth: greatest useful depth of each sample's tree; ``None`` for one that takes no part.
        topology: the planned shape.
        law: how children are drawn, of the coupling.
        greedy_law: the same for greedy samples: the most probable ones, as many.
        shared: whether target and drafter share their noise.
        noise: of this step: uniforms, or the shared one, which is added to draft scores; ``None`` if all are greedy.
        expected_batch: samples that a sampled one takes its batch to have, all of them like itself.
        candidates: children that each root has already, with the ``[V]`` row that they were drawn from; ``None`` if the
            drafter gives roots theirs.
        vocab_size: V, the target's; ``None`` if the drafter has as many ids, come what may.
        fixed_batch: whether nobody else will join the batch, so that it counts which sample ends last.
        resting: nothing is drafted in this step but what constraints force, where no text depends on drafts.
        static: grows whole trees in fixed shapes, as the target's steps have them; ``None`` where steps have not.
        extra_rows: rows of the target's forward that belong to samples which take no part.
    """

    samples: Sequence[ContextSample | None]
    max_depth: Sequence[int | None]
    topology: TreeTopology
    law: DraftLaw
    greedy_law: DraftLaw
    shared: bool = False
    noise: Noise | GumbelNoise | None = None
    expected_batch: int = 1
    candidates: Sequence[tuple[Sequence[int], Tensor] | None] | None = None
    vocab_size: int | None = None
    fixed_batch: bool = False
    resting: bool = False
    static: OneCallDrafts | None = None
    extra_rows: int = 0

    @cached_property
    def alive(self) -> list[int]:
        """The samples that take part."""
        return [sample for sample, max_depth in enumerate(self.max_depth) if max_depth is not None]

    def __getitem__(self, sample: int) -> ContextSample:
        """A sample that takes part."""
        found = self.samples[sample]
        assert found is not None
        return found

    def tokens(self, sample: int) -> list[int]:
        """Committed tokens of a sample that takes part, prompt included."""
        return self[sample].tokens

    def pathwise(self, sample: int) -> bool:
        """Whether a sample's text is the same whatever is drafted, so that drafts may depend on anything.

        So it is at temperature 0, and with noise that target and drafter share.
        """
        return self.shared or self[sample].greedy

    def temperature(self, sample: int) -> float | None:
        """See :func:`~arbordraft.sampling.owned_rows.draft_temperature`."""
        return draft_temperature(self[sample], self.shared)


@dataclass(frozen=True)
class Level:
    """The nodes of a depth that get children: R of them, sample after sample, nodes ascending.

    Args:
        context: the step.
        depth: of all these nodes; 0 for roots.
        places: ``[R]`` sample and node of the topology.
        tokens: ``[R]`` their own tokens.
        parents: ``[R]`` rows of their parents in the level above; none for roots.
        above: that level; ``None`` for roots.
    """

    context: DraftContext
    depth: int
    places: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    parents: Sequence[int] = ()
    above: "Level | None" = None

    @cached_property
    def nodes(self) -> dict[int, list[int]]:
        """The nodes by sample."""
        nodes: dict[int, list[int]] = {}
        for sample, node in self.places:
            nodes.setdefault(sample, []).append(node)
        return nodes

    def path(self, row: int) -> list[int]:
        """Drafted tokens from below the root down to the node of a row."""
        path: list[int] = []
        level = self
        while level.above is not None:
            path.append(level.tokens[row])
            level, row = level.above, level.parents[row]
        return path[::-1]

    def text(self, row: int) -> list[int]:
        """Committed and drafted tokens down to the node of a row, its own included."""
        return [*self.context.tokens(self.places[row][0]), *self.path(row)]

    def allowed(self, row: int) -> Allowed | None:
        """What constraints allow behind the node of a row; ``None`` for everything, or where that is not known."""
        state = self.context[self.places[row][0]].path_state
        return None if state is None else state.allowed(self.path(row))


__all__ = ["ContextSample", "DraftContext", "Level", "OneCallDrafts"]
