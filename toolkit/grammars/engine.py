"""Access to llguidance, the engine that follows grammars: its class, its limits, its errors as sentences."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Parts of a rule, four for each optional property; three times as many take a second to compile.
_PARTS = 8_000
_STEP = 250_000  # parser items of one mask; this many take 0.1 s
_WORDS = (
    (r"Current row has (\d+) items; max is (\d+)", r"an object or a choice has too many parts: \1 items, at most \2"),
    (r"Too many items|step_max_items|max_items_in_row", "there are too many ways to go on from here"),
    (r"grammar size|too large", "it is too large"),
    (r"fuel|lexer states|too complex", "its regular expressions are too complex"),
    (r"NoExtension|no more bytes", "nothing can follow, as a rule leads to nothing but itself"),
    (r"oneOf constraints are not supported.*", "oneOf: two of its schemas may hold together"),
    (r"Unimplemented keys: \[(.*)\]", r"these keywords cannot be enforced while text is written: \1"),
    (r"Resource '([^']*)' is not present.*", r"$ref: \1 is another document, which is not fetched"),
    (r"Pointer '([^']*)' does not exist", r"$ref: \1 does not exist"),
)


class GrammarError(ValueError):
    """Raised if an answer cannot follow its grammar any further; the answer ends there."""


def matcher_class() -> "type[LLMatcher]":
    """Returns the engine's class.

    Raises:
        ModuleNotFoundError: if the extra ``grammar`` is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("grammars need llguidance: pip install 'arbordraft[grammar]'") from error
    return LLMatcher


def limits() -> Any:
    """Returns the engine's limits: high enough for wide schemas, low enough that no mask delays a batch for long."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=_PARTS, step_max_items=_STEP, verbose_errors=False)


def explained(message: str) -> str:
    """Converts an error of the engine to one sentence, without its dumps."""
    message = message.partition("<")[0] if "<state>" in message or "<non-verbose/>" in message else message
    for pattern, words in _WORDS:
        if found := re.search(pattern, message):
            return found.expand(words)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    first = lines[0].removesuffix("regex parse error:").strip() if lines else "no reason is given"
    return " ".join(part for part in (first, reason) if part)


__all__ = ["GrammarError", "explained", "limits", "matcher_class"]
