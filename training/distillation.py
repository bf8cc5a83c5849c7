"""Self-distillation: conversations whose answers, and if need be whose questions, the target writes itself."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from arbordraft.training.chat import ChatFormat
from arbordraft.training.completion import Completer, Completion, Sampling
from arbordraft.training.openings import draw_opening, known_words
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

_SHORTEST_TURN = 12  # characters; less is no question
_FOLLOW_UP = 80  # most tokens of a follow-up
_QUESTION = 40  # most tokens of a question behind a text
_SENTENCE_ENDS = (".", "?", "!", ":")
_KEY = 60  # characters by which user turns are taken for the same
_PROMPTING = 0.75  # temperature of user turns: at 1 a small model's questions make little sense


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    Args:
        conversations: how many prompts in all; the only setting that may be raised later, to have more of the same.
        per_shard: prompts in one shard: what an interruption can lose.
        temperatures: at which answers are drawn; each prompt takes the next ``answers`` of them, in turn.
        answers: answers per prompt.
        max_new_tokens: longest answer.
        max_tokens: longest conversation; prompts that leave no room for an answer are left out, later turns too.
        follow_ups: share of the self-written conversations that get a second user turn.
        seed: of everything drawn.

    Raises:
        ValueError: if one is out of range, or a prompt would get the same greedy answer twice.
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
        """The temperatures of the answers to a prompt."""
        first = number * self.answers
        return [self.temperatures[turn % len(self.temperatures)] for turn in range(first, first + self.answers)]


@dataclass
class _Draft:
    """A conversation while it is written."""

    users: list[str]  # user turns still to come
    follow_up: bool = False  # the target is to write one more
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    temperature: float = 0.0
    ended: bool = False  # the last answer came to its end
    hidden: Tensor | None = None

    def add(self, tokens: Sequence[int], role: int) -> None:
        self.tokens += tokens
        self.roles += [role] * len(tokens)

    def copy(self, temperature: float) -> "_Draft":
        return _Draft([*self.users], self.follow_up, [*self.tokens], [*self.roles], temperature)


@dataclass
class SelfDistillation:
    """Writes shards of conversations; what exists already is kept, so an interrupted run goes on where it stopped.

    A conversation is over once an answer is cut off, or ends otherwise than answers do in the template.

    Args:
        chat: the target's chat format.
        complete: who continues texts.
        recipe: what to generate.
        folder: where to.
        provenance: what else made the data: target, revision, backend.
        messages: conversations whose user turns and first system message are taken; without any the target writes its
            own.
        store: called with every new shard and the hidden states of its conversations, before the shard counts as done.

    Raises:
        ValueError: if there are fewer conversations than the recipe wants, or the target cannot write its own.
    """

    chat: ChatFormat
    complete: Completer
    recipe: Recipe
    folder: ShardFolder
    provenance: dict[str, Any] = field(default_factory=dict)
    messages: Sequence[Sequence[dict[str, str]]] | None = None
    store: Callable[[Shard, list[Tensor]], object] | None = None

    def __post_init__(self) -> None:
        if self.messages is None and not self.chat.ids(self.chat.before_user()):
            raise ValueError("the chat template puts nothing before user turns, so the target cannot write any itself")
        if self.messages is not None and len(self.messages) < self.recipe.conversations:
            raise ValueError(
                f"the recipe wants {self.recipe.conversations} conversations, but only {len(self.messages)} were "
                "given; lower recipe.conversations"
            )
        self._words = known_words(self.chat.tokenizer) if self.messages is None else []
        self._to_user = self.chat.ids_behind(self.chat.to_user)
        self._to_assistant = self.chat.ids_behind(self.chat.to_assistant)

    def run(self, progress: Callable[[int, int, int], object] = lambda *_: None, *, part: int = 0, of: int = 1) -> None:
        """Generates what is missing.

        Args:
            progress: told the shards done, the shards in all, and how many tokens came since the last call.
            part: which share of the shards, 0 to ``of - 1``: several processes can fill one folder.
            of: number of shares.

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
        for number, index in enumerate(mine):
            path = self.folder.path(index)
            if path.exists():
                read_shard(path)
            else:
                self._write(path, index, partial(progress, number, len(mine)))
            progress(number + 1, len(mine), 0)

    def _write(self, path: Path, index: int, done: Callable[[int], object]) -> None:
        source = random.Random(f"{self.recipe.seed} {index}")
        first = index * self.recipe.per_shard
        count = min(self.recipe.per_shard, self.recipe.conversations - first)
        if self.messages is None:
            prompts = list(self._written(count, source, done))
        else:
            prompts = [self._taken(messages) for messages in self.messages[first : first + count]]
        drafts = [
            prompt.copy(temperature)
            for number, prompt in enumerate(prompts)
            if self._fits(len(prompt.tokens))
            for temperature in self.recipe.of_prompt(number)
        ]
        self._converse(drafts, source, done)
        shard = pack([Conversation(draft.tokens, draft.roles, draft.temperature) for draft in drafts], path)
        if self.store:
            self.store(shard, [draft.hidden for draft in drafts if draft.hidden is not None])
        write_shard(shard)

    def _taken(self, messages: Sequence[dict[str, str]]) -> _Draft:
        said = {role: [m["content"] for m in messages if m["role"] == role] for role in ("system", "user")}
        if not said["user"]:
            raise ValueError(f"a conversation has no user turn: {messages}")
        first, *users = said["user"]
        draft = _Draft(users)
        before = self.chat.before_user(*said["system"][:1])
        draft.add(self.chat.ids(before + first + self.chat.to_assistant), GIVEN)
        return draft

    def _written(self, count: int, source: random.Random, done: Callable[[int], object]) -> Iterator[_Draft]:
        before = self.chat.before_user()
        openings = [draw_opening(source, self._words) for _ in range(count)]
        begun = [self.chat.ids(before + o.text + (self.chat.to_assistant if o.around else "")) for o in openings]
        turns: dict[int, list[int]] = {}
        for limit in sorted({opening.limit for opening in openings}):
            group = [number for number, opening in enumerate(openings) if opening.limit == limit]
            group_turns = self._user_turns([begun[number] for number in group], limit, source, done)
            turns |= dict(zip(group, group_turns, strict=True))
        drafts = [_Draft([]) for _ in openings]
        asking = []
        for number, (draft, opening) in enumerate(zip(drafts, openings, strict=True)):
            if opening.around:
                text = opening.around.format(text=self.chat.text(turns[number]).strip())
                draft.add(self.chat.ids(before + text), GIVEN)  # not by the target: not in this place
                if not opening.around.endswith(("{text}", *_SENTENCE_ENDS)):
                    asking.append(draft)
            else:
                draft.add(begun[number], GIVEN)
                draft.add(turns[number], PROMPT)
        questions = self._user_turns([draft.tokens for draft in asking], _QUESTION, source, done)
        for draft, question in zip(asking, questions, strict=True):
            draft.add(question, PROMPT)
        yield from self._useful(drafts, len(self.chat.ids(before)), source)

    def _useful(self, drafts: Sequence[_Draft], start: int, source: random.Random) -> Iterator[_Draft]:
        """Those whose user turns, which begin at token ``start``, are some and have not come up before."""
        seen: set[str] = set()  # of this shard alone, so that shards do not depend on each other
        for draft in drafts:
            text = self.chat.text(draft.tokens[start:])
            key = re.sub(r"[^\w ]", "", text.lower())[:_KEY]
            if _asks(text) and key not in seen:
                seen.add(key)
                draft.follow_up = source.random() < self.recipe.follow_ups
                draft.add(self._to_assistant, GIVEN)
                yield draft

    def _user_turns(
        self, texts: Sequence[Sequence[int]], limit: int, source: random.Random, done: Callable[[int], object]
    ) -> list[list[int]]:
        """Lets the target write user turns of at most ``limit`` tokens."""
        completions = self.complete(texts, Sampling(_PROMPTING, limit), source.getrandbits(31), done)
        return [self._turn(completion) for completion in completions]

    def _turn(self, written: Completion) -> list[int]:
        """A user turn without its end, and cut behind a sentence if it came to none."""
        tokens = written.tokens[:-1] if written.ended else written.tokens
        for end, token in enumerate(tokens):
            if token in self.chat.special:
                return tokens[:end]
        if not written.ended:
            for end in range(len(tokens), len(tokens) // 2, -1):
                if self.chat.text(tokens[:end]).rstrip().endswith(_SENTENCE_ENDS):
                    return tokens[:end]
        return tokens

    def _converse(self, drafts: list[_Draft], source: random.Random, done: Callable[[int], object]) -> None:
        """Lets the target answer, as often as somebody asks."""
        while drafts:
            for temperature in sorted({draft.temperature for draft in drafts}):
                group = [draft for draft in drafts if draft.temperature == temperature]
                sampling = Sampling(temperature, self.recipe.max_new_tokens)
                answers = self.complete([draft.tokens for draft in group], sampling, source.getrandbits(31), done)
                for draft, answer in zip(group, answers, strict=True):
                    draft.add(answer.tokens, ANSWER)
                    draft.ended, draft.hidden = answer.ended, answer.hidden
            drafts = self._asked_again(drafts, source, done)

    def _asked_again(self, drafts: list[_Draft], source: random.Random, done: Callable[[int], object]) -> list[_Draft]:
        """Adds the next user turns; returns the conversations that got one."""
        going = [draft for draft in drafts if draft.ended and draft.tokens[-1] in self._to_user]
        asked = self._followed_up([draft for draft in going if draft.follow_up], source, done)
        for draft in going:
            if draft.users:
                turn = self._behind_answer(draft, draft.users.pop(0) + self.chat.to_assistant)
                if self._fits(len(draft.tokens) + len(turn)):
                    draft.add(turn, GIVEN)
                    asked.append(draft)
        return asked

    def _followed_up(self, drafts: list[_Draft], source: random.Random, done: Callable[[int], object]) -> list[_Draft]:
        room = _FOLLOW_UP + len(self._to_assistant)
        begun = [(draft, draft.tokens + self._behind_answer(draft)) for draft in drafts]
        begun = [(draft, text) for draft, text in begun if self._fits(len(text) + room)]
        turns = self._user_turns([text for _, text in begun], _FOLLOW_UP, source, done)
        asked = []
        for (draft, text), turn in zip(begun, turns, strict=True):
            draft.follow_up = False
            if _asks(self.chat.text(turn)):
                draft.add(text[len(draft.tokens) :], GIVEN)
                draft.add(turn, PROMPT)
                draft.add(self._to_assistant, GIVEN)
                asked.append(draft)
        return asked

    def _behind_answer(self, draft: _Draft, text: str = "") -> list[int]:
        """The beginning of the next user turn, less the end of the answer, which is there already."""
        tokens = self.chat.ids_behind(self.chat.to_user + text)
        return tokens[tokens.index(draft.tokens[-1]) + 1 :]

    def _fits(self, tokens: int) -> bool:
        return tokens + self.recipe.max_new_tokens <= self.recipe.max_tokens


def _asks(text: str) -> bool:
    """Whether a user turn is one: not too short, and not a few words over and over."""
    words = text.lower().split()
    return len(text.strip()) >= _SHORTEST_TURN and (len(words) <= 30 or len(set(words)) >= len(words) / 4)
