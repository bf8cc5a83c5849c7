"""An EAGLE-type drafter: one layer that continues the target's hidden states.

Shapes: T packed rows, R rows whose predictions are wanted, F hidden states side by side, H hidden size, V vocabulary.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.drafters.base import check_ragged, expect
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grower import TreeGrower
from arbordraft.drafters.model_drafter import grow, lay_out_level
from arbordraft.drafters.native_models import NativeEagle, runs_natively
from arbordraft.drafters.one_call import Missing, feed, feed_static, grow_in_one_call
from arbordraft.drafters.slots import SlotDrafter, SlotState
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.onnx.networks import OnnxEagle
from arbordraft.target.attention import Attending, AttentionCall, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict

if TYPE_CHECKING:
    from arbordraft.heads.eagle import EagleHead


@dataclass
class _State(SlotState):
    fed: dict[int, list[int]] = field(default_factory=dict)  # nodes behind the committed slots, in cache order
    hidden: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # the layer's output at each node


class EagleDrafter(SlotDrafter):
    """Drafts with an EAGLE-3 head, whose one layer reads the target's hidden states and then its own.

    Where the target has been, slots are filled from its states; the slots of draft trees are given up after every
    step, since better states are there by then.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one in its place.
        target: the model it drafts for.

    Raises:
        TypeError: if one of them is something else.
        ValueError: if the head is damaged, or was made, or trained, for another target.

    Source: EAGLE-3 (Li et al., 2025).
    """

    takes_candidates = True
    state_class = _State

    def __init__(self, head: "EagleHead | OnnxEagle", target: RaggedModel) -> None:
        from arbordraft.heads.eagle import EagleHead

        super().__init__(head if isinstance(head, OnnxEagle) else expect(EagleHead, head), target)
        self._network: Any = head if isinstance(head, OnnxEagle) else on_rows(self.head, target)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "EagleDrafter":
        """Loads a head that was saved with ``save_pretrained``, from a folder or a hub.

        Args:
            path: where it is.
            target: the model it drafts for.
            **kwargs: passed on to ``EagleHead.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the head was made, or trained, for another target.
        """
        from arbordraft.heads.eagle import EagleHead

        check_ragged(target)
        return cls(EagleHead.from_pretrained(path, dtype=target.model.dtype, **kwargs), target)

    def open(self, target_cache: RaggedKVCache) -> _State:
        if isinstance(self._network, NativeEagle):
            self._network.refresh()
        state: _State = super().open(target_cache)
        return state

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        # A text of one token has no state to start from: the target goes first.
        max_depth = [
            limit if limit is None or len(tokens) > 1 else 0
            for limit, tokens in zip(context.max_depth, context.tokens, strict=True)
        ]
        context = replace(context, max_depth=max_depth, lag=self.lag(state, context))
        if (feeding := self._in_one_call(state, context)) is not None:
            able = [sample for sample, limit in enumerate(max_depth) if limit]

            def run(samples: list[int], growth: Growth, draws: Draws | None) -> Drafted:
                lacking = {state.handles[sample]: self.missing(state, context, sample) for sample in samples}
                return feeding(lacking, growth, draws)

            if (grown := grow_in_one_call(context, self, able, run)) is not None:
                return grown[0]
        return grow(context, self, lambda grower, frontier: self._run(state, grower, frontier))

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        state.cache.drop(list(state.handles.values()))
        state.fed, state.hidden = {}, {}

    def _in_one_call(self, state: _State, context: DraftContext) -> Callable[..., Drafted] | None:
        """What grows whole trees, given what slots lack."""
        network, static = self._network, context.static
        if isinstance(network, NativeEagle):
            return partial(feed, network.run, state.cache)
        if static is None or not isinstance(network, HeadOnRows):
            return None
        return partial(feed_static, static, network, partial(self._fill, state), state.cache)

    def _run(self, state: _State, grower: TreeGrower, frontier: dict[int, list[int]]) -> Tensor:
        if next(iter(frontier)) not in state.fed:
            logits, final, out = self._catch_up(state, grower.context, list(frontier))
        else:
            parents = grower.context.topology.parent_list
            hidden = [state.hidden[s][parents[node]] for s, nodes in frontier.items() for node in nodes]
            tokens, batch = lay_out_level(grower, frontier, state.cache, state.handles, state.fed)
            logits, final, out = self._network(tokens, torch.stack(hidden), batch, state.cache)
        places = [(sample, node) for sample, nodes in frontier.items() for node in nodes]
        grower.hidden |= zip(places, final, strict=True)
        for (sample, node), row in zip(places, out, strict=True):
            state.hidden.setdefault(sample, {})[node] = row
        return logits

    def _catch_up(self, state: _State, context: DraftContext, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Fills the slots of committed tokens; the last one of each sample predicts the children of its root."""
        last = self._fill(state, {state.handles[s]: self.missing(state, context, s) for s in samples})
        state.fed |= {sample: [] for sample in samples}
        rows = [last[state.handles[sample]] for sample in samples]
        logits, final, out = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return logits, final, out

    def _fill(self, state: _State, lacking: Mapping[int, Missing]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Fills slots, by handle; what the network finds at the last one of each."""
        last: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        missing = {handle: tokens for handle, (tokens, _) in lacking.items()}
        fused = self._network.fuse(torch.cat([states for _, states in lacking.values() if states is not None]))
        inputs = dict(zip(missing, fused.split([len(tokens) for tokens in missing.values()]), strict=True))
        for part, tokens, batch in state.cache.portions(missing, self._network.chunk):
            counts = [len(row) for row in part.values()]
            hidden = [inputs[handle][:count] for handle, count in zip(part, counts, strict=True)]
            inputs |= {handle: inputs[handle][count:] for handle, count in zip(part, counts, strict=True)}
            ends = torch.tensor(counts).cumsum(0) - 1
            outputs = self._network(tokens, torch.cat(hidden), batch, state.cache, ends)
            last |= dict(zip(part, zip(*outputs, strict=True), strict=True))
        return last


def on_rows(head: "EagleHead", target: RaggedModel) -> "NativeEagle | HeadOnRows":
    """What runs a head fastest."""
    if runs_natively(head, target):
        return NativeEagle(head, target)
    if target.backend == "native":
        prepack_linears(head.midlayer)
    return HeadOnRows(head, target)


class HeadOnRows:
    """An EAGLE head on the packed rows of a ragged batch, with the embeddings and the attention that it borrows."""

    chunk = 2048  # rows of a run, which bounds its memory

    def __init__(self, head: "EagleHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        config = head.config
        self.states = len(config.hidden_layers or ()) * config.target_hidden_size
        self.vocab_size = config.vocab_size
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._attention = AttentionCall(heads, kv_heads, dim, dim, dim**-0.5, None, None, None)

    def __repr__(self) -> str:
        return type(self.head).__name__

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the head."""
        return self.head.dtype

    @property
    def vocabulary(self) -> Tensor | None:
        """``[D]``; ``None`` if all tokens can be drafted."""
        return None if len(self.head.d2t) == self.vocab_size else self.head.tokens

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Keys and values of the head's layer."""
        shape = self._attention.kv_heads, self._attention.dim
        return list(cache.pools(0, shape, torch.empty(0, dtype=self.dtype, device=self.device)))

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """``[T, F]`` of the target to ``[T, H]``."""
        return self.head.fuse(states.to(self.head.dtype))

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[R, V]`` logits, the ``[R, H]`` that they were made from, and the ``[R, H]`` output of the layer."""
        batch = batch.to(hidden.device)
        ragged = Forward(batch, cache, self.target.backend == "native")
        out = self._layer(tokens.to(hidden.device), hidden, batch.positions, ragged, rows)
        final = self.head.norm(out)
        return self.head.widen(self.head.lm_head(final)), final, out

    @torch.no_grad()
    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~arbordraft.drafters.one_call.DraftNetwork`."""
        assert hidden is not None
        out = self._layer(tokens, hidden, positions, ragged, rows)
        return self.head.lm_head(self.head.norm(out)), out

    def _layer(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, ragged: Attending, rows: Tensor | None
    ) -> Tensor:
        embeddings = self.target.model.get_input_embeddings()(tokens).to(hidden.dtype)
        rotary = self.head.rotary(positions, hidden.dtype)
        query, key, value = self.head.queries_keys_values(embeddings, hidden, rotary)
        attended = ragged.attend(0, query, key, value, self._attention)
        out = self.head.finish(hidden, attended.flatten(1))
        return out if rows is None else out[rows]
