"""The token after every row under the settings of its request, in one call.

Shapes: R rows, T rows of logits, V vocabulary, n changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import NATIVE, Operator
from arbordraft.kernels.next_tokens.reference import next_tokens_reference

UNDECIDED = -2

_next_tokens = Operator(
    "next_tokens(Tensor logits, int[] rows, int[] seeds, int[] positions, float[] temperatures, float[] kept, "
    "Tensor changes, int[] bounds) -> Tensor",
    next_tokens_reference,
    lambda logits, rows, *_: logits.new_empty(len(rows), dtype=torch.int64),
    native=True,
    native_takes=NATIVE,
)


class RowSettings(NamedTuple):
    """How the tokens after R rows are drawn, a column each.

    Args:
        seeds: seeds of the noise, as for :func:`~arbordraft.kernels.gumbel.gumbel`.
        positions: positions of the tokens to draw.
        temperatures: divisors of the scores; 0 takes the highest score, without noise or truncation.
        kept: top-k, top-p and min-p of every row, three numbers each, applied in this order; 0, 1 and 0 keep all.
        changes: ``[n, 3]`` float64 changes of scores before the division, row after row: a token, a factor and a bias.
            A negative score is multiplied with the factor, any other one divided by it. Then the bias is added.
        bounds: ``[R + 1]`` places in ``changes`` at which those of each row begin.
    """

    seeds: Sequence[int]
    positions: Sequence[int]
    temperatures: Sequence[float]
    kept: Sequence[float]
    changes: Tensor
    bounds: Sequence[int]

    def of(self, place: int) -> "RowSettings":
        """Returns the settings of one row alone."""
        first, last = self.bounds[place : place + 2]
        return RowSettings(
            self.seeds[place : place + 1],
            self.positions[place : place + 1],
            self.temperatures[place : place + 1],
            self.kept[3 * place : 3 * place + 3],
            self.changes[first:last],
            (0, last - first),
        )


def next_tokens(logits: Tensor, rows: Sequence[int], settings: RowSettings) -> list[int]:
    """Draws the token after each of some rows.

    Tokens are those that transformers' processors and :func:`~arbordraft.kernels.gumbel.gumbel_argmax` give, bit for
    bit: scores are changed and divided in float32, and the C++ kernel leaves rows that rounding could decide to the
    reference.

    Args:
        logits: ``[T, V]``, without NaN.
        rows: R rows, in any order.
        settings: how their tokens are drawn.

    Returns:
        R tokens; -1 where noise was to decide and no score is above -inf.
    """
    run = _next_tokens.pick(logits)
    tokens: list[int] = run(logits.contiguous(), rows, *settings).tolist()
    for place, token in enumerate(tokens):
        if token == UNDECIDED:
            tokens[place] = int(next_tokens_reference(logits, rows[place : place + 1], *settings.of(place)))
    return tokens


def runs_natively(logits: Tensor) -> bool:
    """Returns whether the C++ kernel takes these logits; processors are as fast as the reference."""
    return _next_tokens.runs_natively(logits)


__all__ = ["RowSettings", "next_tokens", "next_tokens_reference", "runs_natively"]
