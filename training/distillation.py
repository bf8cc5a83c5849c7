"""Self-distillation: lets the target write the answers of conversations, and the questions if none are given."""

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

from torch import Tensor

from arbordraft.training.chat import ChatFormat
from arbordraft.training.completion import Completer, Sampling
from arbordraft.training.shards import (
    ANSWER,
    GIVEN,
    PROMPT,
    Conversation,
    Shard,
    ShardFolder,
    pack,
    read_shard,
    write_shard,
)
from arbordraft.training.user_turns import Dialogue, UserTurns
from arbordraft.utils.files import write_text

_FOLLOW_UP = 80  # most tokens of a follow-up


@dataclass(frozen=True)
class Recipe:
    """Settings of a generation.

    Args:
        conversations: number of prompts in all. Only this setting may be raised later, to generate more of the same.
        per_shard: prompts in one shard: the most that an interruption can lose.
        temperatures: temperatures of the answers; each prompt takes the next ``answers`` of them, in turn.
        answers: answers per prompt.
        max_new_tokens: longest answer, in tokens.
        max_tokens: longest conversation, in tokens; prompts and later turns that leave no room for an answer are left
            out.
        follow_ups: share of the self-written conversations that get a second user turn.
        seed: seed of all random draws.

    Raises:
        ValueError: if a setting is out of range, or a prompt would get the same greedy answer twice.
    """

    conversations: int = 10_000
    per_shard: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.7, 1.0)
    answers: int = 2
    max_new_tokens: int = 128
    max_tokens: int = 1024
    follow_ups: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "per_shard", "answers", "max_new_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.temperatures or min(self.temperatures) < 0 or not 0 <= self.follow_ups <= 1:
            raise ValueError("temperatures must not be empty or negative, and follow_ups must lie in [0, 1]")
        if self.max_new_tokens >= self.max_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must exceed max_new_tokens ({self.max_new_tokens})")
        if any(self.of_prompt(number).count(0) > 1 for number in range(len(self.temperatures))):
            raise ValueError(f"{self.answers} answers at temperatures {self.temperatures} repeat a greedy one")

    @property
    def shards(self) -> int:
        return -(-self.conversations // self.per_shard)

    def of_prompt(self, number: int) -> list[float]:
        """Returns the temperatures of the answers to a prompt."""
        first = number * self.answers
        return [self.temperatures[turn % len(self.temperatures)] for turn in range(first, first + self.answers)]


class _Clock:
    """Adds up the minutes spent in its block over many runs, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.minutes = float(json.loads(path.read_text())) if path.exists() else 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        if failure is None:
            self.minutes += (time.monotonic() - self._start) / 60
            write_text(self.path, json.dumps(self.minutes))


@dataclass
class SelfDistillation:
    """Writes shards of conversations; existing shards are kept, so an interrupted run goes on where it stopped.

    A conversation ends once an answer is cut off, or ends in another way than the template ends answers.

    Args:
        chat: the target's chat format.
        complete: continues texts.
        recipe: settings of the generation.
        folder: where the shards are written.
        provenance: further facts on the origin of the data: target, revision, backend.
        messages: conversations whose user turns and first system message are taken; by default the target writes its
            own.
        store: called with every new shard and the hidden states of its conversations, before the shard counts as done.

    Raises:
        ValueError: if there are fewer conversations than the recipe wants, or the target cannot write user turns.
    """

    chat: ChatFormat
    complete: Completer
    recipe: Recipe
    folder: ShardFolder
    provenance: dict[str, Any] = field(default_factory=dict)
    messages: Sequence[Sequence[dict[str, str]]] | None = None
    store: Callable[[Shard, list[Tensor]], object] | None = None

    def __post_init__(self) -> None:
        if self.messages is not None and len(self.messages) < self.recipe.conversations:
            raise ValueError(
                f"the recipe wants {self.recipe.conversations} conversations, but only {len(self.messages)} were "
                "given; lower recipe.conversations"
            )
        self._turns = UserTurns(self.chat, self.complete) if self.messages is None else None
        self._to_user = self.chat.ids_after(self.chat.to_user)
        self._to_assistant = self.chat.ids_after(self.chat.to_assistant)

    def run(
        self,
        progress: Callable[[int, int, int], object] = lambda *_: None,
        *,
        part: int = 0,
        of: int = 1,
        minutes: float = inf,
    ) -> None:
        """Generates the missing shards.

        Args:
            progress: called with the shards done, an estimate of the shards in all, and the number of tokens since the
                last call.
            part: index of this run's share of the shards, 0 to ``of - 1``: several processes can fill one folder.
            of: number of shares.
            minutes: time limit: no further shard is begun once the shards of this part took so long, earlier runs
                included.

        Raises:
            ShardError: if the folder was begun with other settings or holds a damaged shard.
            ValueError: if there is no such part, or a conversation has no user turn.
        """
        if not 0 <= part < of:
            raise ValueError(f"parts are numbered 0..{of - 1}, got {part}")
        recipe = asdict(self.recipe)
        del recipe["conversations"]  # a folder may grow
        manifest = {**self.provenance, "recipe": recipe, "template": self.chat.tokenizer.chat_template}
        if self.messages is not None:
            manifest["messages"] = hashlib.sha256(json.dumps(self.messages).encode()).hexdigest()
        self.folder.claim(manifest)
        mine = range(part, self.recipe.shards, of)
        clock, count = _Clock(self.folder.folder / f"minutes-{part}.json"), len(mine)
        for number, index in enumerate(mine):
            path = self.folder.path(index)
            if path.exists():
                read_shard(path)
            elif clock.minutes < minutes:
                with clock:
                    self._write(path, index, partial(progress, number, count))
                count = min(len(mine), ceil(max(1, minutes / clock.minutes) * (number + 1))) if minutes < inf else count
            else:
                break
            progress(number + 1, count, 0)

    def _write(self, path: Path, index: int, done: Callable[[int], object]) -> None:
        source = random.Random(f"{self.recipe.seed} {index}")
        first = index * self.recipe.per_shard
        count = min(self.recipe.per_shard, self.recipe.conversations - first)
        prompts = self._prompts(first, first + count, source, done)
        dialogues = [
            prompt.copy(temperature)
            for number, prompt in enumerate(prompts)
            if self._fits(len(prompt.tokens))
            for temperature in self.recipe.of_prompt(number)
        ]
        self._converse(dialogues, source, done)
        shard = pack([Conversation(one.tokens, one.roles, one.temperature) for one in dialogues], path)
        if self.store:
            self.store(shard, [one.hidden for one in dialogues if one.hidden is not None])
        write_shard(shard)

    def _prompts(self, first: int, end: int, source: random.Random, done: Callable[[int], object]) -> list[Dialogue]:
        if self.messages is not None:
            return [self._taken(messages) for messages in self.messages[first:end]]
        assert self._turns is not None
        prompts = list(self._turns.first(end - first, source, done))
        for prompt in prompts:
            prompt.follow_up = source.random() < self.recipe.follow_ups
            prompt.add(self._to_assistant, GIVEN)
        return prompts

    def _taken(self, messages: Sequence[dict[str, str]]) -> Dialogue:
        texts = {role: [m["content"] for m in messages if m["role"] == role] for role in ("system", "user")}
        if not texts["user"]:
            raise ValueError(f"a conversation has no user turn: {messages}")
        first, *users = texts["user"]
        before = self.chat.before_user(*texts["system"][:1])
        prompt = Dialogue(users)
        prompt.add(self.chat.ids(before + first + self.chat.to_assistant), GIVEN)
        return prompt

    def _converse(self, dialogues: list[Dialogue], source: random.Random, done: Callable[[int], object]) -> None:
        """Lets the target answer until no conversation has a further user turn."""
        while dialogues:
            for temperature in sorted({dialogue.temperature for dialogue in dialogues}):
                group = [dialogue for dialogue in dialogues if dialogue.temperature == temperature]
                sampling = Sampling(temperature, self.recipe.max_new_tokens)
                texts = [dialogue.tokens for dialogue in group]
                answers = self.complete(texts, sampling, source.getrandbits(31), done)
                for dialogue, answer in zip(group, answers, strict=True):
                    dialogue.add(answer.tokens, ANSWER)
                    dialogue.ended, dialogue.hidden = answer.ended, answer.hidden
            dialogues = self._asked_again(dialogues, source, done)

    def _asked_again(
        self, dialogues: list[Dialogue], source: random.Random, done: Callable[[int], object]
    ) -> list[Dialogue]:
        """Adds the next user turns; returns the conversations that got one."""
        going = [dialogue for dialogue in dialogues if dialogue.ended and dialogue.tokens[-1] in self._to_user]
        asked = self._followed_up([dialogue for dialogue in going if dialogue.follow_up], source, done)
        for dialogue in going:
            if dialogue.users:
                turn = self._after_answer(dialogue, dialogue.users.pop(0) + self.chat.to_assistant)
                if self._fits(len(dialogue.tokens) + len(turn)):
                    dialogue.add(turn, GIVEN)
                    asked.append(dialogue)
        return asked

    def _followed_up(
        self, dialogues: list[Dialogue], source: random.Random, done: Callable[[int], object]
    ) -> list[Dialogue]:
        if self._turns is None:
            return []
        room = _FOLLOW_UP + len(self._to_assistant)
        begun = [(dialogue, dialogue.tokens + self._after_answer(dialogue)) for dialogue in dialogues]
        begun = [(dialogue, text) for dialogue, text in begun if self._fits(len(text) + room)]
        turns = self._turns.go_on([text for _, text in begun], _FOLLOW_UP, source, done)
        asked = []
        for (dialogue, text), turn in zip(begun, turns, strict=True):
            dialogue.follow_up = False
            if self._turns.asks(turn):
                dialogue.add(text[len(dialogue.tokens) :], GIVEN)
                dialogue.add(turn, PROMPT)
                dialogue.add(self._to_assistant, GIVEN)
                asked.append(dialogue)
        return asked

    def _after_answer(self, dialogue: Dialogue, text: str = "") -> list[int]:
        """Returns the tokens that begin the next user turn, without the end of the answer, which is already there."""
        tokens = self.chat.ids_after(self.chat.to_user + text)
        return tokens[tokens.index(dialogue.tokens[-1]) + 1 :]

    def _fits(self, tokens: int) -> bool:
        return tokens + self.recipe.max_new_tokens <= self.recipe.max_tokens
