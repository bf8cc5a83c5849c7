"""Lookup of the text so far as drafter: no model, no noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grower import TreeGrower
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.sampling.stateful import Allowed
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.utils.checks import check_int

_MOST_MATCHES = 32  # older occurrences of a frequent n-gram say little
_LONGEST = 64  # every suffix of a path is followed as far
_PRIOR = 8.0  # lookups that the expectation counts for
# Continuations of a suffix of n tokens are wrong in a share n**-power, by votes: fitted to answers of a small model.
_CURVES = {0: (0.87, 0.45), 1: (0.72, 0.75), 2: (0.5, 1.0)}

Places = list[npt.NDArray[np.int64]]  # where a path's last token, its last two, and so on, occurred: of their last ones


class _Text:
    """One sample's committed tokens; an array, as an index would be millions of small objects."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(2 * len(tokens) + 64, dtype=np.int64)
        self._length = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(end, dtype=np.int64)])
        self._buffer[self._length : end] = tokens
        self._length = end

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._buffer[: self._length]

    def ends(self, longest: int) -> Places:
        """Where the last tokens of the text occurred before."""
        tokens = self.tokens
        places = [np.flatnonzero(tokens[:-1] == tokens[-1])]
        while len(places) < longest and len(places) < len(tokens) - 1 and len(places[-1]):
            before = len(places)
            found = places[-1][places[-1] >= before]
            places.append(found[tokens[found - before] == tokens[-1 - before]])
        return places

    def behind(self, places: Places, token: int, longest: int) -> Places:
        """Where they occurred with another token behind them."""
        tokens = self.tokens
        longer = (found[tokens[found + 1] == token] + 1 for found in places[: longest - 1])
        # Behind the end of the text there is nothing to continue with.
        return [np.flatnonzero(tokens[:-1] == token), *(found[found < self._length - 1] for found in longer)]

    def continuations(self, found: npt.NDArray[np.int64]) -> list[int]:
        """The tokens that followed, the most frequent first, the latest first among equals."""
        after: list[int] = self.tokens[found[-_MOST_MATCHES:] + 1].tolist()
        if len(after) < 2:  # nearly always: no need to count
            return after
        return [token for token, _ in Counter(reversed(after)).most_common()]


class Guess(NamedTuple):
    """A continuation.

    Args:
        token: what came next.
        size: length of the suffix that speaks for it; 0 if it is the only token that is allowed.
        votes: how often it came next there: 1, or 2 for more than once; 0 if another token did, too.
        rank: its place among the continuations of its node.
    """

    token: int
    size: int
    votes: int
    rank: int


class _Odds:
    """How often lookups came true in a sample, by what speaks for them.

    They start from what texts of language models show: the longer the suffix and the more it agrees with itself, the
    surer what follows it. No sample learns from another, since a seeded text must not depend on others.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], tuple[float, float]] = {}

    def __call__(self, guess: Guess) -> float:
        right, tried = self._of(guess) if guess.size else (1.0, 1.0)
        return right / tried

    def learn(self, guess: Guess, right: bool) -> None:
        if not guess.size:
            return
        before, tried = self._of(guess)
        self._counts[guess[1:]] = before + right, tried + 1

    def _of(self, guess: Guess) -> tuple[float, float]:
        share, power = _CURVES[guess.votes]
        expected = 1 - share * guess.size**-power if guess.rank == 0 else 0.1
        return self._counts.get(guess[1:], (expected * _PRIOR, _PRIOR))


@dataclass
class _State:
    texts: dict[int, _Text] = field(default_factory=dict)
    odds: dict[int, _Odds] = field(default_factory=dict)
    # What was just looked up for every sample: the guesses below a node, each with its child.
    guesses: dict[int, dict[int, list[tuple[int, Guess]]]] = field(default_factory=dict)


class NGramDrafter(Drafter):
    """Continues the longest suffix of the text that occurred before in the prompt or in the output.

    Every node of the tree looks up its own path: first the longest suffix, then shorter ones while children are
    missing. Among the continuations of one suffix the most frequent comes first, then the latest. Where a grammar
    leaves only one token, that is the continuation, and what it forbids is none. The draft probability
    it states is how often lookups of that length came true so far in the sample: what deciders and costs weigh, and
    never the law.

    Args:
        longest: longest suffix to look up, in tokens; 1 to 64.
        shortest: shortest suffix worth following; 1 to ``longest``.

    Raises:
        TypeError: if an argument is no whole number.
        ValueError: if an argument is out of range.

    Source: LLMA (Yang et al., 2023) and prompt lookup decoding (Saxena, 2023), from one continuation to a tree.
    """

    free = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        self.longest = check_int("longest", longest, 1, _LONGEST)
        self.shortest = check_int("shortest", shortest, 1, self.longest)

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if not law.deterministic:
            raise ValueError(f"n-gram lookups are certain, not drawn by {law}; couple them as Fixed({law.k})")

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State()

    def add(self, state: _State, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.texts[sample], state.odds[sample] = _Text(tokens), _Odds()

    def remove(self, state: _State, sample: int) -> None:
        del state.texts[sample], state.odds[sample]

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        grower = TreeGrower(context, Fixed(context.law.k), self)
        grower.add_forced_tokens()
        state.guesses |= {sample: {} for sample in grower.alive}
        places: dict[tuple[int, int], Places] = {}
        parents = context.topology.parent_list
        for depth in range(context.topology.max_depth):
            frontier = grower.frontier(depth)
            if not frontier:
                break
            for sample, nodes in frontier.items():
                text, odds = state.texts[sample], state.odds[sample]
                for node in nodes:
                    if node:
                        here = text.behind(places[sample, parents[node]], grower.tokens[sample][node], self.longest)
                    else:
                        here = text.ends(self.longest)
                    places[sample, node] = here
                    children = context.topology.child_list[node]
                    found = self._lookup(text, here, len(children), grower.allowed(sample, node))
                    state.guesses[sample][node] = list(zip(children, found, strict=False))
                    grower.add_children(
                        sample, node, [guess.token for guess in found], [odds(guess) for guess in found]
                    )
        return grower.tree()

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        for sample, (drafted, judged) in enumerate(zip(tree.samples, verdict.samples, strict=True)):
            if drafted and judged:
                tokens = [*(drafted.tokens[node] for node in judged.path), judged.token]
                self._learn(state.odds[sample], state.guesses.get(sample, {}), tokens)
                state.texts[sample].extend(tokens)
        state.guesses = {}

    @staticmethod
    def _learn(odds: _Odds, guesses: dict[int, list[tuple[int, Guess]]], tokens: Sequence[int]) -> None:
        """Compares what was looked up with what came, whoever drafted and whatever was verified."""
        node = 0
        for token in tokens:
            for child, guess in guesses.get(node, ()):
                odds.learn(guess, guess.token == token)
                if guess.token == token:
                    node = child
                    break
            else:
                return

    def _lookup(self, text: _Text, places: Places, wanted: int, allowed: Allowed | None) -> list[Guess]:
        """Up to ``wanted`` different continuations that are allowed, those of the longest suffix first."""
        if allowed is not None and allowed.only is not None:
            return [Guess(allowed.only, 0, 0, 0)]
        guesses: dict[int, Guess] = {}
        for size in range(len(places), self.shortest - 1, -1):
            if len(guesses) == wanted:
                break
            after = text.continuations(places[size - 1])
            votes = 0 if len(after) > 1 else min(2, len(places[size - 1]))
            for token in after:
                if len(guesses) == wanted:
                    break
                if allowed is None or token in allowed:
                    guesses.setdefault(token, Guess(token, size, votes, len(guesses)))
        return list(guesses.values())

    def extra_repr(self) -> str:
        return f"longest={self.longest}, shortest={self.shortest}"
