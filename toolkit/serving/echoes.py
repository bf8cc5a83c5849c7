"""Echoes prompts before their answers."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from arbordraft.decoding.detokenizing import DecodedToken, IncrementalDetokenizer, TokenDecoder
from arbordraft.decoding.streams import Event
from arbordraft.serving.deltas import AnswerDelta, DecodedLogprob, LogprobBuffer


class Echo:
    """Detokenizes the prompt of one answer.

    Args:
        token_decoder: decodes single tokens.
        prompt: token ids. Special tokens are shown, except a leading ``begin``.
        text: the prompt, if it was given as text. It is shown as given unless ``logprobs``; its tokens may spell it
            differently.
        logprobs: whether log-probabilities of the prompt's tokens are requested.
        begin: token that the tokenizer puts before a text, if there is one.
    """

    def __init__(
        self, token_decoder: TokenDecoder, prompt: Sequence[int], text: str | None, logprobs: bool, begin: int | None
    ) -> None:
        lead = 1 if prompt[0] == begin else 0
        self._text, self._waiting = text, None
        if logprobs or text is None:
            decoding = IncrementalDetokenizer(token_decoder, kept=set(prompt))
            decoded = [*([DecodedToken()] * lead), *decoding.decode(prompt[lead:]), *decoding.flush()]
            self._text = "".join(part.text for part in decoded)
            self._waiting = deque(zip(prompt, decoded, strict=True)) if logprobs else None
        self._logprobs = LogprobBuffer(token_decoder, begun=not lead)

    def __call__(self, event: Event) -> tuple[str, tuple[DecodedLogprob, ...]]:
        """Returns the prompt's text at the first event, and log-probabilities as they arrive."""
        known = list[DecodedLogprob]()
        text, self._text = self._text, None
        if self._waiting is None:
            return text or "", ()
        if text is not None:
            _, first = self._waiting.popleft()
            known.append(DecodedLogprob(first.text, first.data, None))
        if count := len(event.prompt_logprobs):
            tokens, decoded = zip(*islice(self._waiting, count), strict=True)
            self._logprobs.add(tokens, event.prompt_logprobs)
            known += self._logprobs.of(decoded)
            for _ in range(count):
                self._waiting.popleft()
        return text or "", tuple(known)


class EchoDetokenizer:
    """Detokenizes answers, each after its prompt.

    Args:
        detokenizer: detokenizes the answers.
        echoes: one per answer.

    Attributes:
        reasoning_tokens: number of tokens of thoughts: 0, since completions have none.
    """

    reasoning_tokens = 0

    def __init__(self, detokenizer: Callable[[Event], AnswerDelta], echoes: Sequence[Echo]) -> None:
        self._detokenizer, self._echoes = detokenizer, echoes

    def __call__(self, event: Event) -> AnswerDelta:
        text, known = self._echoes[event.answer](event)
        delta = self._detokenizer(event)
        return replace(delta, text=text + delta.text, logprobs=known + delta.logprobs)


__all__ = ["Echo", "EchoDetokenizer"]
