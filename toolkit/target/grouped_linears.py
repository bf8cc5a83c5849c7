"""Lets a model's linears read a copy of their weights in 4 bits, on a GPU.

The forwards here run :mod:`arbordraft.kernels.grouped_linear` in place of the linears of recognised attentions and
gated MLPs, and of the head. Linears that read the same rows are one product. With the norms, rotations and attention of
:mod:`arbordraft.target.fused_modules`, a layer takes eight launches.

Shapes: T packed rows, H hidden size, D head size.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.kernels.grouped_linear import grouped_linear, interleave, round_to_panels
from arbordraft.kernels.prepacked_linear.blocks import LANES
from arbordraft.target.attention import Attending, AttentionCall, UnsupportedModel
from arbordraft.target.fused_linears import plain_linears, refuse_others
from arbordraft.target.fused_modules import Recognised, is_tables


class GroupedCopy:
    """A copy in 4 bits of the weights of linears that read the same rows.

    Args:
        linears: the linears, whose outputs follow one another.
        activation: name of a gated activation; there are then two linears, a gate and its input.
    """

    def __init__(self, linears: Sequence[nn.Linear], activation: str | None = None) -> None:
        weights, biases = ([getattr(module, name) for module in linears] for name in ("weight", "bias"))
        join: Any = interleave if activation else lambda *parts: torch.cat(parts)
        self.panels = round_to_panels(join(*weights) if len(weights) > 1 else weights[0])
        self.bias = None if biases[0] is None else join(*biases).detach() if len(biases) > 1 else biases[0]
        self.outputs, self.activation = sum(map(len, weights)), activation
        self.original_bytes = sum(weight.nbytes for weight in weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps ``[..., I]`` to the outputs of all linears, or to those of the gated activation."""
        return grouped_linear(x, self.panels, self.bias, outputs=self.outputs, activation=self.activation)


def copy_linears(model: Any, found: Recognised, layers: Iterable[nn.Module]) -> list[GroupedCopy]:
    """Replaces the forwards of a view's attentions, MLPs and head by ones that read copies of 4 bits; returns these.

    Args:
        model: the view.
        found: modules that :func:`~arbordraft.target.fused_modules.fuse` has recognised in it.
        layers: its decoder layers.

    Raises:
        UnsupportedModel: if a module with weights has no such kernel; names the first ones.
    """
    done, copies = set[nn.Module](found.norms), list[GroupedCopy]()

    def copied(linears: list[Any], activation: str | None = None) -> GroupedCopy:
        done.update(linears)
        copies.append(GroupedCopy(linears, activation))
        return copies[-1]

    for attention, call in found.calls.items():
        parts: dict[str, Any] = dict(attention.named_children())
        linears = [parts[f"{name}_proj"] for name in "qkvo"]
        if call.dim == call.value_dim and plain_linears(linears[:3]) and plain_linears(linears[3:]):
            run = partial(_run_attention, attention, call, copied(linears[:3]), copied(linears[3:]))
            vars(attention)["forward"] = run
    for mlp, activation in found.gates.items():
        parts = dict(mlp.named_children())
        linears = [parts[f"{name}_proj"] for name in ("gate", "up", "down")]
        if plain_linears(linears[:2]) and plain_linears(linears[2:]) and not len(linears[0].weight) % LANES:
            vars(mlp)["forward"] = partial(_run_mlp, copied(linears[:2], activation), copied(linears[2:]))
    head = model.get_output_embeddings()
    if plain_linears([head]):
        vars(head)["forward"] = copied([head])
    refuse_others(model, found, done, layers, "weights='int4' on a GPU")
    return copies


def _run_mlp(gated: GroupedCopy, down: GroupedCopy, x: Tensor) -> Tensor:
    """Maps ``[..., H]`` to ``[..., H]``."""
    return down(gated(x))


def _run_attention(
    attention: Any,
    call: AttentionCall,
    projected: GroupedCopy,
    out: GroupedCopy,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    ragged: Attending,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the ``[1, T, H]`` output and no attention weights."""
    if attention_mask is not None or not is_tables(position_embeddings, call.dim, hidden_states):
        raise UnsupportedModel(
            f"{type(attention).__name__} was called with arguments that weights='int4' does not support on a GPU"
        )
    layer: int = attention.layer_idx
    ragged.layers[layer] = call
    heads = projected(hidden_states[0]).unflatten(1, (-1, call.dim))
    query, key, value = heads.split([call.heads, call.kv_heads, call.kv_heads], dim=1)
    norms = (attention._modules.get(f"{name}_norm") for name in "qk")
    query, key = (part if norm is None else norm(part) for part, norm in zip((query, key), norms, strict=True))
    cosine, sine = position_embeddings
    attended = ragged.attend(layer, query, key, value, call, (cosine[0], sine[0]))
    return out(attended.reshape(1, len(attended), -1)), None


__all__ = ["GroupedCopy", "copy_linears"]
