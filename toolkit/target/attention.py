"""Our attention under a name of transformers', and what a forward carries to the layers that ask for it.

Shapes: T packed rows, Hq/Hkv heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from arbordraft.kernels.fused_linear import project_rotate_append
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.target.cache import RaggedKVCache

ATTENTION_NAME = "arbordraft_ragged"
REQUIREMENT = (
    "arbordraft needs every layer to be softmax attention that goes through transformers' AttentionInterface "
    "(falcon, bloom, linear-attention and state-space models do not)"
)
_UNTOLD = f"the model does not hand its arguments on to its layers: {REQUIREMENT}"
# Arguments that models hand to their attention although they concern the caller only.
_IGNORED = frozenset({"cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "use_cache"})


Tables = tuple[Tensor, Tensor]  # cosines and sines of packed rows, [T, D] each
Ahead = tuple[nn.Module, Tensor, Tensor]  # a norm, what it was taken of, and what came out


class UnsupportedModel(ValueError):
    """The model cannot be run on packed rows."""


def unsupported(model: nn.Module, failure: Exception) -> UnsupportedModel:
    """What to say of a model that failed on packed rows, which may be no fault of its own."""
    if type(failure).__module__.partition(".")[0] == "triton":
        return UnsupportedModel(
            f"Triton fails on this GPU ({failure!r}): install another version of it, or decode within "
            "arbordraft.kernels.choice.use('reference')"
        )
    return UnsupportedModel(
        f"{type(model).__name__} cannot run on packed tokens: {REQUIREMENT}; it failed with {failure!r}"
    )


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


class Projection(NamedTuple):
    """How a layer makes its queries, keys and values of ``[T, H]`` rows; see ``kernels.fused_linear``."""

    hidden: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    norms: list[Tensor]
    epsilon: float
    offset: float
    wide: bool


@dataclass(kw_only=True)
class Attending:
    """What the layers of a model need of the forward that they are part of, and what they leave there.

    Args:
        layers: the layers that have attended so far; with what they asked for, where a layer did so by itself.
        hidden: the hidden states that are wanted, by index as in transformers' ``hidden_states``: the input of each
            decoder layer, and behind the last one the output of the final norm; filled in as the layers run.
        depth: run only the first layers, as many as this.
        behind: put this behind them; maps ``[1, T, H]`` to the same.
        last: what the last of these layers returned.
        ahead: a norm that a layer has taken of its output for the next layer.
    """

    layers: dict[int, AttentionCall | None] = field(default_factory=dict)
    hidden: dict[int, Tensor | None] = field(default_factory=dict)
    depth: int | None = None
    behind: nn.Module | None = None
    last: Any = None
    ahead: Ahead | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, tables: Tables | None = None
    ) -> Tensor:
        """Stores the ``[T, Hkv, D]`` keys and values of a layer and returns what its ``[T, Hq, D]`` queries find.

        With tables, queries and keys are rotated first.
        """
        raise NotImplementedError

    def project_and_attend(self, layer: int, projection: Projection, call: AttentionCall, tables: Tables) -> Tensor:
        """Does the same with queries, keys and values that are still to be made."""
        raise NotImplementedError


@dataclass
class Forward(Attending):
    """What one forward of a :class:`~arbordraft.target.model.RaggedModel` hands to its layers.

    Args:
        batch: its rows.
        cache: its keys and values.
        native: use the native attention kernel.
        row_invariant: give every row the bits that it has alone, on a GPU, too.
    """

    batch: RaggedBatch
    cache: RaggedKVCache
    native: bool = False
    row_invariant: bool = False

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, tables: Tables | None = None
    ) -> Tensor:
        """See :meth:`Attending.attend`."""
        if tables is None:
            keys, values = self.cache.write(layer, key, value, self.batch.slots)
        else:
            query, keys, values = self.cache.write_rotated(layer, query, key, value, tables, self.batch.slots)
        return self._attended(query, keys, values, call)

    def project_and_attend(self, layer: int, projection: Projection, call: AttentionCall, tables: Tables) -> Tensor:
        """See :meth:`Attending.project_and_attend`."""
        keys, values = self.cache.pools(layer, (call.kv_heads, call.dim), projection.hidden)
        query = project_rotate_append(*projection, *tables, keys, values, self.batch.slots)
        return self._attended(query, keys, values, call)

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
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
            row_invariant=self.row_invariant,
        )


def register() -> None:
    """Tells transformers the name under which our attention can be asked for."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


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


def run_layer(
    index: int, forward: Callable[..., Any], *args: Any, ragged: Attending | None = None, **kwargs: Any
) -> Any:
    """Calls a decoder layer as the forward that it is part of wants it: observed, followed by something, or not."""
    if ragged is None:
        raise UnsupportedModel(_UNTOLD)
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


def run_stack(
    count: int, forward: Callable[..., Any], *args: Any, ragged: Attending | None = None, **kwargs: Any
) -> Any:
    """Calls the owner of all ``count`` decoder layers, whose output is that of the final norm."""
    if ragged is None:
        raise UnsupportedModel(_UNTOLD)
    output = forward(*args, ragged=ragged, **kwargs)
    if count in ragged.hidden:
        ragged.hidden[count] = output[0][0]
    return output
