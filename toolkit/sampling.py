"""From logits to probabilities, and from probabilities and noise to tokens.

Shapes: B samples, N topology nodes, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.checks import whole
from arbordraft.kernels import choice
from arbordraft.kernels.verify import lowest_kept

if TYPE_CHECKING:
    from transformers import LogitsProcessor, LogitsProcessorList

# Processors that look at the scores alone: they run once over all rows. Any other one runs per row, on the
# row's path.
_PATH_FREE = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
# Those of them that are plain arithmetic with a few numbers. The others check their arguments, which takes the host,
# or index with a mask.
_STATIC = _PATH_FREE - {"EtaLogitsWarper", "SuppressTokensLogitsProcessor", "TopHLogitsWarper"}
# Processors that keep a state from call to call, or expect a second, unconditional row: the rows of a tree
# are neither a sequence nor such a pair.
_NOT_FOR_TREES = frozenset(
    {
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
# Processors that index the batch they were built for: they cannot be applied to one sample of several.
_BATCH_BOUND = frozenset(
    {
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
    }
)


class Warp:
    """Applies Hugging Face logits processors to the rows of ragged draft trees, each row along its own path.

    Args:
        processors: what ``generate()`` prepared: penalties, temperature, top-k, top-p, user-defined ones.
            They must be functions of the tokens before a row and of its scores; processors known not to be
            are refused.
        batch_size: number of samples of the batch.

    Raises:
        TypeError: if a processor cannot be called, or ``batch_size`` is no whole number.
        ValueError: if a processor keeps state between calls, or indexes the batch while there are several
            samples.
    """

    def __init__(self, processors: "LogitsProcessorList | Sequence[LogitsProcessor]", batch_size: int = 1) -> None:
        self.processors = list(processors)
        whole("batch_size", batch_size, 0)
        for processor in self.processors:
            if not callable(processor):
                raise TypeError(f"a logits processor is a function of input_ids and scores, got {processor!r}")
            names = {cls.__name__ for cls in type(processor).__mro__}
            if refused := names & _NOT_FOR_TREES:
                raise ValueError(f"{refused.pop()} cannot judge the nodes of a tree: they are not one sequence")
            if batch_size > 1 and (bound := names & _BATCH_BOUND):
                raise ValueError(f"{bound.pop()} is bound to the rows of a batch; decode one prompt at a time with it")

    @staticmethod
    def is_static(processor: "LogitsProcessor") -> bool:
        """Whether a processor looks at the scores alone, and never asks the host about them."""
        return type(processor).__name__ in _STATIC

    @property
    def constants(self) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
        """What tells lists of static processors apart: their names and numbers."""
        return tuple((type(one).__name__, tuple(sorted(vars(one).items()))) for one in self.processors)

    def __call__(self, logits: Tensor, path_of: Callable[[int], Sequence[int]]) -> Tensor:
        """Processed logits in float32 (float64 stays float64).

        Args:
            logits: ``[R, V]``, left as they are.
            path_of: token ids that precede the prediction of a row, prompt included; called only if needed.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        paths: list[Tensor] = []
        for processor in self.processors:
            if type(processor).__name__ in _PATH_FREE:  # a subclass may look at the path after all
                scores = _truncate(processor, scores)
            elif len(scores):
                paths = paths or [
                    torch.tensor([list(path_of(row))], device=scores.device) for row in range(len(scores))
                ]
                # A clone per row: processors are free to write into the scores they are given.
                rows = [processor(path, scores[i : i + 1].clone()) for i, path in enumerate(paths)]
                scores = torch.cat(rows)
        return scores


def _truncate(processor: Any, scores: Tensor) -> Tensor:
    """Applies a processor that looks at the scores alone; top-k and top-p, on a GPU, without their sorting."""
    name = type(processor).__name__
    if name in ("TopKLogitsWarper", "TopPLogitsWarper") and choice.wants_triton("truncate", scores):
        if name == "TopKLogitsWarper":
            lowest = lowest_kept(scores, processor.top_k)
        else:
            lowest = lowest_kept(scores, processor.min_tokens_to_keep, processor.top_p)
        return scores.masked_fill(scores < lowest[:, None], processor.filter_value)
    return processor(scores.new_zeros(len(scores), 1, dtype=torch.long), scores)


class SoftmaxRows:
    """The softmax of ``[T, V]`` scores, row by row, as far as somebody reads them.

    A verifier that stops at the first rejection leaves most rows of a tree alone.
    """

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self._found: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._found:
            self._found[row] = self.scores[row].softmax(dim=-1)
        return self._found[row]


@dataclass(frozen=True)
class Noise:
    """The uniforms of one step: one per sample, node and purpose, so that no draw is ever used twice.

    All are ``[B, N]`` float64 in [0, 1), indexed by topology node: ``draft`` draws the node's own token,
    ``accept`` decides about the node, ``final`` draws the recovered or bonus token if the path ends there.
    """

    draft: Tensor
    accept: Tensor
    final: Tensor

    @staticmethod
    def source(seed: int) -> np.random.Generator:
        """The generator of a request, in which every bit of its seed counts.

        It is Philox, seeded by way of numpy's ``SeedSequence``. Torch's own generator on the CPU would look at the
        lower 32 bits alone.

        Args:
            seed: 0 to 2**64 - 1.

        Raises:
            TypeError: if the seed is no whole number.
            ValueError: if it is out of range.
        """
        return np.random.Generator(np.random.Philox(whole("seed", seed, 0, 2**64 - 1)))

    @classmethod
    def draw(cls, generators: Sequence[np.random.Generator], nodes: int) -> Self:
        """Draws from one :meth:`source` per sample, always as much, so that a request's stream is its own."""
        uniforms = torch.zeros(3, len(generators), nodes, dtype=torch.float64)
        for sample, source in enumerate(generators):
            uniforms[:, sample] = torch.from_numpy(source.random((3, nodes)))
        return cls(*uniforms)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Target mass that the draft did not cover, unnormalised: ``(target - draft)+``."""
    return (target - draft).clamp_min_(0)


def draw(weights: Tensor, uniform: float) -> int:
    """Inverse-CDF draw from unnormalised weights.

    Args:
        weights: ``[V]``, non-negative with a positive sum.
        uniform: in [0, 1).

    Returns:
        A token of positive weight.

    Raises:
        ValueError: if the weights sum to zero or are not finite.
    """
    cumulative = weights.double().cumsum(0)  # in float32 a large vocabulary loses its tail
    total = cumulative[-1].item()
    if not 0 < total < math.inf:
        raise ValueError(f"cannot draw from weights with the sum {total}")
    token = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if token < len(weights):
        return token  # the sum grew at this token, so its weight is positive
    return int(weights.nonzero()[-1])  # uniform * total was rounded up to the total
