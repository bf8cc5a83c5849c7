"""Finds decoder layers that the fused kernels can compute, and proves that they do.

Transformers' models share names of parts. If all parts of a layer are found, a float32 copy is compared with the
kernel, on an observed input and on noise. The kernel replaces the layer only if both agree.

Shapes: H hidden size, D head size, N inner size of the MLP.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights, Norm
from arbordraft.kernels.prepacked_linear import LANES
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import AttentionCall, Forward
from arbordraft.target.mixers import is_ours
from arbordraft.target.observation import LayerCall, fresh_cache
from arbordraft.target.prepacked.mlps import Mlp, is_mlp, mlp_of, single
from arbordraft.target.prepacked.prepacked_modules import memory_of
from arbordraft.target.prepacked.probing import (
    TOLERANCE,
    Unrecognised,
    distance,
    hooked,
    noise,
    own_hooks,
    parts_named,
    tried,
    widened,
)
from arbordraft.target.prepacked.recurrences import is_recurrent, mixer_of
from arbordraft.target.prepacked.rotation import Rotation, apart, side_by_side
from arbordraft.target.prepacked.weight_collector import WeightCollector

# Parts of layers by their names in transformers' models: the linears of an attention that read hidden states, the one
# that leads back, and the places of norms.
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "dense"),
    (("qkv_proj",), "o_proj"),
    (("c_attn",), "c_proj"),
)
_NORM_PLACES = {
    frozenset(places.values()): places
    for places in (
        {"pre_attention": "input_layernorm"},  # the MLP reads the same norm
        {"pre_attention": "input_layernorm", "pre_mlp": "post_attention_layernorm"},
        {"pre_attention": "input_layernorm", "pre_mlp": "pre_ff_layernorm"},
        {"pre_attention": "operator_norm", "pre_mlp": "ffn_norm"},
        {"pre_attention": "ln_1", "pre_mlp": "ln_2"},
        {
            "pre_attention": "input_layernorm",
            "post_attention": "post_attention_layernorm",
            "pre_mlp": "pre_feedforward_layernorm",
            "post_mlp": "post_feedforward_layernorm",
        },
        {
            "pre_attention": "input_layernorm",
            "post_attention": "post_self_attn_layernorm",
            "pre_mlp": "post_attention_layernorm",
            "post_mlp": "post_mlp_layernorm",
        },
        {"post_attention": "post_attention_layernorm", "post_mlp": "post_feedforward_layernorm"},
    )
}
_LONE_NORM = frozenset({"norm"})  # before the only block of a layer
_WITHOUT_ATTENTION: dict[str, Any] = {
    "qkv": None,
    "out": None,
    "sinks": None,
    "heads": 0,
    "kv_heads": 0,
    "dim": 0,
    "window": None,
    "rotary": False,
    "scale": 1.0,
    "softcap": None,
}
_WITHOUT_MLP: dict[str, Any] = {"gate_up": None, "down": None, "inner": 0, "activation": "silu"}
_INTERNALS = frozenset(vars(nn.Module()))  # attributes of every module


def layers_of(
    collector: WeightCollector, layer: nn.Module, call: AttentionCall | None, rotation: Rotation | None
) -> list[LayerWeights]:
    """Extracts and packs the weights of a decoder layer.

    Args:
        collector: packs them.
        layer: the layer.
        call: its call of the attention interface; ``None`` without attention.
        rotation: rotation of its queries and keys.

    Returns:
        One layer, or several if blocks read the same normed input: a recurrent mixer, an attention, an MLP.

    Raises:
        Unrecognised: if the layer has parts that the kernel does not know.
    """
    children = dict(layer.named_children())
    mixer = next((name for name, child in children.items() if is_recurrent(child)), "")  # its forward is ours
    attention = next((n for n, child in children.items() if call and n != mixer and _is_attention(child)), "")
    mlp_names = [name for name, child in children.items() if is_mlp(child)]
    blocks = {mixer, attention, *mlp_names} - {""}
    both = (mixer or attention) and mlp_names
    others = frozenset(
        n for n, c in children.items() if n not in blocks and not isinstance(c, (nn.Dropout, nn.Identity))
    )
    replaced = own_hooks(layer) or "forward" in vars(layer)
    replaced = replaced or any(hooked(child) for name, child in children.items() if name != mixer)
    names = _NORM_PLACES.get(others, {}) if both else {}
    if blocks and not both and others == _LONE_NORM:
        names = {"pre_mlp" if mlp_names else "pre_attention": "norm"}
    buffers = set(layer.buffers()).difference(*(children[name].buffers() for name in blocks - {attention}))
    if not names or replaced or layer._parameters or buffers:
        raise Unrecognised(f"{type(layer).__name__} has parts of another kind")
    places = {place: (layer, name) for place, name in names.items()}
    mlp = mlp_of(collector, [children[name] for name in mlp_names]) if mlp_names else None
    parts: list[dict[str, Any]] = []  # of layers, of which all but the first read its normed input
    if mixer:
        first = {"pre_attention": places.pop("pre_attention")} if attention else places
        parts.append(_recurrent(collector, children[mixer], first, _factor(layer, "ssm_out_multiplier")))
    if attention and call:
        factors = _factor(layer, "attention_in_multiplier"), _factor(layer, "attn_out_multiplier")
        parts.append(_attention(collector, children[attention], call, rotation, places, factors))
    if mlp:
        if places.keys().isdisjoint({"pre_mlp", "post_mlp"}) or not parts:
            parts.append(_alone(collector, mlp, {} if parts else places))
        parts[-1] |= {name: getattr(mlp, name) for name in (*_WITHOUT_MLP, "experts")}
    residual = _factor(layer, "residual_multiplier")
    return [
        LayerWeights(**{**_WITHOUT_MLP, **own}, parallel=number > 0, residual=residual)
        for number, own in enumerate(parts)
    ]


def _factor(module: nn.Module, name: str) -> float:
    """Returns a factor that some modules have; the comparison shows whether it is that."""
    return float(getattr(module, name, 1.0))


def _is_attention(module: nn.Module) -> bool:
    return parts_named(module, _ATTENTIONS) is not None


def _alone(collector: WeightCollector, mlp: Mlp, places: dict[str, tuple[nn.Module, str]]) -> dict[str, Any]:
    """Returns the parts of a layer that only has an MLP, besides this."""
    norms, epsilon = _norms(collector, places, mlp.hidden, None, lambda rows: rows)
    return {**norms, **_WITHOUT_ATTENTION, "epsilon": epsilon}


def _recurrent(
    collector: WeightCollector, module: nn.Module, places: dict[str, tuple[nn.Module, str]], factor: float
) -> dict[str, Any]:
    """Returns the parts of a layer with a recurrent mixer, whose outputs have a factor, besides its MLP."""
    mixer = mixer_of(collector, module, factor)
    norms, epsilon = _norms(collector, places, mixer.out.outputs, None, lambda rows: rows)
    own = {"qkv": mixer.into, "out": mixer.out, "recurrence": mixer.recurrence, "epsilon": epsilon}
    return {**norms, **_WITHOUT_ATTENTION, **own}


def _attention(
    collector: WeightCollector,
    attention: nn.Module,
    call: AttentionCall,
    rotation: Rotation | None,
    places: dict[str, tuple[nn.Module, str]],
    factors: tuple[float, float],
) -> dict[str, Any]:
    """Returns the parts of a layer with attention, besides its MLP; adds the norms of heads to ``places``.

    Its inputs and its outputs have factors, and its keys may have one.
    """
    names = parts_named(attention, _ATTENTIONS)
    inputs, outputs = factors
    own = {"k_proj": _factor(attention, "key_multiplier")}
    linears = zip(names[0], collector.linears(attention, *names[0]), strict=True)
    qkv = [linear.times(own.get(name, 1.0), inputs) for name, linear in linears]
    out = collector.linear(attention, names[1]).times(outputs)
    hidden, queries, keys = len(out.weight), call.heads * call.dim, call.kv_heads * call.dim
    closing = sum(len(linear.weight) for linear in qkv) == 2 * (queries + keys)
    fits = closing or sum(len(linear.weight) for linear in qkv) == queries + 2 * keys
    fits = fits and out.weight.shape[1] == queries and call.value_dim == call.dim
    if call.dim % LANES or hidden % LANES or not fits:
        raise Unrecognised(f"{type(attention).__name__} has sizes that the kernel does not know")

    def in_order(rows: Tensor) -> Tensor:
        return rows if rotation is None else rotation.in_halves(rows, call.dim)

    def all_in_order(rows: Tensor) -> Tensor:
        gates = rows[:0]
        if closing:  # every head's queries are followed by its gates
            both = rows[: 2 * queries].unflatten(0, (call.heads, 2, call.dim))
            gates = both[:, 1].flatten(0, 1)
            rows = torch.cat([both[:, 0].flatten(0, 1), rows[2 * queries :]])
        return torch.cat([in_order(rows[: queries + keys]), rows[queries + keys :], gates])

    for part in ("query", "key"):
        for name in (f"{part[0]}_norm", f"{part[0]}_layernorm"):
            if not isinstance(getattr(attention, name, None), (type(None), nn.Identity)):
                places[f"{part}_norm"] = (attention, name)
    norms, epsilon = _norms(collector, places, hidden, call, in_order)
    collector.remember(attention)  # for parameters of its own
    return {
        **norms,
        "qkv": collector.matrix(qkv, all_in_order),
        "out": collector.matrix([out]),
        "sinks": None if call.sinks is None else call.sinks.detach().to(torch.float32, copy=True),
        "heads": call.heads,
        "kv_heads": call.kv_heads,
        "dim": call.dim,
        "window": call.window,
        "rotary": rotation is not None,
        "epsilon": epsilon,
        "scale": call.scale,
        "softcap": call.softcap,
        "closing": closing,
    }


def _norms(
    collector: WeightCollector,
    places: dict[str, tuple[nn.Module, str]],
    hidden: int,
    call: AttentionCall | None,
    in_order: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Norm | None], float]:
    """Returns the norms of a layer, with channels of head norms in order, and their common epsilon."""
    found = {place: collector.norm(owner, name) for place, (owner, name) in places.items()}
    norms = {place: found[place][0] if place in found else None for place in LayerWeights.NORMS}
    sizes = {place: len(norm.weight) for place, norm in norms.items() if norm}
    known = True
    if call is not None:
        of_heads = sizes.pop("query_norm", call.dim), sizes.pop("key_norm", call.dim)
        known = of_heads in ((call.dim, call.dim), (call.heads * call.dim, call.kv_heads * call.dim))
    epsilons = {epsilon for _, epsilon in found.values()}
    if not known or {hidden, *sizes.values()} != {hidden} or len(epsilons) > 1:
        raise Unrecognised("its norms have other sizes, or several epsilons")
    for place in ("query_norm", "key_norm"):
        if norm := norms[place]:
            norms[place] = Norm(in_order(norm.weight), None if norm.offset is None else in_order(norm.offset))
    return norms, max(epsilons, default=0.0)


def same_mlp(mlp: nn.Module, run: Any) -> bool:
    """Returns whether ``run(gate_up, down, activation)`` agrees with a float32 copy of the MLP on noise."""
    wide = widened(mlp)
    parts = single(WeightCollector(), wide)
    x = noise(3, parts.down.outputs)
    expected = tried(wide, x)
    return expected is not None and distance(run(*parts[:3])(x), expected) < TOLERANCE


def same_layer(
    index: int, call: LayerCall, attention: AttentionCall | None, batch: RaggedBatch, rotation: Rotation | None
) -> bool:
    """Returns whether the kernel agrees with a float32 copy of the layer, on its observed input and on noise.

    The layer must call our attention, or be recurrent and run our operators.

    Raises:
        Unrecognised: if the layer has parts that the kernel does not know.
    """
    wide = widened(call.layer)
    if attention is not None and attention.sinks is not None:
        attention = attention._replace(sinks=attention.sinks.float())
    weights = layers_of(WeightCollector(), wide, attention, rotation)
    run = LayerRun(weights)
    kwargs = _widened(call.kwargs)
    given = _widened(call.args[0] if call.args else kwargs.pop("hidden_states"))
    tables = kwargs.get("position_embeddings")
    tables = apart(tables) if side_by_side(tables) else tables
    for x in (given, noise(*given.shape)):
        kwargs["ragged"] = Forward(batch, fresh_cache(batch))
        expected = tried(partial(_output, wide), x, *call.args[1:], **kwargs)
        cache = fresh_cache(batch)
        rows = cache.state_rows(batch, x.device) if run.recurrent else None
        pools, lineage = memory_of(cache, rows, weights, x, index)
        output, _ = run(x, pools, tables, batch, lineage=lineage)
        if expected is None or not distance(output - x, expected - x) < TOLERANCE:
            return False
    return True


def _output(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns the output of a layer that may return it in a tuple, followed by nothing."""
    found = layer(*args, **kwargs)
    return found[0] if isinstance(found, tuple) else found


def settings(module: nn.Module) -> Any:
    """Returns a key of a module's settings: equal for modules that differ in weights and layer index only."""
    own = {
        k: _settings_key(value)
        for k, value in vars(module).items()
        if k not in _INTERNALS and k != "layer_idx" and not is_ours(value)
    }
    shapes = [(name, tensor.shape) for name, tensor in module._parameters.items() if tensor is not None]
    inner = [(name, settings(child)) for name, child in module.named_children()]
    return type(module), tuple(sorted(own.items())), tuple(shapes), tuple(inner)


def _settings_key(value: Any) -> Any:
    """Returns a hashable key of a value: its contents if they are plain, else its id."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if type(value) is partial:  # activations keep one of their own in each layer
        return value.func, _settings_key(value.args), _settings_key(value.keywords)
    if type(value) is dict:
        return tuple((key, _settings_key(inner)) for key, inner in value.items())
    return tuple(map(_settings_key, value)) if type(value) in (tuple, list) else id(value)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(inner) for key, inner in value.items()}
    return type(value)(map(_widened, value)) if type(value) in (tuple, list) else value
