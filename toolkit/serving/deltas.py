"""Turns an engine's events into text and into data about its steps."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.decoding.detokenizing import DecodedToken, IncrementalDetokenizer, TokenDecoder
from arbordraft.decoding.state import TokenLogprobs
from arbordraft.decoding.streams import Event
from arbordraft.grammars import SchemaCheck
from arbordraft.serving.calls import ToolCallFormat
from arbordraft.serving.reasoning import ReasoningFormat, ReasoningParser
from arbordraft.serving.tool_parsing import ToolCallDelta, ToolCallParser
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Step = dict[str, Any]


class DecodedLogprob(NamedTuple):
    """Log-probability of a token, with the token's text.

    Args:
        text: text that the token adds to the answer, see :class:`~arbordraft.decoding.detokenizing.DecodedToken`. For
            an alternative: the text that it would add, or the name of a special token.
        data: bytes that the token adds; ``None`` if the tokenizer does not tell them.
        logprob: log-probability; ``None`` for the first token of a prompt, which has no context.
        others: most probable tokens at this position, in descending order.
    """

    text: str
    data: bytes | None
    logprob: float | None
    others: "tuple[DecodedLogprob, ...]" = ()


@dataclass(frozen=True)
class AnswerDelta:
    """New part of one answer; ``+`` joins two parts.

    Args:
        index: number of the answer.
        text: new text, without thoughts and tool calls.
        tokens: new committed tokens.
        logprobs: log-probabilities of the tokens whose text has become certain, if requested.
        steps: see :func:`step_of`; only if requested.
        finish_reason: see :class:`~arbordraft.decoding.streams.Answer`; ``tool_calls`` if the answer ended with calls.
        calls: new parts of tool calls.
        reasoning: new text of thoughts.
        check: check of the whole answer, if its schema has keywords that no grammar enforces.
        words: start and end of the text so far, in tokens. The thoughts end at the start; the token before the end
            made the last text certain.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[DecodedLogprob, ...] = ()
    steps: tuple[Step, ...] = ()
    finish_reason: str | None = None
    calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""
    check: SchemaCheck | None = None
    words: tuple[int, int] = (0, 0)

    def __add__(self, later: "AnswerDelta") -> "AnswerDelta":
        return AnswerDelta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.steps + later.steps,
            later.finish_reason,
            self.calls + later.calls,
            self.reasoning + later.reasoning,
            later.check,
            later.words,
        )

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.steps or self.finish_reason)


class AnswerDetokenizer:
    """Turns the events of one request into deltas of its answers.

    Args:
        tokenizer: tokenizer of the model, or its cached decoder.
        stop: texts before which an answer ends.
        n: number of answers.
        steps: whether steps are requested.
        calls: format of tool calls, if there may be some.
        functions: names of the functions that may be called.
        reasoning: marks of thoughts, if they are separated from the text.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | TokenDecoder",
        stop: Sequence[str],
        n: int,
        steps: bool,
        calls: ToolCallFormat | None = None,
        functions: Collection[str] = (),
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self._token_decoder, self._steps = TokenDecoder.of(tokenizer), steps
        kept = {*(calls.marks if calls and functions else ()), *(reasoning.marks if reasoning else ())}
        self._answers = [IncrementalDetokenizer(self._token_decoder, stop, kept) for _ in range(n)]
        self._logprobs = [LogprobBuffer(self._token_decoder) for _ in range(n)]
        self._tool_parsers = [ToolCallParser(calls, functions) if calls and functions else None for _ in range(n)]
        self._reasoning_parsers = [ReasoningParser(reasoning) if reasoning else None for _ in range(n)]
        self._num_read, self._num_shown = [0] * n, [0] * n  # tokens: all, and those up to the last text
        self._start = perf_counter()

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thoughts so far, in all answers."""
        return sum(parser.tokens for parser in self._reasoning_parsers if parser)

    def __call__(self, event: Event) -> AnswerDelta:
        """Returns the delta that an event adds."""
        answer, tool_parser = self._answers[event.answer], self._tool_parsers[event.answer]
        reason = event.finish_reason
        decoded = answer.decode(event.tokens) if reason is None else answer.flush()
        logprobs = self._logprobs[event.answer]
        logprobs.add(event.tokens, event.logprobs)
        known = tuple(logprobs.of(decoded))
        new_reasoning, text, called = self._split(event.answer, decoded, ended=reason is not None)
        if reason == "stop" and tool_parser is not None and tool_parser.called:
            reason = "tool_calls"
        steps: tuple[Step, ...] = ()
        if self._steps and event.tree is not None and event.verdict is not None:
            shown = step_of(event.tree, event.verdict, len(event.tokens), lambda token: self._token_decoder[token].text)
            steps = ({**shown, "seconds": round(perf_counter() - self._start, 4)},)
        reasoning_parser = self._reasoning_parsers[event.answer]
        words = reasoning_parser.tokens if reasoning_parser else 0, self._num_shown[event.answer]
        tokens = tuple(event.tokens)
        return AnswerDelta(event.answer, text, tokens, known, steps, reason, called, new_reasoning, words=words)

    def _split(
        self, index: int, decoded: Sequence[DecodedToken], ended: bool
    ) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """Returns the thoughts, words and calls that the texts of some tokens make certain."""
        reasoning_parser, tool_parser = self._reasoning_parsers[index], self._tool_parsers[index]
        reasoning, words, calls = "", "", list[ToolCallDelta]()
        for part in [*decoded, *([None] if ended else ())]:
            new_reasoning, text = "", part.text if part else ""
            if reasoning_parser:
                new_reasoning, text = reasoning_parser.add(text) if part else reasoning_parser.end()
            if tool_parser:
                text, called = tool_parser.add(text)
                text, calls = text if part else text + tool_parser.end(), [*calls, *called]
            self._num_read[index] += part is not None
            if text:
                self._num_shown[index] = self._num_read[index]
            reasoning, words = reasoning + new_reasoning, words + text
        return reasoning, words, tuple(calls)


class LogprobBuffer:
    """Holds log-probabilities back until the texts of their tokens are certain."""

    def __init__(self, token_decoder: TokenDecoder, begun: bool = False) -> None:
        self._token_decoder = token_decoder
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()
        self._begun = begun  # whether a token that is not hidden has come

    def add(self, tokens: Iterable[int], known: Iterable[TokenLogprobs]) -> None:
        """Adds the log-probabilities of the next tokens, if there are any."""
        self._waiting += zip(tokens, known, strict=False)

    def of(self, decoded: Sequence[DecodedToken]) -> Iterable[DecodedLogprob]:
        """Yields the log-probabilities of the next tokens, given their texts."""
        for part in decoded[: len(self._waiting)]:
            token, known = self._waiting.popleft()
            hidden = self._token_decoder[token].hidden
            others = tuple(
                DecodedLogprob(part.text, part.data, logprob)
                if other == token and not hidden
                else self._alone(other, logprob)
                for other, logprob in known.others
            )
            yield DecodedLogprob(part.text, part.data, known.logprob, others)
            self._begun = self._begun or not hidden

    def _alone(self, token: int, logprob: float) -> DecodedLogprob:
        known = self._token_decoder[token]
        if self._begun or known.text == known.first:
            return DecodedLogprob(known.text, known.data, logprob)
        return DecodedLogprob(known.first, known.first.encode(), logprob)


def step_of(tree: SampleTree, verdict: SampleVerdict, emitted: int, text_of: Callable[[int], str]) -> Step:
    """Returns one step of one answer as plain data.

    Args:
        tree: draft tree of the step.
        verdict: accepted nodes and the target's own token.
        emitted: number of committed tokens; fewer than in the verdict if the answer ended within them.
        text_of: returns the text of a token.

    Returns:
        ``nodes``, ``token``, ``recovered`` and ``emitted``. The first node is the committed token that the drafts
        follow. Each node has its ``text``, the index of its ``parent`` (-1 for the first) and whether it was
        ``accepted``. ``token`` is the text of the target's own token. If ``recovered``, it replaces rejected drafts;
        else it is a bonus.
    """
    nodes = [
        {
            "text": text_of(token),
            "parent": max(parent - tree.root, -1),
            "accepted": row in verdict.path[1:],
        }
        for row, token, parent in zip(tree.rows, tree.tokens, tree.parents, strict=True)
    ]
    return {"nodes": nodes, "token": text_of(verdict.token), "recovered": verdict.recovered, "emitted": emitted}
