"""Modules that replace a model's own and read weights prepacked for this processor.

Shapes: T packed rows, H hidden size.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import (
    LayerRun,
    LayerWeights,
    Matrix,
    Norm,
    Recurrence,
    RecurrentRows,
    apply_norm,
)
from arbordraft.kernels.prepacked_linear import prepacked_linear
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.target.attention import Forward, running
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.rotation import apart
from arbordraft.target.states import WHOLE, Key, StateRows


class PrepackedLayers(nn.Module):
    """Consecutive decoder layers of a model, in one kernel call.

    Args:
        layers: weights of the layers in order; empty if an earlier call has computed this layer.
        first: index of the first layer.
        side_by_side: whether the model puts the two cosines or sines of a pair of channels next to each other.
        rest: values that the model's layers return after their output, in a tuple; ``None`` for the output alone.
        settings: plain attributes of the first layer, such as its kind, which models may read.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        first: int = 0,
        side_by_side: bool = False,
        rest: tuple[Any, ...] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in (settings or {}).items() if name not in vars(self)})
        self.layers, self.side_by_side, self._rest = list(layers), side_by_side, rest
        self._places = indices_of(layers, first)
        self.indices = range(first, self._places[-1] + 1 if layers else first)
        self._runs = {len(layers): LayerRun(layers)}

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        ragged: Forward | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **__: Any,
    ) -> Any:
        """Takes the arguments of the model's own layers, and returns their output as these do; see :meth:`run`."""
        if any(isinstance(given, Tensor) for given in (attention_mask, *others)):
            raise ValueError("prepacked layers take their mask from the batch, but the model made one of its own")
        forward = running(ragged)
        assert isinstance(forward, Forward)
        out = self.run(hidden_states, forward, position_embeddings)
        return out if self._rest is None else (out, *self._rest)

    def run(self, hidden_states: Tensor, ragged: Forward, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """Maps ``[1, T, H]`` to ``[1, T, H]``."""
        depth = self.indices.stop if ragged.depth is None else ragged.depth
        indices = self.indices[: max(0, depth - self.indices.start)]
        if not indices:
            return hidden_states
        count = bisect_left(self._places, indices.stop)
        run = self._runs.get(count)
        if run is None:
            run = self._runs[count] = LayerRun(self.layers[:count])
        rows = ragged.state_rows if run.recurrent else None
        pools, lineage = memory_of(ragged.cache, rows, run.layers, hidden_states, indices.start)
        ragged.layers.update({index: None for index, y in zip(self._places, run.layers, strict=False) if y.mixes})
        wanted = [index for index in indices if index in ragged.hidden]
        taps = [bisect_left(self._places, index) for index in wanted]
        tables = position_embeddings
        tables = apart(tables) if self.side_by_side and tables is not None else tables
        out, inputs = run(hidden_states, pools, tables, ragged.batch, taps, lineage=lineage)
        if rows is not None:
            rows.keep()
        ragged.hidden.update(zip(wanted, inputs, strict=True))
        if indices.stop == ragged.depth:
            out = ragged.last = out if ragged.after_layers is None else ragged.after_layers(out)
        return out


def indices_of(layers: Sequence[LayerWeights], first: int = 0) -> list[int]:
    """Returns the places of layers in the model, from ``first`` on; those side by side are one layer of the model."""
    return [first - 1 + number for number in accumulate(int(not layer.parallel) for layer in layers)]


def memory_of(
    cache: RaggedKVCache, rows: StateRows | None, layers: Sequence[LayerWeights], like: Tensor, first: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], RecurrentRows | None]:
    """Returns keys and values of layers, or windows and states of recurrent ones, and the rows that these see.

    Args:
        cache: holds them.
        rows: the rows of the forward, if layers are recurrent.
        layers: the layers.
        like: has the dtype and the device of the rows.
        first: place of the first layer in the model.
    """
    states, lineage = ({}, None) if rows is None else rows.layers(recurrences_of(layers, first), like)
    nothing = like.new_empty(0), like.new_empty(0)  # for layers that only have an MLP

    def memory(index: int, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        if layer.recurrence is not None:
            return states[index, WHOLE]
        return cache.pools(index, (layer.kv_heads, layer.dim), like) if layer.mixes else nothing

    return list(map(memory, indices_of(layers, first), layers)), lineage


def recurrences_of(layers: Sequence[LayerWeights], first: int = 0) -> dict[Key, Recurrence]:
    """Returns the recurrent mixers of layers, in order; the first layer has this place in the model."""
    return {
        (index, WHOLE): layer.recurrence
        for index, layer in zip(indices_of(layers, first), layers, strict=True)
        if layer.recurrence is not None
    }


class PrepackedNorm(nn.Module):
    """An RMS norm or LayerNorm, computed in float32.

    Args:
        norm: weights and offsets.
        epsilon: added to the mean square.
        weight: the model's own weight, as blocks of Mamba ask their norm for its dtype.
    """

    def __init__(self, norm: Norm, epsilon: float, weight: Tensor | None = None) -> None:
        super().__init__()
        self.norm, self.epsilon = norm, epsilon
        vars(self)["weight"] = weight  # no parameter of this module

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., H]`` to ``[..., H]``."""
        return apply_norm(x, self.norm, self.epsilon)


class PrepackedGatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` in two kernel calls.

    Args:
        gate_up: matrices of gates and inputs, interleaved.
        down: matrix of the outputs.
        activation: activation of the gates.
    """

    def __init__(self, gate_up: Matrix, down: Matrix, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., H]`` to ``[..., H]``."""
        for m, activation in ((self.gate_up, self.activation), (self.down, None)):
            x = prepacked_linear(x, m.weight, m.scale, m.bias, outputs=m.outputs, activation=activation)
        return x


def prepack_linears(module: nn.Module, leave: str = "") -> None:
    """Replaces all linears and RMS norms inside a module permanently by prepacked ones.

    Args:
        module: a module that contains such parts, is none itself and is not used elsewhere.
        leave: name of a direct child that stays as it is.
    """
    for name, child in module.named_children():
        if name == leave:
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, PrepackedLinear(child))
        elif isinstance(child, nn.RMSNorm) and child.eps is not None:
            setattr(module, name, PrepackedNorm(Norm(child.weight.detach().float()), child.eps))
        else:
            prepack_linears(child)


__all__ = [
    "PrepackedGatedMLP",
    "PrepackedLayers",
    "PrepackedNorm",
    "indices_of",
    "memory_of",
    "prepack_linears",
    "recurrences_of",
]
