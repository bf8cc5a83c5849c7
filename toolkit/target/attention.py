"""Our attention for transformers' AttentionInterface, and the state that a forward hands to its layers.

Shapes: T packed rows, H hidden size, Hq/Hkv heads, D head size.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from arbordraft.kernels.fused_linear import project_rotate_append
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.kernels.recurrent_tree import Scan
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.states import Key, StateRows

ATTENTION_NAME = "arbordraft_ragged"
REQUIREMENT = (
    "arbordraft needs every layer to be softmax attention that goes through transformers' AttentionInterface, or a "
    "recurrent layer that it knows (falcon, bloom and rwkv have neither)"
)
_NO_STATES = "this forward keeps no states of recurrent layers"
_ARGUMENTS_LOST = f"the model does not hand its arguments on to its layers: {REQUIREMENT}"
# Arguments that models pass on to their attention although only the caller needs them.
_IGNORED = frozenset({"cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "use_cache"})


_running: ContextVar["Attending | None"] = ContextVar("running", default=None)  # forward of a recurrent model

Tables = tuple[Tensor, Tensor]  # cosines and sines of packed rows, [T, D] each
Ahead = tuple[nn.Module, Tensor, Tensor]  # a norm, its input and its output


class UnsupportedModel(ValueError):
    """The model cannot be run on packed rows."""


def unsupported(model: nn.Module, failure: Exception) -> UnsupportedModel:
    """Returns the error for a model that failed on packed rows; a failure of Triton is not blamed on the model."""
    if type(failure).__module__.partition(".")[0] == "triton":
        return UnsupportedModel(
            f"Triton fails on this GPU ({failure!r}): install another version of it, or decode within "
            "arbordraft.kernels.choice.use('reference')"
        )
    return UnsupportedModel(
        f"{type(model).__name__} cannot run on packed tokens: {REQUIREMENT}; it failed with {failure!r}"
    )


class AttentionCall(NamedTuple):
    """Arguments with which a layer calls the attention interface."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Projection(NamedTuple):
    """``[T, H]`` rows and weights of a layer's queries, keys and values; see ``kernels.fused_linear``."""

    hidden: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    norms: list[Tensor]
    epsilon: float
    offset: float
    wide: bool


@dataclass(kw_only=True)
class Attending:
    """State of one forward that the model's layers read and write.

    Args:
        layers: indices of the layers that have attended so far. The value is the layer's attention call, or ``None`` if
            a kernel ran the layer.
        hidden: hidden states to record, by index in transformers' ``hidden_states``: the input of each decoder layer,
            then the output of the final norm. Layers fill them in as they run.
        depth: number of first layers to run, all by default.
        after_layers: module to run after these layers; maps ``[1, T, H]`` to ``[1, T, H]``.
        last: output of the last of these layers.
        index: index of the layer that runs.
        ahead: the next layer's first norm with its input and output, if a layer has computed it in advance.
    """

    layers: dict[int, AttentionCall | None] = field(default_factory=dict)
    hidden: dict[int, Tensor | None] = field(default_factory=dict)
    depth: int | None = None
    after_layers: nn.Module | None = None
    last: Any = None
    index: int = -1
    ahead: Ahead | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, tables: Tables | None = None
    ) -> Tensor:
        """Stores ``[T, Hkv, D]`` keys and values of a layer and returns the attention of its ``[T, Hq, D]`` queries.

        If ``tables`` are given, queries and keys are rotated first.
        """
        raise NotImplementedError

    def project_and_attend(self, layer: int, projection: Projection, call: AttentionCall, tables: Tables) -> Tensor:
        """Projects hidden states to queries, keys and values, then attends as :meth:`attend` does with tables."""
        raise NotImplementedError

    def convolve(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
        """Convolves ``[T, C]`` inputs along the paths of their rows; see :meth:`StateRows.convolve`."""
        raise UnsupportedModel(_NO_STATES)

    def scan(self, key: Key, rows: Scan) -> Tensor:
        """Runs a recurrence along the paths of the rows; see :meth:`StateRows.scan`."""
        raise UnsupportedModel(_NO_STATES)


@dataclass
class Forward(Attending):
    """One forward of a :class:`~arbordraft.target.model.RaggedModel`, with its rows and its KV cache.

    Args:
        batch: rows of the forward.
        cache: KV cache that the forward reads and writes.
        native: use the native attention kernel.
        row_invariant: give every row the bits that it has alone, also on a GPU.
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

    @cached_property
    def state_rows(self) -> StateRows:
        """The rows in recurrent layers."""
        return self.cache.state_rows(self.batch, self.batch.positions.device)

    def convolve(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
        """See :meth:`Attending.convolve`."""
        return self.state_rows.convolve(key, inputs, weight, bias, activate=activate)

    def scan(self, key: Key, rows: Scan) -> Tensor:
        """See :meth:`Attending.scan`."""
        return self.state_rows.scan(key, rows)

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
    """Registers our attention with transformers' AttentionInterface."""
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
    """Maps ``[1, H, T, D]`` to ``[1, T, Hq, D]``; transformers calls it in every attention layer."""
    unknown = [name for name, given in others.items() if not (given is None or given is False or name in _IGNORED)]
    if ragged is None or attention_mask is not None or unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for something packed rows do not offer: "
            f"{unknown or 'a mask of its own'}"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    layer = ragged.index if layer < 0 else layer  # several layers may share one attention
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads, dim, value_dim = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    call = AttentionCall(heads, kv_heads, dim, value_dim, scale, sliding_window, softcap, s_aux)
    ragged.layers[layer] = call
    out = ragged.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return out[None], None


def run_layer(
    index: int, forward: Callable[..., Any], *args: Any, ragged: Attending | None = None, **kwargs: Any
) -> Any:
    """Calls a decoder layer, or skips it beyond ``depth``; records its input and runs ``after_layers`` if asked for."""
    ragged, forward = _handed_on(ragged, forward)
    ragged.index = index
    if index in ragged.hidden:
        ragged.hidden[index] = (args[0] if args else kwargs["hidden_states"])[0]
    if ragged.depth is None:
        return forward(*args, **kwargs)
    if index < ragged.depth:
        output = forward(*args, **kwargs)
        if index == ragged.depth - 1 and (after_layers := ragged.after_layers) is not None:
            output = after_layers(output) if isinstance(output, Tensor) else (after_layers(output[0]), *output[1:])
        ragged.last = output
    return ragged.last


def run_stack(
    count: int, forward: Callable[..., Any], *args: Any, ragged: Attending | None = None, **kwargs: Any
) -> Any:
    """Calls the module that holds all ``count`` decoder layers; its output is that of the final norm."""
    ragged, forward = _handed_on(ragged, forward)
    output = forward(*args, **kwargs)
    if count in ragged.hidden:
        ragged.hidden[count] = output[0][0]
    return output


def run_model(forward: Callable[..., Any], *args: Any, ragged: Attending | None = None, **kwargs: Any) -> Any:
    """Calls a model with recurrent layers, some of which do not hand keyword arguments on to them."""
    token = _running.set(ragged)
    try:
        return forward(*args, ragged=ragged, **kwargs)
    finally:
        _running.reset(token)


def running(ragged: Attending | None) -> Attending:
    """Returns the forward that reached a module, or else the one that this thread's model runs.

    Raises:
        UnsupportedModel: if there is none.
    """
    if (ragged := ragged or current()) is None:
        raise UnsupportedModel(_ARGUMENTS_LOST)
    return ragged


def current() -> Attending | None:
    """Returns the forward of the model with recurrent layers that this thread runs, if it runs one."""
    return _running.get()


def _handed_on(ragged: Attending | None, forward: Callable[..., Any]) -> tuple[Attending, Callable[..., Any]]:
    """Returns the forward, and a module's call that gets it if the module was given it."""
    return running(ragged), forward if ragged is None else partial(forward, ragged=ragged)
