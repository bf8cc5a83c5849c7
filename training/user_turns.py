"""Lets the target write user turns: it completes prompt templates, and asks about texts that it wrote as answers."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from arbordraft.training.chat import ChatFormat
from arbordraft.training.completion import Completer, Completion, Sampling
from arbordraft.training.prompt_templates import PromptTemplate, draw_prompt_template, known_words
from arbordraft.training.shards import GIVEN, PROMPT

_SHORTEST = 12  # characters; a shorter text is no question
_QUESTION = 40  # most tokens of a question after a text
_KEY = 60  # leading characters; user turns that agree in them count as repetitions
_TEMPERATURE = 0.75  # at 1 a small model's questions make little sense
_ENDS = (".", "?", "!", ":")  # of sentences


@dataclass
class Dialogue:
    """A conversation that is being written."""

    users: list[str]  # user turns still to come
    follow_up: bool = False  # the target is to write one more
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    temperature: float = 0.0
    ended: bool = False  # the last answer ended with a stop token
    hidden: Tensor | None = None

    def add(self, tokens: Sequence[int], role: int) -> None:
        self.tokens += tokens
        self.roles += [role] * len(tokens)

    def copy(self, temperature: float) -> "Dialogue":
        return Dialogue([*self.users], self.follow_up, [*self.tokens], [*self.roles], temperature)


class UserTurns:
    """Lets a target write user turns.

    Args:
        chat: the target's chat format.
        complete: continues texts.

    Raises:
        ValueError: if the chat template puts nothing before user turns, so that the target cannot write any.
    """

    def __init__(self, chat: ChatFormat, complete: Completer) -> None:
        self.chat, self.complete = chat, complete
        self._before = chat.before_user()
        self._start = len(chat.ids(self._before))
        if not self._start:
            raise ValueError("the chat template puts nothing before user turns, so the target cannot write any itself")
        self._words = known_words(chat.tokenizer)

    def first(self, count: int, source: random.Random, done: Callable[[int], object]) -> Iterator[Dialogue]:
        """Yields at most ``count`` dialogues of one user turn each; useless turns and repetitions are left out."""
        templates = [draw_prompt_template(source, self._words) for _ in range(count)]
        begun = [self._begun(template) for template in templates]
        turns: dict[int, list[int]] = {}
        for limit in sorted({template.limit for template in templates}):
            group = [number for number, template in enumerate(templates) if template.limit == limit]
            turns |= zip(group, self.go_on([begun[number] for number in group], limit, source, done), strict=True)
        dialogues = [Dialogue([]) for _ in templates]
        asking = []
        for number, (dialogue, template) in enumerate(zip(dialogues, templates, strict=True)):
            if template.around:
                text = template.around.format(text=self.chat.text(turns[number]).strip())
                dialogue.add(self.chat.ids(self._before + text), GIVEN)  # the target wrote it elsewhere, as an answer
                if not template.around.endswith(("{text}", *_ENDS)):
                    asking.append(dialogue)
            else:
                dialogue.add(begun[number], GIVEN)
                dialogue.add(turns[number], PROMPT)
        questions = self.go_on([dialogue.tokens for dialogue in asking], _QUESTION, source, done)
        for dialogue, question in zip(asking, questions, strict=True):
            dialogue.add(question, PROMPT)
        seen: set[str] = set()
        for dialogue in dialogues:
            turn = dialogue.tokens[self._start :]
            key = re.sub(r"[^\w ]", "", self.chat.text(turn).lower())[:_KEY]
            if self.asks(turn) and key not in seen:
                seen.add(key)
                yield dialogue

    def go_on(
        self, texts: Sequence[Sequence[int]], limit: int, source: random.Random, done: Callable[[int], object]
    ) -> list[list[int]]:
        """Continues each text by at most ``limit`` tokens, up to the end of the turn."""
        completions = self.complete(texts, Sampling(_TEMPERATURE, limit), source.getrandbits(31), done)
        return [self._whole(completion) for completion in completions]

    def asks(self, turn: Sequence[int]) -> bool:
        """Tells whether a user turn is usable: not too short, and not a few words over and over."""
        text = self.chat.text(turn)
        words = text.lower().split()
        return len(text.strip()) >= _SHORTEST and (len(words) <= 30 or len(set(words)) >= len(words) / 4)

    def _begun(self, template: PromptTemplate) -> list[int]:
        return self.chat.ids(self._before + template.text + (self.chat.to_assistant if template.around else ""))

    def _whole(self, written: Completion) -> list[int]:
        """Returns a turn without its end token; a turn that was cut off ends after a sentence, if possible."""
        tokens = written.tokens[:-1] if written.ended else written.tokens
        for end, token in enumerate(tokens):
            if token in self.chat.special:
                return tokens[:end]
        if not written.ended:
            for end in range(len(tokens), len(tokens) // 2, -1):
                if self.chat.text(tokens[:end]).rstrip().endswith(_ENDS):
                    return tokens[:end]
        return tokens
