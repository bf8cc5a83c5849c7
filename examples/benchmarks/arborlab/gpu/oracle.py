"""Drafters of known acceptance: they replay recorded greedy tokens, with wrong tokens in some places."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arbordraft.drafters import EagleDrafter
from arbordraft.drafters.base import Drafter, Guesses
from arbordraft.drafters.context import DraftContext, Level
from arbordraft.heads.eagle import EagleHead
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
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

    def propose(self, state: dict[int, Sequence[int]], level: Level) -> Guesses:
        found = []
        for sample, _ in level.places:
            position = len(level.context.tokens(sample)) + level.depth
            token = self.recorded.token(state[sample], position)
            found.append(([], []) if token is None else ([token], [max(self.recorded.acceptance, 0.01)]))
        return found


class OracleOnHead(EagleDrafter):
    """Runs an EAGLE head for its cost, and replaces the first child of each level by the recorded token.

    Args:
        recorded: the texts.
        head: EAGLE head of any weights.
        target: the target.
    """

    def __init__(self, recorded: Recorded, head: EagleHead, target: RaggedModel) -> None:
        super().__init__(head, target)
        self.recorded = recorded
        self._texts: dict[int, Sequence[int]] = {}

    def add(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
        super().add(state, sample, tokens, handle)
        self._texts[sample] = self.recorded.belonging_to(tokens)

    def propose_trees(
        self, state: Any, context: DraftContext, samples: Sequence[int], growth: Growth, draws: Draws | None
    ) -> Drafted | None:
        if context.static is not None:
            context = replace(context, static=context.static.alone)  # so that the step sees the tokens changed below
        drafted = super().propose_trees(state, context, samples, growth, draws)
        if drafted is None:
            return None
        topology, tokens = context.topology, list(drafted.tokens)
        rows = {place: row for row, place in enumerate(zip(drafted.samples, drafted.nodes, strict=True))}
        for place, sample in enumerate(samples):
            node, position = 0, len(context.tokens(sample))
            while topology.child_list[node]:
                siblings = [rows[place, child] for child in topology.child_list[node] if (place, child) in rows]
                token = self.recorded.token(self._texts[sample], position)
                if not siblings or token is None:
                    break
                for row in siblings[1:]:  # siblings must differ
                    if tokens[row] == token:
                        tokens[row] = tokens[siblings[0]]
                tokens[siblings[0]] = token
                node, position = topology.child_list[node][0], position + 1
        return drafted._replace(tokens=tokens)
