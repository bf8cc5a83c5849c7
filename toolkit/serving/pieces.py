"""Turns an engine's events into text and into data about its steps."""

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
    """Log-probability of a token, with the token's spelling.

    Args:
        text: text that the token adds to the answer, see :class:`~arbordraft.decoding.spelling.Spelt`. For an
            alternative: the text that it would add, or the name of a special token.
        data: bytes that the token adds; ``None`` if the tokenizer does not tell them.
        logprob: log-probability; ``None`` for the first token of a prompt, which has no context.
        others: most probable tokens at this position, in descending order.
    """

    text: str
    data: bytes | None
    logprob: float | None
    others: "tuple[SpeltLogprob, ...]" = ()


@dataclass(frozen=True)
class Piece:
    """New piece of one answer; ``+`` joins two pieces.

    Args:
        index: number of the answer.
        text: new text, without thoughts and tool calls.
        tokens: new committed tokens.
        logprobs: log-probabilities of the tokens whose text has become certain, if requested.
        steps: see :func:`step_of`; only if requested.
        finish_reason: see :class:`~arbordraft.decoding.streams.Answer`; ``tool_calls`` if the answer ended with calls.
        calls: new pieces of tool calls.
        thoughts: new text of thoughts.
        check: check of the whole answer, if its schema has keywords that no grammar enforces.
        words: start and end of the text so far, in tokens. The thoughts end at the start; the token before the end
            made the last text certain.
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
    """Turns the events of one request into pieces of its answers.

    Args:
        tokenizer: tokenizer of the model, or its spelling.
        stop: texts before which an answer ends.
        n: number of answers.
        steps: whether steps are requested.
        calls: format of tool calls, if there may be some.
        functions: names of the functions that may be called.
        thinking: marks of thoughts, if they are separated from the text.
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
        self._read, self._spoken = [0] * n, [0] * n  # tokens: all, and those up to the last text
        self._start = perf_counter()

    @property
    def reasoning(self) -> int:
        """Number of tokens of thoughts so far, in all answers."""
        return sum(thoughts.tokens for thoughts in self._thoughts if thoughts)

    def __call__(self, event: Event) -> Piece:
        """Returns the piece that an event adds."""
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
        """Returns the thoughts, words and calls that the texts of some tokens make certain."""
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
    """Holds log-probabilities back until the spelling of their tokens is certain."""

    def __init__(self, spelling: Spelling, begun: bool = False) -> None:
        self._spelling = spelling
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()
        self._begun = begun  # whether a token that is not hidden has come

    def add(self, tokens: Iterable[int], known: Iterable[TokenLogprobs]) -> None:
        """Adds the log-probabilities of the next tokens, if there are any."""
        self._waiting += zip(tokens, known, strict=False)

    def of(self, spelt: Sequence[Spelt]) -> Iterable[SpeltLogprob]:
        """Yields the log-probabilities of the next tokens, given their spelling."""
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
    """Returns one step of one answer as plain data.

    Args:
        tree: draft tree of the step.
        verdict: accepted nodes and the target's own token.
        emitted: number of committed tokens; fewer than in the verdict if the answer ended within them.
        spell: returns the text of a token.

    Returns:
        ``nodes``, ``token``, ``recovered`` and ``emitted``. The first node is the committed token that the drafts
        follow. Each node has its ``text``, the index of its ``parent`` (-1 for the first) and whether it was
        ``accepted``. ``token`` is the text of the target's own token. If ``recovered``, it replaces rejected drafts;
        else it is a bonus.
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
