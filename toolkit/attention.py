"""Our attention under a name of transformers', for models whose attention goes through its ``AttentionInterface``.

Shapes: T packed rows, Hq/Hkv heads, D head size.
"""

from typing import Any

from torch import Tensor, nn

from arbordraft.observation import Attending, AttentionCall

HOOK = "arbordraft_ragged"
REQUIREMENT = (
    "arbordraft needs every layer to be softmax attention that goes through transformers' AttentionInterface "
    "(falcon, bloom, linear-attention and state-space models do not)"
)
# Arguments that models hand to their attention although they concern the caller only.
_IGNORED = frozenset({"cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "use_cache"})


class UnsupportedModel(ValueError):
    """The model cannot be run on packed rows."""


def register() -> None:
    """Tells transformers the name under which our attention can be asked for."""
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: Attending | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer: ``[1, H, T, D]`` in, ``[1, T, Hq, D]`` out."""
    unknown = [name for name, given in others.items() if not (given is None or given is False or name in _IGNORED)]
    if ragged is None or attention_mask is not None or unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for something packed rows do not offer: "
            f"{unknown or 'a mask of its own'}"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads, dim, value_dim = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    call = AttentionCall(heads, kv_heads, dim, value_dim, scale, sliding_window, softcap, s_aux)
    ragged.layers[layer] = call
    out = ragged.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return out[None], None
