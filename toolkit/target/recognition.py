"""Finds decoder layers that the fused kernels can compute, and proves that they do.

Transformers' models name their parts alike. A layer whose parts are found is copied in float32 and run both ways, on
what it was given in an observed forward and on noise; the kernel takes its place only if both agree.

Shapes: H hidden size, D head size, N inner size of the MLP.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights, Matrix
from arbordraft.kernels.prepacked_linear import LANES, Groups, concatenate, interleave, pack
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.adapters import has_adapters, merged
from arbordraft.target.hook import AttentionCall, Forward
from arbordraft.target.mixtures import is_mixture, mixture
from arbordraft.target.observation import LayerCall, fresh_cache
from arbordraft.target.probing import TOLERANCE, Unrecognised, activation_of, distance, hooked, noise, tried

# Where the norms of a layer stand, by the names that transformers' models give them.
_NORM_PLACES = {
    frozenset(places.values()): places
    for places in (
        {"pre_attention": "input_layernorm", "pre_mlp": "post_attention_layernorm"},
        {
            "pre_attention": "input_layernorm",
            "post_attention": "post_attention_layernorm",
            "pre_mlp": "pre_feedforward_layernorm",
            "post_mlp": "post_feedforward_layernorm",
        },
        {"post_attention": "post_attention_layernorm", "post_mlp": "post_feedforward_layernorm"},
    )
}
_INTERNALS = frozenset(vars(nn.Module()))  # what every module has


class Source(NamedTuple):
    """A tensor that a stand-in was made from, and where it was found."""

    module: nn.Module
    parameter: str
    tensor: Tensor


class Parts:
    """Takes modules apart and remembers every tensor it used.

    Args:
        weights: bits of the matrices that it packs, see :func:`~arbordraft.kernels.prepacked_linear.pack`.
        blocks: groups of a parameter that a file has already, if it has them.
    """

    def __init__(self, weights: str | None = None, blocks: Callable[[Tensor], Groups | None] = lambda _: None) -> None:
        self.sources: list[Source] = []
        self.adapted = 0  # linears into whose copies adapters were merged
        self.weights, self.blocks = weights, blocks

    def take(self, others: "Parts") -> None:
        """Counts what others have taken apart as its own."""
        self.sources += others.sources
        self.adapted += others.adapted

    def linear(self, owner: nn.Module, name: str) -> nn.Linear:
        """A linear of ``owner`` that nothing but adapters has been hung on, those merged into a copy."""
        module = getattr(owner, name, None)
        if not has_adapters(module) and type(module) is not nn.Linear:  # quantised ones are other types
            raise Unrecognised(f"{name} is {type(module).__name__}")
        if hooked(module):
            raise Unrecognised(f"{name} has hooks")
        if module.weight.dtype not in (torch.float32, torch.bfloat16) or not module.weight.is_cpu:
            raise Unrecognised(f"{name} is {module.weight.dtype} on {module.weight.device}")
        for part in module.modules():
            self.remember(part)
        if not has_adapters(module):
            return module
        self.adapted += 1
        return merged(module)

    def linears(self, owner: nn.Module, *names: str) -> list[nn.Linear]:
        """Several linears, all of them with a bias or all without."""
        linears = [self.linear(owner, name) for name in names]
        if len({linear.bias is None for linear in linears}) > 1:
            raise Unrecognised(f"only some of {', '.join(names)} have a bias")
        return linears

    def norm(self, owner: nn.Module, name: str) -> tuple[Tensor, float]:
        """The factors ``[H]`` (float32) and the epsilon of an RMS norm, read off what it does to noise."""
        module = getattr(owner, name)
        weight = getattr(module, "weight", None)
        epsilon = next((getattr(module, key) for key in ("variance_epsilon", "eps") if hasattr(module, key)), None)
        own = [*module.parameters(), *module.buffers()]
        if len(own) != 1 or weight is not own[0] or weight.ndim != 1 or epsilon is None or hooked(module):
            raise Unrecognised(f"{name} is {type(module).__name__}")
        # So small that epsilon shows, and so large that a bound would.
        sizes = torch.tensor([[0.003], [0.02], [1.0], [100.0]])
        x = noise(4, len(weight)) * sizes
        unit = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
        expected = tried(copy.deepcopy(module).float(), x)
        wide = weight.detach().float()
        for factors in (wide, 1 + wide):
            if expected is not None and distance(unit * factors, expected) < TOLERANCE:
                self.remember(module)
                return factors.contiguous(), epsilon
        raise Unrecognised(f"{name} ({type(module).__name__}) is not an RMS norm")

    def gated(self, mlp: nn.Module) -> tuple[list[nn.Linear], nn.Linear, str]:
        """Gates and inputs, the linear behind them, and the activation."""
        names = ("gate_proj", "up_proj") if hasattr(mlp, "gate_proj") else ("gate_up_proj",)
        gates, down = self.linears(mlp, *names), self.linear(mlp, "down_proj")
        fits = sum(linear.out_features for linear in gates) == 2 * down.in_features
        if not fits or down.in_features % LANES or down.out_features % LANES:
            raise Unrecognised(f"{type(mlp).__name__} is not a gated MLP of fitting size")
        if hooked(mlp) or mlp._parameters or list(mlp.buffers()):
            raise Unrecognised(f"{type(mlp).__name__} has parts of another kind")
        return gates, down, activation_of(mlp)

    def gated_mlp(self, mlp: nn.Module) -> tuple[Matrix, Matrix, str]:
        """The same packed, gates and inputs interleaved."""
        gates, down, activation = self.gated(mlp)
        return self.matrix(gates, lambda rows: interleave(*rows.chunk(2))), self.matrix([down]), activation

    def matrix(self, linears: Sequence[nn.Linear], order: Callable[[Tensor], Tensor] = lambda rows: rows) -> Matrix:
        """Packs linears below each other, with rows in another order."""
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = order(torch.cat(biases)).float().contiguous() if biases else None
        blocks = [groups for linear in linears if (groups := self.blocks(linear.weight)) is not None]
        if len(blocks) == len(linears) and len({groups.bits for groups in blocks}) == 1:
            return Matrix(*concatenate(blocks).map(order).prepack(), bias)
        return Matrix(*pack(order(torch.cat([linear.weight.detach() for linear in linears])), self.weights), bias)

    def layer(self, layer: nn.Module, call: AttentionCall, *, rotary: bool) -> LayerWeights:
        """A whole decoder layer."""
        children = dict(layer.named_children())
        attention_name = next((name for name, child in children.items() if hasattr(child, "o_proj")), "")
        mlps = (name for name, child in children.items() if hasattr(child, "down_proj") or is_mixture(child))
        mlp_name = next(mlps, "")
        blocks = {attention_name, mlp_name}
        others = frozenset(
            n for n, c in children.items() if n not in blocks and not isinstance(c, (nn.Dropout, nn.Identity))
        )
        if "" in blocks or others not in _NORM_PLACES or hooked(layer) or layer._parameters or list(layer.buffers()):
            raise Unrecognised(f"{type(layer).__name__} has parts of another kind")
        attention = children[attention_name]
        names = ("q_proj", "k_proj", "v_proj") if hasattr(attention, "q_proj") else ("qkv_proj",)
        qkv, out = self.linears(attention, *names), self.linear(attention, "o_proj")
        mlp = children[mlp_name]
        mixed = is_mixture(mlp)
        gate_up, down, activation, experts = mixture(self, mlp) if mixed else (*self.gated_mlp(mlp), None)
        count = 1 if experts is None else experts.routed + experts.shared
        hidden, inner = out.out_features, len(gate_up.weight) * LANES // 2 // count

        norms, epsilons = {}, set()
        places = {place: (layer, name) for place, name in _NORM_PLACES[others].items()}
        for part in ("query", "key"):
            if not isinstance(getattr(attention, f"{part[0]}_norm", None), (type(None), nn.Identity)):
                places[f"{part}_norm"] = (attention, f"{part[0]}_norm")
        for place, (owner, name) in places.items():
            norms[place], epsilon = self.norm(owner, name)
            epsilons.add(epsilon)
            if len(norms[place]) != (call.dim if owner is attention else hidden):
                raise Unrecognised(f"{name} has {len(norms[place])} channels")
        rows = sum(linear.out_features for linear in qkv)
        fits = rows == (call.heads + 2 * call.kv_heads) * call.dim and out.in_features == call.heads * call.dim
        if call.value_dim != call.dim or call.dim % LANES or hidden % LANES or len(epsilons) > 1 or not fits:
            raise Unrecognised(f"{type(layer).__name__} has sizes that the kernel does not know")
        self.remember(attention)  # for parameters of its own
        return LayerWeights(
            qkv=self.matrix(qkv),
            out=self.matrix([out]),
            gate_up=gate_up,
            down=down,
            **{place: norms.get(place) for place in LayerWeights.NORMS},
            sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
            heads=call.heads,
            kv_heads=call.kv_heads,
            dim=call.dim,
            inner=inner,
            activation=activation,
            window=call.window,
            rotary=rotary,
            epsilon=epsilons.pop(),
            scale=call.scale,
            softcap=call.softcap,
            experts=experts,
        )

    def remember(self, module: nn.Module) -> None:
        """Notes a module's own parameters: when they change, what was made of them must, too."""
        self.sources += [Source(module, key, t) for key, t in module._parameters.items() if t is not None]


def same_mlp(mlp: nn.Module, run: Any) -> bool:
    """Whether ``run(parts of a float32 copy)(x)`` is what the copy makes of noise ``x``."""
    hidden = Parts().linear(mlp, "down_proj").out_features
    wide = copy.deepcopy(mlp).float()
    parts = Parts().gated_mlp(wide)
    x = noise(3, hidden)
    expected = tried(wide, x)
    return expected is not None and distance(run(*parts)(x), expected) < TOLERANCE


def same_layer(index: int, call: LayerCall, attention: AttentionCall, batch: RaggedBatch, rotary: bool) -> bool:
    """Whether the kernel does what a float32 copy of the layer does, on its observed input and on noise.

    The layer must ask for our attention.
    """
    wide = copy.deepcopy(call.layer).float()
    wide_attention = attention._replace(sinks=None if attention.sinks is None else attention.sinks.float())
    try:
        run = LayerRun([Parts().layer(wide, wide_attention, rotary=rotary)])
    except Unrecognised:
        return False
    kwargs = _widened(call.kwargs)
    given = _widened(call.args[0] if call.args else kwargs.pop("hidden_states"))
    for x in (given, noise(*given.shape)):
        kwargs["ragged"] = Forward(batch, fresh_cache(batch))
        expected = tried(wide, x, *call.args[1:], **kwargs)
        pools = [fresh_cache(batch).pools(index, (attention.kv_heads, attention.dim), x)]
        output, _ = run(x, pools, kwargs["position_embeddings"], batch)
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
