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
from arbordraft.drafters.block import BlockDrafter, BlockState, LookAhead
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.native_models import matrix_of, runs_natively
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

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

    def _built(self, target: RaggedModel) -> LookAhead:
        return DFlashNetwork(self.head, target)

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


class DFlashNetwork(LookAhead):
    """A DFlash or DSpark head, whose output matrix is the target's if it has none.

    Native kernels grow whole trees if the Markov term reads only tokens.
    """

    def __init__(self, head: "DFlashHead", target: RaggedModel) -> None:
        if runs_natively(head, target):
            for layer in head.layers:
                attention: Any = layer.self_attn
                for name in ("k_proj", "v_proj"):  # all that the context needs
                    setattr(attention, name, PrepackedLinear(getattr(attention, name)))
        super().__init__(head, target)
        self._read_output()

    @property
    def grows_trees(self) -> bool:
        term = self.head.markov_head
        return super().grows_trees and (term is None or term.kind == "vanilla")

    def refresh(self) -> None:
        super().refresh()
        self._read_output()

    def _read_output(self) -> None:
        network: Any = self.target.network()
        # The target's output matrix is prepacked if its layers are.
        self._output: Any = self.head.lm_head or network.get_output_embeddings()

    @torch.no_grad()
    def _convert(self) -> None:
        if self.grows_trees and (term := self.head.markov_head) is not None:
            self._table = term.markov_w1.weight.detach().contiguous()
            self._correction = matrix_of(term.markov_w2).weight

    def _gates(self, block: Sequence[tuple[Tensor, ...]], table: Tensor) -> Tensor:
        return table.new_ones(len(block), len(block[0][0]), table.shape[1])

    @torch.no_grad()
    def context(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` hidden states of the target into ``[T, H]`` and norms them."""
        context: Tensor = self.head.context(states.to(self.head.dtype))
        return context

    @torch.no_grad()
    def store(self, context: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> None:
        """Writes the keys and values of context ``[T, H]``."""
        batch = batch.to(context.device)
        rotary = self.head.rotary(batch.positions, context.dtype)
        for number in range(len(self.head.layers)):
            keys, values = self.head.keys_values(context, rotary, number)
            cache.write(number, keys, values, batch.slots)

    @torch.no_grad()
    def block(self, tokens: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> tuple[Tensor, Tensor]:
        """Returns ``[R, D]`` logits of block rows without the Markov term, and the ``[R, H]`` states before them."""
        final = self.head.norm(self.layers.run_batch(self.embed(tokens), batch, cache))
        return self._output(final), final

    @torch.no_grad()
    def condition(
        self, logits: Tensor, final: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the Markov term of the nodes' tokens to ``[R, D]`` logits; also returns the memory for children."""
        if (term := self.head.markov_head) is None:
            return logits, None
        follow, memory = term.follow(final, tokens.to(final.device), memory)
        return logits + term.markov_w2(follow), memory


__all__ = ["DFlashDrafter", "DFlashNetwork"]
