"""Texts of files in which lookups find what may come next."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arbordraft.drafters.text_pool import TextPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POOL = ".safetensors"


def fill(pool: TextPool, paths: Sequence[Path], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Adds the texts of files, of folders with all that they hold, and of saved pools.

    Args:
        pool: takes them in.
        paths: what is named. Files of folders that hold no text, and hidden ones, are left out.
        tokenizer: the target's.

    Raises:
        ValueError: if a file that was named itself holds no text, no pool, or nothing is left at all.
    """
    for path in paths:
        if path.suffix == _POOL:
            pool.extend(TextPool.load(path).texts())
            continue
        for file in _files(path):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                if file == path:
                    raise ValueError(f"--corpus {path}: it is no text in UTF-8 ({error})") from error
                continue
            pool.add(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not len(pool):
        raise ValueError(f"--corpus {', '.join(map(str, paths))}: there is no text of more than {pool.shortest} tokens")


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file


__all__ = ["fill"]
