"""Extracts and packs recurrent mixers of layers: short convolutions, Mamba-2 and gated delta nets.

Shapes: H heads, G key heads, K keys and V values of a head, C channels of a convolution, O outputs of a linear.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import Matrix, Recurrence
from arbordraft.kernels.prepacked_linear import LANES
from arbordraft.target.prepacked.probing import Unrecognised, hooked, own_hooks, plain
from arbordraft.target.prepacked.weight_collector import WeightCollector


class Mixer(NamedTuple):
    """A recurrent mixer and the matrices before and after it."""

    into: Matrix
    out: Matrix
    recurrence: Recurrence


_Extract = Callable[[WeightCollector, Any], tuple[Recurrence, Callable[[Tensor], Tensor]]]


def is_recurrent(module: nn.Module) -> bool:
    """Returns whether a module has the parts of a recurrent mixer."""
    return _kind_of(module) is not None


def mixer_of(collector: WeightCollector, mixer: Any, factor: float = 1.0) -> Mixer:
    """Packs a mixer that :func:`is_recurrent` found.

    Args:
        collector: packs its matrices.
        mixer: the mixer.
        factor: factor of its outputs.

    Raises:
        Unrecognised: if the module has other parts.
    """
    kind = _kind_of(mixer)
    assert kind is not None
    names, last, extract = kind
    parts = {last, "norm", "o_norm", "conv", "conv1d", "act", *names}
    others = [name for name, _ in mixer.named_children() if name not in parts]
    buffers = dict(mixer.named_buffers())
    factors = buffers.pop("mup_vector", None)  # of Falcon-H1's projected rows
    if others or own_hooks(mixer) or any(map(hooked, mixer.children())) or buffers:
        raise Unrecognised(f"{type(mixer).__name__} has parts of another kind")
    recurrence, order = extract(collector, mixer)
    into, out = collector.linears(mixer, *names), collector.linear(mixer, last).times(factor)
    if factors is not None:
        (linear,) = into
        into = [linear.times(factors.detach().flatten(), inputs=float(mixer.ssm_in_multiplier))]
    if recurrence.channels % LANES or recurrence.values % LANES or out.weight.shape[1] != recurrence.outputs:
        raise Unrecognised(f"{type(mixer).__name__} has sizes that the kernel does not know")
    collector.remember(mixer)
    return Mixer(collector.matrix(into, order), collector.matrix([out]), recurrence)


def _kind_of(module: nn.Module) -> tuple[tuple[str, ...], str, _Extract] | None:
    """Returns a mixer's linears that read hidden states, the one that leads back, and the function that extracts it."""
    for names, last, own, extract in _KINDS:
        if all(hasattr(module, name) for name in (*names, last, *own)):
            return names, last, extract
    return None


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def _convolution(collector: WeightCollector, mixer: Any, name: str) -> dict[str, Any]:
    """Returns the weights and biases of a depthwise convolution."""
    module = getattr(mixer, name)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    known = type(module) is nn.Conv1d and plain(weight) and weight.shape[1] == 1 and module.groups == len(weight)
    if not known or module.stride != (1,) or module.dilation != (1,):
        raise Unrecognised(f"{name} is {type(module).__name__}")
    collector.remember(module)
    return {"taps": _wide(weight[:, 0].T), "bias": None if bias is None else _wide(bias)}


def _short_convolution(collector: WeightCollector, mixer: Any) -> tuple[Recurrence, Callable[[Tensor], Tensor]]:
    return Recurrence("convolution", **_convolution(collector, mixer, "conv")), _unchanged


def _selective(collector: WeightCollector, mixer: Any) -> tuple[Recurrence, Callable[[Tensor], Tensor]]:
    size = mixer.num_heads * mixer.head_dim
    group = getattr(mixer.norm, "group_size", size // getattr(mixer.norm, "n_groups", 1))
    recurrence = Recurrence(
        "selective",
        **_convolution(collector, mixer, "conv1d"),
        **_heads(collector, mixer, mixer.norm, mixer.num_heads),
        key_heads=mixer.n_groups,
        keys=mixer.ssm_state_size,
        values=mixer.head_dim,
        skip=_wide(mixer.D),
        group=mixer.head_dim if isinstance(mixer.norm, nn.Identity) else group,
        steps=(float(mixer.time_step_limit[0]), float(mixer.time_step_limit[1])),
    )
    if mixer.activation not in ("silu", "swish") or not 0 < group <= size or group % LANES:
        raise Unrecognised(f"{type(mixer).__name__} has another activation, or norms of another size")
    return recurrence, _unchanged


def _delta(
    collector: WeightCollector, mixer: Any, order: Callable[[Any, Tensor], Tensor] | None = None, norm: str = "norm"
) -> tuple[Recurrence, Callable[[Tensor], Tensor]]:
    recurrence = Recurrence(
        "delta",
        **_convolution(collector, mixer, "conv1d"),
        **_heads(collector, mixer, getattr(mixer, norm), mixer.num_v_heads),
        key_heads=mixer.num_k_heads,
        keys=mixer.head_k_dim,
        values=mixer.head_v_dim,
        group=mixer.head_v_dim,
        strongest=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
    )
    if mixer.activation not in ("silu", "swish"):
        raise Unrecognised(f"{type(mixer).__name__} has another activation")
    return recurrence, _unchanged if order is None else partial(order, mixer)


def _heads(collector: WeightCollector, mixer: Any, norm: Any, heads: int) -> dict[str, Any]:
    """Returns the decays and the norm of outputs, which selective mixers and gated delta nets have alike.

    Some selective mixers have no norm.
    """
    parts = {"heads": heads, "rates": -_wide(mixer.A_log).exp(), "step_bias": _wide(mixer.dt_bias)}
    if isinstance(norm, nn.Identity):
        return parts
    weight = norm._parameters.get("weight")
    if list(norm.parameters()) != [weight] or list(norm.buffers()) or not plain(weight):
        raise Unrecognised(f"the norm of outputs is {type(norm).__name__}")
    collector.remember(norm)
    return {**parts, "norm": _wide(weight), "epsilon": float(norm.variance_epsilon)}


def _by_key_head(mixer: Any, rows: Tensor) -> Tensor:
    """Reorders rows of Qwen3-Next's linears, which lie by key head, as :class:`Recurrence` wants them."""
    each = mixer.num_v_heads // mixer.num_k_heads
    width = 2 * mixer.head_k_dim + 2 * each * mixer.head_v_dim
    large, small = rows.tensor_split([mixer.num_k_heads * width])
    query, key, value, z = large.unflatten(0, (mixer.num_k_heads, width)).split(
        [mixer.head_k_dim, mixer.head_k_dim, each * mixer.head_v_dim, each * mixer.head_v_dim], dim=1
    )
    parts = z, query, key, value, *small.unflatten(0, (mixer.num_k_heads, 2 * each)).split(each, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _gates_first(mixer: Any, rows: Tensor) -> Tensor:
    """Moves the gates of Qwen3.5's linears before queries, keys and values."""
    mixed, z, rest = rows.tensor_split([mixer.conv_dim, mixer.conv_dim + mixer.value_dim])
    return torch.cat([z, mixed, rest])


def _wide(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in float32, which does not follow later changes."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()


_STATES = ("conv1d", "A_log", "dt_bias")
_KINDS: tuple[tuple[tuple[str, ...], str, tuple[str, ...], _Extract], ...] = (
    (("in_proj_qkvz", "in_proj_ba"), "out_proj", (*_STATES, "norm"), partial(_delta, order=_by_key_head)),
    (
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "out_proj",
        (*_STATES, "norm"),
        partial(_delta, order=_gates_first),
    ),
    (
        ("g_proj", "q_proj", "k_proj", "v_proj", "b_proj", "a_proj"),
        "o_proj",
        (*_STATES, "o_norm"),
        partial(_delta, norm="o_norm"),
    ),
    (("in_proj",), "out_proj", (*_STATES, "norm", "D", "time_step_limit"), _selective),
    (("in_proj",), "out_proj", ("conv",), _short_convolution),
)


__all__ = ["Mixer", "is_recurrent", "mixer_of"]
