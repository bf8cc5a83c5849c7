"""Generates, keeps and loads the data that drafters learn from: the target's own conversations."""

import hashlib
import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from arbordraft import RaggedModel
from arbordraft.heads.base import fingerprint
from arbordraft.training.batches import BatchLoader, Place
from arbordraft.training.chat import ChatFormat
from arbordraft.training.completion import Completer, DecoderCompleter, ServerCompleter
from arbordraft.training.conversations import read_conversations
from arbordraft.training.distillation import Recipe, SelfDistillation
from arbordraft.training.features import CachedFeatures, FreshFeatures
from arbordraft.training.shards import ANSWER, PROMPT, Shard, ShardError, ShardFolder
from arbordraft.training.targets import Target
from arbordraft.utils.checks import check_positive

_MOST_HELD_OUT = 48  # conversations, unless a number is given
_CHECKED = 2  # cached sequences that are compared with a fresh forward


class SelfDistillationDataModule(LightningDataModule):  # type: ignore[misc]  # Lightning is not type-checked here
    """Conversations whose answers the target wrote, with the target's hidden states.

    Missing data are generated before training; an interrupted generation goes on where it stopped.

    Args:
        folder: folder of the shards, which need not exist yet.
        target: the model to imitate.
        recipe: settings of the generation; with given prompts, no more conversations than prompts.
        prompts: conversations whose user turns are answered: a JSONL file or ``hf:NAME``; by default the target writes
            its own user turns.
        server: an OpenAI-compatible API that runs the same target, for instance ``http://localhost:8000/v1``; by
            default the target runs in this process.
        server_model: the target's name on the server.
        generation_batch: texts that are continued at a time in this process.
        minutes: time for generation, all runs together: no further shard is begun after it, and training uses the
            shards that exist. By default all conversations of the recipe are generated.
        cache: whether to keep hidden states on disk; otherwise they are computed for every batch.
        batch_tokens: bound on the tokens of a batch, padding included, on every device.
        learn_prompts: whether to learn from user turns that the target wrote, too.
        validation: number of conversations that are held out, with all their answers; by default a quarter, at most 48.
        max_conversations: upper bound on the conversations to train on, for learning curves.
        seed: seed of the order and of the choice of held-out conversations.

    Raises:
        FileNotFoundError: if there is no such file of prompts.
        ValueError: if a prompt has another form than expected, or holding out would leave nothing to train on.
    """

    def __init__(
        self,
        folder: str = "arbordraft-data",
        target: Target = Target(),  # noqa: B008  (frozen)
        recipe: Recipe = Recipe(),  # noqa: B008
        prompts: str | None = None,
        server: str | None = None,
        server_model: str = "default",
        generation_batch: int = 128,
        minutes: float | None = None,
        cache: bool = True,
        batch_tokens: int = 2048,
        learn_prompts: bool = True,
        validation: int | None = None,
        max_conversations: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.folder = ShardFolder(Path(folder))
        self.spec, self.recipe, self.prompts = target, recipe, prompts
        self.minutes = math.inf if minutes is None else check_positive("minutes", minutes)
        self.server, self.server_model, self.generation_batch = server, server_model, generation_batch
        self.cache, self.batch_tokens = cache, batch_tokens
        self.learned = (ANSWER, PROMPT) if learn_prompts else (ANSWER,)
        self.validation, self.max_conversations, self.seed = validation, max_conversations, seed
        self._messages = read_conversations(prompts) if prompts else None  # read now, before the target is loaded
        self._conversations = min(recipe.conversations, len(self._messages or range(recipe.conversations)))
        self._held_out_of(self._conversations)
        self.shards: list[Shard] = []
        self._train: list[Place] = []
        self._held_out: list[Place] = []
        self._batches: BatchLoader | None = None
        self._resumed: dict[str, Any] = {}

    @cached_property
    def target(self) -> RaggedModel:
        """The target, loaded when it is first needed."""
        return self.spec.load(self.trainer.strategy.root_device if self.trainer else "cpu")

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states that the model in training reads."""
        if self.trainer is None:
            raise RuntimeError("the data module needs a trainer, whose model says which hidden states it reads")
        return tuple(self.trainer.lightning_module.hidden_layers(self.target))

    def prepare_data(self) -> None:
        """Generates missing shards and hidden states, on one process of each machine."""
        self.generate()
        if self.cache:
            self._fill_cache()

    def setup(self, stage: str) -> None:
        """Reads the shards and holds some conversations out.

        Raises:
            ShardError: if a shard is missing, damaged or made by another target.
            ValueError: if too few of the conversations were generated.
        """
        made_for = self.folder.manifest().get("target")
        if made_for != fingerprint(self.target.model):
            raise ShardError(f"{self.folder.folder} was generated by another target (fingerprint {made_for})")
        self.shards = list(self.folder.shards())
        self._train, self._held_out = self._split()
        if self.cache:
            missing = [shard.path.name for shard in self.shards if not self._cached.complete(shard)]
            if missing:
                raise ShardError(f"hidden states of {', '.join(missing)} are missing; run prepare_data() first")
            self._cached.check(self.shards[0], range(min(_CHECKED, len(self.shards[0]))), self._fresh)

    def train_dataloader(self) -> BatchLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self._batches = self._loader(self._train, self.seed, rank, world)
        if self._resumed:
            self._batches.load_state_dict(self._resumed)
            self._resumed = {}
        return self._batches

    def val_dataloader(self) -> BatchLoader:
        """Returns held-out batches in a fixed order, equal on every process."""
        return self._loader(self._held_out, None, 0, 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the order of batches, which Lightning itself forgets between two epochs."""
        return self._batches.state_dict() if self._batches is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes at a saved place; a schedule that asks for the number of batches has already made the loader."""
        if self._batches is None:
            self._resumed = state_dict
        else:
            self._batches.load_state_dict(state_dict)

    def frequent(self, count: int) -> list[int]:
        """Returns the ``count`` most frequent learned tokens, ties by id; unseen tokens fill up the list."""
        counts = torch.zeros(self.target.vocab_size, dtype=torch.int64)
        for place in self._train:
            tokens, roles = self.shards[place.shard].sequence(place.sequence)
            learned = torch.isin(roles, torch.tensor(self.learned, dtype=torch.uint8))
            counts += torch.bincount(tokens[learned], minlength=len(counts))
        return counts.argsort(descending=True, stable=True)[:count].tolist()

    def held_out_prompts(self, count: int) -> list[list[int]]:
        """Returns at most ``count`` distinct prompts: held-out conversations up to the first answer."""
        prompts: dict[tuple[int, ...], None] = {}
        for place in self._held_out:
            tokens, roles = self.shards[place.shard].sequence(place.sequence)
            prompts[tuple(tokens[: _first(roles == ANSWER)].tolist())] = None
        return [list(prompt) for prompt in prompts][:count]

    def profile(self) -> dict[str, Any]:
        """Returns the digest, the counts and the manifest of the data."""
        return {
            "digest": self.folder.digest(),
            "conversations": len(self._train) + len(self._held_out),
            "tokens": sum(len(shard.tokens) for shard in self.shards),
            "answer_tokens": sum(int((shard.roles == ANSWER).sum()) for shard in self.shards),
            "held_out": len(self._held_out),
            "manifest": self.folder.manifest(),
        }

    def description(self) -> dict[str, Any]:
        return {
            "model": self.spec.model,
            "revision": self.spec.revision,
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(self.target.model),
        }

    def generate(self, part: int = 0, of: int = 1) -> None:
        """Generates this process's share of the shards."""
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        keep = self.cache and self.server is None  # generation in this process computes them anyway
        complete: Completer
        if self.server is not None:
            complete = ServerCompleter(self.server, self.server_model, tokenizer)
        else:
            hidden = (*self.layers, self.target.num_layers) if keep else ()
            complete = DecoderCompleter(self.target, self.generation_batch, hidden)

        def store(shard: Shard, states: list[Tensor]) -> None:
            self._cached.write(shard, self._fresh.split(states))

        work = SelfDistillation(
            ChatFormat(tokenizer),
            complete,
            replace(self.recipe, conversations=self._conversations),
            self.folder,
            provenance={
                "target": fingerprint(self.target.model),
                "model": self.spec.model,
                "revision": self.spec.revision,
                "prompts": self.prompts,
            },
            messages=self._messages,
            store=store if keep else None,
        )
        with _progress("Generating") as bar:
            total = 0

            def report(done: int, shards: int, tokens: int) -> None:
                nonlocal total
                total += tokens
                # The first shard says nothing about the time: until it is done, the bar only moves.
                state = f"{total:,} tokens, {done} of {shards} shards"
                bar.update(task, completed=done, total=shards if done else None, description=state)

            task = bar.add_task("", total=None)
            work.run(report, part=part, of=of, minutes=self.minutes)

    @cached_property
    def _fresh(self) -> FreshFeatures:
        return FreshFeatures(self.target, self.layers)

    @cached_property
    def _cached(self) -> CachedFeatures:
        return CachedFeatures(self.folder, self.layers)

    def _fill_cache(self) -> None:
        """Computes the hidden states that generation did not store."""
        missing = [shard for shard in self.folder.shards() if not self._cached.complete(shard)]
        if not missing:
            return
        size = self._cached.bytes_per_token(self.target) * sum(len(shard.tokens) for shard in missing)
        with _progress(f"Caching hidden states, {size / 1e9:.1f} GB; cache: false computes them each time") as bar:
            for shard in bar.track(missing, description=f"{len(missing)} shards"):
                self._cached.write(shard, self._fresh.read(shard, range(len(shard))))

    def _loader(self, places: list[Place], seed: int | None, part: int, of: int) -> BatchLoader:
        read = self._cached.read if self.cache else self._fresh.read
        return BatchLoader(self.shards, places, read, self.batch_tokens, seed, part, of)

    def _held_out_of(self, conversations: int) -> int:
        """Returns how many conversations are held out; raises ValueError if no other is left."""
        held = max(1, min(_MOST_HELD_OUT, conversations // 4)) if self.validation is None else self.validation
        if conversations <= held:
            raise ValueError(
                f"{conversations} conversations leave nothing to train on after holding out {held}: take more "
                "(data.recipe.conversations, data.prompts), or lower data.validation"
            )
        return held

    def _split(self) -> tuple[list[Place], list[Place]]:
        """Splits the sequences into training and held-out ones; all answers to one prompt stay together.

        Shards were generated independently: a prompt that occurs in several of them counts only in the first.
        """
        groups: dict[bytes, list[Place]] = {}
        for index, shard in enumerate(self.shards):
            for sequence in range(len(shard)):
                tokens, roles = shard.sequence(sequence)
                place = Place(index, sequence, len(tokens))
                prompt = tokens[: _first(roles == ANSWER)].numpy().tobytes()
                group = groups.setdefault(hashlib.sha256(prompt).digest(), [])
                if not group or group[0].shard == index:
                    group.append(place)
        held = self._held_out_of(len(groups))
        order = sorted(groups, key=lambda key: hashlib.sha256(key + str(self.seed).encode()).digest())
        held_out, rest = order[:held], order[held:][: self.max_conversations]
        return [p for key in rest for p in groups[key]], [p for key in held_out for p in groups[key]]


def _first(marks: Tensor) -> int:
    """Returns the index of the first mark, or the length if there is none."""
    return int(marks.nonzero()[0]) if marks.any() else len(marks)


def _progress(title: str) -> Progress:
    return Progress(TextColumn(title), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
