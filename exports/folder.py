"""Folders that are written whole or not at all."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
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
    """What an export wrote.

    Args:
        folder: where.
        files: every file in it, by name.
        parity: what was measured against the original before it was written, by the name of the check; empty where
            nothing is reckoned anew.
    """

    folder: Path
    files: list[File]
    parity: dict[str, float | bool] = field(default_factory=dict)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A private folder to fill, which becomes ``path`` when the block ends without an error.

    Whatever goes wrong inside leaves no trace, and an older folder at ``path`` as it was.

    Args:
        path: the folder to be; its parents are made.
        force: replace a folder that is there.

    Raises:
        FileExistsError: if ``path`` exists and ``force`` is not given, before anything is done.
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists: name another folder, or replace it with --force (force=True)")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is no folder; only folders are replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        staging = Path(scratch, "new")
        staging.mkdir()
        yield staging
        if path.exists():
            path.rename(Path(scratch, "old"))
            try:
                staging.rename(path)
            except OSError:
                Path(scratch, "old").rename(path)
                raise
        else:
            staging.rename(path)


def contents(folder: str | os.PathLike[str]) -> list[File]:
    """Every file below a folder, by name."""
    root = Path(folder)
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found.append(File(path.relative_to(root).as_posix(), path.stat().st_size, digest))
    return found
