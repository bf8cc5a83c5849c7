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
from arbordraft.target.observation import LayerCall, fresh_cache
from arbordraft.target.prepacked.mlps import is_mlp, mlp_of, single
from arbordraft.target.prepacked.probing import (
    TOLERANCE,
    Unrecognised,
    distance,
    hooked,
    noise,
    parts_named,
    tried,
    widened,
)
from arbordraft.target.prepacked.rotation import Rotation, apart, side_by_side
from arbordraft.target.prepacked.weight_collector import WeightCollector

# Parts of layers by their names in transformers' models: the linears of an attention that read hidden states, the one
# that leads back, and the places of norms.
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "dense"),
    (("qkv_proj",), "o_proj"),
    (("c_attn",), "c_proj"),
)
_NORM_PLACES = {
    frozenset(places.values()): places
    for places in (
        {"pre_attention": "input_layernorm"},  # the MLP reads the same norm
        {"pre_attention": "input_layernorm", "pre_mlp": "post_attention_layernorm"},
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
_INTERNALS = frozenset(vars(nn.Module()))  # attributes of every module


def layer_of(
    collector: WeightCollector, layer: nn.Module, call: AttentionCall, rotation: Rotation | None
) -> LayerWeights:
    """Extracts and packs the weights of a decoder layer."""
    children = dict(layer.named_children())
    attention_name = next((name for name, child in children.items() if parts_named(child, _ATTENTIONS)), "")
    mlp_name = next((name for name, child in children.items() if is_mlp(child)), "")
    blocks = {attention_name, mlp_name}
    others = frozenset(
        n for n, c in children.items() if n not in blocks and not isinstance(c, (nn.Dropout, nn.Identity))
    )
    if "" in blocks or others not in _NORM_PLACES or hooked(layer) or layer._parameters or list(layer.buffers()):
        raise Unrecognised(f"{type(layer).__name__} has parts of another kind")
    attention = children[attention_name]
    names = parts_named(attention, _ATTENTIONS)
    qkv, out = collector.linears(attention, *names[0]), collector.linear(attention, names[1])
    mlp = mlp_of(collector, children[mlp_name])
    hidden, rotary_rows = len(out.weight), (call.heads + call.kv_heads) * call.dim
    fits = sum(len(linear.weight) for linear in qkv) == rotary_rows + call.kv_heads * call.dim
    fits = fits and out.weight.shape[1] == call.heads * call.dim and call.value_dim == call.dim
    if call.dim % LANES or hidden % LANES or not fits:
        raise Unrecognised(f"{type(layer).__name__} has sizes that the kernel does not know")

    def in_order(rows: Tensor) -> Tensor:
        return rows if rotation is None else rotation.in_halves(rows, call.dim)

    places = {place: (layer, name) for place, name in _NORM_PLACES[others].items()}
    for part in ("query", "key"):
        if not isinstance(getattr(attention, f"{part[0]}_norm", None), (type(None), nn.Identity)):
            places[f"{part}_norm"] = (attention, f"{part[0]}_norm")
    norms, epsilon = _norms(collector, places, hidden, call, in_order)
    collector.remember(attention)  # for parameters of its own
    return LayerWeights(
        qkv=collector.matrix(qkv, lambda rows: torch.cat([in_order(rows[:rotary_rows]), rows[rotary_rows:]])),
        out=collector.matrix([out]),
        gate_up=mlp.gate_up,
        down=mlp.down,
        table=0,
        **norms,
        sinks=None if call.sinks is None else call.sinks.detach().to(torch.float32, copy=True),
        heads=call.heads,
        kv_heads=call.kv_heads,
        dim=call.dim,
        inner=mlp.inner,
        activation=mlp.activation,
        window=call.window,
        rotary=rotation is not None,
        epsilon=epsilon,
        scale=call.scale,
        softcap=call.softcap,
        parallel=places.keys().isdisjoint({"pre_mlp", "post_mlp"}),
        experts=mlp.experts,
    )


def _norms(
    collector: WeightCollector,
    places: dict[str, tuple[nn.Module, str]],
    hidden: int,
    call: AttentionCall,
    in_order: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Norm | None], float]:
    """Returns the norms of a layer, with channels of head norms in order, and their common epsilon."""
    found = {place: collector.norm(owner, name) for place, (owner, name) in places.items()}
    norms = {place: found[place][0] if place in found else None for place in LayerWeights.NORMS}
    sizes = {place: len(norm.weight) for place, norm in norms.items() if norm}
    of_heads = sizes.pop("query_norm", call.dim), sizes.pop("key_norm", call.dim)
    known = of_heads in ((call.dim, call.dim), (call.heads * call.dim, call.kv_heads * call.dim))
    epsilons = {epsilon for _, epsilon in found.values()}
    if not known or {hidden, *sizes.values()} != {hidden} or len(epsilons) > 1:
        raise Unrecognised("its norms have other sizes, or several epsilons")
    for place in ("query_norm", "key_norm"):
        if norm := norms[place]:
            norms[place] = Norm(in_order(norm.weight), None if norm.offset is None else in_order(norm.offset))
    return norms, epsilons.pop()


def same_mlp(mlp: nn.Module, run: Any) -> bool:
    """Returns whether ``run(gate_up, down, activation)`` agrees with a float32 copy of the MLP on noise."""
    wide = widened(mlp)
    parts = single(WeightCollector(), wide)
    x = noise(3, parts.down.outputs)
    expected = tried(wide, x)
    return expected is not None and distance(run(*parts[:3])(x), expected) < TOLERANCE


def same_layer(
    index: int, call: LayerCall, attention: AttentionCall, batch: RaggedBatch, rotation: Rotation | None
) -> bool:
    """Returns whether the kernel agrees with a float32 copy of the layer, on its observed input and on noise.

    The layer must call our attention.

    Raises:
        Unrecognised: if the layer has parts that the kernel does not know.
    """
    wide = widened(call.layer)
    wide_attention = attention._replace(sinks=None if attention.sinks is None else attention.sinks.float())
    run = LayerRun([layer_of(WeightCollector(), wide, wide_attention, rotation)])
    kwargs = _widened(call.kwargs)
    given = _widened(call.args[0] if call.args else kwargs.pop("hidden_states"))
    tables = kwargs.get("position_embeddings")
    tables = apart(tables) if side_by_side(tables) else tables
    for x in (given, noise(*given.shape)):
        kwargs["ragged"] = Forward(batch, fresh_cache(batch))
        expected = tried(wide, x, *call.args[1:], **kwargs)
        pools = [fresh_cache(batch).pools(index, (attention.kv_heads, attention.dim), x)]
        output, _ = run(x, pools, tables, batch)
        if expected is None or not distance(output - x, expected - x) < TOLERANCE:
            return False
    return True


def settings(module: nn.Module) -> Any:
    """Returns a key of a module's settings: equal for modules that differ in weights and layer index only."""
    own = {k: _settings_key(value) for k, value in vars(module).items() if k not in _INTERNALS and k != "layer_idx"}
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
