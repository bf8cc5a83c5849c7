"""Whole draft trees in one call, by the C++ kernels: from a small model that is fed with its own tokens level by level,
or from rows that are there already.

What it computes is what :func:`arbordraft.drafters.grower.grow` does level by level with the same model and plan.

Shapes: N tokens to catch up with, S samples, F hidden states side by side, V vocabulary, E embedding size, H hidden
size, D draft vocabulary, P pool rows, M drafted nodes, K depths told apart, B rotary tables, R rotated channels.
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
        fuse: ``[H, F]`` makes the layers' input of the target's hidden states, beside which the embedding then stands;
            without it the layers read the embedding alone, and E is H.
        layers: from the first to the last; ``table`` is a row of ``frequencies``.
        norm: ``[H]``, behind them.
        head: ``[D, H]``.
        outputs: D.
        vocabulary: ``[D]`` int64 ascending tokens of the head's outputs; by default 0 to D - 1.
        frequencies: ``[B, R / 2]`` float32 of the B rotary tables.
        factors: of each one's cosines and sines.
        epsilon: of the last norm.
        scale: by which embeddings are multiplied.
        input_norm: ``[H]`` of what the layers read, residual included: fused states, or the output in their place.
        norm_output: whether the output that stands for states is that behind ``norm``.
        exact: ``[V, H]`` of the type of the embedding: the head that says which of the best tokens by ``head`` come
            first; ``head`` is then one of fewer bits.
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
    """How far trees go on: a :class:`~arbordraft.deciders.decisions.Plan` in plain numbers.

    Args:
        offsets: ``[nodes + 1]`` where the children of every node of the topology begin in ``children``.
        children: children of node 0, of node 1, and so on.
        levels: ``[S]`` most levels.
        trust: ``[S K]``.
        next: ``[S K]``.
        weights: ``[S]``.
        level: tokens that a level must gain.
        row: tokens that a node must gain.
        budget: most drafts in all, -1 for any number.
        keep: given how many drafts there can be, tokens that none, one, two of them and so on must bring together to be
            verified; says nothing where all are. ``None`` where the host has to be asked. Kernels do not read it.
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
        """The growth and the draws as operators take them."""
        *numbers, level, row, budget, _ = self
        return (*numbers, [level, row], budget, *(draws or (None, None, ())))


class Drafted(NamedTuple):
    """What was drafted: M nodes below the roots, sample after sample, nodes ascending.

    Args:
        samples: ``[M]`` places of their samples among the S.
        nodes: ``[M]`` of the topology.
        tokens: ``[M]``.
        chances: ``[M]`` draft probability of each, given its parent.
        fed: sample and node of those that were fed, in their order behind a sample's committed keys.
        broken: rows of scores that were no numbers, where nothing was drafted.
        trimmed: whether what the plan does not keep is left out already.
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
        """What the kernels return: ``[M, 3]``, ``[M]`` and ``[F, 2]``."""
        owners, places, tokens = nodes.T.tolist()
        return cls(owners, places, tokens, chances.tolist(), fed.tolist(), broken)


class Draws(NamedTuple):
    """How tokens are drawn with noise that the target shares; see :mod:`arbordraft.kernels.gumbel`.

    Args:
        seeds: ``[S]`` int64.
        positions: ``[S]`` int64, of what follows the roots.
        temperatures: ``[S]`` by which scores are divided before the noise is added; 0 adds none.
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
    """Grows trees from rows that depend on the depth alone, or on the parent's token besides.

    Args:
        scores: ``[S, K, D]`` float32: of what follows nodes at depth 0 to K - 1.
        growth: how far; at most K levels.
        draws: by default the most probable tokens are drafted.
        vocabulary: ``[D]`` int64 ascending tokens of the scores; by default 0 to D - 1.
        table: ``[V, r]`` of every parent's token, of which, times the depth's gates, ``correction`` makes what is added
            to its row.
        correction: ``[D, r]`` prepacked.
        gates: ``[S, K, r]``, of the dtype of ``table``.
        roots: ``[S]`` int64 tokens of the roots.
    """
    nodes, chances, fed, broken = _draft_from_rows(
        scores, table, correction, gates, roots, vocabulary, *growth.spelled(draws)
    )
    return Drafted.of(nodes, chances, fed, broken)


class DraftRun:
    """A drafting model with its arguments spelled out once, as the kernel takes them.

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
        """Feeds what is missing and grows the trees; a row's bits do not depend on the rows beside it.

        Args:
            tokens: ``[N]`` int64 to catch up with, sample after sample; the last of each predicts its first drafts.
            states: ``[N, F]`` the target's hidden states beside them, for a model that reads them.
            pools: ``[P, Hkv, D]`` keys and values of every layer; what is fed is written behind the committed rows.
            slabs: ``[3, S]`` int64: first pool row, committed tokens and tokens to catch up with of every sample.
            growth: how far.
            draws: by default the most probable tokens are drafted.
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
    """Whether there are kernels to grow trees with."""
    return load()


def _spelled(matrix: Matrix | None) -> list[Tensor | None]:
    return [None, None, None] if matrix is None else [matrix.weight, matrix.scale, matrix.bias]


__all__ = ["DraftRun", "DraftWeights", "Drafted", "Draws", "Growth", "draft_from_rows", "usable"]
