"""Computes and caches the target's hidden states of conversations, for drafters to read and for rows to imitate.

Shapes: n tokens of a sequence, N of a shard, F input features side by side, H hidden size, V vocabulary, R rows.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from arbordraft import RaggedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.training.shards import Shard, ShardError, ShardFolder, read_rows, write_tensors

_BATCH = 16  # sequences that are run at a time
_ROWS = 64  # rows of logits over the whole vocabulary that are in memory at a time
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to a row's norm; half precision rounds far more


class Features(NamedTuple):
    """The target's hidden states of one sequence and the normalisers of its rows; the last token has none.

    Args:
        inputs: ``[n - 1, F]`` hidden states that the drafter reads.
        final: ``[n - 1, H]`` outputs of the final norm, from which the head computes the rows to imitate.
        normalisers: ``[n - 1]`` log-sum-exp of these rows over the whole vocabulary. With it, a part of a row has the
            probabilities that it has in decoding.
    """

    inputs: Tensor
    final: Tensor
    normalisers: Tensor


class TeacherHead(nn.Module):
    """The target's output head: computes logits from outputs of the final norm.

    Args:
        target: the model.

    Raises:
        ValueError: if the model computes logits by more than projecting and capping, or reads other weights.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, target: RaggedModel) -> None:
        super().__init__()
        head = target.model.get_output_embeddings()
        self.register_buffer("weight", head.weight.detach(), persistent=False)
        self.register_buffer("bias", None if head.bias is None else head.bias.detach(), persistent=False)
        self.softcap: float | None = getattr(target.model.config.get_text_config(), "final_logit_softcapping", None)
        self._check(target)

    def forward(self, final: Tensor) -> Tensor:
        """Computes ``[R, V]`` logits of ``[R, H]``, multiplied as the target does, in float32 at least."""
        with torch.autocast(final.device.type, enabled=False):
            logits = functional.linear(final.to(self.weight.dtype), self.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.bias is None else logits + self.bias
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def part(self, tokens: Tensor | None) -> "TeacherHead":
        """Returns the head of only ``[D]`` tokens, or the whole head for ``None``."""
        if tokens is None:
            return self
        part = copy(self)
        part._buffers = {name: rows if rows is None else rows[tokens] for name, rows in self._buffers.items()}
        return part

    @torch.no_grad()
    def normalisers(self, final: Tensor) -> Tensor:
        """Computes ``[R]`` log-sum-exp of the logits of ``[R, H]``, in float32 at least, a few rows at a time."""
        found = final.new_empty(len(final), dtype=torch.promote_types(self.weight.dtype, torch.float32))
        for rows, out in zip(final.split(_ROWS), found.split(_ROWS), strict=True):
            torch.logsumexp(self(rows), dim=-1, out=out)
        return found

    def _check(self, target: RaggedModel) -> None:
        cache = RaggedKVCache()
        tokens = torch.arange(4) % target.vocab_size
        logits, final = target.run(
            tokens, cache.lay_out([cache.open(4)], [range(4)]), cache, hidden=(target.num_layers,)
        )
        if not _close(self(final), logits, half=0.03):
            raise ValueError(
                f"{type(target.model).__name__} does something unknown to its logits after the output layer, or does "
                "not read that layer as it is (int8): drafters would learn wrong rows"
            )


class FreshFeatures:
    """Computes features on demand.

    Args:
        target: the model.
        layers: hidden states that the drafter reads, as transformers numbers them.
    """

    def __init__(self, target: RaggedModel, layers: Sequence[int]) -> None:
        self.target = target
        self.layers = tuple(layers)
        self.head = TeacherHead(target)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Features]:
        """Computes the features of several sequences, in one unpadded batch."""
        cache = RaggedKVCache()
        handles = [cache.open(len(tokens)) for tokens in sequences]
        known = {handle: tokens[:-1] for handle, tokens in zip(handles, sequences, strict=True)}
        states = self.target.prefill(known, cache, hidden=(*self.layers, self.target.num_layers))
        return self.split([states[handle] for handle in handles])

    def read(self, shard: Shard, sequences: Sequence[int]) -> list[Features]:
        """Computes the features of some sequences of a shard, a few at a time."""
        texts = [shard.sequence(number)[0].tolist() for number in sequences]
        return [found for start in range(0, len(texts), _BATCH) for found in self(texts[start : start + _BATCH])]

    def split(self, states: Sequence[Tensor]) -> list[Features]:
        """Splits ``[n - 1, F + H]`` states of several sequences into features."""
        if not states:
            return []
        width = self.head.weight.shape[1]
        inputs, finals = [rows[:, :-width] for rows in states], [rows[:, -width:] for rows in states]
        # In one call: the few numbers kept of each sequence would lie where rows of logits were. The next rows would
        # not fit there any more, and memory would grow by them.
        normalisers = self.head.normalisers(torch.cat(finals)).split([len(rows) for rows in finals])
        return [Features(*parts) for parts in zip(inputs, finals, normalisers, strict=True)]


class CachedFeatures:
    """Features of all sequences of a folder, from files beside its shards.

    Args:
        folder: folder of the shards.
        layers: hidden states that the drafter reads, as transformers numbers them; files may hold more of them.
    """

    def __init__(self, folder: ShardFolder, layers: Sequence[int]) -> None:
        self.folder = folder
        self.layers = tuple(layers)

    def write(self, shard: Shard, features: Sequence[Features]) -> None:
        """Stores the features of all sequences of a shard.

        Raises:
            ShardError: if they do not fit its sequences.
        """
        lengths = shard.offsets.diff().tolist()
        if [len(sequence.inputs) + 1 for sequence in features] != lengths:
            raise ShardError(f"{len(features)} sequences of features do not fit the sequences of {shard.path}")
        # The row that the last token lacks is filled, so that one list of offsets serves both files.
        columns = [
            torch.cat([part for rows in parts for part in (rows, rows.new_zeros(1, *rows.shape[1:]))])
            for parts in zip(*features, strict=True)
        ]
        layers = ",".join(map(str, self.layers))
        metadata = {"digest": shard.digest, "layers": layers}
        write_tensors(dict(zip(Features._fields, columns, strict=True)), self.folder.hidden_path(shard), metadata)

    def complete(self, shard: Shard) -> bool:
        """Tells whether all features of a shard are stored.

        Raises:
            ShardError: if the file cannot be read, belongs to other text, or lacks a hidden state that is read.
        """
        path = self.folder.hidden_path(shard)
        if not path.exists():
            return False
        try:
            with safe_open(path, "pt") as file:
                digest, layers = (file.metadata() or {}).get("digest"), _layers(file)
                rows, stored = file.get_slice("inputs").get_shape()[0], set(file.keys())
        except (OSError, SafetensorError) as error:
            raise ShardError(f"{path} cannot be read ({error}); delete it to compute it again") from error
        if digest != shard.digest or rows != len(shard.tokens):
            raise ShardError(f"{path} holds hidden states of other text; delete it to compute it again")
        if not {*self.layers} <= {*layers}:
            raise ShardError(
                f"{path} holds hidden states {layers}, the drafter reads {self.layers}; delete it to compute it again"
            )
        return stored >= {*Features._fields}

    def read(self, shard: Shard, sequences: Sequence[int]) -> list[Features]:
        """Reads the features of some sequences of a shard."""
        spans = [(int(shard.offsets[s]), int(shard.offsets[s + 1]) - 1) for s in sequences]
        path = self.folder.hidden_path(shard)
        with safe_open(path, "pt") as file:
            layers = _layers(file)
        features = [Features(*parts) for parts in zip(*read_rows(path, Features._fields, spans), strict=True)]
        if layers == self.layers:
            return features
        wanted = [layers.index(layer) for layer in self.layers]
        return [f._replace(inputs=f.inputs.unflatten(1, (len(layers), -1))[:, wanted].flatten(1)) for f in features]

    def bytes_per_token(self, target: RaggedModel) -> int:
        """Returns the bytes that a token takes on disk."""
        width, dtype = target.model.get_output_embeddings().weight.shape[1], target.model.dtype
        return (len(self.layers) + 1) * width * dtype.itemsize + torch.promote_types(dtype, torch.float32).itemsize

    def check(self, shard: Shard, sequences: Sequence[int], fresh: FreshFeatures) -> None:
        """Compares cached features with a fresh forward.

        Raises:
            ShardError: if they differ by more than rounding.
        """
        pairs = zip(self.read(shard, sequences), fresh.read(shard, sequences), strict=True)
        for sequence, (cached, wanted) in zip(sequences, pairs, strict=True):
            # The cache may come from a device with another default type. Normalisers have full precision, but are only
            # as exact as the states that they come from.
            coarser = max(cached.final.dtype, wanted.final.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            for name, ours, theirs in zip(Features._fields, cached, wanted, strict=True):
                if not _close(ours, theirs.cpu().to(coarser)):
                    raise ShardError(
                        f"{self.folder.hidden_path(shard)}: cached {name} of sequence {sequence} differ from a fresh "
                        "forward of this target; delete the file to compute it again"
                    )


def _layers(file: Any) -> tuple[int, ...]:
    """Returns the numbers of the hidden states in an open file."""
    return tuple(int(layer) for layer in (file.metadata() or {}).get("layers", "").split(",") if layer)


def _close(actual: Tensor, expected: Tensor, half: float = 0.1) -> bool:
    """Tells whether two tensors are equal up to rounding, row by row."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.reshape(len(actual), -1), expected.reshape(len(expected), -1)
    error, size = (actual.double() - expected.double()).norm(dim=-1), expected.double().norm(dim=-1)
    return bool((error <= _ROUNDING.get(expected.dtype, half) * size).all())
