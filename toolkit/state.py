"""What changes while a batch is decoded.

Shapes: B samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arbordraft.huggingface import Stopping
from arbordraft.metrics import DecodeStats
from arbordraft.processors import Warp
from arbordraft.sampling import SharedSource
from arbordraft.target.cache import RaggedKVCache

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass
class DecodeState:
    """A batch between two steps. Every list has one entry per sample.

    Args:
        tokens: committed tokens, prompt included, padding not.
        budget: tokens a sample may still emit; 0 when it is finished.
        padding: left padding that the caller's batch has in front of the prompt.
        handles: the samples in the target's cache.
        cache: the target's cache; it holds all committed tokens but the last.
        drafts: the drafter's own state.
        generators: sources of noise.
        shared: source of the noise that target and drafter share.
        warp: the request's logits processors.
        greedy: whether the target decodes at temperature 0.
        stopping: the request's stopping criteria.
        stats: what is counted.
        memory: what the decider remembers of each sample.
        streamers: receivers of committed tokens; none if empty.
        failures: why samples were given up.
        following: ``[V]`` target row behind the committed tokens of a sample, for decoders that draft from it.
    """

    tokens: list[list[int]]
    budget: list[int]
    padding: list[int]
    handles: list[int]
    cache: RaggedKVCache
    drafts: Any
    generators: Sequence[np.random.Generator]
    shared: SharedSource
    warp: Warp
    greedy: bool
    stopping: Stopping
    stats: DecodeStats
    memory: list[Any]
    streamers: "Sequence[BaseStreamer]" = ()
    failures: dict[int, str] = field(default_factory=dict)
    following: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def active(self) -> list[int]:
        """Samples that are not finished."""
        return [sample for sample, budget in enumerate(self.budget) if budget > 0]

    def path(self, sample: int, drafted: Sequence[int] = ()) -> list[int]:
        """A sample's own tokens with drafted ones behind: what logits processors and stopping criteria are told."""
        return [*self.tokens[sample], *drafted]

    def append(self, sample: int, tokens: Sequence[int]) -> int:
        """Commits tokens one by one until the sample ends; returns how many."""
        kept = 0
        for token in tokens[: self.budget[sample]]:
            self.tokens[sample].append(token)
            self.budget[sample] -= 1
            kept += 1
            if self.stopping(token, lambda: self.path(sample)):
                self.budget[sample] = 0
                break
        self.stream(sample, tokens[:kept])
        return kept

    def stream(self, sample: int, tokens: Sequence[int]) -> None:
        """Hands committed tokens to the sample's streamer."""
        if self.streamers:
            self.streamers[sample].put(torch.tensor(tokens))
