"""Compiles grammars for the tokens of one model.

Shapes: V vocabulary.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from torch import Tensor

from arbordraft.grammars.closing import Closings, Deadline, TokenShapes
from arbordraft.grammars.engine import GrammarError, explained, limits
from arbordraft.grammars.grammar import Grammar
from arbordraft.sampling.stateful import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_KEPT = 256  # compiled grammars
_TRIED = 16  # most first tokens that are tried


class GrammarState:
    """Position of a text in its grammar: a :class:`~arbordraft.sampling.stateful.Constraint`.

    Args:
        matcher: state of the engine; no other object may change it.
        ends: tokens that end an answer.
        closings: closings of the grammar, if the answer must be complete within its limit.
        deadline: how far the text is from that limit.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        ends: Sequence[int],
        closings: Closings | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._matcher, self._ends = matcher, ends
        self._closings, self._deadline = closings, deadline
        self._allowed: Allowed | None = None  # computed on demand
        self._ended = False

    def fork(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._ends, self._closings, self._deadline)

    def within(self, limit: int, closings: Closings) -> Self:
        """Returns this state for answers that must be complete within ``limit`` tokens."""
        matcher = self._matcher.deep_copy()
        return type(self)(matcher, self._ends, closings, closings.begin(matcher, limit))

    def accept(self, token: int) -> None:
        """Advances by a token.

        Raises:
            GrammarError: if the grammar forbids the token, or the engine gave up after it.
        """
        self._allowed = None
        if not self._ended and token in self._ends and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.try_consume_tokens([token]) or self._matcher.is_error():
            raise self._failure(f"it forbids the token {token}")
        elif self._closings is not None and self._deadline is not None:
            self._deadline = self._closings.after(self._matcher, self._deadline, token)

    def allowed(self) -> Allowed:
        """Returns the tokens that may come next.

        Raises:
            GrammarError: if the engine gave up because the grammar is too complex at this place. Also if the grammar
                has an end token in the middle, where the answer would end unfinished.
        """
        if self._allowed is None:
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error() or not any(bits):
                raise self._failure("no token may come next")
            allowed = Allowed(bits)
            if not self._matcher.is_accepting() and any(token in allowed for token in self._ends):
                raise GrammarError("the grammar has an end token in the middle: the answer would end there, unfinished")
            if self._closings is not None and self._deadline is not None and not self._ended:
                allowed = self._closings.timely(self._matcher, allowed, self._deadline)
            self._allowed = allowed  # only after the checks: a second call raises again
        return self._allowed

    def _failure(self, otherwise: str) -> GrammarError:
        reason = explained(self._matcher.get_error()) if self._matcher.is_error() else otherwise
        return GrammarError(f"the grammar cannot be followed any further: {reason}")

    def __call__(self, scores: Tensor) -> Tensor:
        return self.allowed().mask(scores)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest ones.

    Args:
        tokenizer: fast tokenizer.
        vocab_size: V of the model; at least that of the tokenizer.

    Raises:
        TypeError: if the tokenizer is not a fast one.
        ValueError: if there is no tokenizer, or it has more tokens than the model.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> None:
        if tokenizer is None:
            raise ValueError("grammars need a tokenizer: build the target as RaggedModel(model, tokenizer)")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TypeError(
                f"grammars need a fast tokenizer, of the library tokenizers; {type(tokenizer).__name__} is none"
            )
        if len(tokenizer) > vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the target {vocab_size}: a grammar could ask for tokens "
                "that the target cannot say"
            )
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._engines: dict[tuple[int, ...], LLTokenizer] = {}  # by the tokens that end a text
        self._shapes: dict[tuple[int, ...], TokenShapes] = {}  # by the same
        self._compiled: OrderedDict[tuple[Grammar, tuple[int, ...], int | None], GrammarState] = OrderedDict()
        self._mutex = threading.Lock()

    def __call__(self, grammar: Grammar, ends: Sequence[int], limit: int | None = None) -> GrammarState:
        """Returns the state in which an answer begins; callers must fork it, not change it.

        Args:
            grammar: grammar of the answer.
            ends: tokens that end the answer, at least one.
            limit: longest answer, in tokens; ``None`` for any length.

        Raises:
            ValueError: if there are no ends, or the grammar cannot be met with this tokenizer.
        """
        if not ends:
            raise ValueError("an answer in a grammar ends with an end token: give at least one (eos_token_id, ends)")
        with self._mutex:
            return self._kept(grammar, tuple(sorted(ends)), limit if grammar.bounded else None)

    def _kept(self, grammar: Grammar, ends: tuple[int, ...], limit: int | None) -> GrammarState:
        key = grammar, ends, limit
        state = self._compiled.pop(key, None)
        if state is None and limit is not None:
            closings = Closings(self._token_shapes(ends), ends, grammar.definition)
            state = self._kept(grammar, ends, None).within(limit, closings)
        self._compiled[key] = state or self._compile(grammar, ends)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[key]

    def _compile(self, grammar: Grammar, ends: tuple[int, ...]) -> GrammarState:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._engine(ends), grammar.definition, log_level=0, limits=limits())
        if matcher.is_error():
            raise ValueError(f"invalid {grammar.kind}: {explained(matcher.get_error())}")
        state = GrammarState(matcher, ends)
        self._try(state)
        return state

    def _try(self, state: GrammarState) -> None:
        """Raises GrammarError early if every answer would fail at its first token."""
        tokens, failure = state.allowed().tokens(), None
        for token in tokens if len(tokens) <= _TRIED else ():
            place = state.fork()
            try:
                place.accept(token)
                place.allowed()
            except GrammarError as error:
                failure = error
            else:
                return
        if failure is not None:
            raise failure

    def _engine(self, ends: tuple[int, ...]) -> "LLTokenizer":
        if ends not in self._engines:
            from llguidance.hf import from_tokenizer

            try:
                engine = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=list(ends))
            except ValueError as error:
                raise ValueError(f"grammars cannot be followed with this tokenizer: {error}") from error
            self._engines[ends] = engine
        return self._engines[ends]

    def _token_shapes(self, ends: tuple[int, ...]) -> TokenShapes:
        if ends not in self._shapes:
            self._shapes[ends] = TokenShapes(self._engine(ends), self._vocab_size)
        return self._shapes[ends]


__all__ = ["GrammarCompiler", "GrammarState"]
