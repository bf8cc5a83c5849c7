"""Reads conversations from files and datasets; keeps system messages and user turns, drops the answers."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_HUB = "hf:"
_ASKING = {"system": "system", "user": "user", "human": "user"}  # names of roles -> ours
_ANSWERING = {
    "assistant",
    "gpt",
    "model",
    "chatgpt",
    "bard",
    "bing",
    "tool",
    "function",
    "function_call",
    "observation",
}


def read_conversations(source: str | os.PathLike[str] | Iterable[Mapping[str, Any]]) -> list[list[dict[str, str]]]:
    """Reads the system and user messages of conversations.

    Every row has a list called ``messages`` or ``conversations``, of ``{"role", "content"}`` or ShareGPT's
    ``{"from", "value"}``. Rows without a user turn are left out, as are rows whose first user turn occurred before.

    Args:
        source: a JSONL file, ``hf:NAME`` or ``hf:NAME:SPLIT``, or the rows, for instance a loaded dataset. NAME is a
            dataset of the Hugging Face hub or a folder that its ``save_to_disk`` wrote. SPLIT is ``train`` by default.

    Returns:
        ``{"role", "content"}`` messages of the roles ``system`` and ``user``; answers are dropped.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if ``hf:`` is used without the library ``datasets``.
        ValueError: if a row has another form (the message names its place), or if no conversation is left.
    """
    conversations: dict[str, list[dict[str, str]]] = {}
    for place, row in _rows(source):
        try:
            messages = _messages(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if first := next((message["content"] for message in messages if message["role"] == "user"), None):
            conversations.setdefault(first, messages)
    if not conversations:
        raise ValueError(f"{_name(source)} holds no conversation in which a user says something")
    return list(conversations.values())


def _name(source: object) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else type(source).__name__


def _rows(source: str | os.PathLike[str] | Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """Yields every row with its place."""
    if isinstance(source, str) and source.startswith(_HUB):
        rows = _dataset(source.removeprefix(_HUB))
    elif isinstance(source, str | os.PathLike):
        yield from _lines(Path(source))
        return
    else:
        rows = source
    for number, row in enumerate(rows):
        yield f"{_name(source)}, row {number}", row


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; a dataset of the Hugging Face hub is called {_HUB}{path}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: every line must hold one JSON object ({error})") from error


def _dataset(name: str) -> Iterable[Mapping[str, Any]]:
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise ImportError(f"datasets cannot be imported ({error}); run: pip install 'arbordraft[train]'") from error
    split = "train"
    if ":" in name and not Path(name).is_dir():
        name, _, split = name.rpartition(":")
    if not Path(name).is_dir():
        return load_dataset(name, split=split)
    dataset = load_from_disk(name)
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(f"{name} has no split {split!r}; name one of {', '.join(dataset)}: {_HUB}{name}:SPLIT")
    return dataset[split]


def _messages(row: object) -> list[dict[str, str]]:
    """Returns the system and user messages of a row, without the space around them, which many templates drop."""
    lists = [row.get(name) for name in ("messages", "conversations")] if isinstance(row, Mapping) else []
    turns = next((turns for turns in lists if isinstance(turns, list)), None)
    if turns is None:
        raise ValueError("a row must have a list called messages or conversations")
    messages = []
    for turn in turns:
        fields = turn if isinstance(turn, Mapping) else {}
        role, content = str(fields.get("role", fields.get("from"))), fields.get("content", fields.get("value"))
        if role in _ANSWERING:
            continue
        if role not in _ASKING:
            raise ValueError(f"unknown role {role!r}; known are {', '.join([*_ASKING, *sorted(_ANSWERING)])}")
        if not isinstance(content, str):
            raise ValueError(f"the {role}'s message must be a text called content or value, not {content!r:.50}")
        if content := content.strip():
            messages.append({"role": _ASKING[role], "content": content})
    return messages
