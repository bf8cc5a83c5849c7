"""Drafters of known acceptance: they replay recorded greedy tokens, with wrong tokens in some places."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.drafters import EagleDrafter, SelfDrafter
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


class OracleOnCopy(SelfDrafter):
    """Runs a target's copy of 4 bits for its cost, and drafts as :class:`OracleOnHead` does.

    Args:
        recorded: the texts.
        drafter: has the target and its copy.
    """

    def __init__(self, recorded: Recorded, drafter: SelfDrafter) -> None:
        Drafter.__init__(self)  # shares the copy instead of making one
        self.target, self.model = drafter.target, drafter.model
        self._network: Any = OracleNetwork(recorded, drafter._network)


class OracleNetwork(DraftNetwork):
    """A network whose most probable next token is the recorded one; runs wherever that network runs.

    A token and its position name the recorded text. If several texts have this token there, the first of them counts.

    Args:
        recorded: the texts.
        network: runs a head or a model; its outputs are the target's tokens, or the first ones.
    """

    def __init__(self, recorded: Recorded, network: DraftNetwork) -> None:
        super().__init__(network.weights, recorded.vocab_size)
        self._network, self.states, self.native_attention = network, network.states, network.native_attention
        self._source, self._recorded = recorded, self
        longest = max(map(len, recorded.texts)) + 1
        known = torch.full((2, len(recorded.texts), longest), -1)
        for number, text in enumerate(recorded.texts):
            drafts = [recorded.token(text, position) for position in range(len(text))]
            known[0, number, : len(text)], known[1, number, : len(text)] = torch.tensor(text), torch.tensor(drafts)
        self._texts, self._drafts = known.to(network.device)

    def __repr__(self) -> str:
        return f"recorded texts on {self._network}"

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        return self._network.pools(cache, dummy)

    def refresh(self) -> None:
        self._network.refresh()

    def normed(self, states: Tensor) -> Tensor:
        """Norms ``[T, F]`` hidden states of the target for :meth:`fuse`."""
        assert isinstance(self._network, EagleNetwork)
        return self._network.normed(states)

    def fuse(self, states: Tensor) -> Tensor:
        return self._network.fuse(states)

    def recorded(self) -> "OracleNetwork | None":
        if (network := self._network.recorded()) is None or network is self._network:
            return None if network is None else self
        if network is not self._recorded._network:  # another object runs recorded steps
            self._recorded = OracleNetwork(self._source, network)
        return self._recorded

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        """Runs packed rows, see :class:`~arbordraft.drafters.network.DraftNetwork`."""
        logits, final, out = self._network.run(tokens, hidden, positions, ragged, rows)
        if rows is not None:
            tokens, positions = tokens[rows], positions[rows]
        return Outputs(self.corrected(logits, tokens, positions), final, out)

    def corrected(self, logits: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns ``[R, V]`` logits in which the token recorded after each token is the most probable one.

        A head may have fewer outputs; all other tokens then get the lowest logit.
        """
        tokens, positions = tokens.to(logits.device), positions.to(logits.device)
        ahead = 1 if self.states else 0  # slot j of a head that reads states holds token j + 1
        place = (positions + ahead).clamp(max=self._texts.shape[1] - 2)
        same = self._texts[:, place] == tokens
        following = self._drafts[:, place + 1].gather(0, same.to(torch.int8).argmax(dim=0, keepdim=True))[0]
        known = same.any(dim=0) & (following >= 0)
        lowest = logits.amin(dim=1, keepdim=True)
        bonus = torch.where(known, logits.amax(dim=1) - lowest[:, 0] + 1, 0)
        if (others := self.vocab_size - logits.shape[1]) > 0:
            logits = torch.cat([logits, lowest.expand(-1, others)], dim=1)
        return logits.scatter_add(1, following.clamp(min=0)[:, None], bonus[:, None].to(logits.dtype))
