"""Observes one forward of a model: its decoder layers, their inputs and their calls of the attention interface."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import AttentionCall, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.memory import drop_originals
from arbordraft.trees.topology import TreeTopology, ancestor_words


class LayerCall(NamedTuple):
    """A decoder layer and its arguments in an observed forward on a fresh cache.

    Args:
        layer: the layer.
        args: its arguments.
        kwargs: its arguments by name.
        rest: values that it returned after its output, in a tuple; ``None`` if it returned the output alone.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rest: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Observation:
    """Record of one forward of a model.

    Args:
        place: the module that holds the list of decoder layers, and the list's name; ``None`` if there is none.
        layers: the layers that were called, in order.
        attention: calls of the attention interface by layer index.
        called: all modules that were called.
        batch: the forward's rows, on a fresh cache.
    """

    place: tuple[nn.Module, str] | None
    layers: list[LayerCall]
    attention: dict[int, AttentionCall]
    called: set[nn.Module]
    batch: RaggedBatch


def decoder_list(model: nn.Module, count: int) -> tuple[nn.Module, str] | None:
    """Finds the list of decoder layers, the outermost one of length ``count``: returns its owner and its name."""
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    return None


def final_module(model: nn.Module, num_layers: int) -> nn.Module | None:
    """Returns the one module between the last decoder layer and its owner's output; ``None`` if there are several.

    Args:
        model: a private copy whose layers call our attention.
        num_layers: number of the model's decoder layers.
    """
    if (place := decoder_list(model, num_layers)) is None:
        return None
    owner, layers = place[0], getattr(*place)
    seen: list[tuple[nn.Module, Any]] = []
    for module in (layers[-1], *owner.children(), owner):
        module.register_forward_hook(lambda module, _, output: seen.append((module, output)))
    cache = RaggedKVCache()
    device = next(model.parameters()).device
    run = Forward(cache.lay_out([cache.open(1)], [[0]]).to(device), cache)
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        model(tokens, position_ids=run.batch.positions[None], use_cache=False, ragged=run)
    (before, _), (last, made), (_, output) = seen[-3:]
    return last if before is layers[-1] and torch.equal(made.flatten(), output[0].flatten()) else None


def observe(model: nn.Module, num_layers: int, vocab_size: int) -> Observation:
    """Records a forward of two small trees of random tokens, in a model whose layers call our attention."""
    place = decoder_list(model, num_layers)
    layers: list[nn.Module] = list(getattr(*place)) if place else []
    given: dict[nn.Module, LayerCall] = {}
    called: set[nn.Module] = set()

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called.add(module)
        if module in layers:
            given[module] = LayerCall(module, args, kwargs)

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, tuple):
            given[module] = given[module]._replace(rest=output[1:])

    topology = TreeTopology.from_parents([-1, 0, 0, 1])
    tokens = torch.randint(vocab_size, (1, 2 * topology.num_nodes), generator=torch.Generator().manual_seed(0))
    cache = RaggedKVCache()
    samples = [cache.open(topology.num_nodes) for _ in range(2)]
    words = ancestor_words(topology.visible.cpu()).repeat(2, 1)
    run = Forward(cache.lay_out(samples, [topology.depth_list] * 2, words), cache)
    hooks = [module.register_forward_pre_hook(watch, with_kwargs=True) for module in model.modules()]
    hooks += [layer.register_forward_hook(hook) for layer in layers for hook in (forget, note)]
    try:
        with torch.no_grad(), _WithoutBlocks():
            model(tokens, position_ids=run.batch.positions[None], use_cache=False, ragged=run)
    finally:
        for hook in hooks:
            hook.remove()
    attention = {index: call for index, call in run.layers.items() if call}
    return Observation(place, [given[layer] for layer in layers if layer in given], attention, called, run.batch)


def forget(layer: nn.Module, *_: Any) -> None:
    """Takes a layer's weights that lie in mapped files out of memory; a hook after a layer's forward."""
    drop_originals(layer.parameters())


class _WithoutBlocks(TorchFunctionMode):
    """Lets linears whose weights lie in blocks of a file return zeros: only shapes and settings are observed."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and isinstance(args[1], FileBlocks):
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        return function(*args, **(kwargs or {}))


def fresh_cache(batch: RaggedBatch) -> RaggedKVCache:
    """Returns an empty cache whose slabs lie where a batch without a past expects them."""
    cache = RaggedKVCache()
    for rows in batch.rows:
        cache.open(rows)
    return cache
