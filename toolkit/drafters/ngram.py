"""A drafter that looks up the text so far, without a model or noise.

Shapes: R nodes of a depth.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from arbordraft.drafters.base import Lookup
from arbordraft.drafters.context import Frontier
from arbordraft.drafters.text_pool import TextPool
from arbordraft.sampling.stateful import Allowed
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.utils.checks import check_instance, check_int

_MOST_MATCHES = 32  # older occurrences of a frequent n-gram say little
_MOST_PLACES = 4096  # older places that match only the end of a suffix say little, too
_LONGEST = 64  # greatest length of a suffix that is looked up
_LONGEST_PREDICTED = 16  # length of a suffix that shows which place of a prediction the text has reached
_PRIOR = 8.0  # weight of the expected rate, in lookups
# By votes, (share, power): continuations of a suffix of n tokens are wrong at the rate share * n**-power.
# Fitted to answers of a small model.
_CURVES = {0: (0.87, 0.45), 1: (0.72, 0.75), 2: (0.5, 1.0)}


class _Index:
    """Index of the places in a text where n-grams of one length end; each place links to the previous one.

    Args:
        size: length of the n-grams.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the tokens added to a text, except the last one, which has no next token yet."""
        size, last, before = self.size, self._last, self._before
        for end in range(len(before), len(tokens) - 1):
            gram = tuple(tokens[end - size + 1 : end + 1])  # shorter at the beginning, where it is never looked up
            before.append(last.get(gram, -1))
            last[gram] = end

    def matches(self, tokens: Sequence[int], suffix: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns the length of each match with a suffix, and the next token there; the latest match comes first.

        The search ends after a bounded number of matches of the whole suffix, or of places.
        """
        end, longest = self._last.get(suffix[-self.size :], -1), len(suffix)
        found: list[tuple[int, int]] = []
        whole = 0
        while end >= 0 and whole < _MOST_MATCHES and len(found) < _MOST_PLACES:
            size = self.size
            while size < longest and size <= end and tokens[end - size] == suffix[-1 - size]:
                size += 1
            whole += size == longest
            found.append((size, tokens[end + 1]))
            end = self._before[end]
        return found


class Guess(NamedTuple):
    """A proposed continuation.

    Args:
        token: the next token.
        size: length of the matching suffix; 0 if it is the only allowed token.
        votes: how often it followed the suffix: 1, or 2 for more than once; 0 if another token did, too.
        rank: its rank among the continuations of its node.
        text: number of the pool's text in which it was found; 0 for the sample's own text.
    """

    token: int
    size: int
    votes: int
    rank: int
    text: int = 0


class _SuccessRates:
    """Success rates of a sample's lookups, by length of the suffix, votes and rank.

    They start from rates in texts of language models: longer suffixes and more consistent ones are right more often.
    No sample learns from another, because a seeded text must not depend on others.
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
        self._counts[guess[1:4]] = before + right, tried + 1

    def _of(self, guess: Guess) -> tuple[float, float]:
        if (known := self._counts.get(guess[1:4])) is not None:
            return known
        share, power = _CURVES[guess.votes]
        expected = 1 - share * guess.size**-power if guess.rank == 0 else 0.1
        return expected * _PRIOR, _PRIOR


class _Prediction:
    """A predicted answer, indexed.

    Args:
        tokens: the end of the prompt and the prediction, which is thus found as soon as the answer begins.
        size: length of the n-grams.
    """

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        self.tokens, self._index = tokens, _Index(size)
        self._index.extend(tokens)

    def matches(self, suffix: tuple[int, ...]) -> list[tuple[int, int]]:
        """See :meth:`_Index.matches`."""
        return self._index.matches(self.tokens, suffix)


@dataclass
class _Text:
    """Lookup state of a sample.

    Args:
        index: index of its committed tokens.
        end: end of its prompt.
        prediction: its predicted answer, once it is looked up.
        odds: success rates of its lookups.
        guesses: by node of this step, its children and the continuations looked up for them.
        tokens: committed tokens, for a pool.
        grew: whether the pool lacks some of these tokens.
    """

    index: _Index
    end: Sequence[int] = ()
    prediction: _Prediction | None = None
    odds: _SuccessRates = field(default_factory=_SuccessRates)
    guesses: dict[int, list[tuple[int, Guess]]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    grew: bool = False


@dataclass
class _State:
    texts: dict[int, _Text] = field(default_factory=dict)
    growing: dict[int, _Text] = field(default_factory=dict)  # those of the last step
    suffixes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by sample and node of this step


class NGramDrafter(Lookup):
    """Continues the longest suffix of the text that occurred before in the prompt or in the output.

    Every node of the tree looks up its own path: first the longest suffix, then shorter ones while children are
    missing. Among the continuations of one suffix the most frequent comes first, then the latest. Tokens that a grammar
    forbids are left out; if it allows only one token, this is the continuation. The stated draft probability is the
    success rate of such lookups in the sample so far. Deciders and costs use it, the output law does not.

    A sample's prediction is looked up like its text, with suffixes of up to 16 tokens. The longest match shows the
    place that the answer has reached.

    Args:
        longest: longest suffix to look up, in tokens; 1 to 64.
        shortest: shortest suffix to look up; 1 to ``longest``.
        pool: finished texts to look up as well, for samples whose text does not depend on drafts. Texts that end are
            added to it.

    Raises:
        TypeError: if an argument is no whole number, or ``pool`` is not a :class:`~arbordraft.TextPool`.
        ValueError: if an argument is out of range.

    Source: LLMA (Yang et al., 2023) and prompt lookup decoding (Saxena, 2023), from one continuation to a tree.
    """

    reads_later = True

    def __init__(self, longest: int = 4, shortest: int = 2, pool: TextPool | None = None) -> None:
        super().__init__()
        if pool is not None:
            check_instance("pool", pool, TextPool)
        self.pool = pool
        self.longest = check_int("longest", longest, 1, _LONGEST)
        self.shortest = check_int("shortest", shortest, 1, self.longest)

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State()

    def add(self, state: _State, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.texts[sample] = _Text(_Index(self.shortest), tokens[-_LONGEST_PREDICTED:], tokens=list(tokens))
        state.texts[sample].index.extend(tokens)

    def remove(self, state: _State, sample: int) -> None:
        self._keep(state.texts.pop(sample))
        state.growing.pop(sample, None)

    def scores(self, state: _State, frontier: Frontier) -> list[tuple[list[int], list[float]]]:
        context, drafted = frontier.context, frontier.tokens
        child_list, parent_list = context.topology.child_list, context.topology.parent_list
        proposed = []
        for row, (sample, node) in enumerate(frontier.places):
            text, tokens = state.texts[sample], context.tokens(sample)
            prediction = self._prediction(text, context[sample].prediction)
            longest = self.longest if prediction is None else max(self.longest, _LONGEST_PREDICTED)
            if node:
                suffix = (*state.suffixes[sample, parent_list[node]], drafted[row])[-longest:]
            else:
                text.index.extend(tokens)
                suffix = tuple(tokens[-longest:])
            state.suffixes[sample, node] = suffix
            children = child_list[node]
            pool = self.pool if self.pool is not None and context.pathwise(sample) else None
            predicted = () if prediction is None else prediction.matches(suffix)
            own, allowed = suffix[-self.longest :], frontier.allowed(row)
            found = self._lookup(text.index, tokens, own, len(children), allowed, pool, predicted)
            if found:
                text.guesses[node] = list(zip(children, found, strict=False))
            proposed.append(([guess.token for guess in found], [text.odds(guess) for guess in found]))
        return proposed

    def _prediction(self, text: _Text, tokens: Sequence[int]) -> _Prediction | None:
        """Returns the index of a sample's prediction, which is made at its first lookup; ``None`` if it has none."""
        if tokens and text.prediction is None:
            text.prediction = _Prediction([*text.end, *tokens], self.shortest)
        return text.prediction

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        state.suffixes = {}
        before, state.growing = state.growing, {}
        for sample in tree.living:
            if not verdict.paths[sample]:
                continue
            text, emitted = state.texts[sample], verdict.emitted(tree, sample)
            if text.guesses:
                self._learn(text, emitted)
            text.guesses = {}
            if self.pool is not None:
                text.tokens += emitted
                text.grew = True
            state.growing[sample] = text
        for sample, text in before.items():
            if sample not in state.growing:  # it has ended; later texts may begin like it
                self._keep(text)
                text.guesses, text.prediction = {}, None

    def rollback(self, state: _State) -> None:
        state.suffixes = {}
        for text in state.texts.values():
            text.guesses = {}

    def _keep(self, text: _Text) -> None:
        if self.pool is not None and text.grew:
            self.pool.add(text.tokens)
            text.grew = False

    def _learn(self, text: _Text, tokens: Sequence[int]) -> None:
        """Compares all lookups with the emitted tokens, no matter which drafts were verified."""
        node = 0
        for token in tokens:
            for child, guess in text.guesses.get(node, ()):
                text.odds.learn(guess, guess.token == token)
                if guess.token == token:
                    if guess.text and self.pool is not None:
                        self.pool.praise(guess.text)
                    node = child
                    break
            else:
                return

    def _lookup(
        self,
        index: _Index,
        tokens: Sequence[int],
        suffix: tuple[int, ...],
        wanted: int,
        allowed: Allowed | None,
        pool: TextPool | None = None,
        predicted: Sequence[tuple[int, int]] = (),
    ) -> list[Guess]:
        """Returns up to ``wanted`` different allowed continuations, those of the longest suffix first."""
        if allowed is not None and allowed.only is not None:
            return [Guess(allowed.only, 0, 0, 0)]
        matches = [(size, token, 0) for size, token in (*index.matches(tokens, suffix), *predicted)]
        if pool is not None and not any(size >= len(suffix) for size, *_ in matches):  # its own text comes first
            matches += pool.matches(suffix)
        if len(matches) == 1 and allowed is None:  # the usual case if there are any
            size, token, text = matches[0]
            return [Guess(token, size, 1, 0, text)]
        places = {(size, token): text for size, token, text in reversed(matches)}
        guesses: dict[int, Guess] = {}
        for size in sorted({size for size, *_ in matches}, reverse=True):
            after = [token for reach, token, _ in matches if reach >= size]
            votes, after = min(2, len(after)), after[:_MOST_MATCHES]
            if len(after) > 1:
                after = [token for token, _ in Counter(after).most_common()]  # the latest one first among equals
            for token in after:
                if len(guesses) == wanted:
                    return list(guesses.values())
                if token not in guesses and (allowed is None or token in allowed):
                    text = places.get((size, token), 0)
                    guesses[token] = Guess(token, size, votes if len(after) == 1 else 0, len(guesses), text)
        return list(guesses.values())

    def extra_repr(self) -> str:
        pool = "" if self.pool is None else ", pool=..."
        return f"longest={self.longest}, shortest={self.shortest}{pool}"
