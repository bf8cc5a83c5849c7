"""What one forward of a model shows: its decoder layers, what they are given, what they ask their attention for."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from arbordraft.cache import RaggedKVCache
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.topology import TreeTopology, ancestor_words


class AttentionCall(NamedTuple):
    """What a layer asks its attention for."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Attending(Protocol):
    """What an attention layer needs of the forward that it is part of."""

    layers: dict[int, AttentionCall | None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Stores the ``[T, Hkv, D]`` keys and values of a layer and returns what its ``[T, Hq, D]`` queries find."""


@dataclass
class Forward:
    """What one forward of a :class:`~arbordraft.target.RaggedModel` hands to its layers.

    Args:
        batch: its rows.
        cache: its keys and values.
        native: use the native attention kernel.
        layers: the layers that have attended so far; with what they asked for, where a layer did so by itself.
        hidden: the hidden states that are wanted, by index as in transformers' ``hidden_states``: the input of each
            decoder layer, and behind the last one the output of the final norm; filled in as the layers run.
    """

    batch: RaggedBatch
    cache: RaggedKVCache
    native: bool = False
    layers: dict[int, AttentionCall | None] = field(default_factory=dict)
    hidden: dict[int, Tensor | None] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Stores the ``[T, Hkv, D]`` keys and values of a layer and returns what its ``[T, Hq, D]`` queries find."""
        keys, values = self.cache.write(layer, key, value, self.batch.slots)
        return ragged_tree_attention(
            query,
            keys,
            values,
            self.batch,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            use_native=self.native,
        )


class LayerCall(NamedTuple):
    """A decoder layer and what it was given in an observed forward on a fresh cache."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """What one forward of a model showed.

    Args:
        place: the module that holds the list of decoder layers, and the list's name; ``None`` if there is none.
        layers: the layers that were called, in order.
        attention: what they asked their attention for, by index.
        called: all modules that were called.
        batch: the forward's rows, on a fresh cache.
    """

    place: tuple[nn.Module, str] | None
    layers: list[LayerCall]
    attention: dict[int, AttentionCall]
    called: set[nn.Module]
    batch: RaggedBatch


def decoder_list(model: nn.Module, count: int) -> tuple[nn.Module, str] | None:
    """The module that holds the list of decoder layers, and the list's name: the outermost list of that length."""
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    return None


def tap(place: tuple[nn.Module, str], hidden: dict[int, Tensor | None]) -> list[RemovableHandle]:
    """Fills in the wanted hidden states of a forward from outside; returns the hooks to remove behind it."""
    owner, name = place
    layers = getattr(owner, name)

    def before(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden[index] = (args[0] if args else kwargs["hidden_states"])[0]

    def behind(_: nn.Module, __: Any, output: Any) -> None:
        hidden[len(layers)] = output[0][0]

    return [
        owner.register_forward_hook(behind)
        if index == len(layers)
        else layers[index].register_forward_pre_hook(
            lambda _, args, kwargs, index=index: before(index, args, kwargs), with_kwargs=True
        )
        for index in hidden
    ]


def insert(place: tuple[nn.Module, str], module: nn.Module) -> RemovableHandle:
    """Puts a module behind the last decoder layer from outside; returns the hook to remove behind it."""

    def through(_: nn.Module, __: Any, output: Any) -> Any:
        return module(output) if isinstance(output, Tensor) else (module(output[0]), *output[1:])

    return getattr(*place)[-1].register_forward_hook(through)


def final_module(model: nn.Module, place: tuple[nn.Module, str]) -> nn.Module | None:
    """What makes the output of the decoder layers' owner from theirs; ``None`` if that is not one module alone."""
    owner, layers = place[0], getattr(*place)
    seen: list[tuple[nn.Module, Any]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, output: seen.append((module, output)))
        for module in (layers[-1], *owner.children(), owner)
    ]
    try:
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    (before, _), (last, made), (_, output) = seen[-3:]
    return last if before is layers[-1] and torch.equal(made.flatten(), output[0].flatten()) else None


def observe(model: nn.Module, num_layers: int, vocab_size: int) -> Observation:
    """Runs two small trees of random tokens through a model, whose attention must be hooked, and watches."""
    place = decoder_list(model, num_layers)
    layers: list[nn.Module] = list(getattr(*place)) if place else []
    given: dict[nn.Module, LayerCall] = {}
    called: set[nn.Module] = set()

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called.add(module)
        if module in layers:
            given[module] = LayerCall(module, args, kwargs)

    topology = TreeTopology.from_parents([-1, 0, 0, 1])
    tokens = torch.randint(vocab_size, (1, 2 * topology.num_nodes), generator=torch.Generator().manual_seed(0))
    cache = RaggedKVCache()
    samples = [cache.open(topology.num_nodes) for _ in range(2)]
    words = ancestor_words(topology.visible.cpu()).repeat(2, 1)
    run = Forward(cache.plan(samples, [topology.depth_list] * 2, words), cache)
    hooks = [module.register_forward_pre_hook(watch, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad():
            model(tokens, position_ids=run.batch.positions[None], use_cache=False, ragged=run)
    finally:
        for hook in hooks:
            hook.remove()
    attention = {index: call for index, call in run.layers.items() if call}
    return Observation(place, [given[layer] for layer in layers if layer in given], attention, called, run.batch)


def fresh_cache(batch: RaggedBatch) -> RaggedKVCache:
    """An empty cache whose slabs lie where a batch without a past expects them."""
    cache = RaggedKVCache()
    for rows in batch.rows:
        cache.open(rows)
    return cache
