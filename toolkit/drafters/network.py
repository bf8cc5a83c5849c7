"""Networks of drafters on packed rows, run by torch, by native kernels or by onnxruntime.

Shapes: T packed rows, R of them that predict, F hidden states side by side, E embedding size, H hidden size, D outputs
of a network, V vocabulary.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.vocabulary import fit_tokens
from arbordraft.drafters.feeding import CHUNK
from arbordraft.drafters.native_models import embeddings_of, layer_weights, native_model, norm_of, runs_natively
from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.kernels.prepacked_linear.module import version_of
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import Attending, AttentionCall, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from arbordraft.heads.layers import LayeredHead

_LARGE_HEAD = 1 << 23  # weights from which reading a head takes much of a level


class Outputs(NamedTuple):
    """Outputs of a network for packed rows.

    Args:
        logits: ``[R, D]``.
        final: ``[R, H]`` states before the logits, if the network exposes them.
        out: ``[R, H]`` states that the rows of children read, if they read any.
    """

    logits: Tensor
    final: Tensor | None = None
    out: Tensor | None = None


class DraftNetwork:
    """A network that reads committed tokens and drafts.

    It runs packed rows. A subclass may also grow whole trees, either in one native call or in a recorded step.

    Args:
        weights: the module that holds its weights, on its device and in the dtype of its states.
        vocab_size: V, the number of token ids that it reads.

    Attributes:
        vocabulary: ``[D]`` tokens of its outputs; ``None`` for 0 to D - 1.
        states: F; 0 if it reads no states of the target.
        chunk: most rows of a run, to bound its memory.
        native_attention: whether native kernels attend.
    """

    vocabulary: Tensor | None = None
    states = 0
    chunk = CHUNK
    native_attention = False

    def __init__(self, weights: "PreTrainedModel", vocab_size: int) -> None:
        self.weights, self.vocab_size = weights, vocab_size

    def __repr__(self) -> str:
        return type(self.weights).__name__

    @property
    def device(self) -> torch.device:
        """Device of its inputs."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the states that it reads and returns."""
        return self.weights.dtype

    @property
    def native(self) -> DraftRun | None:
        """Runs it in native kernels, which grow whole trees in one call; ``None`` if these cannot."""
        return None

    def recorded(self) -> "DraftNetwork | None":
        """Returns the network whose runs can be recorded, as they ask nothing of the host; ``None`` if none can.

        If modules have been replaced since the last call, this is another object, and earlier recordings are void.
        """
        return None

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Returns its key and value pools in a cache; creates missing pools with a token of the sample ``dummy``."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Reads weights again that have changed."""

    def fuse(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` states of the target into the ``[T, H]`` that it reads, if it reads any."""
        return states

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        """Runs packed rows on its device.

        Args:
            tokens: ``[T]``.
            hidden: ``[T, H]`` states for the tokens, if it reads any: the target's, or its own output for the parents.
            positions: ``[T]``.
            ragged: stores keys and values and attends to them.
            rows: ``[R]`` rows to predict from, all T by default.
        """
        raise NotImplementedError

    def run_batch(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
    ) -> Outputs:
        """Runs the rows of a ragged batch; other arguments are those of :meth:`run`, on the host or on its device.

        Args:
            tokens: ``[T]``.
            hidden: ``[T, H]``.
            batch: result of ``cache.lay_out`` for the tokens.
            cache: gets keys and values.
            rows: ``[R]``.
        """
        batch, (tokens, *wanted) = batch.upload(self.device, tokens, *(() if rows is None else (rows,)))
        ragged = Forward(batch, cache, self.native_attention)
        return self.run(tokens, hidden, batch.positions, ragged, *wanted)

    def widen(self, logits: Tensor) -> Tensor:
        """Widens ``[..., D]`` logits to ``[..., V]``; other tokens get probability 0."""
        return logits


class ModelNetwork(DraftNetwork):
    """A causal LM, or its first layers.

    Args:
        model: the model.
        layers: number of first layers to run, all by default.
        after_layers: module to run after these; maps ``[1, T, H]`` to ``[1, T, H]``.
        modules: the modules that recorded steps run; see :meth:`recorded`.
    """

    def __init__(
        self,
        model: RaggedModel,
        layers: int | None = None,
        after_layers: nn.Module | None = None,
        modules: nn.Module | None = None,
    ) -> None:
        super().__init__(model.model, model.vocab_size)
        self.model, self.layers, self.after_layers, self.modules = model, layers, after_layers, modules
        self._recorded = self
        self._native: tuple[object, DraftRun | None] | None = None  # with the prepacked weights that it reads

    @property
    def native(self) -> DraftRun | None:
        if self.model.backend != "native" or self.layers is not None:
            return None
        source = self._source()
        if self._native is None or self._native[0] != source:
            self._native = source, self._convert()
        return self._native[1]

    def _source(self) -> object:
        """Returns the prepacked weights that native kernels read."""
        return self.model.prepacking

    def _convert(self) -> DraftRun | None:
        modules: Any = self.model.network()
        return native_model(self.model, screen=modules.get_output_embeddings().weight.numel() >= _LARGE_HEAD)

    def recorded(self) -> DraftNetwork | None:
        if self.model.backend == "native" or self.layers is not None or self.model.recurrent:
            return None
        if (modules := self.model.network()) is not self._recorded.modules:
            self._recorded = ModelNetwork(self.model, modules=modules)
        return self._recorded

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        if next(cache.buffers(), None) is None:
            self.model.prefill({dummy: [0]}, cache)
        return cache.rows(self.model.num_layers)

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        if isinstance(ragged, Forward):  # the model prepares and checks a forward itself
            tokens = fit_tokens(tokens, self.vocab_size)
            return Outputs(self.model(tokens, ragged.batch, ragged.cache, rows, self.layers, self.after_layers))
        assert self.modules is not None
        output = self.modules(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=slice(None) if rows is None else rows,
            ragged=ragged,
        )
        return Outputs(output.logits[0])


class HeadLayers:
    """The layers of a trained head on packed rows: fused where native kernels can run them, else torch's modules.

    Args:
        head: in the target's dtype; native kernels read a prepacked copy of its layers' weights.
        target: gives embeddings if the head has none, and chooses the kernels.

    Attributes:
        fused: the fused layers; ``None`` if torch's modules run.
        native_attention: whether native kernels attend.
    """

    def __init__(self, head: "LayeredHead", target: RaggedModel) -> None:
        config = head.config
        self.head, self.target, self.native_attention = head, target, target.backend == "native"
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._attention = AttentionCall(heads, kv_heads, dim, dim, dim**-0.5, None, None, None)
        self.fused: LayerRun | None = None
        if runs_natively(head, target):
            self._prepack()
        elif self.native_attention:
            for layer in head.layers:
                prepack_linears(layer)

    def refresh(self) -> bool:
        """Reads weights again that have changed; returns whether there were any."""
        if changed := self.fused is not None and self._versions != self._current():
            self._prepack()
        return changed

    def _current(self) -> list[int]:
        return [version_of(parameter) for parameter in self.head.parameters()]

    def _prepack(self) -> None:
        self._versions = self._current()
        self.fused = LayerRun([self._weights(layer) for layer in self.head.layers])

    def _weights(self, layer: Any) -> LayerWeights:
        config, before = self.head.config, norm_of(layer.input_layernorm)
        if not hasattr(layer, "hidden_norm"):
            return layer_weights(config, layer, before)
        # A layer that reads embeddings, too, concatenates embeddings and states, in this order.
        states = None if self._norms_first else norm_of(layer.hidden_norm)
        return layer_weights(config, layer, states, before)

    @property
    def _norms_first(self) -> bool:
        """Whether the first layer's residual is its normed input."""
        return bool(getattr(self.head.config, "norm_before_residual", False))

    @property
    def vocabulary(self) -> Tensor | None:
        """``[D]`` tokens that the head can draft; ``None`` for all."""
        config = self.head.config
        return None if config.draft_vocab_size == config.vocab_size else self.head.tokens.contiguous()

    @property
    def embeddings(self) -> Any:
        """The head's embeddings of tokens, or the target's."""
        return embeddings_of(self.head, self.target)

    def pools(self, cache: RaggedKVCache) -> list[Tensor]:
        """Returns the layers' key and value pools in a cache."""
        like = torch.empty(0, dtype=self.head.dtype, device=self.head.device)
        return [pool for pair in self._pools(cache, like) for pool in pair]

    def _pools(self, cache: RaggedKVCache, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        shape = self._attention.kv_heads, self._attention.dim
        return [cache.pools(layer, shape, like) for layer in range(len(self.head.layers))]

    def run(self, hidden: Tensor, positions: Tensor, ragged: Attending, embeddings: Tensor | None = None) -> Tensor:
        """Runs packed rows; returns the last layer's ``[T, H]`` output.

        Args:
            hidden: ``[T, H]`` input of the first layer.
            positions: ``[T]``.
            ragged: stores keys and values and attends to them; a forward over a ragged batch, if layers are fused.
            embeddings: ``[T, E]`` embeddings that the first layer reads besides, if it reads any.
        """
        head: Any = self.head
        if self.fused is not None:
            assert isinstance(ragged, Forward)
            cosine, sine = (table[:, 0] for table in head.rotary(positions, torch.float32))
            if self._norms_first:
                hidden = head.layers[0].hidden_norm(hidden)
            pools, rotary = self._pools(ragged.cache, hidden), (cosine[None], sine[None])
            return self.fused(hidden[None], pools, rotary, ragged.batch, (), embeddings)[0][0]
        rotary = head.rotary(positions, hidden.dtype)
        read = () if embeddings is None else (embeddings,)
        for layer in range(len(head.layers)):
            query, key, value = head.queries_keys_values(*read, hidden, rotary, layer)
            attended = ragged.attend(layer, query, key, value, self._attention)
            hidden = head.finish(hidden, attended.flatten(1), layer)
        return hidden

    def run_batch(
        self, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache, embeddings: Tensor | None = None
    ) -> Tensor:
        """Runs the layers on the rows of a ragged batch; see :meth:`run`."""
        batch = batch.to(hidden.device)
        return self.run(hidden, batch.positions, Forward(batch, cache, self.native_attention), embeddings)


__all__ = ["DraftNetwork", "HeadLayers", "ModelNetwork", "Outputs"]
