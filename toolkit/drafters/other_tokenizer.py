"""Drafters whose tokenizer differs from the target's.

Shapes: R nodes of a depth, D ids of the drafter, V ids of the target, I that both have.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.checkpoints.translation import Translation, decoded, encoded, shared_tokens
from arbordraft.drafters.base import Guesses, Predictions, check_ragged
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.feeding import Missing, feed
from arbordraft.drafters.model_drafter import ModelState, OwnCacheDrafter
from arbordraft.drafters.network import ModelNetwork
from arbordraft.kernels.draft_tree import Limits, TreesToGrow
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling.laws import DraftLaw
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.sources import read_model, read_tokenizer, source_of
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict

_PRIOR, _TRIED = 0.6, 4.0  # prior success rate of retokenised tokens, and its weight in tries


@dataclass
class _Text:
    """Text of a sample in the drafter's tokens.

    Args:
        translation: translates its committed tokens.
        read: ids that the cache holds.
        chain: the target's tokens to propose, each a child of the previous one.
        right: proposed tokens that were right.
        tried: proposed tokens that the target checked.
    """

    translation: Translation
    read: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    right: float = _PRIOR * _TRIED
    tried: float = _TRIED


@dataclass
class _State(ModelState):
    target: RaggedKVCache = field(kw_only=True)
    texts: dict[int, _Text] = field(default_factory=dict)


class _OtherTokenizerDrafter(OwnCacheDrafter):
    """Base class of drafters that read the text in tokens of their own.

    Args:
        model: the draft model, with its tokenizer.
        target: the model it drafts for, with its own.
    """

    per_token = 1.0  # expected number of its tokens per token of the target

    def __init__(self, model: RaggedModel, target: RaggedModel) -> None:
        super().__init__()
        check_ragged(target)
        check_ragged(model)
        if model.tokenizer is None or target.tokenizer is None:
            raise ValueError(
                "drafts between two tokenizers need both: wrap the models with theirs, RaggedModel(model, tokenizer)"
            )
        self.model, self.target = model, target
        self._ours, self._theirs = model.tokenizer, target.tokenizer
        self._network = ModelNetwork(model)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> Self:
        """Loads a causal LM and its tokenizer, from a folder, a hub or a GGUF file.

        Args:
            path: folder, hub name or GGUF file.
            target: the model it drafts for, which sets device, dtype and kernels.
            **kwargs: passed on to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged or incomplete, or one of the models has no tokenizer.
        """
        check_ragged(target)
        source = source_of(path)
        model = read_model(source, target.model.dtype, as_stored=target.backend == "native", **kwargs)
        model.to(target.device)  # type: ignore[arg-type]
        return cls(RaggedModel(model, read_tokenizer(source), kernels=target.backend), target)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        super().check(target, law)
        if target is not self.target:
            raise ValueError(f"{type(self).__name__} must be built for the target that it drafts for")

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State(target_cache.beside(self), target=target_cache)

    def add(self, state: _State, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.texts[sample] = _Text(Translation(self._theirs, self._ours))
        # The target's capacity: in a bounded cache, a text that needs more rows here gets no more drafts.
        state.handles[sample] = state.cache.open(state.target.capacity(handle))

    def remove(self, state: _State, sample: int) -> None:
        del state.texts[sample]
        state.cache.close(state.handles.pop(sample))

    def depths(self, state: _State, context: DraftContext) -> list[int]:
        found = super().depths(state, context)
        for sample in context.alive:
            length = len(state.texts[sample].translation(context.tokens(sample)))
            if not length:  # the text has no token here, as if it consists of special ones alone
                found[sample] = 0
            rooms = [] if self.model.max_positions is None else [self.model.max_positions - length]
            if state.cache.max_tokens is not None:  # a tree has rows besides its deepest path
                rooms.append(state.cache.capacity(state.handles[sample]) - length - context.topology.num_nodes)
            for room in rooms:
                found[sample] = min(found[sample], max(0, int((room - 1) / self.per_token)))
        return found

    def lag(self, state: _State, context: DraftContext) -> Sequence[int]:
        lacking = [0] * len(context.samples)
        for sample, handle in state.handles.items():
            if sample in context.alive:
                lacking[sample] = max(0, len(context.tokens(sample)) - 1 - state.cache.length(handle))
        return lacking

    def _drafts_target_ids(self, context: DraftContext) -> bool:
        return False

    def missing(self, state: _State, context: DraftContext, sample: int) -> Missing:
        handle, text = state.handles[sample], state.texts[sample]
        tokens = text.translation(context.tokens(sample))
        held = text.read[: state.cache.length(handle)]  # shorter if a step was broken off
        pairs = enumerate(zip(held, tokens[:-1], strict=False))
        known = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(held), len(tokens) - 1))
        state.cache.shorten(handle, known)
        known = state.cache.length(handle)  # less if recurrent layers have no state there
        text.read = tokens
        return tokens[known:], None


class IntersectionDrafter(_OtherTokenizerDrafter):
    """Drafts with a causal LM of another tokenizer, from shared tokens: token-level intersection (TLI).

    Committed text is tokenised anew for the drafter. Drafts are drawn from its law over the shared tokens, so any
    coupling is lossless, and trees may branch. Tokens that it lacks are never drafted.

    Args:
        model: the draft model, wrapped with its tokenizer.
        target: the model it drafts for, wrapped with its own.

    Raises:
        TypeError: if one of them is not a RaggedModel.
        ValueError: if one has no tokenizer, or they have no token in common.

    Source: Timor et al., 2025 (arXiv:2502.05202), algorithm 4.
    """

    def __init__(self, model: RaggedModel, target: RaggedModel) -> None:
        super().__init__(model, target)
        sizes = target.vocab_size, model.vocab_size
        theirs, ours = shared_tokens(self._theirs, self._ours, sizes)
        if len(theirs) < 2:
            raise ValueError("the two tokenizers have no tokens in common: draft with RetokenizedDrafter")
        self._ids = dict(zip(theirs.tolist(), ours.tolist(), strict=True))
        self.shared = len(theirs)
        self.register_buffer("theirs", theirs.to(target.device), persistent=False)
        self.register_buffer("ours", ours.to(target.device), persistent=False)

    def scores(self, state: _State, frontier: Frontier) -> Predictions:
        logits, _ = super().scores(state, frontier)
        wide = logits.new_full((len(logits), self.target.vocab_size), -torch.inf)
        return Predictions(wide.index_copy_(1, self.theirs, logits.index_select(1, self.ours)))  # type: ignore[arg-type]

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        super().commit(state, tree, verdict)
        for sample, handle in state.handles.items():
            text = state.texts[sample]
            if (kept := state.cache.length(handle) - len(text.read)) > 0:
                path = [int(tree.token[row]) for row in verdict.paths[sample][1 : 1 + kept]]
                text.read = text.read + [self._id_of(token) for token in path]

    def _lay_out(self, state: Any, frontier: Frontier) -> tuple[Tensor, RaggedBatch]:
        tokens, batch = super()._lay_out(state, frontier)
        return torch.tensor([self._id_of(token) for token in tokens.tolist()]), batch

    def _id_of(self, token: int) -> int:
        """Returns the drafter's id of a token; for a token that it lacks, the first id of the token's text."""
        if (known := self._ids.get(token)) is None:
            known = self._ids[token] = (encoded(self._ours, decoded(self._theirs, [token], special=True)) or [0])[0]
        return known

    def extra_repr(self) -> str:
        return f"shared={self.shared}"


class RetokenizedDrafter(_OtherTokenizerDrafter):
    """Drafts with a causal LM of any tokenizer, whose output is tokenised for the target (SLEM).

    Its most probable continuation becomes a chain of the target's tokens. They need not be in the drafter's vocabulary,
    so it can propose any token. Like lookups they are certain, not drawn.

    Args:
        model: the draft model, wrapped with its tokenizer.
        target: the model it drafts for, wrapped with its own.

    Raises:
        TypeError: if one of them is not a RaggedModel.
        ValueError: if one has no tokenizer.

    Source: string-level exact match, Timor et al., 2025 (arXiv:2502.05202), algorithm 2; here no whole string has to
    match, as verification goes token by token.
    """

    certain = True
    takes_candidates = False

    def __init__(self, model: RaggedModel, target: RaggedModel) -> None:
        super().__init__(model, target)
        text = decoded(self._theirs, range(min(2000, target.vocab_size)), special=False)
        self.per_token = max(0.5, min(3.0, len(encoded(self._ours, text)) / max(1, len(encoded(self._theirs, text)))))

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(5)

    def scores(self, state: _State, frontier: Frontier) -> Guesses:  # type: ignore[override]  # it is certain
        if frontier.depth == 0:
            self._write(state, frontier.context, frontier.samples)
        found: list[tuple[Sequence[int], Sequence[float]]] = []
        for row, sample in enumerate(frontier.samples):
            text, path = state.texts[sample], frontier.path(row)
            if text.chain[: len(path)] != path or len(text.chain) == len(path):
                found.append(((), ()))
            else:
                found.append(((text.chain[len(path)],), (text.right / text.tried,)))
        return found

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        state.drop()
        for sample, text in state.texts.items():
            emitted = verdict.emitted(tree, sample) if verdict.paths[sample] else []
            for ours, token in zip(text.chain, emitted, strict=False):
                text.tried += 1
                if ours != token:
                    break
                text.right += 1
            text.chain = []

    def rollback(self, state: _State) -> None:
        super().rollback(state)
        for text in state.texts.values():
            text.chain = []

    def _write(self, state: _State, context: DraftContext, samples: Sequence[int]) -> None:
        """Lets the model continue the texts, and converts its output to the target's tokens."""
        depths = self.depths(state, context)
        wanted = [min(context.topology.max_depth, depths[sample]) for sample in samples]
        missing = {state.handles[sample]: self.missing(state, context, sample) for sample in samples}
        written = self._continued(state, missing, [ceil(tokens * self.per_token) for tokens in wanted])
        for sample, most, tokens in zip(samples, wanted, written, strict=True):
            chain = encoded(self._theirs, decoded(self._ours, tokens, special=False))
            if (end := self._ours.eos_token_id) in tokens and self._theirs.eos_token_id is not None:
                before = tokens[: tokens.index(end)]
                chain = [*encoded(self._theirs, decoded(self._ours, before, special=False)), self._theirs.eos_token_id]
            state.texts[sample].chain = [token for token in chain if token < self.target.vocab_size][:most]

    def _continued(self, state: _State, missing: Mapping[int, Missing], steps: Sequence[int]) -> list[list[int]]:
        """Returns the model's greedy continuation of each text, at most as many tokens as its ``steps``.

        A continuation ends early where the model gives NaN or infinite logits.
        """
        written: list[list[int]] = [[] for _ in steps]
        if (run := self._network.native) is not None:
            chain, samples = TreeTopology.chain(max(steps)), range(len(steps))
            forest = Forest.of_roots(chain, [tokens[-1] for tokens, _ in missing.values()], [None] * len(steps))
            forest.reach[:, 0] = 1
            limits = Limits.everything(steps)
            trees = TreesToGrow(forest, list(samples), chain.child_offsets, chain.child_order, limits)
            feed(run, state.cache, missing, trees, chain, np.full(forest.token.shape, -1))
            return [[token for token in row if token >= 0] for row in forest.token[:, 1:].tolist()]
        logits, handles = self.catch_up(state, missing).logits, list(missing)
        going = list(range(len(handles)))
        for step in range(max(steps)):
            best = logits.max(dim=-1)
            rows = zip(going, best.values.isfinite().tolist(), best.indices.tolist(), strict=True)
            found = {place: token for place, finite, token in rows if finite}
            for place, token in found.items():
                written[place].append(token)
            going = [place for place in found if step + 1 < steps[place]]
            if not going:
                break
            words = torch.full((len(going), 1), (1 << step + 1) - 1)
            batch = state.cache.lay_out([handles[place] for place in going], [[step]] * len(going), words)
            tokens = torch.tensor([found[place] for place in going])
            logits = self._network.run_batch(tokens, None, batch, state.cache).logits
        state.cache.drop(handles)
        return written


__all__ = ["IntersectionDrafter", "RetokenizedDrafter"]
