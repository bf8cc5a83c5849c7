"""Lookup of the text so far as drafter: no model, no noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from arbordraft.checks import whole
from arbordraft.drafters.base import Drafter, Garden
from arbordraft.laws import DraftLaw, Fixed
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftContext, DraftTree, Verdict

_MOST_MATCHES = 32  # older occurrences of a frequent n-gram say little
_LONGEST = 64  # every suffix of every position is kept
_PRIOR = 8.0  # lookups that the expectation counts for


class _Index:
    """Where every n-gram of one sample's text ended."""

    def __init__(self, sizes: range, tokens: Sequence[int]) -> None:
        self.sizes = sizes
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self.ends.setdefault(tuple(self.tokens[end - size :]), []).append(end)

    def continuations(self, suffix: tuple[int, ...]) -> Sequence[int]:
        """The tokens that followed ``suffix``, the most frequent first, the latest first among equals."""
        ends = [end for end in self.ends.get(suffix, ())[-_MOST_MATCHES:] if end < len(self.tokens)]
        if len(ends) < 2:  # nearly always: no need to count
            return [self.tokens[end] for end in ends]
        return [token for token, _ in Counter(self.tokens[end] for end in reversed(ends)).most_common()]


class _Odds:
    """How often lookups came true in a sample, by length of the matching suffix and rank of the continuation.

    They start from what texts of language models show: the longer the suffix, the surer what follows it. No sample
    learns from another, since deciders and costs go by them, and a seeded text must not depend on others.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def __call__(self, size: int, rank: int) -> float:
        right, tried = self._of(size, rank)
        return right / tried

    def learn(self, size: int, rank: int, right: bool) -> None:
        before, tried = self._of(size, rank)
        self._counts[size, rank] = before + right, tried + 1

    def _of(self, size: int, rank: int) -> tuple[float, float]:
        expected = 1 - 0.8 * size**-0.8 if rank == 0 else 0.1
        return self._counts.get((size, rank), (expected * _PRIOR, _PRIOR))


@dataclass
class _State:
    indices: list[_Index]
    odds: list[_Odds]
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)  # suffix length of each (sample, node) just drafted


class NGramDrafter(Drafter):
    """Continues the longest suffix of the text that occurred before in the prompt or in the output.

    Every node of the tree looks up its own path: first the longest suffix, then shorter ones while children are
    missing. Among the continuations of one suffix the most frequent comes first, then the latest. The draft probability
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
        self.longest = whole("longest", longest, 1, _LONGEST)
        self.shortest = whole("shortest", shortest, 1, self.longest)

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if not law.deterministic:
            raise ValueError(f"n-gram lookups are certain, not drawn by {law}; couple them as Fixed({law.k})")

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> _State:
        sizes = range(self.shortest, self.longest + 1)
        return _State([_Index(sizes, prompt) for prompt in tokens], [_Odds() for _ in tokens])

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        garden = Garden(context, Fixed(context.law.k), self)
        sizes: dict[tuple[int, int], int] = {}
        for depth in range(context.topology.max_depth):
            frontier = garden.frontier(depth)
            if not frontier:
                break
            for sample, nodes in frontier.items():
                index = state.indices[sample]
                committed = index.tokens[-self.longest :]
                for node in nodes:
                    text = [*committed, *garden.trees[sample].path(node)]
                    children = context.topology.child_list[node]
                    guesses = self._lookup(index, text, len(children))
                    odds = [state.odds[sample](size, rank) for rank, size in enumerate(guesses.values())]
                    garden.plant(sample, node, list(guesses), odds)
                    sizes |= {(sample, child): size for child, size in zip(children, guesses.values(), strict=False)}
        tree = garden.tree()
        alive = {(sample, node) for sample, node, _ in tree.rows()}
        state.sizes = {place: size for place, size in sizes.items() if place in alive}
        return tree

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        for sample, (index, drafted, judged) in enumerate(
            zip(state.indices, tree.samples, verdict.samples, strict=True)
        ):
            if not (drafted and judged):
                continue
            index.extend([*(drafted.tokens[node] for node in judged.path), judged.token])
            if any((sample, child) not in state.sizes for child in drafted.children(0)):
                continue  # another drafter's tree
            for node, accepted in zip((0, *judged.path), (*judged.path, None), strict=True):
                for rank, child in enumerate(drafted.children(node)):
                    state.odds[sample].learn(state.sizes[sample, child], rank, child == accepted)
                    if child == accepted:
                        break

    def _lookup(self, index: _Index, text: list[int], wanted: int) -> dict[int, int]:
        """Up to ``wanted`` continuations with the length of the suffix that speaks for each."""
        guesses: dict[int, int] = {}
        for size in range(min(self.longest, len(text)), self.shortest - 1, -1):
            for token in index.continuations(tuple(text[-size:])):
                if len(guesses) == wanted:
                    return guesses
                guesses.setdefault(token, size)
        return guesses

    def extra_repr(self) -> str:
        return f"longest={self.longest}, shortest={self.shortest}"
