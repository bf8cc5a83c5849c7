"""Lookup of the text so far as drafter: no model, no noise."""

from collections import Counter
from collections.abc import Sequence

from arbordraft.cache import RaggedKVCache
from arbordraft.drafters.base import Drafter, Garden
from arbordraft.laws import DraftLaw, Fixed
from arbordraft.target import RaggedModel
from arbordraft.types import DraftContext, DraftTree, Verdict

_MOST_MATCHES = 32  # older occurrences of a frequent n-gram say little


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

    def continuations(self, suffix: tuple[int, ...]) -> Counter[int]:
        """How often each token followed ``suffix``, the latest first among equals."""
        ends = self.ends.get(suffix, ())[-_MOST_MATCHES:]
        return Counter(self.tokens[end] for end in reversed(ends) if end < len(self.tokens))


class NGramDrafter(Drafter):
    """Continues the longest suffix of the text that occurred before in the prompt or in the output.

    Every node of the tree looks up its own path: first the longest suffix, then shorter ones while children are
    missing. Among the continuations of one suffix the most frequent comes first, then the latest.

    Args:
        longest: longest suffix to look up, in tokens.
        shortest: shortest suffix worth following.

    Source: LLMA (Yang et al., 2023) and prompt lookup decoding (Saxena, 2023), from one continuation to a tree.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        if not 1 <= shortest <= longest:
            raise ValueError(f"need 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest = longest
        self.shortest = shortest

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if not law.deterministic:
            raise ValueError(f"n-gram lookups are certain, not drawn by {law}; couple them as Fixed({law.k})")

    def start(
        self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]
    ) -> list[_Index]:
        return [_Index(range(self.shortest, self.longest + 1), prompt) for prompt in tokens]

    def propose(self, state: list[_Index], context: DraftContext) -> DraftTree:
        garden = Garden(context, Fixed(context.law.k))
        for depth in range(context.topology.max_depth):
            frontier = garden.frontier(depth)
            if not frontier:
                break
            for sample, nodes in frontier.items():
                index = state[sample]
                committed = index.tokens[-self.longest :]
                for node in nodes:
                    text = [*committed, *garden.trees[sample].path(node)]
                    found = self._lookup(index, text, len(context.topology.child_list[node]))
                    garden.plant(sample, node, list(found), list(found.values()), None)
        return garden.tree()

    def commit(self, state: list[_Index], tree: DraftTree, verdict: Verdict) -> None:
        for index, drafted, judged in zip(state, tree.samples, verdict.samples, strict=True):
            if drafted and judged:
                index.extend([*(drafted.tokens[node] for node in judged.path), judged.token])

    def _lookup(self, index: _Index, text: list[int], wanted: int) -> dict[int, float]:
        """Up to ``wanted`` continuations with the share of the matches that speak for each."""
        found: dict[int, float] = {}
        for size in range(min(self.longest, len(text)), self.shortest - 1, -1):
            counts = index.continuations(tuple(text[-size:]))
            for token, count in counts.most_common():
                if len(found) == wanted:
                    return found
                found.setdefault(token, count / counts.total())
        return found

    def extra_repr(self) -> str:
        return f"longest={self.longest}, shortest={self.shortest}"
