"""What a drafter is told about the step that it drafts for.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from arbordraft.deciders.decisions import Plan, Situation, StepView
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.stateful import PathState
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import TreeTopology


class OneCallDrafts(Protocol):
    """Grows the trees of a step with a drafter's network, all levels at once.

    Attributes:
        rows: most tokens that a sample's cache may lack.
    """

    rows: int

    def __call__(
        self, network: Any, cache: Any, missing: Mapping[int, Any], growth: Growth, draws: Draws | None
    ) -> Drafted:
        """Feeds what is missing, which is committed, and grows the trees.

        Args:
            network: a :class:`~arbordraft.drafters.one_call.DraftNetwork`.
            cache: the drafter's, which was made beside the target's.
            missing: by handle, in the order of ``growth``; see :data:`~arbordraft.drafters.one_call.Missing`.
            growth: how far trees go on.
            draws: how tokens are drawn.
        """


@dataclass(frozen=True)
class DraftContext:
    """All a drafter may know about the step it drafts for.

    Args:
        tokens: committed tokens of every sample, prompt included.
        max_depth: greatest useful depth of each sample's tree; ``None`` for one that does not take part.
        topology: the planned shape.
        mask: the topology's sliced mask.
        law: how children are drawn. At temperature 0, where the verdict depends on the tokens alone, the most probable
            ones, whatever the coupling says.
        pathwise: the text is the same whatever is drafted: at temperature 0, or with noise that target and drafter
            share. What is drafted may then depend on anything.
        process_logits: the request's logits processors. Given ``[R, V]`` logits and, per row, the sample and the
            drafted tokens before the prediction, it returns ``[R, V]`` scores.
        plan: says before anything is drafted how far the trees of some samples go on; ``None`` to be asked instead.
        temperatures: by sample, all that ``process_logits`` does is to divide by it; 0 where it does nothing, as
            decoding is greedy. ``None`` if it does more for some sample.
        decide: says before every level which samples go on.
        memory: what the decider remembers of each sample.
        noise: of this step: uniforms, or the shared one, which drafters add to their scores; ``None`` at temperature 0.
        expected_batch: samples that a sampled one takes its batch to have, all of them like itself.
        candidates: children that each root has already, with the ``[V]`` row that they were drawn from; ``None`` if the
            drafter gives roots theirs.
        vocab_size: V, the target's; ``None`` if the drafter has as many ids, come what may.
        lag: committed tokens of every sample that the drafter has not read, if there are any.
        fixed_batch: whether nobody else will join the batch, so that it counts which sample ends last.
        path_states: by sample, its stateful processors behind the committed tokens; ``None`` where it has none.
        static: grows whole trees in fixed shapes, as the target's steps have them; ``None`` where steps have not.
        extra_rows: rows of the target's forward that belong to samples which take no part, where the text is pathwise.
    """

    tokens: Sequence[Sequence[int]]
    max_depth: Sequence[int | None]
    topology: TreeTopology
    mask: SlicedCausalMask
    law: DraftLaw
    pathwise: bool
    process_logits: Callable[[Tensor, Callable[[int], tuple[int, Sequence[int]]]], Tensor]
    temperatures: Sequence[float] | None
    plan: Callable[[Situation], Plan | None]
    decide: Callable[[StepView], Sequence[bool]]
    memory: Sequence[Any]
    noise: Noise | GumbelNoise | None
    expected_batch: int = 1
    candidates: Sequence[tuple[Sequence[int], Tensor] | None] | None = None
    vocab_size: int | None = None
    lag: Sequence[int] = ()
    fixed_batch: bool = False
    path_states: Sequence[PathState | None] = ()
    static: OneCallDrafts | None = None
    extra_rows: int = 0
