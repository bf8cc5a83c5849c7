"""Prompts for trials and measurements, written for this project.

Shapes: B prompts, L columns.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.decoding.text import encode, settings_of, user_turn
from arbordraft.utils.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTICE = (
    "The valley library opens at nine. The valley library closes at six. On Mondays the valley library opens at nine "
    "and closes at noon. On Sundays the valley library is closed. Members of the valley library may borrow five "
    "books. Guests of the valley library may borrow one book."
)
_CLASS = (
    "class Account:\n"
    "    def get_name(self):\n        return self.name\n\n"
    "    def get_owner(self):\n        return self.owner\n\n"
    "    def get_balance(self):\n        return self.balance\n"
)


def _copy(what: str, lines: Iterable[str], tag: str = "") -> str:
    passage = "\n".join(lines)
    return f"Repeat this {what} exactly as it is:\n\n" + (f"<{tag}>\n{passage}\n</{tag}>" if tag else passage)


_GALLERY = _copy(
    "HTML gallery", (f'<img src="/photos/holiday{n}.jpg" alt="Holiday {n}" width="200">' for n in range(1, 8)), "div"
)
_REQUESTS = _copy("server log", (f"192.168.0.{n} - GET /index.html HTTP/1.1 - 200 OK - 512 bytes" for n in range(1, 9)))
_TOWNS = ("Lisbon", "Porto", "Braga", "Coimbra", "Faro")

# Answers copy from the prompt, so lookups should pay.
REPEATING = (
    _copy("HTML list", (f'<li class="entry"><a href="/page{n}.html">Page {n}</a></li>' for n in range(1, 8)), "ul"),
    _copy(
        "weather log",
        (
            f"2031-05-0{day} station {name}: temperature {18 + day} C, wind {day} m/s, sky clear"
            for day in range(1, 4)
            for name in ("north", "south", "harbour")
        ),
    ),
    _copy(
        "HTML table",
        (f'<tr><td class="name">sensor {n}</td><td class="unit">celsius</td><td>active</td></tr>' for n in range(1, 7)),
        "table",
    ),
    _copy(
        "XML document",
        (f"<city><id>{n}</id><name>{_TOWNS[n - 1]}</name><country>Portugal</country></city>" for n in range(1, 6)),
        "cities",
    ),
    _copy("HTML menu", (f'<option value="size{n}">Size {n} of the shoe</option>' for n in range(30, 38)), "select"),
    _copy("style sheet", (f".column{n} {{ margin: 10px; padding: 5px; color: black; }}" for n in range(1, 8))),
    _REQUESTS,
    _GALLERY,
)

# Answers are new text, so a drafter without a model should rest.
VARIED = (
    "Describe the smell of a bakery at dawn to somebody who has never been awake that early.",
    "Why do leaves change their colour in autumn? Explain it to a ten-year-old.",
    "Write the opening paragraph of a detective story that is set on a research ship.",
    "What should I consider before I adopt an old dog from a shelter?",
    "Compare learning to play the violin with learning to cook.",
    "Invent a holiday that celebrates forgotten inventions and describe how a town spends the day.",
    "Explain how a bill becomes a law, in plain language.",
    "Give me advice for a first conversation with a new neighbour who seems shy.",
)

# Chat, code and repetitive passages, of different lengths.
MIXED = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    f"Summarise this notice in two sentences:\n\n{_NOTICE}",
    "Explain in simple words why the sky is blue.",
    f"Repeat this Python class and add a method get_city in the same style:\n\n{_CLASS}",
    _REQUESTS,
    "Give three tips for a good night's sleep.",
    _GALLERY,
)


def read_prompts(path: Path) -> list[str]:
    """Reads the first user turns from a file with one JSON object per line.

    Args:
        path: file whose lines hold ``messages`` as chat APIs take them, or ``turns``, a list of texts, as in MT-Bench.

    Raises:
        ValueError: if a line holds neither, or the file is not UTF-8.
    """
    return [prompt for _, prompt in _entries(path)]


def read_categories(path: Path) -> dict[str, list[str]]:
    """Reads the first user turns from a file as :func:`read_prompts` does, by the ``category`` of their lines.

    Raises:
        ValueError: see :func:`read_prompts`; also if a line has no category.
    """
    found: dict[str, list[str]] = {}
    for number, (category, prompt) in enumerate(_entries(path), 1):
        if not isinstance(category, str) or not category:
            raise ValueError(f'prompt {number} of {path} has no "category": measure without --categories')
        found.setdefault(category, []).append(prompt)
    return found


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    """Yields the category, or ``None``, and the first user turn of every line that is not empty."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            users = (message["content"] for message in entry.get("messages", ()) if message["role"] == "user")
            prompt = entry["turns"][0] if "turns" in entry else next(users)
            if not isinstance(prompt, str):
                raise TypeError("a turn is no text")
        except (ValueError, AttributeError, LookupError, TypeError, StopIteration) as error:
            raise ValueError(
                f'{path}:{number} is not {{"messages": [{{"role": "user", "content": ...}}]}} or {{"turns": [...]}}'
            ) from error
        yield entry.get("category"), prompt


def left_padded(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Pads tokenized prompts to ``input_ids`` and ``attention_mask``, both ``[B, L]``."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
    }


def chat_batch(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]) -> dict[str, Any]:
    """Builds a left-padded batch of single-turn chats, or of plain texts if the tokenizer has no chat template.

    Returns:
        ``input_ids`` and ``attention_mask``, both ``[B, L]``.

    Raises:
        ValueError: if a prompt has no tokens.
    """
    return left_padded(
        [
            encode(tokenizer, user_turn(prompt, None), raw=False, name=f"prompt {number}")
            for number, prompt in enumerate(prompts, 1)
        ]
    )


def chat_batches(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], batch: int) -> list[dict[str, Any]]:
    """Builds left-padded batches of ``batch`` prompts each, as :func:`chat_batch` does."""
    return [chat_batch(tokenizer, prompts[first : first + batch]) for first in range(0, len(prompts), batch)]


def plain_request(temperature: float, new_tokens: int) -> dict[str, Any]:
    """Returns ``generate`` arguments that sample from the whole vocabulary, or decode greedily at temperature 0."""
    return settings_of(new_tokens, temperature, 1.0, 0, None, 1)


def check_texts(prompts: Sequence[str]) -> None:
    """Raises TypeError unless ``prompts`` is a list of texts, and ValueError if it is empty."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError("prompts must be a list of texts")
    if not prompts:
        raise ValueError("prompts must hold at least one text to measure with, got none")
