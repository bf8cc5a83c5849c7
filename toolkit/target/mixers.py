"""Lets the recurrent mixers of transformers' models run packed rows of draft trees.

A mixer calls its convolution and its scan by their names in its module. In a view of the model, a copy of the mixer's
``forward`` finds the operators of :mod:`arbordraft.kernels.recurrent_tree` under these names. Everything else, such as
projections, norms and adapters, is the model's own.

Shapes: T packed rows, C channels, H heads, G key heads, K keys and V values of a
head, N states of a channel, W width of a convolution.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from arbordraft.kernels.recurrent_tree import Scan, gate
from arbordraft.target.attention import Attending, UnsupportedModel, run_model, running
from arbordraft.target.observation import decoder_list

_SILU = ("silu", "swish")


class _Call:
    """One call of a mixer in a forward; its methods replace functions of transformers and take their arguments.

    Args:
        ragged: the forward.
        mixer: number of the mixer.
    """

    def __init__(self, ragged: Attending, mixer: int) -> None:
        self._ragged, self._mixer, self._calls = ragged, mixer, 0

    def _key(self) -> tuple[int, int]:
        self._calls += 1
        return self._mixer, self._calls

    def convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Maps ``[1, C, T]`` to ``[1, C, T]``; the weight is ``[C, W]``."""
        if activation not in (None, *_SILU):
            raise UnsupportedModel(f"a convolution with the activation {activation!r} has no operator")
        activate = activation is not None
        out = self._ragged.convolve(self._key(), hidden_states[0].T, weight.T, bias, activate=activate)
        return out.T[None]

    def delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Runs the gated delta rule: ``[1, T, G, K]`` queries and keys, ``[1, T, H, V]`` values."""
        rows = Scan.gated_delta(*(part[0] for part in (query, key, value, g, beta)), normalize=use_qk_l2norm_in_kernel)
        return self._ragged.scan(self._key(), rows).to(value.dtype)[None], None

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        """Runs Mamba-2: ``[1, T, H, V]`` hidden states, ``[1, T, H]`` step sizes, ``[1, T, G, N]`` B and C."""
        if z is not None or not dt_softplus:
            raise UnsupportedModel("a Mamba-2 scan with a gate of its own or without softplus has no operator")
        rows = Scan.mamba2(hidden_states[0], dt[0], A, B[0], C[0], bias=dt_bias, skip=D, limits=dt_limit)
        return self._ragged.scan(self._key(), rows)[None]

    def mamba(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        """Runs Mamba: ``[1, C, T]`` hidden states and step sizes, ``[C, N]`` A, ``[1, N, T]`` B and C."""
        if not delta_softplus:
            raise UnsupportedModel("a Mamba scan without softplus has no operator")
        steps = gate(dt[0].T, "softplus", delta_bias)
        x = hidden_states[0].T
        out = self._ragged.scan(self._key(), Scan.mamba(x, steps, A.T.contiguous(), B[0].T, C[0].T))[:, 0]
        out = out if D is None else out + x.float() * D.float()
        return (out if z is None else out * gate(z[0].T, "silu")).T[None]


class _PathConvolution(nn.Module):
    """Stands for a depthwise convolution that a mixer calls as a module.

    Args:
        number: number of the mixer.
        convolution: the model's own.
    """

    def __init__(self, number: int, convolution: nn.Conv1d) -> None:
        super().__init__()
        self._number = number
        vars(self)["_own"] = convolution  # not registered: no kernel shall replace it

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[1, C, T]`` to ``[1, C, T]``."""
        own: nn.Conv1d = vars(self)["_own"]
        return _Call(running(None), self._number).convolve(x, own.weight[:, 0], own.bias)


def _run_recurrence(
    number: int, layer: int, *, hidden_states: Tensor, recurrent_gate: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Runs a real-gated linear recurrent unit on ``[1, T, C]`` inputs and decays; texts begin with zeros anyway."""
    ragged = running(None)
    ragged.layers.setdefault(layer, None)
    x = hidden_states[0].float()  # each channel is a state of its own
    ones, rates = x.new_ones(len(x), 1, 1), x.new_ones(1, 1, x.shape[1])
    rows = Scan(ones, ones, x[:, None], recurrent_gate[0].float().log()[:, None], rates=rates)
    return ragged.scan((number, 0), rows)[:, 0][None].to(hidden_states.dtype), None


# By their names in transformers' modules.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _Call.convolve,
    "torch_chunk_gated_delta_rule": _Call.delta,
    "chunk_kimi_delta_attention": _Call.delta,
    "mamba2_chunk_scan": _Call.mamba2,
    "mamba_selective_scan": _Call.mamba,
}


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the recurrent modules of a model for which there are operators."""
    return [module for module in model.modules() if _is_mixer(module) or _is_recurrent_unit(module)]


def run_mixers(model: nn.Module, num_layers: int) -> int:
    """Lets all recurrent modules in a view of a model run packed rows; returns their number.

    Raises:
        UnsupportedModel: if a module's forward is not that of its class.
    """
    place = decoder_list(model, num_layers)
    layers = [] if place is None else list(getattr(*place))
    layer_of = {part: index for index, layer in enumerate(layers) for part in layer.modules()}
    mixers = mixers_of(model)
    for number, mixer in enumerate(mixers):
        layer = layer_of.get(mixer, getattr(mixer, "layer_idx", -1))
        if "forward" in vars(mixer):
            raise UnsupportedModel(
                f"{type(mixer).__name__} has a forward of its own instead of its class's, so its states are unknown: "
                "delete that attribute of the module"
            )
        if _is_mixer(mixer):
            vars(mixer)["forward"] = partial(_run_mixer, number, layer, mixer, _code(mixer))
        else:
            vars(mixer)["_rnn_scan"] = partial(_run_recurrence, number, layer)
            owner = next(module for module in model.modules() if mixer in module._modules.values())
            for name, child in owner._modules.items():
                if type(child) is nn.Conv1d:
                    owner._modules[name] = _PathConvolution(number, child)
    if mixers:
        vars(model)["forward"] = partial(run_model, model.forward)
    return len(mixers)


def _run_mixer(
    number: int,
    layer: int,
    mixer: nn.Module,
    forward: FunctionType,
    *args: Any,
    ragged: Attending | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a mixer's forward, in which the names of its functions mean our operators on this forward's rows."""
    ragged = running(ragged)
    ragged.layers.setdefault(layer, None)
    call = _Call(ragged, number)
    known = {name: MethodType(function, call) for name, function in _FUNCTIONS.items()}
    copy = FunctionType(
        forward.__code__, forward.__globals__ | known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy(mixer, *args, **kwargs)


def is_ours(forward: Any) -> bool:
    """Returns whether this is a forward that :func:`run_mixers` has given to a mixer."""
    return isinstance(forward, partial) and forward.func is _run_mixer


def _is_mixer(module: nn.Module) -> bool:
    code = getattr(_code(module), "__code__", None)
    return code is not None and not _FUNCTIONS.keys().isdisjoint(code.co_names)


def _is_recurrent_unit(module: nn.Module) -> bool:
    return hasattr(type(module), "_rnn_scan")


def _code(module: nn.Module) -> FunctionType:
    """Returns the function behind the decorators of a module's forward."""
    return inspect.unwrap(type(module).forward)


__all__ = ["is_ours", "mixers_of", "run_mixers"]
