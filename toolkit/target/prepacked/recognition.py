"""Finds decoder layers that the fused kernels can compute, and proves that they do.

Transformers' models name their parts alike. A layer whose parts are found is copied in float32 and run both ways, on
what it was given in an observed forward and on noise; the kernel takes its place only if both agree.

Shapes: H hidden size, D head size, N inner size of the MLP.
"""

from collections.abc import Callable
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

# What layers are made of, by the names that transformers' models give the parts: which linears of an attention and of
# an MLP read hidden states and which one leads back, and where norms stand.
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "dense"),
    (("qkv_proj",), "o_proj"),
    (("c_attn",), "c_proj"),
)
_NORM_PLACES = {
    frozenset(places.values()): places
    for places in (
        {"pre_attention": "input_layernorm"},  # and the MLP reads the same
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
_INTERNALS = frozenset(vars(nn.Module()))  # what every module has


def layer_of(
    collector: WeightCollector, layer: nn.Module, call: AttentionCall, rotation: Rotation | None
) -> LayerWeights:
    """A whole decoder layer."""
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
    hidden, turning = len(out.weight), (call.heads + call.kv_heads) * call.dim
    fits = sum(len(linear.weight) for linear in qkv) == turning + call.kv_heads * call.dim
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
        qkv=collector.matrix(qkv, lambda rows: torch.cat([in_order(rows[:turning]), rows[turning:]])),
        out=collector.matrix([out]),
        gate_up=mlp.gate_up,
        down=mlp.down,
        table=0,
        **norms,
        sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
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
    """The norms of a layer, those of heads with their channels in order, and the epsilon that all of them share."""
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
    """Whether ``run(gate_up, down, activation)(x)`` is what a float32 copy makes of noise ``x``."""
    wide = widened(mlp)
    parts = single(WeightCollector(), wide)
    x = noise(3, LANES * len(parts.down.weight))
    expected = tried(wide, x)
    return expected is not None and distance(run(*parts[:3])(x), expected) < TOLERANCE


def same_layer(
    index: int, call: LayerCall, attention: AttentionCall, batch: RaggedBatch, rotation: Rotation | None
) -> bool:
    """Whether the kernel does what a float32 copy of the layer does, on its observed input and on noise.

    The layer must ask for our attention.

    Raises:
        Unrecognised: if it has other parts than the kernel knows.
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
    """What tells modules of one class apart, other than their weights and their number."""
    own = {k: _told(value) for k, value in vars(module).items() if k not in _INTERNALS and k != "layer_idx"}
    shapes = [(name, tensor.shape) for name, tensor in module._parameters.items() if tensor is not None]
    inner = [(name, settings(child)) for name, child in module.named_children()]
    return type(module), tuple(sorted(own.items())), tuple(shapes), tuple(inner)


def _told(value: Any) -> Any:
    """A value, by its contents as far as these are plain."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if type(value) is dict:
        return tuple((key, _told(inner)) for key, inner in value.items())
    return tuple(map(_told, value)) if type(value) in (tuple, list) else id(value)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(inner) for key, inner in value.items()}
    return type(value)(map(_widened, value)) if type(value) in (tuple, list) else value
