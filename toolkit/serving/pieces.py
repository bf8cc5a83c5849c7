"""An engine's events as text and as data about its steps."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.decoding.spelling import Pieces, Spelling, Spelt
from arbordraft.decoding.state import TokenLogprobs
from arbordraft.decoding.streams import Event
from arbordraft.grammars import SchemaCheck
from arbordraft.serving.calls import CallFormat
from arbordraft.serving.reading import CallPiece, CallReader
from arbordraft.serving.thinking import Thinking, ThoughtReader
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Step = dict[str, Any]


class SpeltLogprob(NamedTuple):
    """The log-probability of a token, and how that is spelt.

    Args:
        text: what it adds to the answer, see :class:`~arbordraft.decoding.spelling.Spelt`; of another token than
            the answer's, what it would add, or the name of a special token.
        data: the bytes of the same; ``None`` if the tokenizer does not tell.
        logprob: its log-probability; ``None`` of the first token of a prompt, which follows nothing.
        others: the most probable tokens at its place, descending.
    """

    text: str
    data: bytes | None
    logprob: float | None
    others: "tuple[SpeltLogprob, ...]" = ()


@dataclass(frozen=True)
class Piece:
    """A new piece of one answer; two pieces add up.

    Args:
        index: of the answer.
        text: what can be shown of it, without its thoughts and its calls of tools.
        tokens: what was committed.
        logprobs: one per token that ``text`` is of, if they are wanted: a token waits until it is certain what it adds.
        steps: see :func:`step_of`, if they are wanted.
        finish_reason: see :class:`~arbordraft.decoding.streams.Answer`; ``tool_calls`` if the answer ended with those.
        calls: of tools.
        thoughts: what the model thought first.
        check: of the whole answer, if its schema has keywords that no grammar holds.
        words: of the answer's tokens so far, the first one behind its thoughts, and the one behind the token that made
            the last of its words certain.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[SpeltLogprob, ...] = ()
    steps: tuple[Step, ...] = ()
    finish_reason: str | None = None
    calls: tuple[CallPiece, ...] = ()
    thoughts: str = ""
    check: SchemaCheck | None = None
    words: tuple[int, int] = (0, 0)

    def __add__(self, later: "Piece") -> "Piece":
        return Piece(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.steps + later.steps,
            later.finish_reason,
            self.calls + later.calls,
            self.thoughts + later.thoughts,
            later.check,
            later.words,
        )

    def __bool__(self) -> bool:
        return bool(self.text or self.thoughts or self.calls or self.logprobs or self.steps or self.finish_reason)


class Speller:
    """Spells the answers to one request.

    Args:
        tokenizer: of the model.
        stop: texts before which an answer ends.
        n: number of answers.
        steps: whether the steps are wanted.
        calls: how calls of tools are written, if there may be some.
        functions: names of what may be called.
        thinking: how thoughts are marked, if they are told from the rest.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | Spelling",
        stop: Sequence[str],
        n: int,
        steps: bool,
        calls: CallFormat | None = None,
        functions: Collection[str] = (),
        thinking: Thinking | None = None,
    ) -> None:
        self._spelling, self._steps = Spelling.of(tokenizer), steps
        kept = {*(calls.marks if calls and functions else ()), *(thinking.marks if thinking else ())}
        self._answers = [Pieces(self._spelling, stop, kept) for _ in range(n)]
        self._logprobs = [SpellingLogprobs(self._spelling) for _ in range(n)]
        self._readers = [CallReader(calls, functions) if calls and functions else None for _ in range(n)]
        self._thoughts = [ThoughtReader(thinking) if thinking else None for _ in range(n)]
        self._read, self._spoken = [0] * n, [0] * n  # tokens: all, and those up to the last of words
        self._start = perf_counter()

    @property
    def reasoning(self) -> int:
        """Tokens of thoughts so far."""
        return sum(thoughts.tokens for thoughts in self._thoughts if thoughts)

    def __call__(self, event: Event) -> Piece:
        """The piece that an event adds."""
        answer, reader = self._answers[event.answer], self._readers[event.answer]
        reason = event.finish_reason
        spelt = answer.spelt(event.tokens) if reason is None else answer.rest()
        logprobs = self._logprobs[event.answer]
        logprobs.add(event.tokens, event.logprobs)
        known = tuple(logprobs.of(spelt))
        thoughts, text, called = self._told(event.answer, spelt, ended=reason is not None)
        if reason == "stop" and reader is not None and reader.called:
            reason = "tool_calls"
        steps: tuple[Step, ...] = ()
        if self._steps and event.tree is not None and event.verdict is not None:
            shown = step_of(event.tree, event.verdict, len(event.tokens), lambda token: self._spelling[token].text)
            steps = ({**shown, "seconds": round(perf_counter() - self._start, 4)},)
        thinking = self._thoughts[event.answer]
        words = thinking.tokens if thinking else 0, self._spoken[event.answer]
        tokens = tuple(event.tokens)
        return Piece(event.answer, text, tokens, known, steps, reason, called, thoughts, words=words)

    def _told(self, index: int, spelt: Sequence[Spelt], ended: bool) -> tuple[str, str, tuple[CallPiece, ...]]:
        """The thoughts, the words and the calls that the texts of some tokens make certain."""
        thinking, calling = self._thoughts[index], self._readers[index]
        told, words, calls = "", "", list[CallPiece]()
        for part in [*spelt, *([None] if ended else ())]:
            thoughts, text = "", part.text if part else ""
            if thinking:
                thoughts, text = thinking.add(text) if part else thinking.end()
            if calling:
                text, called = calling.add(text)
                text, calls = text if part else text + calling.end(), [*calls, *called]
            self._read[index] += part is not None
            if text:
                self._spoken[index] = self._read[index]
            told, words = told + thoughts, words + text
        return told, words, tuple(calls)


class SpellingLogprobs:
    """Keeps the log-probabilities of a text's tokens until it is certain how these are spelt."""

    def __init__(self, spelling: Spelling, begun: bool = False) -> None:
        self._spelling = spelling
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()
        self._begun = begun  # a token that is not hidden has come

    def add(self, tokens: Iterable[int], known: Iterable[TokenLogprobs]) -> None:
        """Takes the log-probabilities of the next tokens, if there are any."""
        self._waiting += zip(tokens, known, strict=False)

    def of(self, spelt: Sequence[Spelt]) -> Iterable[SpeltLogprob]:
        """Those of the next tokens, which are spelt like this."""
        for part in spelt[: len(self._waiting)]:
            token, known = self._waiting.popleft()
            hidden = self._spelling[token].hidden
            others = tuple(
                SpeltLogprob(part.text, part.data, logprob)
                if other == token and not hidden
                else self._alone(other, logprob)
                for other, logprob in known.others
            )
            yield SpeltLogprob(part.text, part.data, known.logprob, others)
            self._begun = self._begun or not hidden

    def _alone(self, token: int, logprob: float) -> SpeltLogprob:
        known = self._spelling[token]
        if self._begun or known.text == known.first:
            return SpeltLogprob(known.text, known.data, logprob)
        return SpeltLogprob(known.first, known.first.encode(), logprob)


def step_of(tree: SampleTree, verdict: SampleVerdict, emitted: int, spell: Callable[[int], str]) -> Step:
    """One step of one answer as plain data.

    Args:
        tree: the drafts.
        verdict: which of them were accepted.
        emitted: tokens that were committed: fewer than the verdict has if the answer ended among them.
        spell: the text of a token.

    Returns:
        ``nodes``, the committed token that the drafts follow first: of each the text, the place of the parent in this
        list (-1 for the first) and whether it was accepted; then the text of the target's own ``token``, whether that
        was ``recovered`` in the place of rejected drafts (else it is a bonus), and ``emitted``.
    """
    nodes = [
        {
            "text": spell(token),
            "parent": max(parent - tree.root, -1),
            "accepted": row in verdict.path[1:],
        }
        for row, token, parent in zip(tree.rows, tree.tokens, tree.parents, strict=True)
    ]
    return {"nodes": nodes, "token": spell(verdict.token), "recovered": verdict.recovered, "emitted": emitted}
