"""Whole draft trees in one call of the C++ kernels.

Trees grow from a small model that is fed with its own tokens level by level, or from rows of scores that already exist.
:func:`arbordraft.drafters.grow.grow` computes the same trees level by level, with the same model and limits.

Shapes: T tokens to catch up with, S samples, N nodes of the topology, M drafts, K depths with values of their own. F
concatenated hidden states, V vocabulary, E embedding size, H hidden size, D draft vocabulary, P pool rows, B rotary
tables, R rotated channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.decoder_layers import LayerWeights, Matrix, Norm
from arbordraft.kernels.dispatch import define
from arbordraft.kernels.draft_tree.limits import Ints, Limits, Trees, Verification
from arbordraft.kernels.native import load

_GROWTH = (
    "Tensor(t!) token, Tensor(c!) chance, Tensor(r!) reach, int[] slots, int[] offsets, int[] children, int[] levels, "
    "float[] calibration, float[] expected, float[] costs, int budget, Tensor? seeds, Tensor? positions, "
    "float[] temperatures, float[] truncations, Tensor? corrections, int[] corrected, Tensor? allowed, int[] masked"
)
_draft_from_rows = define(
    "draft_from_rows(Tensor scores, Tensor? table, Tensor? correction, Tensor? gates, Tensor? vocabulary, "
    f"{_GROWTH}) -> int"
)
_draft_tree = define(
    "draft_tree(Tensor tokens, Tensor? states, Tensor embedding, Tensor?[] ends, Tensor?[] parameters, int[] ints, "
    "float[] scalars, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor? vocabulary, Tensor? blocks, Tensor frequencies, "
    f"Tensor slabs, Tensor(f!) fed, {_GROWTH}, float[] numbers) -> int"
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
        exact: ``[V, H]`` of the type of the embedding or in panels, a head that ranks the best tokens of ``head`` anew.
            ``head`` has fewer bits then.
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


class Draws(NamedTuple):
    """Shared noise for drawing tokens; see :mod:`arbordraft.kernels.gumbel`.

    Args:
        seeds: ``[S]`` int64.
        positions: ``[S]`` int64 positions of the tokens that follow the roots.
        temperatures: ``[S]`` divisors of the scores, applied before the noise is added; 0 adds no noise.
        truncations: how the law of each sample that adds noise is truncated; by default not at all.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Sequence[float]
    truncations: Sequence["Truncation"] = ()


class Truncation(NamedTuple):
    """Truncation of a law: 0, 1 and 0 keep all tokens.

    Drafts follow it up to 1/16 of a unit of the scores, which spares sorting them.

    Args:
        top_k: number of tokens, the most probable ones.
        top_p: the least probability of the most probable tokens together.
        min_p: the least probability of a token relative to the most probable one.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Corrections(NamedTuple):
    """Changes of the scores of single tokens, known before a step: penalties, biases and bans.

    Args:
        changes: ``[n, 5]`` float64, sample after sample: a token, a factor, a bias, and two depths of a parent. A
            change applies from the first depth on, and no longer at the second. Changes of a token apply in their
            order. A positive score is divided by the factor, any other one is multiplied with it; then the bias is
            added. A bias of -inf bans the token.
        bounds: ``[S + 1]`` places in ``changes`` at which the changes of each sample begin.
        allowed: ``[S, W]`` uint8: a bit for each token that may come next, the first tokens in the lowest bits.
            ``None`` if no sample has such a mask.
        depths: ``[S]`` depth of the parents to which the mask of a sample applies; -1 for a sample without a mask.
    """

    changes: Tensor
    bounds: Sequence[int]
    allowed: Tensor | None = None
    depths: Sequence[int] = ()


class TreesToGrow(NamedTuple):
    """The trees of some samples, which kernels grow in place, and how far they go on.

    Args:
        trees: trees of all slots; their roots are there. Tokens are int64, chances and reach float64.
        slots: the S slots that draft.
        offsets: ``[N + 1]`` positions in ``children`` at which the children of each node of the topology begin.
        children: children of node 0, of node 1, and so on.
        limits: limits of all slots; one group decides.
        draws: shared noise of the S samples; ``None`` drafts the most probable tokens.
        corrections: changes of the scores of the S samples, if there are any.
    """

    trees: Trees
    slots: Sequence[int]
    offsets: Sequence[int]
    children: Sequence[int]
    limits: Limits
    draws: Draws | None = None
    corrections: Corrections | None = None

    @property
    def costs(self) -> tuple[float, float]:
        """Tokens that a level, and that a row must gain."""
        limits, first = self.limits, self.slots[0]
        if limits.group is None:
            return limits.level_cost, limits.row_cost
        return float(limits.level_cost[first, 0]), float(limits.row_cost[first, 0])

    @property
    def budget(self) -> int:
        """Greatest number of drafts; -1 for no limit."""
        return int(self._price[0])

    @property
    def verification(self) -> Verification | None:
        """Price of verifying drafts."""
        return self._price[1]

    @property
    def _price(self) -> tuple[int, Verification | None]:
        group = self.limits.group
        return self.limits.price_of(0 if group is None else group[self.slots[0]])

    def spelled(self) -> tuple[object, ...]:
        """Returns the arguments of the operators."""
        trees, slots, limits = self.trees, self.slots, self.limits
        return (
            torch.from_numpy(trees.token),
            torch.from_numpy(trees.chance),
            torch.from_numpy(trees.reach),
            slots,
            self.offsets,
            self.children,
            limits.levels.tolist(),
            limits.calibration.ravel().tolist(),
            limits.expected.ravel().tolist(),
            self.costs,
            self.budget,
            *self._spelled_draws(),
            *(self.corrections or (None, (), None, ())),
        )

    def _spelled_draws(self) -> tuple[object, ...]:
        if self.draws is None:
            return None, None, (), ()
        seeds, positions, temperatures, truncations = self.draws
        kept = truncations or [Truncation()] * len(temperatures)
        return seeds, positions, temperatures, [float(number) for one in kept for number in one]


def draft_from_rows(
    scores: Tensor,
    trees: TreesToGrow,
    *,
    vocabulary: Tensor | None = None,
    table: Tensor | None = None,
    correction: Tensor | None = None,
    gates: Tensor | None = None,
) -> int:
    """Grows trees from rows of scores that depend on the depth alone, or also on the parent's token.

    Args:
        scores: ``[S, K, D]`` float32 scores of the children of nodes at depth 0 to K - 1.
        trees: grown in place, by at most K levels.
        vocabulary: ``[D]`` int64 ascending tokens of the scores; by default 0 to D - 1.
        table: ``[V, r]`` a row for each parent token. That row times the depth's gates, multiplied by ``correction``,
            is added to the scores.
        correction: ``[D, r]``, prepacked.
        gates: ``[S, K, r]``, of the dtype of ``table``.

    Returns:
        The number of rows of scores with NaN or without a finite maximum; their nodes got no children.
    """
    broken: int = _draft_from_rows(scores, table, correction, gates, vocabulary, *trees.spelled())
    return broken


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
        trees: TreesToGrow,
        fed: Ints,
        blocks: Tensor | None = None,
    ) -> int:
        """Feeds the missing tokens and grows the trees; a row's bits do not depend on the other rows.

        Args:
            tokens: ``[T]`` int64 tokens to catch up with, sample after sample. The last one of a sample predicts its
                first drafts.
            states: ``[T, F]`` the target's hidden states for these tokens, for a model that reads them.
            pools: ``[P, Hkv, D]`` keys and values of every layer; those of fed tokens are written after the committed
                rows.
            slabs: ``[3, S]`` int64: first pool row, committed tokens and tokens to catch up with of every sample.
            trees: grown in place.
            fed: of the shape of the trees; gets the place of each node that was fed, after a sample's committed keys.
            blocks: ``[n]`` int64 ascending numbers of blocks of 16 tokens, the only ones that are drafted; by default
                all are. The weights have no ``vocabulary`` then.

        Returns:
            The number of rows of scores with NaN or without a finite maximum; their nodes got no children.
        """
        weights = self.weights
        broken: int = _draft_tree(
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
            blocks,
            weights.frequencies,
            slabs,
            torch.from_numpy(fed),
            *trees.spelled(),
            [weights.epsilon, float(weights.outputs), weights.scale, float(weights.norm_output), *weights.factors],
        )
        return broken


def usable() -> bool:
    """Returns whether the C++ kernels that grow trees can be used."""
    return load()


def _spelled(matrix: Matrix | None) -> list[Tensor | None]:
    return [None, None, None] if matrix is None else [matrix.weight, matrix.scale, matrix.bias]


__all__ = [
    "Corrections",
    "DraftRun",
    "DraftWeights",
    "Draws",
    "Limits",
    "TreesToGrow",
    "Truncation",
    "Verification",
    "draft_from_rows",
    "usable",
]
