"""Decoder layers in plain PyTorch: the computation of the fused kernel, step by step.

Shapes: T packed rows, H hidden size, Hq/Hkv query and key heads, D head size, N inner size of the MLP, R rotary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from arbordraft.kernels.decoder_layers.norms import Norm, apply_norm_reference
from arbordraft.kernels.decoder_layers.recurrences import Recurrence, RecurrentRows
from arbordraft.kernels.prepacked_linear import (
    ACTIVATION_CODES,
    ACTIVATIONS,
    LANES,
    outputs_of,
    prepacked_linear_reference,
    select_panels,
)
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention_reference


@dataclass(frozen=True)
class Matrix:
    """A prepacked matrix: see :func:`arbordraft.kernels.prepacked_linear.prepacked_linear`."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Outputs, padded to 16 unless each has a scale or a bias."""
        for part in (self.scale, self.bias):
            if part is not None:
                return len(part)
        return outputs_of(self.weight) if self.weight.dtype == torch.uint8 else len(self.weight) * LANES


@dataclass(frozen=True)
class Experts:
    """Choice among the MLPs of a layer: ``routed`` experts, followed by ``shared`` ones.

    Args:
        router: ``[routed, H]``, or ``[routed + 1, H]`` if the shared experts are gated, in float32 or in the type of
            the rows.
        routed: number of experts that rows choose from. Their weights are a softmax over their scores.
        chosen: number of routed experts that a row takes, those with the largest weights.
        shared: number of experts that every row takes.
        normalised: whether the factors of a row's chosen experts add up to 1.
        gated: whether the factor of shared experts is the sigmoid of the router's last output instead of 1.
        sigmoid: whether the weight of an expert is the sigmoid of its score instead.
        corrections: ``[routed]`` float32, added to sigmoids for the choice alone.
        factor: factor of the routed experts' outputs, besides their weights.
    """

    router: Matrix
    routed: int
    chosen: int
    shared: int = 0
    normalised: bool = True
    gated: bool = False
    sigmoid: bool = False
    corrections: Tensor | None = None
    factor: float = 1.0

    def integers(self) -> list[int]:
        """Returns the integers in the order in which the kernel takes them."""
        return [self.routed, self.chosen, self.shared, int(self.normalised), int(self.gated), int(self.sigmoid)]


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer with grouped-query attention, or a recurrent mixer in its place, and an MLP.

    Either block may be missing, and so may every norm. ``post_*`` norms follow their block; then the residual is added.

    Args:
        pre_attention: ``[H]``.
        qkv: ``[(Hq + 2 Hkv) D, H]``, or ``[(Hq + 2 Hkv) D, E + H]`` with an input beside the hidden states. With
            ``closing``, ``Hq D`` more rows. Of a recurrent mixer, see :class:`Recurrence`.
        query_norm: ``[D]`` for every head by itself, or ``[Hq D]`` for all heads together.
        key_norm: ``[D]`` for every head by itself, or ``[Hkv D]`` for all heads together.
        sinks: ``[Hq]`` float32 logits of attention sinks.
        out: ``[H, Hq D]``, or as many inputs as a recurrent mixer has outputs.
        post_attention: ``[H]``.
        pre_mlp: ``[H]``.
        gate_up: ``[2 N, H]``, gates and inputs interleaved, or ``[N, H]``, inputs alone, for an MLP without gates.
            Experts are concatenated along the rows.
        down: ``[H, N]``; experts are concatenated along the rows.
        post_mlp: ``[H]``.
        heads: query heads; 0 without attention.
        kv_heads: key heads.
        dim: head size.
        inner: inner size of the MLP; 0 without one.
        activation: activation of the gates, or of the inputs if there are no gates.
        window: sliding window in tokens.
        rotary: whether queries and keys are rotated. The channels of a pair lie half of the rotated channels apart.
        epsilon: constant of the norms.
        scale: factor of the scores.
        softcap: bound of the scores.
        beside_norm: ``[E]`` norm of an additional input. Queries, keys and values read that input, placed before the
            hidden states. ``None`` if there is no such input.
        parallel: whether the first block reads the normed input of the layer before, which has one block, instead of
            an own one. Blocks side by side in a layer of a model are several layers.
        experts: choice of experts, if there is more than one MLP.
        table: index of the layer's rotary table, if a call has several.
        closing: whether the attention's output is multiplied by the sigmoid of gates, the last rows of ``qkv``.
        residual: factor of the outputs of attention and MLP before they are added to the residual.
        recurrence: a recurrent mixer; all about heads and attention is ignored then.
    """

    NORMS: ClassVar = ("pre_attention", "query_norm", "key_norm", "post_attention", "pre_mlp", "post_mlp")
    _MATRICES: ClassVar = ("qkv", "out", "gate_up", "down")

    pre_attention: Norm | None
    qkv: Matrix | None
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: Tensor | None
    out: Matrix | None
    post_attention: Norm | None
    pre_mlp: Norm | None
    gate_up: Matrix | None
    down: Matrix | None
    post_mlp: Norm | None
    heads: int
    kv_heads: int
    dim: int
    inner: int
    activation: str
    window: int | None
    rotary: bool
    epsilon: float
    scale: float
    softcap: float | None
    beside_norm: Norm | None = None
    parallel: bool = False
    experts: Experts | None = None
    table: int = 0
    closing: bool = False
    residual: float = 1.0
    recurrence: Recurrence | None = None

    @property
    def mixes(self) -> bool:
        """Whether there is attention or a recurrent mixer."""
        return self.heads > 0 or self.recurrence is not None

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices in the order in which a forward reads them."""
        router = [] if self.experts is None else [self.experts.router]
        return [m for m in (self.qkv, self.out, *router, self.gate_up, self.down) if m is not None]

    def tensors(self) -> list[Tensor | None]:
        """Returns the tensors in the order in which the kernel takes them."""
        tensors: list[Tensor | None] = []
        for name in (
            "pre_attention", "qkv", "query_norm", "key_norm", "sinks", "out", "post_attention", "pre_mlp", "gate_up",
            "down", "post_mlp", "beside_norm",
        ):  # fmt: skip
            value = getattr(self, name)
            if name in self._MATRICES:
                tensors += [None] * 3 if value is None else [value.weight, value.scale, value.bias]
            elif name in (*self.NORMS, "beside_norm"):
                tensors += [None, None] if value is None else [value.weight, value.offset]
            else:
                tensors.append(value)
        router = None if self.experts is None else self.experts.router
        tensors += [None] * 3 if router is None else [router.weight, router.scale, router.bias]
        tensors.append(None if self.experts is None else self.experts.corrections)
        return tensors + ([None] * 6 if self.recurrence is None else self.recurrence.tensors())

    def integers(self) -> list[int]:
        """Returns the integers in the order in which the kernel takes them."""
        flags, e = [1 + self.table if self.rotary else 0, int(self.parallel)], self.experts
        experts = [0] * 6 if e is None else e.integers()
        sizes = [self.heads, self.kv_heads, self.dim, self.inner]
        mixer = [0] * 8 if self.recurrence is None else self.recurrence.integers()
        return [
            *sizes, ACTIVATION_CODES[self.activation], self.window or 0, *flags, *experts, int(self.closing), *mixer
        ]  # fmt: skip

    def scalars(self) -> list[float]:
        """Returns the floats in the order in which the kernel takes them."""
        mixer = [0.0] * 4 if self.recurrence is None else self.recurrence.scalars()
        factor = 1.0 if self.experts is None else self.experts.factor
        return [self.epsilon, self.scale, self.softcap or 0.0, self.residual, factor, *mixer]


def decoder_layers_reference(
    hidden: Tensor,
    layers: Sequence[LayerWeights],
    pools: Sequence[tuple[Tensor, Tensor]],
    rotary: tuple[Tensor, Tensor],
    batch: RaggedBatch,
    taps: Sequence[int] = (),
    beside: Tensor | None = None,
    lineage: RecurrentRows | None = None,
) -> tuple[Tensor, Tensor]:
    """See :class:`arbordraft.kernels.decoder_layers.LayerRun`."""
    x = hidden.flatten(0, -2)
    inputs, read = [], x
    kept = iter(() if lineage is None else lineage.kept)
    for layer, (keys, values) in zip(layers, pools, strict=True):
        inputs.append(x)
        if not layer.parallel:
            read = apply_norm_reference(x, layer.pre_attention if layer.mixes else layer.pre_mlp, layer.epsilon)
        if layer.mixes:
            y = read
            if layer.beside_norm is not None:
                assert beside is not None
                y = torch.cat([apply_norm_reference(beside, layer.beside_norm, layer.epsilon), y], dim=-1)
            assert layer.qkv is not None
            assert layer.out is not None
            projected = _times(y, layer.qkv)
            if layer.recurrence is None:
                y = _attended(projected, layer, keys, values, rotary, batch)
            else:
                assert lineage is not None
                y = layer.recurrence.mix(projected, keys, values, lineage, next(kept)).to(x.dtype)
            y = apply_norm_reference(_times(y, layer.out), layer.post_attention, layer.epsilon)
            x = x + layer.residual * y
        if layer.inner:
            y = _mlp(apply_norm_reference(x, layer.pre_mlp, layer.epsilon) if layer.mixes else read, layer)
            x = x + layer.residual * apply_norm_reference(y, layer.post_mlp, layer.epsilon)
    tapped = torch.stack([inputs[index] for index in taps]) if taps else x.new_empty(0, *x.shape)
    return x.view(hidden.shape), tapped


def _attended(
    projected: Tensor,
    layer: LayerWeights,
    keys: Tensor,
    values: Tensor,
    rotary: tuple[Tensor, Tensor],
    batch: RaggedBatch,
) -> Tensor:
    """Returns the ``[T, Hq D]`` output of an attention from ``[T, O]`` projected rows."""
    heads = projected.unflatten(-1, (-1, layer.dim))
    query, key, value, gates = heads.split(
        [layer.heads, layer.kv_heads, layer.kv_heads, layer.heads * layer.closing], dim=1
    )
    query, key = _normed(query, layer.query_norm, layer.epsilon), _normed(key, layer.key_norm, layer.epsilon)
    if layer.rotary:
        query, key = _rotated(query, rotary), _rotated(key, rotary)
    keys[batch.slots], values[batch.slots] = key, value
    y = ragged_tree_attention_reference(
        query,
        keys,
        values,
        batch,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )
    return (y * gates.sigmoid() if layer.closing else y).flatten(1)


def _mixture(x: Tensor, layer: LayerWeights, experts: Experts) -> Tensor:
    """Adds up the outputs of the experts that each row takes, by their factors; other experts are not read."""
    scores = _times(x.to(torch.promote_types(x.dtype, torch.float32)), experts.router)
    routed = scores[:, : experts.routed]
    weights = routed.sigmoid() if experts.sigmoid else routed.softmax(dim=-1)
    taken = (weights if experts.corrections is None else weights + experts.corrections).topk(experts.chosen).indices
    factors = weights.gather(1, taken)
    if experts.normalised:
        factors = factors / factors.sum(dim=-1, keepdim=True)
    factors = experts.factor * factors
    shared = torch.arange(experts.routed, experts.routed + experts.shared).expand(len(x), -1)
    gates = scores[:, experts.routed, None].sigmoid() if experts.gated else scores.new_ones(len(x), 1)
    factors, taken = torch.cat([factors, gates.expand(shared.shape)], dim=-1), torch.cat([taken, shared], dim=-1)
    total = torch.zeros_like(x)
    for index in taken.unique().tolist():
        gate_up, down = (_part(m, index, experts.routed + experts.shared) for m in _mlp_matrices(layer))
        rows, place = (taken == index).nonzero(as_tuple=True)
        made = _two_matrices(x[rows], gate_up, down, layer)
        total[rows] += (factors[rows, place, None] * made).to(x.dtype)
    return total


def _part(matrix: Matrix, index: int, count: int) -> Matrix:
    """Returns one of ``count`` matrices that are concatenated along the rows."""
    scale, bias = (
        None if part is None else part.unflatten(0, (count, -1))[index] for part in (matrix.scale, matrix.bias)
    )
    if matrix.weight.dtype == torch.uint8:
        panels = matrix.outputs // LANES // count
        return Matrix(select_panels(matrix.weight, index * panels, panels), scale, bias)
    return Matrix(matrix.weight.unflatten(0, (count, -1))[index], scale, bias)


def _times(x: Tensor, matrix: Matrix, activation: str | None = None) -> Tensor:
    return prepacked_linear_reference(x, matrix.weight, matrix.scale, matrix.bias, matrix.outputs, activation)


def _mlp(x: Tensor, layer: LayerWeights) -> Tensor:
    if layer.experts is not None:
        return _mixture(x, layer, layer.experts)
    return _two_matrices(x, *_mlp_matrices(layer), layer)


def _two_matrices(x: Tensor, gate_up: Matrix, down: Matrix, layer: LayerWeights) -> Tensor:
    """Computes an MLP, with gates or without."""
    if gate_up.outputs == 2 * layer.inner:
        return _times(_times(x, gate_up, layer.activation), down)
    return _times(ACTIVATIONS[layer.activation](_times(x, gate_up)), down)


def _mlp_matrices(layer: LayerWeights) -> tuple[Matrix, Matrix]:
    assert layer.gate_up is not None
    assert layer.down is not None
    return layer.gate_up, layer.down


def _normed(heads: Tensor, norm: Norm | None, epsilon: float) -> Tensor:
    """Norms ``[T, heads, D]``, as many channels together as the norm has factors."""
    if norm is None:
        return heads
    return apply_norm_reference(heads.flatten(1).unflatten(1, (-1, len(norm.weight))), norm, epsilon).view(heads.shape)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (table.flatten(0, -2)[:, None] for table in rotary)
    channels, rest = x.tensor_split([cosine.shape[-1]], dim=-1)
    first, second = channels.chunk(2, dim=-1)
    return torch.cat([channels * cosine + torch.cat([-second, first], dim=-1) * sine, rest], dim=-1)
