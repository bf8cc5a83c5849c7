"""Runs consecutive decoder layers in one call, for models whose layers are recognised."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from arbordraft.kernels.decoder_layers.norms import Norm, apply_norm_reference
from arbordraft.kernels.decoder_layers.recurrences import (
    Kept,
    NodeMemory,
    Recurrence,
    RecurrentRows,
    replay_reference,
)
from arbordraft.kernels.decoder_layers.reference import Experts, LayerWeights, Matrix, decoder_layers_reference
from arbordraft.kernels.dispatch import define
from arbordraft.kernels.native import load
from arbordraft.kernels.prepacked_linear import LANES
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.recurrent_tree import Schedule


def _fake(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, taps = hidden.flatten(0, -2), others[12]
    return hidden.new_empty(hidden.shape), hidden.new_empty(len(taps), *rows.shape)


_layers = define(
    "decoder_layers(Tensor hidden, Tensor?[] parameters, int[] ints, float[] scalars, Tensor(a!)[] keys, "
    "Tensor(b!)[] values, Tensor cosine, Tensor sine, Tensor layout, Tensor? region, Tensor positions, Tensor? words, "
    "Tensor slots, int[] taps, Tensor? beside, Tensor[] paths, Tensor(c!)[] kept, int scratch) -> (Tensor, Tensor)",
    _fake,
)
_norm = define(
    "norm(Tensor x, Tensor weight, Tensor? offset, float epsilon) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    lambda x, weight, offset, epsilon: apply_norm_reference(x, Norm(weight, offset), epsilon),
)


_replay = define(
    "replay_layers(int[] ints, Tensor(a!)[] windows, Tensor(b!)[] states, Tensor[] kept, Tensor rows, Tensor first, "
    "Tensor read, Tensor write, Tensor slots, Tensor ends) -> ()",
    lambda *_: None,
)


class LayerRun:
    """Consecutive decoder layers, whose kernel arguments are prepared once.

    Args:
        layers: the layers, from the first to the last.

    Attributes:
        recurrent: whether some layer has a recurrent mixer.
    """

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = list(layers)
        self._tensors = [tensor for layer in layers for tensor in layer.tensors()]
        self._integers = [number for layer in layers for number in layer.integers()]
        self._scalars = [number for layer in layers for number in layer.scalars()]
        self._windowed = any(layer.window for layer in layers)
        self.recurrent = any(layer.recurrence is not None for layer in layers)

    def __call__(
        self,
        hidden: Tensor,
        pools: Sequence[tuple[Tensor, Tensor]],
        rotary: tuple[Tensor, Tensor] | None,
        batch: RaggedBatch,
        taps: Sequence[int] = (),
        beside: Tensor | None = None,
        lineage: RecurrentRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers; in the C++ kernels a row's bits do not depend on the other rows.

        Args:
            hidden: ``[1, T, H]`` float32 or bfloat16.
            pools: ``[P, Hkv, D]`` keys and values of every layer; those of the rows are written to ``batch.slots``. Of
                recurrent layers, windows and states; see :meth:`Recurrence.mix`.
            rotary: ``[1, T, R]`` cosines and sines, of the dtype of ``hidden`` or float32. The entries of a pair of
                channels lie R / 2 apart. ``None`` if no layer rotates.
            batch: rows, slabs and ancestor words.
            taps: layers of this run whose inputs are also returned; taps change no bit of the output.
            beside: ``[T, E]`` of the dtype of ``hidden``, an additional input for layers with a ``beside_norm``.
            lineage: the rows among all uncommitted rows, if layers are recurrent. All convolutions have one width.

        Returns:
            ``[1, T, H]`` output, kept in float32 between the layers, and the ``[len(taps), T, H]`` tapped inputs.
        """
        rotary = rotary or (hidden.new_empty(*hidden.shape[:-1], 0),) * 2
        if not load():
            return decoder_layers_reference(hidden, self.layers, pools, rotary, batch, taps, beside, lineage)
        out: tuple[Tensor, Tensor] = _layers(
            hidden.contiguous(),
            self._tensors,
            self._integers,
            self._scalars,
            [keys for keys, _ in pools],
            [values for _, values in pools],
            rotary[0].contiguous(),
            rotary[1].contiguous(),
            batch.layout,
            batch.region if self._windowed else None,
            batch.positions,
            None if batch.words is None else batch.words.contiguous(),
            batch.slots,
            list(taps),
            None if beside is None else beside.contiguous(),
            *([], []) if lineage is None else lineage.spelled(),
            0 if lineage is None else lineage.schedule.scratch,
        )
        return out


def replay_layers(
    layers: Sequence[Recurrence],
    pools: Sequence[tuple[Tensor, Tensor]],
    kept: Sequence[Kept],
    rows: Tensor,
    schedule: Schedule,
    slots: Tensor,
    ends: Tensor,
) -> None:
    """Runs accepted rows of recurrent layers once more, from committed states, and commits states and windows.

    Args:
        layers: the layers; their convolutions have one width.
        pools: windows and states of every layer, changed in place.
        kept: inputs of every layer, for more rows than these.
        rows: ``[R]`` int64 accepted rows among the kept ones, sample after sample.
        schedule: states that these rows read and write.
        slots: ``[B]`` int64 windows of the samples.
        ends: ``[B, W - 1]`` int64 inputs of the windows, from :meth:`Paths.windows` of the accepted rows.
    """
    if not load():
        replay_reference(layers, pools, kept, rows, schedule, slots, ends)
        return
    windows, states = zip(*pools, strict=True)
    _replay(
        [number for layer in layers for number in layer.integers()],
        list(windows),
        list(states),
        [tensor for each in kept for tensor in each],
        *(rows, schedule.first, schedule.read, schedule.write, slots, ends.contiguous()),
    )


def apply_norm(x: Tensor, norm: Norm, epsilon: float) -> Tensor:
    """Norms ``[..., H]`` row by row; in the C++ kernels a row's bits do not depend on the other rows."""
    if x.shape[-1] % LANES:
        return apply_norm_reference(x, norm, epsilon)
    load()  # without the kernels the operator runs the reference
    normed: Tensor = _norm(x.contiguous(), norm.weight, norm.offset, epsilon)
    return normed


__all__ = [
    "Experts",
    "Kept",
    "LayerRun",
    "LayerWeights",
    "Matrix",
    "NodeMemory",
    "Norm",
    "Recurrence",
    "RecurrentRows",
    "apply_norm",
    "decoder_layers_reference",
    "replay_layers",
]
