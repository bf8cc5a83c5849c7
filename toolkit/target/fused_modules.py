"""Replaces modules of transformers that run ten operations on a GPU by one or two Triton launches.

In a view of a model (see :class:`~arbordraft.target.model_view.ModelView`), norms, gated MLPs, attentions and decoder
layers get forwards that run :mod:`arbordraft.kernels.fused_layers`. They read the same tensors and call the same
linears as before, so adapters, hooks and new weights keep their effect. A module gets such a forward only if it
reproduces the bits of the operators' references on noise. Any other module stays as it is.

Shapes: T packed rows, H hidden size, N inner size of an MLP, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from arbordraft.kernels import choice
from arbordraft.kernels.fused_layers import (
    ACTIVATIONS,
    add_rms_norm,
    gated_activation,
    rms_norm,
    rms_norm_reference,
    rotate_reference,
)
from arbordraft.target.attention import Attending, AttentionCall, Tables
from arbordraft.target.model_view import ModelView, active_hooks
from arbordraft.target.prepacked.probing import hooked, is_gated, noise, plain

_ROWS = 3  # rows of noise
_INNER = 16  # channels of the linears that an MLP is tried with
_FORMS = ((0.0, False), (0.0, True), (1.0, True))  # offset of the weights, and whether they are wide
# Small enough to reveal epsilon, and large enough to reveal a bound.
_SIZES = torch.tensor([[0.003], [0.02], [1.0], [100.0]])
_MLP = {"gate_proj", "up_proj", "down_proj"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
# By all parts of a layer: the norms of its attention's output, of the sum after it, and of its MLP's output.
_LAYERS: dict[frozenset[str], tuple[str | None, str, str | None]] = {
    frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}): (
        None,
        "post_attention_layernorm",
        None,
    ),
    frozenset(
        {
            "input_layernorm",
            "self_attn",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "mlp",
            "post_feedforward_layernorm",
        }
    ): ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


class NormForm(NamedTuple):
    """Parameters of an RMS norm besides its weights; see :func:`~arbordraft.kernels.fused_layers.rms_norm`."""

    epsilon: float
    offset: float
    wide: bool


class LayerForm(NamedTuple):
    """Norms of a decoder layer after its attention.

    Args:
        attended: norm of the attention's output, if there is one.
        norm: norm of the sum of the attention's (normed) output and the layer's input.
        form: form of ``norm``.
        fed: norm of the MLP's output, if there is one.
    """

    attended: nn.Module | None
    norm: Any
    form: NormForm
    fed: nn.Module | None


@dataclass(frozen=True)
class Recognised:
    """The modules of a view that run in Triton, with the form of each.

    Args:
        norms: RMS norms.
        calls: attentions that rotate as Llama does, with their calls of the attention interface.
        layers: decoder layers.
        gates: gated MLPs and their activations.
    """

    norms: dict[nn.Module, NormForm] = field(default_factory=dict)
    calls: dict[nn.Module, AttentionCall] = field(default_factory=dict)
    layers: dict[nn.Module, LayerForm] = field(default_factory=dict)
    gates: dict[nn.Module, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = {
            "norms": len(self.norms),
            "rotations": len(self.calls),
            "gates": len(self.gates),
            "sums": len(self.layers),
        }
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def fuse(model: Any) -> Recognised:
    """Replaces the forwards of recognised modules of a view by Triton kernels, and returns these modules.

    Args:
        model: a view of a causal LM whose layers call our attention.
    """
    own = [module for module in model.modules() if "forward" not in vars(module)]  # leaves replaced forwards alone
    norms = {module: form for module in own if (form := _known(_norm_form, module))}
    calls = {module: call for module in own if (call := _known(_attention_call, module, model.dtype))}
    layers = {module: form for module in own if (form := _known(_layer_form, module, norms, calls, model.dtype))}
    others = [module for module in own if not (module in norms or module in calls or module in layers)]
    gates = {module: activation for module in others if (activation := _known(_gated_activation, module))}
    runs: dict[nn.Module, Callable[..., Any]] = {
        **{norm: partial(_run_norm, norm, norm.forward, form) for norm, form in norms.items()},
        **{attention: partial(_run_attention, attention, attention.forward, calls[attention]) for attention in calls},
        **{mlp: partial(_run_mlp, mlp, activation) for mlp, activation in gates.items()},
    }
    for layer, form in layers.items():
        runs[layer] = partial(_run_layer, layer, layer.forward, form, _following(layer, list(layers), norms))
    for module, run in runs.items():
        vars(module)["forward"] = run
    return Recognised(norms, calls, layers, gates)


def _known(recognise: Callable[..., Any], module: nn.Module, *others: Any) -> Any:
    """Returns the form of a module, or ``None`` if it is of another kind, which may fail in any way."""
    try:
        with torch.no_grad(), choice.use("reference"):
            return recognise(module, *others)
    except Exception:
        return None


def _norm_form(norm: Any) -> NormForm | None:
    """Returns the form of a module whose only tensor is a weight and whose bits are those of an RMS norm."""
    weight = norm._parameters.get("weight")
    epsilon = next((getattr(norm, key) for key in ("variance_epsilon", "eps") if hasattr(norm, key)), None)
    tensors = [*norm.parameters(), *norm.buffers()]
    if len(tensors) != 1 or not plain(weight) or weight.ndim != 1 or not isinstance(epsilon, float) or is_gated(norm):
        return None
    size, copy = len(weight), ModelView(norm).model
    forms = [NormForm(epsilon, *form) for form in _FORMS]
    for dtype in {torch.bfloat16, weight.dtype}:  # 16 bits reveal where the module rounds
        other = noise(size).to(dtype)
        vars(copy)["_parameters"] = {"weight": other}
        x = (noise(4, size) * _SIZES).to(dtype)
        expected = copy.forward(x)
        forms = [form for form in forms if torch.equal(rms_norm_reference(x, other, *form), expected)]
    return forms[0] if forms else None


def _run_norm(norm: Any, forward: Callable[..., Tensor], form: NormForm, x: Tensor) -> Tensor:
    """Maps ``[..., H]`` to ``[..., H]``."""
    weight = norm.weight
    return rms_norm(x, weight, *form) if x.dtype == weight.dtype else forward(x)


def _gated_activation(mlp: Any) -> str | None:
    """Returns the activation of a module that computes ``down(activation(gate(x)) * up(x))`` with any linears."""
    others = [child for name, child in mlp.named_children() if name not in _MLP]
    tensors = [*mlp._parameters.values(), *mlp._buffers.values(), *(t for o in others for t in o.state_dict().values())]
    if not mlp._modules.keys() >= _MLP or tensors or any(map(hooked, others)):
        return None
    copy, weights = ModelView(mlp).model, noise(len(_MLP), _INNER, _INNER)
    linears = {name: nn.Linear(_INNER, _INNER, bias=False, device="meta") for name in _MLP}
    for linear, weight in zip(linears.values(), weights, strict=True):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    copy._modules.update(linears)
    # Large values, too: some activations differ only in a bound.
    x = noise(len(_SIZES), _INNER)[None] * _SIZES
    for activation in ACTIVATIONS:
        gate, up = ACTIVATIONS[activation](linears["gate_proj"](x)), linears["up_proj"](x)
        if torch.equal(copy.forward(x), linears["down_proj"](gate * up)):
            return activation
    return None


def _run_mlp(mlp: Any, activation: str, x: Tensor) -> Tensor:
    """Maps ``[..., H]`` to ``[..., H]``."""
    out: Tensor = mlp.down_proj(gated_activation(mlp.gate_proj(x), mlp.up_proj(x), activation))
    return out


@dataclass
class _Recorder(Attending):
    """Stands in for a forward's attention: records queries, keys and values, and returns noise."""

    seen: list[Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, tables: Tables | None = None
    ) -> Tensor:
        if tables is not None:
            query, key = rotate_reference(query, key, *tables)
        self.seen += [query, key, value]
        return noise(*query.shape[:2], call.value_dim).to(query)


def _attention_call(attention: Any, dtype: torch.dtype) -> AttentionCall | None:
    """Returns a layer's attention call if it rotates all channels of all heads as Llama does and has no sinks."""
    if not attention._modules.keys() >= _ATTENTION or not hasattr(attention, "layer_idx"):
        return None
    given = _attention_inputs(attention, attention.head_dim, dtype)
    theirs, ours = _Recorder(), _Recorder()
    expected, weights = attention.forward(**given, ragged=theirs)
    call = theirs.layers[attention.layer_idx]
    if call is None or call.sinks is not None or weights is not None:
        return None
    found, _ = _run_attention(attention, attention.forward, call, **given, ragged=ours)
    same = theirs.layers == ours.layers and torch.equal(found, expected)
    same = same and all(map(torch.equal, ours.seen, theirs.seen)) and len(ours.seen) == len(theirs.seen) == 3
    return call if same else None


def _attention_inputs(attention: Any, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns noise as the inputs of an attention; cosines and sines differ between all channels."""
    device = next(attention.parameters()).device
    rows, *tables = (
        noise(1, _ROWS * count, size)[:, -_ROWS:].to(device, dtype)
        for count, size in ((1, attention.q_proj.in_features), (2, dim), (3, dim))
    )
    return {"hidden_states": rows, "position_embeddings": tuple(tables), "attention_mask": None}


def _run_attention(
    attention: Any,
    forward: Callable[..., Any],
    call: AttentionCall,
    *others: Any,
    ragged: Attending | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the ``[1, T, H]`` output and no attention weights."""
    hidden: Any = kwargs.get("hidden_states")
    tables: Any = kwargs.get("position_embeddings")
    known = not others and ragged is not None and kwargs.get("attention_mask") is None
    if not (known and hidden is not None and is_tables(tables, call.dim, hidden)):
        return cast(tuple[Tensor, Tensor | None], forward(*others, ragged=ragged, **kwargs))
    assert ragged is not None
    query, key, value = (_heads(attention, name, hidden, call.dim) for name in "qkv")
    layer: int = attention.layer_idx
    ragged.layers[layer] = call
    out = ragged.attend(layer, query, key, value, call, (tables[0][0], tables[1][0]))
    return attention.o_proj(out.reshape(1, len(out), -1)), None


def is_tables(tables: Any, dim: int, like: Tensor) -> bool:
    """Returns whether these are ``[1, T, D]`` cosines and sines of the dtype of ``like``."""
    return isinstance(tables, tuple) and all(
        table.shape[-1] == dim and table.ndim == 3 and table.dtype == like.dtype for table in tables
    )


def _heads(attention: Any, name: str, hidden: Tensor, dim: int) -> Tensor:
    """Returns ``[T, heads, D]`` queries, keys or values, after their norm if they have one."""
    rows: Tensor = getattr(attention, f"{name}_proj")(hidden).view(hidden.shape[1], -1, dim)
    norm = attention._modules.get(f"{name}_norm")
    return rows if norm is None else norm(rows)


def _layer_form(
    layer: Any, norms: dict[nn.Module, NormForm], calls: dict[nn.Module, AttentionCall], dtype: torch.dtype
) -> LayerForm | None:
    """Returns the form of a layer that adds its attention to its input, then the MLP of the normed sum to the sum."""
    parts = layer._modules
    attended, name, fed = _LAYERS[frozenset(parts)]
    attention, norm = parts["self_attn"], parts[name]
    if hooked(norm) or layer._parameters or layer._buffers:
        return None
    form = LayerForm(parts.get(attended), norm, norms[norm], parts.get(fed))
    given = _attention_inputs(attention, calls[attention].dim, dtype)
    expected = layer.forward(**given, ragged=_Recorder())
    found = _run_layer(layer, layer.forward, form, None, **given, ragged=_Recorder())
    return form if torch.equal(found, expected) else None


def _following(layer: Any, layers: list[Any], norms: dict[nn.Module, NormForm]) -> tuple[Any, NormForm] | None:
    """Returns the norm that reads a layer's output next; ``None`` if there is none or a hook runs in between."""
    others = layers[layers.index(layer) + 1 :]
    norm = others[0].input_layernorm if others else None
    if (
        norm not in norms
        or hooked(norm)
        or active_hooks(layer._forward_hooks)
        or active_hooks(others[0]._forward_pre_hooks)
    ):
        return None
    return norm, norms[norm]


def _run_layer(
    layer: Any,
    forward: Callable[..., Any],
    form: LayerForm,
    following: tuple[Any, NormForm] | None,
    hidden_states: Tensor,
    *others: Any,
    ragged: Attending | None = None,
    **kwargs: Any,
) -> Tensor:
    """Returns the ``[1, T, H]`` output; adds the MLP's output in the launch of the next layer's norm."""
    weight, first = form.norm.weight, layer.input_layernorm
    if others or ragged is None or hidden_states.dtype != weight.dtype:
        return cast(Tensor, forward(hidden_states, *others, ragged=ragged, **kwargs))
    ahead = ragged.ahead
    known = ahead is not None and ahead[0] is first and ahead[1] is hidden_states
    normed = ahead[2] if ahead is not None and known else first(hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, ragged=ragged, **kwargs)
    attended = attended if form.attended is None else form.attended(attended)
    total, normed = add_rms_norm(attended, hidden_states, weight, *form.form)
    out: Tensor = layer.mlp(normed)
    out = out if form.fed is None else form.fed(out)
    if following is None or (weight := following[0].weight).dtype != out.dtype:
        return total + out
    out, normed = add_rms_norm(out, total, weight, *following[1])
    ragged.ahead = following[0], out, normed
    return out


__all__ = ["Recognised", "fuse", "is_tables"]
