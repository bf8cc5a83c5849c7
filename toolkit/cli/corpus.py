"""Fills the text pool of lookups from files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arbordraft.drafters.text_pool import TextPool
from arbordraft.kernels.progress import phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POOL = ".safetensors"


def fill(pool: TextPool, paths: Sequence[Path], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Adds the texts of files, of folders with their subfolders, and of saved pools to a pool.

    Args:
        pool: pool to fill.
        paths: files and folders. In folders, hidden files and files without text are skipped.
        tokenizer: tokenizer of the target.

    Raises:
        ValueError: if a named file is neither text nor a pool, or if the pool stays empty.
    """
    for path in paths:
        with phase(f"reading the texts of {path}"):
            _add(pool, path, tokenizer)
    if not len(pool):
        raise ValueError(f"--corpus {', '.join(map(str, paths))}: there is no text of more than {pool.shortest} tokens")


def _add(pool: TextPool, path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    if path.suffix == _POOL:
        pool.extend(TextPool.load(path).texts())
        return
    for file in _files(path):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if file == path:
                raise ValueError(f"--corpus {path}: it is no text in UTF-8 ({error})") from error
            continue
        pool.add(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file


__all__ = ["fill"]
