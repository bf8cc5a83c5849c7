"""HTML page that chats and draws every decoding step, or shows a recorded answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARK = "/* recorded */ null"


def page(recorded: Mapping[str, Any] | None = None) -> str:
    """Returns the page as one HTML file that fetches nothing but the server's answers.

    Args:
        recorded: answer to show instead of a chat, with the keys ``model``, ``exactness``, ``prompt``, ``text`` and
            ``steps`` (of a :class:`~arbordraft.serving.deltas.AnswerDelta`).
    """
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    if recorded is None:
        return text
    data = json.dumps(recorded).replace("<", "\\u003c")  # else ``</script>`` in the text would end the script
    return text.replace(_MARK, data, 1)
