"""The page that chats and shows what happens, or only what has happened."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARK = "/* recorded */ null"


def page(recorded: Mapping[str, Any] | None = None) -> str:
    """One file of HTML that fetches nothing but a server's answers.

    Args:
        recorded: an answer to show instead of chatting: ``model``, ``exactness``, ``prompt``, ``text`` and ``steps``,
            which are those of a :class:`~arbordraft.serving.pieces.Piece`.
    """
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    if recorded is None:
        return text
    data = json.dumps(recorded).replace("<", "\\u003c")  # or the text could end the script
    return text.replace(_MARK, data, 1)
