"""A smaller causal LM as drafter.

Shapes: T packed rows, R frontier nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arbordraft.cache import RaggedKVCache
from arbordraft.drafters.base import Drafter, Garden, grow, plan_level
from arbordraft.laws import DraftLaw
from arbordraft.target import RaggedModel
from arbordraft.types import DraftContext, DraftTree, Verdict


@dataclass
class _State:
    cache: RaggedKVCache
    handles: list[int]
    fed: dict[int, list[int]] = field(default_factory=dict)  # nodes behind the committed tokens, in cache order


class LanguageModelDrafter(Drafter):
    """Drafts with any causal LM that shares the target's tokenizer, on its own ragged cache.

    Args:
        model: the draft model.
    """

    def __init__(self, model: RaggedModel) -> None:
        super().__init__()
        self.model = model
        self.max_positions = model.max_positions

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the drafter has {self.model.vocab_size} token ids, the target {target.vocab_size}: both must share "
                "one tokenizer"
            )
        ours, theirs = self.model.tokenizer, target.tokenizer
        if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            raise ValueError("the drafter's tokenizer gives other ids to some tokens than the target's")

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> _State:
        cache = RaggedKVCache(target_cache.max_tokens)
        state = _State(cache, [cache.open(target_cache.capacity(handle)) for handle in handles])
        self.model.prefill({handle: prompt[:-1] for handle, prompt in zip(state.handles, tokens, strict=True)}, cache)
        return state

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        state.fed = {}
        return grow(context, lambda garden, frontier: self._run(state, garden, frontier))

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        kept: dict[int, list[int]] = {}
        for sample, (handle, judged) in enumerate(zip(state.handles, verdict.samples, strict=True)):
            if judged is not None:
                fed = state.fed.get(sample, [])
                # A leaf was never fed: the next catch-up brings it.
                kept[handle] = [fed.index(node) for node in judged.path if node in fed]
            elif handle in state.cache:
                state.cache.close(handle)
        state.cache.commit(kept)

    def _run(self, state: _State, garden: Garden, frontier: dict[int, list[int]]) -> Tensor:
        if not state.fed:
            return self._catch_up(state, garden.context, list(frontier))
        tokens, batch = plan_level(garden, frontier, state.cache, state.handles, state.fed)
        return self.model(tokens, batch, state.cache)

    def _catch_up(self, state: _State, context: DraftContext, samples: list[int]) -> Tensor:
        """Feeds the committed tokens that the draft cache lacks; the last one is the root."""
        handles = [state.handles[sample] for sample in samples]
        missing = [
            context.tokens[sample][state.cache.length(handle) :]
            for sample, handle in zip(samples, handles, strict=True)
        ]
        batch = state.cache.plan(handles, [range(len(tokens)) for tokens in missing])
        last = torch.tensor([len(tokens) for tokens in missing]).cumsum(0) - 1
        logits = self.model(torch.tensor([t for tokens in missing for t in tokens]), batch, state.cache, rows=last)
        state.cache.commit({handle: range(len(tokens)) for handle, tokens in zip(handles, missing, strict=True)})
        state.fed = {sample: [] for sample in samples}
        return logits
