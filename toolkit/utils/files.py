"""Atomic writes of files and folders, and one-line errors for failed writes."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = "free some space there, or name another place, and run the same command again"
_FIXES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name another place",
    errno.EIO: "check the disk, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EACCES: "name a place that you may write, or ask for the right",
    errno.EPERM: "name a place that you may write, or ask for the right",
    errno.ENAMETOOLONG: "name a shorter path",
}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # errors of the disk itself, by any library
_OBSTACLES = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)

StrPath = str | os.PathLike[str]


class WriteError(OSError):
    """A file or folder could not be written; nothing half-written is left of it.

    Args:
        path: the file or folder that was to be written.
        number: cause, as a number of ``errno``.
        kept: for the message: data that is still there, and how to continue with it.
        obstacle: the file or folder that is in the way, if there is one.
    """

    def __init__(self, path: StrPath, number: int, kept: str = "", obstacle: StrPath | None = None) -> None:
        why, fix = os.strerror(number), _FIXES.get(number, "name another path")
        if number in _OBSTACLES:
            kind = "folder, not a file" if number == errno.EISDIR else "file, not a folder"
            why, fix = f"{path if obstacle is None else obstacle} is a {kind}", "name another path"
        super().__init__("; ".join(filter(None, (f"{path} cannot be written: {why}", kept, fix))))
        self.errno = number


@contextlib.contextmanager
def new_file(path: StrPath, kept: str = "") -> Iterator[Path]:
    """Yields a private path to write, which becomes ``path`` when the block ends without an error.

    After any error, interrupts included, nothing of it remains and an older file is unchanged.

    Args:
        path: the file to create; its folder is created, too. Devices and pipes are written directly.
        kept: for the error message: data that is still there, and how to continue with it.

    Raises:
        WriteError: if the disk is full, or the path cannot be written.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file() and not final.is_dir():
        with _explained(path, final, kept):
            yield final
        return
    check_writable(path)
    partial = final.with_name(f".{final.stem[:100]}-{secrets.token_hex(4)}{final.suffix[:100]}")
    with _explained(path, partial, kept):
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            _flush(partial)
            partial.replace(final)
        finally:
            _remove(partial)


@contextlib.contextmanager
def new_folder(path: StrPath, *, force: bool = False, kept: str = "") -> Iterator[Path]:
    """Yields a private folder to fill, which becomes ``path`` when the block ends without an error.

    After any error, interrupts included, nothing of it remains and an older folder is unchanged.

    Args:
        path: the folder to create; its parents are created, too.
        force: replace an existing folder.
        kept: for the error message: data that is still there, and how to continue with it.

    Raises:
        FileExistsError: if ``path`` exists and ``force`` is not given, before anything is done.
        WriteError: if the disk is full, or the path cannot be written.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_dir():
        raise FileExistsError(f"{path} is no folder; only folders are replaced: name another path")
    if final.exists() and not force:
        raise FileExistsError(f"{path} exists: name another folder, or replace it with --force (force=True)")
    check_writable(path, folder=True)
    scratch = final.with_name(f".{final.name[:100]}-{secrets.token_hex(4)}")
    new, old = scratch / "new", scratch / "old"
    with _explained(path, scratch, kept):
        try:
            new.mkdir(parents=True)
            yield new
            for file in (file for file in new.rglob("*") if file.is_file()):
                _flush(file)
            try:
                if final.exists():
                    final.rename(old)
                new.rename(final)
            except BaseException:  # between the renames no folder is in place
                if old.exists() and not final.exists():
                    old.rename(final)
                raise
        finally:
            _remove(scratch)


def write_text(path: StrPath, text: str, kept: str = "") -> None:
    """Writes a text file as :func:`new_file` does, with the same errors."""
    with new_file(path, kept) as partial:
        partial.write_text(text, encoding="utf-8")


def read_text(path: StrPath) -> str:
    """Returns the text of a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def check_writable(path: StrPath, *, folder: bool = False) -> None:
    """Checks before hours of work that their result can be written; creates nothing.

    Args:
        path: the file to write; its parents may be missing.
        folder: check for a folder instead of a file.

    Raises:
        WriteError: if a file or folder is in the way or may not be written.
    """
    final = Path(os.path.realpath(path))
    nearest = next(place for place in (final, *final.parents) if os.path.lexists(place))
    if nearest == final and not folder and final.is_dir():
        raise WriteError(path, errno.EISDIR)
    if not nearest.is_dir() and (nearest != final or folder):
        raise WriteError(path, errno.ENOTDIR, obstacle=nearest)
    written = nearest if nearest.is_dir() or not nearest.is_file() else nearest.parent  # a file is replaced
    if not os.access(written, os.W_OK):
        raise WriteError(path, errno.EACCES)


@contextlib.contextmanager
def _explained(path: StrPath, private: Path, kept: str) -> Iterator[None]:
    """Turns errors of a disk, raised by any library, into a one-line error about ``path``."""
    try:
        yield
    except Exception as error:
        number = _number(error, private)
        if number is None:
            raise
        before = "the previous content is kept" if os.path.exists(path) else "nothing half-written is left"
        raise WriteError(path, number, kept or before, getattr(error, "filename", None)) from error


def _number(error: BaseException | None, private: Path) -> int | None:
    """Finds the errno of a failed write, also in a library's message; returns ``None`` for any other error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            # A named file must be our own, or one of its parent folders.
            place = Path(error.filename) if isinstance(error.filename, str) else None
            if place is None:
                return error.errno if error.errno in _DISK or isinstance(error, WriteError) else None
            return error.errno if private in (place, *place.parents) or place in private.parents else None
        text = str(error)
        if code := next((number for number in _DISK if os.strerror(number) in text), None):
            return code
        error = error.__cause__ or error.__context__
    return None


def _flush(file: Path) -> None:
    """Flushes a file to disk: some disks report only now that they are full, and a crash must not leave it empty."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    """Deletes a file or folder if it exists; finishes even if interrupted."""
    try:
        _delete(path)
    except KeyboardInterrupt:
        _delete(path)
        raise


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


__all__ = ["WriteError", "check_writable", "new_file", "new_folder", "read_text", "write_text"]
