"""Echoes prompts before their answers."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from arbordraft.decoding.spelling import Pieces, Spelling, Spelt
from arbordraft.decoding.streams import Event
from arbordraft.serving.pieces import Piece, SpellingLogprobs, SpeltLogprob


class Echo:
    """Spells the prompt of one answer.

    Args:
        spelling: spelling of the tokenizer's tokens.
        prompt: token ids. Special tokens are spelt, except a leading ``begin``.
        text: the prompt, if it was given as text. It is shown as given unless ``scored``; its tokens may spell it
            differently.
        scored: whether log-probabilities of the prompt's tokens are requested.
        begin: token that the tokenizer puts before a text, if there is one.
    """

    def __init__(
        self, spelling: Spelling, prompt: Sequence[int], text: str | None, scored: bool, begin: int | None
    ) -> None:
        lead = 1 if prompt[0] == begin else 0
        self._text, self._waiting = text, None
        if scored or text is None:
            pieces = Pieces(spelling, kept=set(prompt))
            spelt = [*([Spelt()] * lead), *pieces.spelt(prompt[lead:]), *pieces.rest()]
            self._text = "".join(part.text for part in spelt)
            self._waiting = deque(zip(prompt, spelt, strict=True)) if scored else None
        self._logprobs = SpellingLogprobs(spelling, begun=not lead)

    def __call__(self, event: Event) -> tuple[str, tuple[SpeltLogprob, ...]]:
        """Returns the prompt's text at the first event, and log-probabilities as they arrive."""
        known = list[SpeltLogprob]()
        text, self._text = self._text, None
        if self._waiting is None:
            return text or "", ()
        if text is not None:
            _, first = self._waiting.popleft()
            known.append(SpeltLogprob(first.text, first.data, None))
        if count := len(event.prompt_logprobs):
            tokens, spelt = zip(*islice(self._waiting, count), strict=True)
            self._logprobs.add(tokens, event.prompt_logprobs)
            known += self._logprobs.of(spelt)
            for _ in range(count):
                self._waiting.popleft()
        return text or "", tuple(known)


class Echoing:
    """Spells answers, each after its prompt.

    Args:
        speller: spells the answers.
        echoes: one per answer.

    Attributes:
        reasoning: number of tokens of thoughts: 0, since completions have none.
    """

    reasoning = 0

    def __init__(self, speller: Callable[[Event], Piece], echoes: Sequence[Echo]) -> None:
        self._speller, self._echoes = speller, echoes

    def __call__(self, event: Event) -> Piece:
        text, known = self._echoes[event.answer](event)
        piece = self._speller(event)
        return replace(piece, text=text + piece.text, logprobs=known + piece.logprobs)


__all__ = ["Echo", "Echoing"]
