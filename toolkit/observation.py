"""What one forward of a model shows: its decoder layers, what they are given, what they ask their attention for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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
    """What the layers of a model need of the forward that they are part of."""

    layers: dict[int, AttentionCall | None]
    hidden: dict[int, Tensor | None]
    depth: int | None
    behind: nn.Module | None
    last: Any

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
        depth: run only the first so many layers.
        behind: put this behind them; maps ``[1, T, H]`` to the same.
        last: what the last of these layers returned.
    """

    batch: RaggedBatch
    cache: RaggedKVCache
    native: bool = False
    layers: dict[int, AttentionCall | None] = field(default_factory=dict)
    hidden: dict[int, Tensor | None] = field(default_factory=dict)
    depth: int | None = None
    behind: nn.Module | None = None
    last: Any = None

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


def run_layer(index: int, forward: Callable[..., Any], *args: Any, ragged: Attending, **kwargs: Any) -> Any:
    """Calls a decoder layer as the forward that it is part of wants it: observed, followed by something, or not."""
    if index in ragged.hidden:
        ragged.hidden[index] = (args[0] if args else kwargs["hidden_states"])[0]
    if ragged.depth is None:
        return forward(*args, ragged=ragged, **kwargs)
    if index < ragged.depth:
        output = forward(*args, ragged=ragged, **kwargs)
        if index == ragged.depth - 1 and (behind := ragged.behind) is not None:
            output = behind(output) if isinstance(output, Tensor) else (behind(output[0]), *output[1:])
        ragged.last = output
    return ragged.last


def run_stack(count: int, forward: Callable[..., Any], *args: Any, ragged: Attending, **kwargs: Any) -> Any:
    """Calls the owner of all ``count`` decoder layers, whose output is that of the final norm."""
    output = forward(*args, ragged=ragged, **kwargs)
    if count in ragged.hidden:
        ragged.hidden[count] = output[0][0]
    return output


def final_module(model: nn.Module, num_layers: int) -> nn.Module | None:
    """What makes the output of the decoder layers' owner from theirs; ``None`` if that is not one module alone.

    Args:
        model: a copy that nobody else uses, whose layers ask for our attention.
        num_layers: of the model.
    """
    if (place := decoder_list(model, num_layers)) is None:
        return None
    owner, layers = place[0], getattr(*place)
    seen: list[tuple[nn.Module, Any]] = []
    for module in (layers[-1], *owner.children(), owner):
        module.register_forward_hook(lambda module, _, output: seen.append((module, output)))
    cache = RaggedKVCache()
    device = next(model.parameters()).device
    run = Forward(cache.plan([cache.open(1)], [[0]]).to(device), cache)
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        model(tokens, position_ids=run.batch.positions[None], use_cache=False, ragged=run)
    (before, _), (last, made), (_, output) = seen[-3:]
    return last if before is layers[-1] and torch.equal(made.flatten(), output[0].flatten()) else None


def observe(model: nn.Module, num_layers: int, vocab_size: int) -> Observation:
    """Runs two small trees of random tokens through a model whose layers ask for our attention, and watches."""
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
