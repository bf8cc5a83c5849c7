"""Recurrent mixers in the place of a layer's attention: gated short convolutions, Mamba-2 and gated delta nets.

Shapes: T rows of a forward, A uncommitted rows of its samples, E windows computed ahead, S committed states, H heads, G
key heads, K keys and V values of a head, C channels and W width of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.decoder_layers.norms import Norm, apply_norm_reference
from arbordraft.kernels.recurrent_tree import (
    LENGTH_EPSILON,
    Schedule,
    commit_windows,
    gate,
    tree_convolution,
    tree_scan,
)

KINDS = ("attention", "convolution", "selective", "delta")  # by the kernel's numbers


class Kept(NamedTuple):
    """Inputs of a recurrent layer for all uncommitted rows, from which a commit runs the accepted ones again.

    Args:
        inputs: ``[A, C]`` of the convolution, of the dtype of the rows.
        convolved: ``[A, C]`` inputs of the scan, ``[A, 0]`` without one.
        gates: ``[A, 2 H]`` float32: step sizes or strengths of corrections, then logarithms of decays; or ``[A, 0]``.
    """

    inputs: Tensor
    convolved: Tensor
    gates: Tensor


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of a forward among all uncommitted rows of their samples.

    Args:
        places: ``[T]`` int64 places of the forward's rows.
        schedule: states that all uncommitted rows read and write.
        history: ``[A, W - 1]`` int64, from :meth:`Paths.history`.
        ends: ``[E, W - 1]`` int64 inputs of windows that the forward computes ahead, from :meth:`Paths.windows`.
        slots: ``[E]`` int64 places of these windows.
        kept: for each recurrent layer, its inputs. Those of earlier forwards are there, the others get filled in.
    """

    places: Tensor
    schedule: Schedule
    history: Tensor
    ends: Tensor
    slots: Tensor
    kept: Sequence[Kept]

    def spelled(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the arguments of the kernels: paths, and the memory of all layers."""
        schedule = self.schedule
        paths = [self.places, schedule.first, schedule.read, schedule.write, self.slots, self.history, self.ends]
        return paths, [tensor for kept in self.kept for tensor in kept]


class NodeMemory(NamedTuple):
    """Memory of recurrent layers for the nodes of S draft trees, which change no committed state.

    Args:
        kept: for each recurrent layer, room for the inputs of nodes: as many rows for each sample, one after the other.
        slots: ``[S, m]`` int64 free places among windows and states. m is the greatest number of fed nodes in a level.
            It is 0 if no layer has a state besides its window.
    """

    kept: Sequence[Kept]
    slots: Tensor

    def spelled(self) -> tuple[list[Tensor], Tensor]:
        """Returns the arguments of the kernel: the memory of all layers, and the places."""
        return [tensor for kept in self.kept for tensor in kept], self.slots


@dataclass(frozen=True)
class Recurrence:
    """A recurrent mixer of a decoder layer, between the projections that lead to it and back.

    - A convolution is LFM2's: it convolves the products of B and x, and multiplies the sums by C. Projected rows are
      B, C and x.
    - A selective mixer is Mamba-2. Projected rows are gates z, channels of the convolution, and a step size per head.
      The convolved channels are x, B and C.
    - A delta mixer is the gated delta rule of Qwen3-Next. Projected rows are gates z, channels of the convolution,
      strengths and decays. The convolved channels are queries, keys and values.

    Args:
        kind: ``"convolution"``, ``"selective"`` or ``"delta"``.
        taps: ``[W, C]`` float32 weights of the convolution; the last row weighs a row's own input.
        bias: ``[C]`` float32.
        heads: H.
        key_heads: G.
        keys: K.
        values: V, a multiple of 16.
        rates: ``[H]`` negative float32 factors of step sizes, which give the logarithms of decays.
        step_bias: ``[H]`` float32, added to step sizes before their softplus.
        skip: ``[H]`` float32 factors of a selective mixer's input, which is added to its output.
        norm: ``[H V]`` float32 factors of the norm after a selective mixer's gates, or ``None`` without one. Of a delta
            mixer, ``[V]`` of the norm before its gates.
        group: channels that are normed together; V without a norm.
        epsilon: constant of the norm.
        steps: least and greatest step size of a selective mixer.
        strongest: greatest strength of a delta mixer's corrections, 1 or 2: their factor.
    """

    kind: str
    taps: Tensor
    bias: Tensor | None = None
    heads: int = 0
    key_heads: int = 0
    keys: int = 0
    values: int = 0
    rates: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
    group: int = 0
    epsilon: float = 0.0
    steps: tuple[float, float] = (0.0, float("inf"))
    strongest: float = 1.0

    @property
    def scans(self) -> bool:
        """Whether there is a state besides the convolution's window."""
        return self.kind != "convolution"

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.taps.shape[1]

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a state."""
        return self.heads, self.keys, self.values

    @property
    def outputs(self) -> int:
        """Channels of the mixer's output."""
        return self.heads * self.values if self.scans else self.channels

    def tensors(self) -> list[Tensor | None]:
        """Returns the tensors in the order in which the kernel takes them."""
        return [self.taps, self.bias, self.rates, self.step_bias, self.skip, self.norm]

    def integers(self) -> list[int]:
        """Returns the integers in the order in which the kernel takes them."""
        sizes = [self.heads, self.key_heads, self.keys, self.values, len(self.taps), self.channels, self.group]
        return [KINDS.index(self.kind), *sizes]

    def scalars(self) -> list[float]:
        """Returns the floats in the order in which the kernel takes them."""
        return [self.epsilon, *self.steps, self.strongest]

    def memory(self, rows: int, like: Tensor) -> Kept:
        """Returns room for the inputs of ``rows`` rows, of the dtype of ``like``."""
        scanned = self.channels if self.scans else 0
        shapes = ((self.channels, like.dtype), (scanned, like.dtype), (2 * self.heads, torch.float32))
        return Kept(*(like.new_empty(rows, size, dtype=dtype) for size, dtype in shapes))

    def scan(self, states: Tensor, schedule: Schedule, convolved: Tensor, gates: Tensor) -> Tensor:
        """Runs the recurrence of ``[A]`` rows; see :func:`arbordraft.kernels.recurrent_tree.tree_scan`.

        Args:
            states: ``[S, H, K, V]``.
            schedule: states that the rows read and write.
            convolved: see :class:`Kept`.
            gates: see :class:`Kept`.

        Returns:
            ``[A, H, V]`` float32.
        """
        shared, size = self.key_heads * self.keys, self.heads * self.values
        first, log_decay = gates.chunk(2, dim=-1)
        delta = self.kind == "delta"
        parts = convolved.split([shared, shared, size] if delta else [size, shared, shared], dim=-1)
        query, key, value = parts if delta else (parts[2], parts[1], parts[0])
        query, key = (part.unflatten(-1, (self.key_heads, self.keys)) for part in (query, key))
        value = value.float().unflatten(-1, (self.heads, self.values))
        if delta:
            options = {"beta": first, "scale": self.keys**-0.5, "epsilon": LENGTH_EPSILON}
            return tree_scan(states, schedule, query, key, value, log_decay, **options)
        return tree_scan(states, schedule, query, key, value * first[..., None], log_decay)

    def mix(self, projected: Tensor, windows: Tensor, states: Tensor, rows: RecurrentRows, kept: Kept) -> Tensor:
        """Computes the mixer's outputs from projected rows, changes states that the schedule writes, and keeps inputs.

        Args:
            projected: ``[T, O]``.
            windows: ``[S, W - 1, C]``.
            states: ``[S, H, K, V]`` float32; unused without a scan.
            rows: rows of the forward.
            kept: inputs of the layer; those of the forward's rows get filled in.

        Returns:
            ``[T, outputs]`` float32.
        """
        size, channels, places = self.outputs, self.channels, rows.places
        if not self.scans:
            before, after, x = projected[:, : 3 * channels].split(channels, dim=-1)
            inputs, gates = before * x, after
        else:
            z, inputs, gates = projected[:, : size + channels + 2 * self.heads].tensor_split(
                [size, size + channels], -1
            )
        kept.inputs[places] = inputs.to(kept.inputs.dtype)
        convolved = tree_convolution(kept.inputs, windows, rows.history, self.taps, self.bias, activate=self.scans)[
            places
        ]
        if len(rows.slots):
            commit_windows(windows, kept.inputs, rows.ends, rows.slots)
        if not self.scans:
            return gates * convolved
        kept.convolved[places] = convolved
        kept.gates[places] = self._gates(gates.float())
        out = self.scan(states, rows.schedule, kept.convolved, kept.gates)[places]
        gated = gate(z, "silu")
        if self.kind == "delta":
            assert self.norm is not None
            return apply_norm_reference(out, Norm(self.norm), self.epsilon).flatten(1) * gated
        assert self.skip is not None
        y = (out + convolved[:, :size].view(out.shape).float() * self.skip[:, None]).flatten(1) * gated
        if self.norm is None:
            return y
        groups = y.unflatten(-1, (-1, self.group))
        return apply_norm_reference(groups, Norm(self.norm.view(groups.shape[1:])), self.epsilon).flatten(1)

    def _gates(self, numbers: Tensor) -> Tensor:
        """Returns ``[T, 2 H]`` step sizes or strengths, and log-decays."""
        strengths, steps = numbers[:, : self.heads], numbers[:, -self.heads :]
        if self.kind == "selective":
            steps = strengths
        steps = gate(steps, "softplus", self.step_bias)
        if self.kind == "delta":
            first = self.strongest * gate(strengths, "sigmoid")
        else:
            first = steps = steps.clamp(*self.steps)
        assert self.rates is not None
        return torch.cat([first, steps * self.rates], dim=-1)


def replay_reference(
    layers: Sequence[Recurrence],
    pools: Sequence[tuple[Tensor, Tensor]],
    kept: Sequence[Kept],
    rows: Tensor,
    schedule: Schedule,
    slots: Tensor,
    ends: Tensor,
) -> None:
    """See :func:`arbordraft.kernels.decoder_layers.replay_layers`."""
    for layer, (windows, states), each in zip(layers, pools, kept, strict=True):
        commit_windows(windows, each.inputs[rows], ends, slots)
        if layer.scans:
            layer.scan(states, schedule, each.convolved[rows], each.gates[rows])


__all__ = ["Kept", "NodeMemory", "Recurrence", "RecurrentRows", "replay_reference"]
