"""Drafters of known acceptance: they replay recorded greedy tokens, with wrong tokens in some places."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.drafters import EagleDrafter
from arbordraft.drafters.base import Drafter, Guesses
from arbordraft.drafters.context import Frontier
from arbordraft.drafters.eagle import EagleNetwork
from arbordraft.drafters.network import DraftNetwork, Outputs
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.attention import Attending
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel


class Recorded:
    """Recorded texts; each token is replayed correctly with a given probability.

    Args:
        texts: token ids, prompts included.
        acceptance: probability that a token is the recorded one, 0 to 1; only seed and position decide.
        vocab_size: vocabulary size of the target.
        seed: seed of the wrong tokens' positions.
    """

    def __init__(self, texts: Sequence[Sequence[int]], acceptance: float, vocab_size: int, seed: int = 0) -> None:
        self.texts, self.acceptance, self.vocab_size, self.seed = texts, acceptance, vocab_size, seed

    def belonging_to(self, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the text that begins with a prompt; an empty text if none does."""
        return next((text for text in self.texts if list(text[: len(prompt)]) == list(prompt)), ())

    def token(self, text: Sequence[int], position: int) -> int | None:
        """Returns the draft of a position; ``None`` after the end of the text."""
        if position >= len(text):
            return None
        right = random.Random(f"{self.seed}-{position}").random() < self.acceptance
        return text[position] if right else (text[position] + 1) % self.vocab_size


class OracleDrafter(Drafter):
    """Replays recorded texts at no cost.

    Args:
        recorded: the texts.

    Examples:
        >>> recorded = Recorded([[5, 6, 7, 8]], acceptance=1.0, vocab_size=10)
        >>> text = recorded.belonging_to([5, 6])
        >>> [recorded.token(text, position) for position in (2, 3, 4)]
        [7, 8, None]
    """

    certain = True

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self.recorded = recorded

    def open(self, target_cache: Any) -> dict[int, Sequence[int]]:
        return {}

    def add(self, state: dict[int, Sequence[int]], sample: int, tokens: Sequence[int], handle: int) -> None:
        state[sample] = self.recorded.belonging_to(tokens)

    def remove(self, state: dict[int, Sequence[int]], sample: int) -> None:
        del state[sample]

    def scores(self, state: dict[int, Sequence[int]], frontier: Frontier) -> Guesses:
        found = []
        for sample in frontier.samples:
            position = len(frontier.context.tokens(sample)) + frontier.depth
            token = self.recorded.token(state[sample], position)
            found.append(([], []) if token is None else ([token], [max(self.recorded.acceptance, 0.01)]))
        return found


class OracleOnHead(EagleDrafter):
    """Runs an EAGLE head for its cost, and makes the recorded token the most probable one after each recorded token.

    Args:
        recorded: the texts.
        head: EAGLE head of any weights, with the target's vocabulary.
        target: the target.
    """

    def __init__(self, recorded: Recorded, head: EagleHead, target: RaggedModel) -> None:
        super().__init__(head, target)
        self._network = OracleNetwork(recorded, self._network)


class OracleNetwork(DraftNetwork):
    """A head whose most probable next token is the recorded one; runs wherever the head runs.

    A token and its position name the recorded text. If several texts have this token there, the first of them counts.

    Args:
        recorded: the texts.
        head: runs the head.
    """

    def __init__(self, recorded: Recorded, head: EagleNetwork) -> None:
        super().__init__(head.head, head.vocab_size)
        self._head, self.states, self.native_attention = head, head.states, head.native_attention
        longest = max(map(len, recorded.texts)) + 1
        known = torch.full((2, len(recorded.texts), longest), -1)
        for number, text in enumerate(recorded.texts):
            drafts = [recorded.token(text, position) for position in range(len(text))]
            known[0, number, : len(text)], known[1, number, : len(text)] = torch.tensor(text), torch.tensor(drafts)
        self._texts, self._drafts = known.to(head.device)

    def __repr__(self) -> str:
        return f"recorded texts on {self._head}"

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        return self._head.pools(cache, dummy)

    def refresh(self) -> None:
        self._head.refresh()

    def normed(self, states: Tensor) -> Tensor:
        """Norms ``[T, F]`` hidden states of the target for :meth:`fuse`."""
        return self._head.normed(states)

    def fuse(self, states: Tensor) -> Tensor:
        return self._head.fuse(states)

    def recorded(self) -> "OracleNetwork | None":
        return None if self._head.recorded() is None else self

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        """Runs packed rows, see :class:`~arbordraft.drafters.network.DraftNetwork`."""
        logits, final, out = self._head.run(tokens, hidden, positions, ragged, rows)
        if rows is not None:
            tokens, positions = tokens[rows], positions[rows]
        return Outputs(self.corrected(logits, tokens, positions), final, out)

    def corrected(self, logits: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns ``[R, V]`` logits in which the token recorded after each token is the most probable one."""
        tokens, positions = tokens.to(logits.device), positions.to(logits.device)
        place = (positions + 1).clamp(max=self._texts.shape[1] - 2)  # slot j holds token j + 1
        same = self._texts[:, place] == tokens
        following = self._drafts[:, place + 1].gather(0, same.to(torch.int8).argmax(dim=0, keepdim=True))[0]
        known = same.any(dim=0) & (following >= 0)
        bonus = torch.where(known, logits.amax(dim=1) - logits.amin(dim=1) + 1, 0)
        return logits.scatter_add(1, following.clamp(min=0)[:, None], bonus[:, None].to(logits.dtype))
