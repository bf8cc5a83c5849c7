"""Thoughts before an answer: their marks, grammars that allow them, and a reader that separates them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from arbordraft.serving.calls import added_tokens, lark_string, ranges
from arbordraft.serving.tool_parsing import begun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Marks of thoughts, with {} for the name: Qwen and DeepSeek, Mistral, Kimi, Cohere.
_SHAPES = (("<{}>", "</{}>"), ("[{}]", "[/{}]"), ("\u25c1{}\u25b7", "\u25c1/{}\u25b7"), ("<|START_{}|>", "<|END_{}|>"))
_NAME = r"([\w:]*(?:think|thought|reason)\w*)"


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks that a model puts around its thoughts.

    Args:
        opening: text before the thoughts.
        closing: text after the thoughts.
        added: the tokenizer's added tokens by text, except those that end an answer.
        begun: whether the prompt ends within thoughts, so that an answer continues them.
    """

    opening: str
    closing: str
    added: Mapping[str, int]
    begun: bool = False

    @property
    def marks(self) -> frozenset[int]:
        """Ids of marks that are added tokens; their text is kept even if they are special."""
        return frozenset(self.added[mark] for mark in (self.opening, self.closing) if mark in self.added)

    def for_prompt(self, prompt: str, answer: str = "") -> "ReasoningFormat | None":
        """Returns the marks for an answer to a prompt; ``None`` if its thoughts have ended.

        Args:
            prompt: last words of the prompt.
            answer: beginning of the answer, if the prompt contains one.
        """
        if answer.strip():
            return replace(self, begun=True) if answer.rfind(self.opening) > answer.rfind(self.closing) else None
        end = prompt.rstrip()
        return None if end.endswith(self.closing) else replace(self, begun=end.endswith(self.opening))

    def grammar(self, answer: str) -> str:
        """Builds the grammar of free thoughts, followed by an answer.

        Thoughts are optional unless the prompt has begun them.

        Args:
            answer: grammar of the answer, in llguidance's dialect of Lark; its first rule is ``start``.
        """
        reasoning = "thoughts" if self.begun else f"({self._terminal(self.opening)} thoughts)?"
        others = [token for text, token in self.added.items() if text != self.closing]
        words = f"THOUGHT? (<[{ranges(others)}]> THOUGHT?)*" if others else "THOUGHT?"
        closing = lark_string(self.closing)
        if self.closing in self.added:
            # Excludes the mark written character by character: it would look like the end of thoughts.
            rules = [f"thoughts: {words} {self._terminal(self.closing)} BLANK?", "THOUGHT: /(?s:.+)/ & ~CLOSED"]
            rules.append(f"CLOSED: /(?s:.*)/ {closing} /(?s:.*)/")
        else:
            rules = [f"thoughts: {words} closed BLANK?", "THOUGHT: /(?s:.+)/", f"closed[lazy]: THOUGHT? {closing}"]
        rest = answer.replace("start:", "behind:", 1)
        return "\n".join([f"start: {reasoning} behind", *rules, r"BLANK: /\s{1,8}/", rest])

    def _terminal(self, mark: str) -> str:
        return f"<[{self.added[mark]}]>" if mark in self.added else lark_string(mark)


def reasoning_format_of(tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> ReasoningFormat | None:
    """Finds the marks of thoughts in a model's chat template; returns ``None`` if it has none.

    Args:
        tokenizer: tokenizer of the model.
        ends: token ids that end an answer.
    """
    template = str(tokenizer.chat_template or "")
    for opening, closing in _SHAPES:
        pattern = "".join(_NAME if part == "{}" else re.escape(part) for part in re.split(r"(\{\})", closing))
        if match := re.search(pattern, template, re.IGNORECASE):
            return ReasoningFormat(opening.format(match[1]), closing.format(match[1]), added_tokens(tokenizer, ends))
    return None


class ReasoningParser:
    """Separates the thoughts of one answer from its text; drops blanks around thoughts.

    Args:
        reasoning: marks of the thoughts.

    Attributes:
        tokens: number of tokens of thoughts and marks so far.
    """

    def __init__(self, reasoning: ReasoningFormat) -> None:
        self._opening, self._closing = reasoning.opening, reasoning.closing
        self._place: Literal["before", "inside", "after"] = "inside" if reasoning.begun else "before"
        self._held, self._leading = "", True  # whether to drop the blanks that come next
        self._waiting = self.tokens = 0

    def add(self, text: str) -> tuple[str, str]:
        """Adds the text of one token; returns the thoughts and the text that are now certain."""
        self._held += text
        self._waiting += 1
        if self._place == "before":
            self._begin()
        reasoning = words = ""
        if self._place == "inside":
            self.tokens, self._waiting = self.tokens + self._waiting, 0
            reasoning = self._next_reasoning()
        if self._place == "after":
            words, self._held = self._strip_leading(self._held), ""
        return reasoning, words

    def end(self) -> tuple[str, str]:
        """Returns the remaining thoughts and text; an incomplete mark is kept as it is."""
        return (self._strip_leading(self._held), "") if self._place == "inside" else ("", self._held)

    def _begin(self) -> None:
        """Enters the thoughts or the text as soon as it is certain which comes first."""
        held = self._held.lstrip()
        if held.startswith(self._opening):
            self._place, self._held = "inside", held.removeprefix(self._opening)
        elif not self._opening.startswith(held):
            self._place, self._leading = "after", False

    def _next_reasoning(self) -> str:
        reasoning, closing, rest = self._held.partition(self._closing)
        if not closing:
            reasoning = reasoning[: len(reasoning) - begun(reasoning, self._closing)]
        reasoning = reasoning.rstrip()
        text = self._strip_leading(reasoning)
        if closing:
            self._place, self._held, self._leading = "after", rest, True
        else:
            self._held = self._held[len(reasoning) :]
        return text

    def _strip_leading(self, text: str) -> str:
        """Strips leading blanks where thoughts or text begin."""
        text = text.lstrip() if self._leading else text
        self._leading = self._leading and not text
        return text


__all__ = ["ReasoningFormat", "ReasoningParser", "reasoning_format_of"]
