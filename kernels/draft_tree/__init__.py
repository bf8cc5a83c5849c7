"""Whole draft trees in one call of the C++ kernels.

Trees grow from a small model that is fed with its own tokens level by level, or from rows of scores that already exist.
:func:`arbordraft.drafters.grower.grow` computes the same trees level by level, with the same model and plan.

Shapes: N tokens to catch up with, S samples, F concatenated hidden states, V vocabulary, E embedding size, H hidden
size. D draft vocabulary, P pool rows, M drafted nodes, K depths told apart, B rotary tables, R rotated channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from arbordraft.kernels.decoder_layers import LayerWeights, Matrix, Norm
from arbordraft.kernels.dispatch import define
from arbordraft.kernels.native import load

_GROWTH = (
    "int[] offsets, int[] children, int[] levels, float[] trust, float[] next, float[] weights, float[] prices, "
    "int budget, Tensor? seeds, Tensor? positions, float[] temperatures"
)
_draft_from_rows = define(
    "draft_from_rows(Tensor scores, Tensor? table, Tensor? correction, Tensor? gates, Tensor roots, "
    f"Tensor? vocabulary, {_GROWTH}) -> (Tensor, Tensor, Tensor, int)"
)
_draft_tree = define(
    "draft_tree(Tensor tokens, Tensor? states, Tensor embedding, Tensor?[] ends, Tensor?[] parameters, int[] ints, "
    "float[] scalars, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor? vocabulary, Tensor frequencies, Tensor slabs, "
    f"{_GROWTH}, float[] numbers) -> (Tensor, Tensor, Tensor, int)"
)


@dataclass(frozen=True)
class DraftWeights:
    """A small model that drafts.

    Args:
        embedding: ``[V, E]``, of the dtype of keys and values.
        fuse: ``[H, F]``, turns the target's hidden states into the layers' input; the embedding is then an input
            beside them. Without it the layers read the embedding alone, and E is H.
        layers: the layers, from the first to the last; ``table`` is a row of ``frequencies``.
        norm: ``[H]`` norm after the layers.
        head: ``[D, H]``.
        outputs: D.
        vocabulary: ``[D]`` int64 ascending tokens of the head's outputs; by default 0 to D - 1.
        frequencies: ``[B, R / 2]`` float32 frequencies of the B rotary tables.
        factors: factor of the cosines and sines of each table.
        epsilon: constant of ``norm``.
        scale: factor of the embeddings.
        input_norm: ``[H]`` norm of the layers' input, residual included. That input is the fused states, or the
            parent's output in their place.
        norm_output: whether the output that replaces the states is taken after ``norm``.
        exact: ``[V, H]`` of the type of the embedding, a head that ranks the best tokens of ``head`` anew. ``head``
            has fewer bits then.
    """

    embedding: Tensor
    fuse: Matrix | None
    layers: Sequence[LayerWeights]
    norm: Norm
    head: Matrix
    outputs: int
    vocabulary: Tensor | None
    frequencies: Tensor
    factors: Sequence[float]
    epsilon: float
    scale: float = 1.0
    exact: Matrix | None = None
    input_norm: Norm | None = None
    norm_output: bool = False


class Growth(NamedTuple):
    """Limits of growing trees: a :class:`~arbordraft.deciders.decisions.Plan` in plain numbers.

    Args:
        offsets: ``[nodes + 1]`` positions in ``children`` at which the children of each node of the topology begin.
        children: children of node 0, of node 1, and so on.
        levels: ``[S]`` maximum number of levels.
        trust: ``[S K]`` factor of draft probabilities, by depth of the parent.
        next: ``[S K]`` how often some child is expected to be accepted, by depth of the parent.
        weights: ``[S]`` worth of a sample's tokens to the batch.
        level: tokens that a level must gain.
        row: tokens that a node must gain.
        budget: maximum number of drafts of all samples, -1 for no limit.
        keep: takes the maximum number of drafts and returns the prices, in tokens, of verifying 0, 1, 2, ... of them.
            An empty result keeps all drafts. ``None`` if the host has to decide. Kernels do not read it.
    """

    offsets: Sequence[int]
    children: Sequence[int]
    levels: Sequence[int]
    trust: Sequence[float]
    next: Sequence[float]
    weights: Sequence[float]
    level: float
    row: float
    budget: int
    keep: Callable[[int], Sequence[float]] | None = None

    def spelled(self, draws: "Draws | None") -> tuple[object, ...]:
        """Returns growth and draws as the arguments of the operators."""
        *numbers, level, row, budget, _ = self
        return (*numbers, [level, row], budget, *(draws or (None, None, ())))


class Drafted(NamedTuple):
    """Drafted nodes: M nodes below the roots, sample after sample, nodes ascending.

    Args:
        samples: ``[M]`` index of each node's sample, below S.
        nodes: ``[M]`` node of the topology.
        tokens: ``[M]``.
        chances: ``[M]`` draft probability of each node, given its parent.
        fed: sample and node of each node that was fed, in the order of their keys after a sample's committed keys.
        broken: number of rows of scores with NaN or without a finite maximum; their nodes got no children.
        trimmed: whether the nodes that the plan does not keep are already left out.
    """

    samples: Sequence[int]
    nodes: Sequence[int]
    tokens: Sequence[int]
    chances: Sequence[float]
    fed: Sequence[Sequence[int]]
    broken: int
    trimmed: bool = False

    @classmethod
    def of(cls, nodes: Tensor, chances: Tensor, fed: Tensor, broken: int) -> Self:
        """Converts the kernels' results ``[M, 3]``, ``[M]`` and ``[fed nodes, 2]``."""
        owners, places, tokens = nodes.T.tolist()
        return cls(owners, places, tokens, chances.tolist(), fed.tolist(), broken)


class Draws(NamedTuple):
    """Shared noise for drawing tokens; see :mod:`arbordraft.kernels.gumbel`.

    Args:
        seeds: ``[S]`` int64.
        positions: ``[S]`` int64 positions of the tokens that follow the roots.
        temperatures: ``[S]`` divisors of the scores, applied before the noise is added; 0 adds no noise.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Sequence[float]


def draft_from_rows(
    scores: Tensor,
    growth: Growth,
    draws: Draws | None = None,
    *,
    vocabulary: Tensor | None = None,
    table: Tensor | None = None,
    correction: Tensor | None = None,
    gates: Tensor | None = None,
    roots: Tensor,
) -> Drafted:
    """Grows trees from rows of scores that depend on the depth alone, or also on the parent's token.

    Args:
        scores: ``[S, K, D]`` float32 scores of the children of nodes at depth 0 to K - 1.
        growth: limits of the trees; at most K levels.
        draws: shared noise; by default the most probable tokens are drafted.
        vocabulary: ``[D]`` int64 ascending tokens of the scores; by default 0 to D - 1.
        table: ``[V, r]`` a row for each parent token. That row times the depth's gates, multiplied by ``correction``,
            is added to the scores.
        correction: ``[D, r]``, prepacked.
        gates: ``[S, K, r]``, of the dtype of ``table``.
        roots: ``[S]`` int64 tokens of the roots.
    """
    nodes, chances, fed, broken = _draft_from_rows(
        scores, table, correction, gates, roots, vocabulary, *growth.spelled(draws)
    )
    return Drafted.of(nodes, chances, fed, broken)


class DraftRun:
    """A drafting model, whose kernel arguments are prepared once.

    Args:
        weights: the model, on a CPU.
    """

    def __init__(self, weights: DraftWeights) -> None:
        self.weights = weights
        norm = [weights.norm.weight, weights.norm.offset]
        before = None if weights.input_norm is None else weights.input_norm.weight
        self._ends = [*_spelled(weights.fuse), *norm, *_spelled(weights.head), *_spelled(weights.exact), before]
        self._tensors = [tensor for layer in weights.layers for tensor in layer.tensors()]
        self._integers = [number for layer in weights.layers for number in layer.integers()]
        self._scalars = [number for layer in weights.layers for number in layer.scalars()]

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor | None,
        pools: Sequence[tuple[Tensor, Tensor]],
        slabs: Tensor,
        growth: Growth,
        draws: Draws | None = None,
    ) -> Drafted:
        """Feeds the missing tokens and grows the trees; a row's bits do not depend on the other rows.

        Args:
            tokens: ``[N]`` int64 tokens to catch up with, sample after sample. The last one of a sample predicts its
                first drafts.
            states: ``[N, F]`` the target's hidden states for these tokens, for a model that reads them.
            pools: ``[P, Hkv, D]`` keys and values of every layer; those of fed tokens are written after the committed
                rows.
            slabs: ``[3, S]`` int64: first pool row, committed tokens and tokens to catch up with of every sample.
            growth: limits of the trees.
            draws: shared noise; by default the most probable tokens are drafted.
        """
        weights = self.weights
        nodes, chances, fed, broken = _draft_tree(
            tokens,
            states,
            weights.embedding,
            self._ends,
            self._tensors,
            self._integers,
            self._scalars,
            [keys for keys, _ in pools],
            [values for _, values in pools],
            weights.vocabulary,
            weights.frequencies,
            slabs,
            *growth.spelled(draws),
            [weights.epsilon, float(weights.outputs), weights.scale, float(weights.norm_output), *weights.factors],
        )
        return Drafted.of(nodes, chances, fed, broken)


def usable() -> bool:
    """Returns whether the C++ kernels that grow trees can be used."""
    return load()


def _spelled(matrix: Matrix | None) -> list[Tensor | None]:
    return [None, None, None] if matrix is None else [matrix.weight, matrix.scale, matrix.bias]


__all__ = ["DraftRun", "DraftWeights", "Drafted", "Draws", "Growth", "draft_from_rows", "usable"]
