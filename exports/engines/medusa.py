"""Medusa heads in vLLM's layout.

vLLM takes the most probable token of every head, and loads output matrices of the whole vocabulary only. Heads with a
trimmed vocabulary get rows for the other tokens, each the mean of the existing rows. Such a row gives the mean of their
logits and is never the most probable.

Shapes: D draft vocabulary, H hidden size, V vocabulary.
"""

from typing import Any

from torch import Tensor

from arbordraft.exports.engines.layout import Layout, Shapes, dtype_name
from arbordraft.exports.engines.target import Target, check_fit
from arbordraft.heads.medusa import MedusaHead


def medusa(head: MedusaHead, target: Target, card: str) -> Layout:
    """Returns the layout of Medusa checkpoints; raises ValueError if the heads cannot draft for this target."""
    settings = head.config
    check_fit(settings, target)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": settings.target_hidden_size,
        "vocab_size": settings.vocab_size,
        "num_heads": settings.num_heads,
        "num_hidden_layers": settings.num_hidden_layers,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": dtype_name(head.dtype),
        "torch_dtype": dtype_name(head.dtype),
    }
    tensors = {
        name: widened(tensor, head.tokens, settings.vocab_size) if name.startswith("lm_heads.") else tensor
        for name, tensor in head.state_dict().items()
        if name not in ("d2t", "t2d")
    }
    return Layout(config, tensors, medusa_shapes(config), card)


def medusa_shapes(config: dict[str, Any]) -> Shapes:
    """Returns the shapes of the tensors that vLLM builds for a ``config.json``."""
    hidden = config["hidden_size"]
    shapes: Shapes = {}
    for head in range(config["num_heads"]):
        shapes[f"lm_heads.{head}.weight"] = (config["vocab_size"], hidden)
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    return shapes


def widened(rows: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Widens ``[D, H]`` output rows, which stand for the token ids ``[D]``, to ``[V, H]``."""
    if len(rows) == vocabulary:
        return rows
    wide = rows.float().mean(dim=0).to(rows.dtype).repeat(vocabulary, 1)
    return wide.index_copy(0, tokens, rows.detach())
