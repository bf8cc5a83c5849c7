"""What the kernels return, without the numbers: lets ``torch.compile`` and ``torch.export`` trace them."""

from typing import Any

from torch import Tensor, float32, float64, int64, library


def register() -> None:
    """Tells torch; once per process, after the library was loaded."""
    for fake in (
        _prepacked_linear,
        _norm,
        _ragged_tree_attention,
        _decoder_layers,
        _row_max,
        _gumbel,
        _gumbel_argmax,
    ):
        library.register_fake(f"arbordraft::{fake.__name__[1:]}", fake)


def _prepacked_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int, activation: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs if activation < 0 else outputs // 2)


def _norm(x: Tensor, weight: Tensor, offset: Tensor | None, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


def _ragged_tree_attention(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[2])


def _decoder_layers(hidden: Tensor, *others: Any, **_: Any) -> tuple[Tensor, Tensor]:
    rows, taps = hidden.flatten(0, -2), others[12]
    return hidden.new_empty(hidden.shape), hidden.new_empty(len(taps), *rows.shape)


def _row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=float32), x.new_empty(x.shape[0], dtype=int64)


def _gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    return seeds.new_empty(seeds.shape[0], vocabulary, dtype=float64)


def _gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=int64)
