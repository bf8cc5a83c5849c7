"""A drafter that predicts a whole tree in one pass: a block of rows, one per depth.

Shapes: T packed rows, R of them that predict, or nodes of a depth, k depths, F hidden states side by side, H hidden
size, D draft vocabulary, V vocabulary, r rank of the Markov term.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.drafters.base import Predictions, check_ragged, expect
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.feeding import CHUNK
from arbordraft.drafters.native_models import matrix_of
from arbordraft.drafters.network import HeadLayers
from arbordraft.drafters.onnx_networks import OnnxBlock
from arbordraft.drafters.slots import SlotDrafter, SlotState
from arbordraft.kernels.draft_tree import TreesToGrow, draft_from_rows
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from arbordraft.heads.block import BlockHead


_MOST_SLOTS = 32  # of a sample in the pass of its masks: slots and masks then fit into one word


@dataclass
class BlockState(SlotState):
    """State of a batch; see also :class:`~arbordraft.drafters.slots.SlotState`.

    Args:
        block: by sample, the network's outputs for each depth of this step, ``[k, ...]`` each.
        memory: ``[R, r]`` memory of a recurrent Markov term for the nodes one depth above, if there is one.
    """

    block: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    memory: Tensor | None = None

    def forget(self) -> None:
        super().forget()
        self.block, self.memory = {}, None


class BlockDrafter(SlotDrafter):
    """Drafts with a block head: one pass predicts all depths, and a Markov term adds the effect of a node's token.

    The law of a node's children depends only on committed tokens and on the node's own token. Any coupling is
    therefore as lossless as with a drafter that runs once per level. Trees are at most as deep as the block.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one.
        target: the model it drafts for.

    Raises:
        TypeError: if the head or the target has another type.
        ValueError: if the head is damaged, or was made or trained for another target.

    Source: see :class:`~arbordraft.heads.block.BlockHead`.
    """

    state_class = BlockState

    def __init__(self, head: "BlockHead | OnnxBlock", target: RaggedModel) -> None:
        super().__init__(self._expected(head), target)
        self.max_levels = head.config.block_size
        self.takes_candidates = head.config.markov_rank > 0  # without the term, predictions ignore the candidates
        self._network: Any = self.head if isinstance(self.head, OnnxBlock) else self._built(target)

    def _expected(self, head: Any) -> Any:
        """Returns the head; raises TypeError unless it is of the drafter's kind."""
        from arbordraft.heads.block import BlockHead

        return head if isinstance(head, OnnxBlock) else expect(BlockHead, head)

    def _built(self, target: RaggedModel) -> "LookAhead":
        """Builds the network of the head."""
        return BlockNetwork(self.head, target)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "BlockDrafter":
        """Loads a head that was saved with ``save_pretrained``, from a folder or a hub.

        Args:
            path: folder or hub name.
            target: the model it drafts for.
            **kwargs: passed on to ``BlockHead.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the head was made or trained for another target.
        """
        from arbordraft.heads.block import BlockHead

        check_ragged(target)
        return cls(BlockHead.from_pretrained(path, dtype=target.model.dtype, **kwargs), target)

    def scores(self, state: BlockState, frontier: Frontier) -> Predictions:
        if frontier.depth == 0:
            self._look_ahead(state, frontier.context, frontier.samples)
        rows = zip(*(state.block[sample] for sample in frontier.samples), strict=True)
        logits, final, gates = (torch.stack([part[frontier.depth] for part in parts]) for parts in rows)
        logits = self._network.condition(logits, gates, torch.tensor(frontier.tokens))
        return Predictions(self.head.widen(logits), final)

    def grow_natively(self, state: BlockState, context: DraftContext, trees: TreesToGrow) -> int | None:
        if not self._network.grows_trees:
            return None
        self._look_ahead(state, context, trees.slots)
        broken: int = self._network.grow([state.block[sample] for sample in trees.slots], trees)
        return broken

    def _look_ahead(self, state: BlockState, context: DraftContext, samples: Sequence[int]) -> None:
        """Fills the slots of committed tokens, and predicts all depths after the last ones in the same pass."""
        cache, handles = state.cache, [state.handles[sample] for sample in samples]
        lacking = [self.missing(state, context, sample) for sample in samples]
        tokens = {handle: row for handle, (row, _) in zip(handles, lacking, strict=True)}
        fused = self._network.fuse(torch.cat([states for _, states in lacking]))
        slots = dict(zip(handles, fused.split([len(row) for row in tokens.values()]), strict=True))
        early = {handle: row[:-_MOST_SLOTS] for handle, row in tokens.items()}
        for part, row, batch in cache.portions(early, self._network.chunk):
            counts = {handle: len(taken) for handle, taken in part.items()}
            self._network.store(row, torch.cat([slots[h][:n] for h, n in counts.items()]), batch, cache)
            slots |= {handle: slots[handle][count:] for handle, count in counts.items()}
        depths = self.depths(state, context)
        levels = min(context.topology.max_depth, max(depths[sample] for sample in samples))
        state.block |= zip(samples, self._ask(cache, tokens, slots, levels), strict=True)

    def _ask(
        self, cache: RaggedKVCache, tokens: Mapping[int, Sequence[int]], slots: Mapping[int, Tensor], levels: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Fills each sample's last slots; returns its ``[levels, ...]`` outputs of :meth:`BlockNetwork.look_ahead`."""
        packed: list[int] = []
        mask = self.head.config.mask_token_id
        depths: list[int] = []
        words: list[int] = []
        asked: list[int] = []
        states: list[Tensor] = []
        for handle, rows in slots.items():
            count, text = len(rows), tokens[handle][-len(rows) :]
            packed += [*text, *[text[-1] if mask is None else mask] * (levels - 1)]
            states += [rows, rows[-1:].expand(levels - 1, -1)]
            depths += [*[0] * count, *range(1, levels)]
            # A slot sees itself and earlier slots. A mask sees all slots; in P-EAGLE's form also masks up to itself.
            last = count if mask is None else count + levels - 1
            words += [(1 << min(row + 1, last)) - 1 for row in range(count + levels - 1)]
            asked += range(len(packed) - levels, len(packed))
        places = [range(len(rows) + levels - 1) for rows in slots.values()]
        batch = cache.lay_out(list(slots), places, torch.tensor(words)[:, None])
        found = self._network.look_ahead(
            torch.tensor(packed), torch.cat(states), torch.tensor(depths), batch, cache, torch.tensor(asked)
        )
        cache.commit({handle: range(len(rows)) for handle, rows in slots.items()})
        return zip(*(part.unflatten(0, (-1, levels)) for part in found), strict=True)


class LookAhead:
    """Base class of networks that predict all depths in one run, with borrowed embeddings.

    Native kernels grow whole trees from the rows of this run, if they run the layers.

    Args:
        head: in the target's dtype.
        target: the model it drafts for.
    """

    chunk = CHUNK  # most rows of a run, to bound its memory

    def __init__(self, head: Any, target: RaggedModel) -> None:
        self.head, self.target = head, target
        self.layers = HeadLayers(head, target)
        self._table: Tensor | None = None  # ``[V, r]`` Markov features of every token, for native kernels
        self._correction: Tensor | None = None  # packed ``[D, r]`` matrix of their effect on logits
        self._convert()

    @property
    def grows_trees(self) -> bool:
        """Whether native kernels grow whole trees in one call."""
        return self.layers.fused is not None

    def refresh(self) -> None:
        """Reads weights again that have changed."""
        if self.layers.refresh():
            self._convert()

    def _convert(self) -> None:
        """Converts the Markov term for native kernels, if these grow trees."""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns ``[..., E]`` embeddings of ``[...]`` tokens."""
        embeddings: Tensor = self.layers.embeddings(tokens.to(self.target.device)).to(self.head.dtype)
        return embeddings

    def grow(self, block: Sequence[tuple[Tensor, ...]], trees: TreesToGrow) -> int:
        """Grows trees from the outputs of each sample's run; returns the number of broken rows."""
        return draft_from_rows(
            torch.stack([rows[0] for rows in block]).float(),
            trees,
            vocabulary=self.layers.vocabulary,
            table=self._table,
            correction=self._correction,
            gates=None if self._table is None else self._gates(block, self._table),
        )

    def _gates(self, block: Sequence[tuple[Tensor, ...]], table: Tensor) -> Tensor:
        """Returns the ``[S, k, r]`` gates of S samples."""
        raise NotImplementedError


class BlockNetwork(LookAhead):
    """A block head."""

    @torch.no_grad()
    def _convert(self) -> None:
        head = self.head
        if self.grows_trees and isinstance(head.lm_head_markov, nn.Linear | PrepackedLinear):
            self._table = head.follow(self.embed(torch.arange(self.target.vocab_size))).contiguous()
            self._correction = matrix_of(head.lm_head_markov).weight

    def _gates(self, block: Sequence[tuple[Tensor, ...]], table: Tensor) -> Tensor:
        return torch.stack([gates for _, _, gates in block])

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` hidden states of the target into ``[T, H]``."""
        fused: Tensor = self.head.fuse(states.to(self.head.dtype))
        return fused

    @torch.no_grad()
    def store(self, tokens: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> None:
        """Writes the keys and values of slots that predict nothing."""
        self.layers.run_batch(hidden, batch, cache, self.embed(tokens))

    @torch.no_grad()
    def look_ahead(
        self,
        tokens: Tensor,
        hidden: Tensor,
        depths: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[R, D]`` logits without the Markov term, the ``[R, H]`` states before them and ``[R, r]`` gates."""
        embeddings, hidden = self.head.ask(self.embed(tokens), hidden, depths.to(hidden.device))
        out = self.layers.run_batch(hidden, batch, cache, embeddings)
        final = self.head.norm(out[rows.to(hidden.device)])
        return self.head.lm_head(final), final, self.head.gates(final)

    @torch.no_grad()
    def condition(self, logits: Tensor, gates: Tensor, tokens: Tensor) -> Tensor:
        """Adds the Markov term of the nodes' tokens to their ``[R, D]`` logits."""
        if self.head.lm_head_markov is None:
            return logits
        corrected: Tensor = logits + self.head.lm_head_markov(gates * self.head.follow(self.embed(tokens)))
        return corrected


__all__ = ["BlockDrafter", "BlockNetwork", "BlockState", "LookAhead"]
