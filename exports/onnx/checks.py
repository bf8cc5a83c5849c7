"""Checks whether a model can be exported as a graph.

Shapes: n rows, P keys before them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from arbordraft import UnsupportedModel
from arbordraft.exports.onnx.cases import Shape, chain, past_of
from arbordraft.exports.onnx.networks import CausalNetwork
from arbordraft.onnx.graph import HIDDEN
from arbordraft.target.hf_cache import returned_cache


def cache_sizes(model: PreTrainedModel) -> list[tuple[int, int, int]]:
    """Returns the heads, the size of keys and the size of values of every layer.

    Raises:
        UnsupportedModel: if the model keeps anything but all keys and values of all layers.
    """
    with torch.no_grad():
        outputs = model(torch.zeros(1, 2, dtype=torch.int64), use_cache=True)
    cache = returned_cache(outputs)
    layers: list[Any] = cache.layers if isinstance(cache, DynamicCache) else []
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if not layers or other:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps {', '.join(other) or type(cache).__name__} instead of all keys and values "
            "of all layers: graphs are exported of models whose every layer is full attention, as Llama's and Qwen's"
        )
    return [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]


@torch.no_grad()
def check_against(network: CausalNetwork, model: PreTrainedModel, sizes: Sequence[tuple[int, ...]]) -> None:
    """Compares a small tree after a past with the model's own logits.

    Raises:
        UnsupportedModel: if they differ by more than rounding, or the model does not take such inputs.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.get_output_embeddings().weight.shape[0], (1, 7), generator=generator)
    paths = [[3], [3, 4], [3, 5], [3, 4, 6]] if not network.causal else [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    seen = torch.zeros(4, 7, dtype=torch.bool)
    for row, path in enumerate(paths):
        seen[row, [0, 1, 2, *path]] = True
    try:
        past = past_of(Shape(1, 0, 0), sizes, generator).values()
        past = network(*chain(tokens[:, :3], causal=network.causal).values(), *past)[-2 * len(sizes) :]
        mask = torch.ones(1, 7) if network.causal else torch.where(seen, 0.0, HIDDEN)[None, None]
        positions = torch.tensor([[len(path) + 2 for path in paths]])
        rows = network(tokens[:, 3:], mask, positions, *past)[0][0]
    except Exception as failure:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be run with keys, values, positions and a mask from outside ({failure}): "
            "graphs are exported of decoder-only models of Llama's kind"
        ) from failure
    own = torch.stack([model(tokens[:, [0, 1, 2, *path]], use_cache=False).logits[0, -1] for path in paths])
    error = ((rows - own).square().mean() / own.var()).sqrt().item()
    if not error < 1e-3:
        raise UnsupportedModel(
            f"{type(model).__name__}: logits with a mask from outside differ from its own by {error:.1e} of their "
            "spread; its attention uses something that a graph cannot be given"
        )
