"""Chooses settings of a training by the sizes of the target and the memory and disk that are free.

The settings bound the peak of memory. Generation holds a batch of texts and the hidden states of a shard. Training
holds a drafter with its optimizer and one batch. Each takes at most half of the memory that the target leaves free.
"""

import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from arbordraft.kernels.machine import available_memory
from arbordraft.training.distillation import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LR, _LR_SIZE = 2.5e-3, 576  # learning rate, and the hidden size for which it was tried
_HEAD = 8  # draft tokens per hidden unit: the head then costs about as much as the layer
_STATES = 4  # hidden states that are kept per token: three to read, and the input of the target's head
_SCORE = 16  # bytes per text and token of the vocabulary: scores, probabilities and noise of a draw
_ANSWER = 384  # tokens of a conversation, prompt included: twice the usual number
_UNROLLED = 4  # drafting steps whose activations are kept for the gradient
_HOUR = 4_000_000  # tokens: more than a small model generates on a CPU in an hour


@dataclass(frozen=True)
class Sizes:
    """Settings that bound the memory of a training.

    Args:
        vocabulary: tokens that can be drafted.
        lr: highest learning rate.
        generation_batch: texts that are continued at a time.
        per_shard: prompts per shard, whose hidden states are in memory together.
        batch_tokens: tokens of a training batch.
        cache: whether the disk has room for the hidden states of an hour's text.
    """

    vocabulary: int
    lr: float
    generation_batch: int
    per_shard: int
    batch_tokens: int
    cache: bool

    @classmethod
    def of(cls, model: "PreTrainedModel", memory: int, disk: int) -> "Sizes":
        """Chooses sizes for a target, with conversations of the default lengths of :class:`Recipe`.

        Args:
            model: the target.
            memory: free bytes where the target runs, beside its own weights.
            disk: free bytes for data.

        Raises:
            ValueError: if there is too little memory.
        """
        recipe, config = Recipe(), model.config.get_text_config()
        words, size = model.get_output_embeddings().weight.shape
        heads = config.num_attention_heads
        kv = (getattr(config, "num_key_value_heads", None) or heads) * (
            getattr(config, "head_dim", None) or size // heads
        )
        inner = getattr(config, "intermediate_size", None) or 4 * size
        vocabulary = min(words, 1 << (_HEAD * size - 1).bit_length())
        states = _STATES * size * model.dtype.itemsize
        text = recipe.max_tokens * (2 * config.num_hidden_layers * kv * model.dtype.itemsize + states) + _SCORE * words
        shard = 2 * recipe.answers * _ANSWER * states  # once in pieces, once as a file
        drafter = 16 * (vocabulary * size + 8 * size**2 + 3 * size * inner)  # weights, gradients, two moments
        token = 4 * _UNROLLED * (12 * size + 4 * inner)
        sizes = cls(
            vocabulary=vocabulary,
            lr=min(_LR, _LR * (_LR_SIZE / size) ** 0.5),
            generation_batch=_power(memory // 4 // text, 128),
            per_shard=_power(memory // 4 // shard, 256),
            batch_tokens=min(3072, (memory // 2 - drafter) // token // 512 * 512),
            cache=disk // 2 > _HOUR * states,
        )
        if min(sizes.generation_batch, sizes.per_shard) < 1 or sizes.batch_tokens < recipe.max_tokens:
            least = max(4 * text, 4 * shard, 2 * (drafter + token * recipe.max_tokens))
            raise ValueError(
                f"{memory / 1e9:.1f} GB of memory are free beside the target, and training for it takes at least "
                f"{least / 1e9:.1f} GB: free some, or take a machine with more"
            )
        return sizes


def _power(room: int, most: int) -> int:
    """Returns the largest power of two that exceeds neither number; 0 if ``room`` is 0."""
    return min(most, 1 << room.bit_length() >> 1)


def free_memory(model: "PreTrainedModel") -> int:
    """Returns the free bytes where a target will run, less the bytes that the target will take.

    Raises:
        ValueError: if the system does not report its free memory.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if torch.cuda.is_available():
        return max(0, torch.cuda.mem_get_info()[0] - weights)
    room = available_memory()
    if room is None:
        raise ValueError("this system does not say how much memory is free: train with 'train drafter fit' instead")
    return max(0, room - 2 * weights)  # on a CPU, kernels read a repacked copy


def free_disk(folder: Path) -> int:
    """Returns the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def peak_memory() -> int:
    """Returns the peak of this process's memory in bytes; of its GPU memory if there is a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # there ru_maxrss begins with the memory of the parent process
        status = Path("/proc/self/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
