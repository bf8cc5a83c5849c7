"""Token shards: sequences with the role of every token, packed into safetensors files.

Shapes: S sequences, N tokens of all of them.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arbordraft.utils.files import new_file, write_text

GIVEN, ANSWER, PROMPT = 0, 1, 2  # roles: text of others, the target's answers, user turns that the target wrote
MANIFEST = "manifest.json"
_KEPT = "the files before it are kept, and the same command goes on after them"
_AGAIN = "delete it and run the same generation again"


class ShardError(ValueError):
    """A shard is missing, empty, damaged, or made with other settings."""


class Conversation(NamedTuple):
    """One sequence.

    Args:
        tokens: its tokens.
        roles: role of each token: ``GIVEN``, ``ANSWER`` (its end token included) or ``PROMPT``.
        temperature: temperature at which the answers were drawn, 0 for greedy.
    """

    tokens: list[int]
    roles: list[int]
    temperature: float


@dataclass(frozen=True, eq=False)
class Shard:
    """The sequences of one file.

    Args:
        tokens: ``[N]`` int32.
        roles: ``[N]`` uint8.
        offsets: ``[S + 1]`` int64; sequence s is ``offsets[s]:offsets[s + 1]``.
        temperatures: ``[S]`` float32.
        path: path of the file.
    """

    tokens: Tensor
    roles: Tensor
    offsets: Tensor
    temperatures: Tensor
    path: Path

    def __len__(self) -> int:
        return len(self.temperatures)

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens, as int64, and the roles of one sequence."""
        span = slice(*self.offsets[index : index + 2].tolist())
        return self.tokens[span].long(), self.roles[span]

    @property
    def digest(self) -> str:
        hasher = hashlib.sha256()
        for name, tensor in self.tensors().items():
            hasher.update(name.encode() + str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
        return hasher.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name, as they are stored."""
        return {name: getattr(self, name) for name in ("tokens", "roles", "offsets", "temperatures")}


def pack(conversations: Sequence[Conversation], path: Path) -> Shard:
    """Concatenates sequences into a shard.

    Raises:
        ShardError: if there are no sequences.
        ValueError: if a sequence does not have one role per token.
    """
    if not conversations:
        raise ShardError(
            f"{path} would be empty: none of its prompts was usable and left room for an answer; raise max_tokens or "
            "per_shard, or take other prompts"
        )
    if any(len(conversation.tokens) != len(conversation.roles) for conversation in conversations):
        raise ValueError("a conversation needs one role per token")
    lengths = torch.tensor([0, *(len(conversation.tokens) for conversation in conversations)])
    return Shard(
        torch.tensor([token for c in conversations for token in c.tokens], dtype=torch.int32),
        torch.tensor([role for c in conversations for role in c.roles], dtype=torch.uint8),
        lengths.cumsum(0),
        torch.tensor([c.temperature for c in conversations], dtype=torch.float32),
        path,
    )


def write_shard(shard: Shard) -> None:
    """Writes a shard with its digest; the file appears only when it is complete."""
    write_tensors(shard.tensors(), shard.path, {"digest": shard.digest})


def read_shard(path: Path) -> Shard:
    """Reads and verifies a shard.

    Raises:
        ShardError: if it is missing, empty or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            stored = (file.metadata() or {}).get("digest")
            shard = Shard(**{name: file.get_tensor(name) for name in file.keys()}, path=path)  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        raise ShardError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    if len(shard) == 0 or len(shard.tokens) == 0:
        raise ShardError(f"{path} holds no tokens; {_AGAIN}")
    if shard.digest != stored:
        raise ShardError(f"{path} is damaged: its contents do not match its digest; {_AGAIN}")
    return shard


def read_rows(path: Path, names: Sequence[str], spans: Sequence[tuple[int, int]]) -> Iterator[list[Tensor]]:
    """Yields the rows ``start:end`` of some tensors of a safetensors file, reading nothing else.

    A mapped file would be read ahead, by megabytes on some disks: mostly rows that are not wanted now.

    Yields:
        The rows of every span, for one tensor after the other.

    Raises:
        ShardError: if the file is shorter than it says.
    """
    with safe_open(path, "pt") as known, path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name in names:
            kind = known.get_slice(name)[:0]
            width = kind.shape[1:].numel()
            begin, chunks = 8 + size + header[name]["data_offsets"][0], []
            for start, end in spans:
                rows = torch.empty(end - start, *kind.shape[1:], dtype=kind.dtype)
                file.seek(begin + start * width * kind.itemsize)
                if file.readinto(rows.view(torch.uint8).numpy().data) != rows.nbytes:
                    raise ShardError(f"{path} ended while it was read; {_AGAIN}")
                chunks.append(rows)
            yield chunks


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, which appears only when it is complete; for errors see ``files.new_file``."""
    with new_file(path, _KEPT) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, dict(metadata))


class ShardFolder:
    """A folder of shards that were all made with the same settings.

    Args:
        folder: created by :meth:`claim` if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, manifest: Mapping[str, Any]) -> None:
        """Starts or resumes a generation.

        Raises:
            ShardError: if the folder was begun with other settings; the message names the first that differs.
            WriteError: if it cannot be written.
        """
        path = self.folder / MANIFEST
        if not path.exists():
            if self._paths():
                raise ShardError(f"{self.folder} holds shards but no {MANIFEST}; choose another folder")
            write_text(path, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        wanted, stored = (dict(_settings(made)) for made in (json.loads(json.dumps(manifest)), self.manifest()))
        for name in sorted({*wanted, *stored}):
            if wanted.get(name) != stored.get(name):
                raise ShardError(
                    f"{self.folder} was begun with another {name}: {stored.get(name)!r:.200} instead of "
                    f"{wanted.get(name)!r:.200}; choose another folder, or the old settings to resume"
                )

    def manifest(self) -> dict[str, Any]:
        """Reads the settings with which the shards were made.

        Raises:
            ShardError: if the folder has no readable manifest.
        """
        try:
            return dict(json.loads((self.folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ShardError(
                f"{self.folder} has no readable {MANIFEST} ({error}), so nothing tells how its shards were made; "
                "generate into another folder"
            ) from error

    def path(self, index: int) -> Path:
        return self.folder / f"tokens-{index:05d}.safetensors"

    def hidden_path(self, shard: Shard) -> Path:
        return shard.path.with_name(shard.path.name.replace("tokens-", "hidden-"))

    def shards(self) -> Iterator[Shard]:
        """Reads all shards, in order, and verifies them.

        Raises:
            ShardError: if there are none, or one is damaged.
        """
        paths = self._paths()
        if not paths:
            raise ShardError(f"{self.folder} holds no token shards; generate them first")
        return map(read_shard, paths)

    def digest(self) -> str:
        return hashlib.sha256("".join(shard.digest for shard in self.shards()).encode()).hexdigest()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("tokens-*.safetensors"))


def _settings(manifest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested settings, with their names joined by dots."""
    for name, value in manifest.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
