"""A drafter that predicts a whole tree in one pass of several layers: DFlash and DSpark.

Shapes: T packed rows, R rows of blocks or nodes of a depth, b rows of a block, k depths, F hidden states side by side,
H hidden size, D draft vocabulary, V vocabulary, r rank of the Markov term.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.drafters.base import Predictions, check_ragged, expect
from arbordraft.drafters.block import BlockDrafter, BlockState
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.native_models import layer_weights, matrix_of, norm_of, runs_natively
from arbordraft.kernels.decoder_layers import LayerRun
from arbordraft.kernels.draft_tree import TreesToGrow, draft_from_rows
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear, version_of
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears

if TYPE_CHECKING:
    from arbordraft.heads.dflash import DFlashHead


class DFlashDrafter(BlockDrafter):
    """Drafts with a DFlash or DSpark head: one pass predicts all depths, and a Markov term distinguishes nodes.

    A block always has all its rows, even for shallow trees, because its rows see each other. The law of a node's
    children depends only on committed tokens and on the node's path, so any coupling is lossless.

    Args:
        head: the trained network, which is cast to the target's dtype.
        target: the model it drafts for.

    Raises:
        TypeError: if the head or the target has another type.
        ValueError: if the head is damaged, or was made or trained for another target.

    Source: see :class:`~arbordraft.heads.dflash.DFlashHead`.
    """

    layers = "layers"

    def __init__(self, head: "DFlashHead", target: RaggedModel) -> None:
        super().__init__(head, target)  # type: ignore[arg-type]  # _expected checks its type
        self.max_levels = head.config.depths

    def _expected(self, head: Any) -> Any:
        from arbordraft.heads.dflash import DFlashHead

        return expect(DFlashHead, head)

    def _on_rows(self) -> Any:
        return (_NativeRows if runs_natively(self.head, self.target) else _Rows)(self.head, self.target)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "DFlashDrafter":
        """Loads a head that was saved with ``save_pretrained``, from a folder or a hub.

        Args:
            path: folder or hub name.
            target: the model it drafts for.
            **kwargs: passed on to ``DFlashHead.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the head was made or trained for another target.
        """
        from arbordraft.heads.dflash import DFlashHead

        check_ragged(target)
        return cls(DFlashHead.from_pretrained(path, dtype=target.model.dtype, **kwargs), target)

    def scores(self, state: BlockState, frontier: Frontier) -> Predictions:
        if frontier.depth == 0:
            self._look_ahead(state, frontier.context, frontier.samples)
        rows = zip(*(state.block[sample] for sample in frontier.samples), strict=True)
        logits, final = (torch.stack([part[frontier.depth] for part in parts]) for parts in rows)
        above = None
        if frontier.depth and state.memory is not None:
            parents = frontier.context.topology.parent_list
            above = state.memory[[state.rows[sample, parents[node]] for sample, node in frontier.places]]
        logits, state.memory = self._network.condition(logits, final, torch.tensor(frontier.tokens), above)
        state.rows = {place: row for row, place in enumerate(frontier.places)}
        return Predictions(self.head.widen(logits), final)

    def _look_ahead(self, state: BlockState, context: DraftContext, samples: Sequence[int]) -> None:
        """Fills the slots of each sample's context, and predicts all depths of a block after it."""
        cache, network = state.cache, self._network
        handles = [state.handles[sample] for sample in samples]
        lacking = [self.missing(state, context, sample)[1] for sample in samples]
        known = network.context(torch.cat(lacking)).split([len(rows) for rows in lacking])
        states = dict(zip(handles, known, strict=True))
        places = {handle: range(len(rows)) for handle, rows in states.items()}
        for part, _, batch in cache.portions(places, network.chunk):
            network.store(torch.cat([states[h][rows[0] : rows[-1] + 1] for h, rows in part.items()]), batch, cache)
        config, size = self.head.config, self.head.config.block_size
        tokens = [[context.tokens(sample)[-1], *[config.mask_token_id] * (size - 1)] for sample in samples]
        words = torch.full((size * len(samples), 1), (1 << size) - 1)  # a row sees the whole block
        batch = cache.lay_out(handles, [range(size)] * len(handles), words)
        found = network.block(torch.tensor(tokens).flatten(), batch, cache)
        cache.drop(handles)
        parts = (part.unflatten(0, (-1, size))[:, size - config.depths :] for part in found)
        state.block |= zip(samples, zip(*parts, strict=True), strict=True)


class _Rows:
    """Runs a head on the packed rows of a ragged batch, with borrowed embeddings and attention."""

    chunk = 2048  # most rows of a run, to bound its memory
    grows_trees = False

    def __init__(self, head: "DFlashHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        self._native = target.backend == "native"
        if self._native:
            prepack_linears(head.layers)
        self.refresh()

    def refresh(self) -> None:
        """Reads weights again that have changed."""
        network: Any = self.target.network()
        # The target's output matrix is prepacked if its layers are.
        self._output: Any = self.head.lm_head or network.get_output_embeddings()

    @torch.no_grad()
    def context(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` hidden states of the target into ``[T, H]`` and norms them."""
        return self.head.context(states.to(self.head.dtype))

    @torch.no_grad()
    def store(self, context: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> None:
        """Writes the keys and values of context ``[T, H]``."""
        batch = batch.to(context.device)
        rotary = self.head.rotary(batch.positions, context.dtype)
        for number in range(len(self.head.layers)):
            cache.write(number, *self.head.keys_values(context, rotary, number), batch.slots)

    @torch.no_grad()
    def block(self, tokens: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> tuple[Tensor, Tensor]:
        """Returns ``[R, D]`` logits of block rows without the Markov term, and the ``[R, H]`` states before them."""
        final = self.head.norm(self._layers(self._embed(tokens), batch, cache))
        return self._output(final), final

    def _layers(self, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> Tensor:
        batch = batch.to(hidden.device)
        rotary = self.head.rotary(batch.positions, hidden.dtype)
        scale = self.head.config.head_dim**-0.5
        for number, layer in enumerate(self.head.layers):
            query, key, value = self.head.queries_keys_values(hidden, rotary, number)
            keys, values = cache.write(number, key, value, batch.slots)
            attended = ragged_tree_attention(query, keys, values, batch, scale=scale, use_native=self._native)
            hidden = layer.finish(hidden, attended.flatten(1))
        return hidden

    @torch.no_grad()
    def condition(
        self, logits: Tensor, final: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the Markov term of the nodes' tokens to ``[R, D]`` logits; also returns the memory for children."""
        if (term := self.head.markov_head) is None:
            return logits, None
        follow, memory = term.follow(final, tokens.to(final.device), memory)
        return logits + term.markov_w2(follow), memory

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.model.get_input_embeddings()(tokens.to(self.target.device)).to(self.head.dtype)


class _NativeRows(_Rows):
    """Runs a head with fused layers; grows whole trees in one call if the Markov term reads only tokens."""

    def __init__(self, head: "DFlashHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        self._native = True
        for layer in head.layers:
            attention: Any = layer.self_attn
            for name in ("k_proj", "v_proj"):  # all that the context needs
                setattr(attention, name, PrepackedLinear(getattr(attention, name)))
        self._read()
        self.refresh()

    def refresh(self) -> None:
        super().refresh()
        if self._versions != self._current():
            self._read()

    def _current(self) -> list[int]:
        return [version_of(parameter) for parameter in self.head.parameters()]

    @torch.no_grad()
    def _read(self) -> None:
        head, config = self.head, self.head.config
        self._versions = self._current()
        self._run = LayerRun([layer_weights(config, layer, norm_of(layer.input_layernorm)) for layer in head.layers])
        term = head.markov_head
        self.grows_trees = term is None or term.kind == "vanilla"
        self._table = self._correction = None
        if term is not None and term.kind == "vanilla":
            self._table = term.markov_w1.weight.detach().contiguous()
            self._correction = matrix_of(term.markov_w2).weight
        trimmed = config.draft_vocab_size != config.vocab_size
        self._vocabulary = head.tokens.contiguous() if trimmed else None

    def _layers(self, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> Tensor:
        cosine, sine = (table[:, 0] for table in self.head.rotary(batch.positions, torch.float32))
        shape = (self.head.config.num_key_value_heads, self.head.config.head_dim)
        pools = [cache.pools(number, shape, hidden) for number in range(len(self.head.layers))]
        return self._run(hidden[None], pools, (cosine[None], sine[None]), batch)[0][0]

    def grow(self, block: Sequence[tuple[Tensor, ...]], trees: TreesToGrow) -> int:
        """Grows trees from the rows that a pass has predicted for every sample; returns the number of broken rows."""
        logits = torch.stack([rows for rows, _ in block])
        gates = None
        if self._table is not None:
            gates = self._table.new_ones(*logits.shape[:2], self._table.shape[1])
        return draft_from_rows(
            logits.float(),
            trees,
            vocabulary=self._vocabulary,
            table=self._table,
            correction=self._correction,
            gates=gates,
        )


__all__ = ["DFlashDrafter"]
