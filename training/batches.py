"""Batches of whole sequences for drafter training, in an order that a seed fixes and a checkpoint can resume.

Shapes: B sequences, L longest of them, F hidden states side by side, H hidden size.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arbordraft.training.features import Features
from arbordraft.training.shards import Shard

_STEP = 16  # lengths that round up to the same multiple count as equal


class Batch(NamedTuple):
    """Sequences side by side, padded on the right.

    Args:
        tokens: ``[B, L]``; padding holds 0.
        roles: ``[B, L]`` uint8, see :mod:`arbordraft.training.shards`; padding counts as given.
        temperatures: ``[B]`` temperatures at which the answers were drawn.
        inputs: ``[B, L - 1, F]`` the target's hidden states of all tokens but the last.
        final: ``[B, L - 1, H]`` inputs of the target's head at these tokens; row j predicts token j + 1.
        normalisers: ``[B, L - 1]`` log-sum-exp of the target's rows at these tokens.
    """

    tokens: Tensor
    roles: Tensor
    temperatures: Tensor
    inputs: Tensor
    final: Tensor
    normalisers: Tensor

    def learned(self, roles: Sequence[int]) -> Tensor:
        """Returns ``[B, L]`` bool: tokens of the given roles."""
        return torch.isin(self.roles, torch.tensor(roles, dtype=torch.uint8, device=self.roles.device))

    def looked_up(self) -> Tensor:
        """Returns ``[B, L]`` bool: tokens that also followed the last occurrence of the three tokens before them."""
        found, size = [], 3
        for text in self.tokens.tolist():
            following: dict[tuple[int, ...], int] = {}
            found.append([False] * min(size, len(text)))
            for at in range(size, len(text)):
                suffix = tuple(text[at - size : at])
                found[-1].append(following.get(suffix) == text[at])
                following[suffix] = text[at]
        return torch.tensor(found, device=self.tokens.device)


class Place(NamedTuple):
    """The shard of a sequence, its index there, and its length."""

    shard: int
    sequence: int
    length: int


class Segment(NamedTuple):
    """A part of an epoch that was read with batches of other sizes, or by another number of processes.

    Args:
        of: number of processes.
        batch_tokens: bound on the tokens of a batch.
        batches: number of batches that each process read.
    """

    of: int
    batch_tokens: int
    batches: int


class BatchLoader:
    """An endless supply of epochs, each in its own order, that Lightning can stop and resume anywhere.

    Sequences of one batch have similar lengths and come from the same shard, whose files are then read in one go. All
    epochs and all parts have the same number of batches. For that, some batches are split. If there are hardly more
    sequences than parts, an epoch may lack a few sequences.

    A state may be loaded with another number of parts or another ``batch_tokens``. The rest of the epoch then holds the
    sequences that its beginning did not, each once.

    Args:
        shards: the data.
        places: the sequences to take.
        features: computes or reads the features of some sequences of a shard.
        batch_tokens: bound on B x L; a longer sequence is a batch of its own.
        seed: seed of the order. With ``None`` the order never changes, and every iteration starts at the beginning.
        part: index of this loader's share of every epoch's batches, 0 to ``of - 1``.
        of: number of shares, one per process.

    Raises:
        ValueError: if there are fewer sequences than parts.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        places: Sequence[Place],
        features: Callable[[Shard, Sequence[int]], list[Features]],
        batch_tokens: int,
        seed: int | None = None,
        part: int = 0,
        of: int = 1,
    ) -> None:
        if len(places) < of:
            raise ValueError(f"{len(places)} sequences cannot be shared by {of} processes; use fewer, or more data")
        self.shards, self.places, self.features = shards, places, features
        self.batch_tokens, self.seed, self.part, self.of = batch_tokens, seed, part, of
        self.epoch = 0
        self.position = 0  # of the next batch in this epoch
        self._before: list[Segment] = []  # of this epoch
        self._whole = len(self._batches(self.places, of, batch_tokens)) // of

    def __len__(self) -> int:
        """Returns the greatest number of batches that this process has in any remaining epoch: Lightning asks once."""
        return max(self._whole, self._end)

    def __iter__(self) -> Iterator[Batch]:
        start, end = self._start, self._end
        batches = self._shuffled(self._left(), self.of, self.batch_tokens)
        for index in range(self.position, end):
            # Before the yield: a checkpoint may be written while the consumer holds the batch, and no batch follow.
            if self.seed is not None:
                self.position = index + 1
                if self.position == end:
                    self.epoch, self.position, self._before = self.epoch + 1, 0, []
            yield self.collate(batches[(index - start) * self.of + self.part])

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the order of batches, equal on every process, and the settings of the order."""
        order = {"seed": self.seed, "sequences": len(self.places), "of": self.of, "batch_tokens": self.batch_tokens}
        return {"epoch": self.epoch, "position": self.position, "before": list(map(tuple, self._before)), **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes at a saved place.

        Raises:
            ValueError: if the place is inside an epoch of other sequences or of another seed, or if its rest cannot be
                shared evenly by the processes.
        """
        self.epoch, self.position = state["epoch"], state["position"]
        self._before = [Segment(*portion) for portion in state.get("before", ())] if self.position else []
        if not self.position:
            return
        for name, ours in (("seed", self.seed), ("sequences", len(self.places))):
            if state.get(name, ours) != ours:
                raise ValueError(
                    f"the checkpoint stands in the middle of an epoch with {name} {state[name]}, not {ours}: go on "
                    "with the data that it was written with, or with a checkpoint from between two epochs"
                )
        of, batch_tokens = state.get("of", self.of), state.get("batch_tokens", self.batch_tokens)
        if (of, batch_tokens) != (self.of, self.batch_tokens):
            self._before.append(Segment(of, batch_tokens, self.position - self._start))
            batches = self._batches(self._left(), self.of, self.batch_tokens)
            if not batches or len(batches) % self.of:
                raise ValueError(
                    f"the {len(batches)} batches that are left of the epoch in the checkpoint cannot be shared evenly "
                    f"by {self.of} processes: go on with {of} processes and batches of {batch_tokens} tokens, as before"
                )
        if self.position >= self._end:
            raise ValueError(
                f"the checkpoint stands at batch {self.position} of an epoch that has {self._end}: go on with the "
                "number of processes and the data.batch_tokens that it was written with"
            )

    def collate(self, places: Sequence[Place]) -> Batch:
        shard = self.shards[places[0].shard]
        numbers = [place.sequence for place in places]
        rows = zip(*map(shard.sequence, numbers), strict=True), zip(*self.features(shard, numbers), strict=True)
        tokens, roles, *features = (pad_sequence(list(column), batch_first=True) for column in chain(*rows))
        return Batch(tokens, roles, shard.temperatures[numbers], *features)

    @property
    def _start(self) -> int:
        """Batches of each process before the last change of batch sizes or of the number of processes."""
        return sum(portion.batches for portion in self._before)

    @property
    def _end(self) -> int:
        """Batches of this process in this epoch, those before the last such change included."""
        if not self._before:
            return self._whole
        return self._start + len(self._batches(self._left(), self.of, self.batch_tokens)) // self.of

    def _left(self) -> list[Place]:
        """Returns the sequences of this epoch that were not read before the last change of batches or processes."""
        places = list(self.places)
        for of, batch_tokens, count in self._before:
            batches = self._shuffled(places, of, batch_tokens)
            places = [place for batch in batches[count * of :] for place in batch]
        return places

    def _shuffled(self, places: Sequence[Place], of: int, batch_tokens: int) -> list[list[Place]]:
        batches = self._batches(places, of, batch_tokens)
        if self.seed is not None:
            random.Random(f"{self.seed} {self.epoch}").shuffle(batches)
        return batches

    def _batches(self, places: Sequence[Place], of: int, batch_tokens: int) -> list[list[Place]]:
        """Builds the batches, ascending by shard and length; ``of`` divides their number if possible."""
        source = random.Random(f"{self.seed} {self.epoch} neighbours")
        # Only equal rounded lengths are shuffled: their sequence, and so the number of batches, is always the same.
        shuffled = [(p.shard, _rounded(p), source.random() if self.seed is not None else 0.0, p) for p in places]
        places = [entry[-1] for entry in sorted(shuffled)]
        batches: list[list[Place]] = []
        for place in places:
            last = batches[-1] if batches else []
            if last and last[0].shard == place.shard and (len(last) + 1) * _rounded(place) <= batch_tokens:
                last.append(place)
            else:
                batches.append([place])
        while len(batches) % of and len(largest := max(batches, key=len)) > 1:
            at = batches.index(largest)
            batches[at : at + 1] = largest[::2], largest[1::2]
        return batches


def _rounded(place: Place) -> int:
    return -(-place.length // _STEP) * _STEP
