"""Lists the files of an export with their digests."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A file that was written.

    Args:
        name: path inside the folder, with ``/``.
        size: bytes.
        sha256: hexadecimal digest.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Export:
    """The folder of a finished export.

    Args:
        folder: path of the folder.
        files: every file in it, by name.
        parity: results of the comparison with the original before writing, by the name of the check; empty if the
            weights are only copied.
    """

    folder: Path
    files: list[File]
    parity: dict[str, float | bool] = field(default_factory=dict)


def contents(folder: str | os.PathLike[str]) -> list[File]:
    """Lists every file below a folder, by name, with its size and digest."""
    root = Path(folder)
    files = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        files.append(File(path.relative_to(root).as_posix(), path.stat().st_size, digest))
    return files
