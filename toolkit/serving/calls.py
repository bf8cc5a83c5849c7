"""Finds out how a model writes tool calls, by rendering some with its chat template."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from arbordraft.grammars.schema import enforced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = Mapping[str, Any]
Written = Callable[..., str]

_ID = "\0"  # placeholder of a call's id in the texts of a format
_ID_PATTERN = "[a-zA-Z0-9]{9}"  # Mistral's templates accept no others
_WORDS = "some words"
_FIRST: dict[str, Any] = {"name": "first_function", "arguments": {"first": 1}, "id": "firstcall"}
_SECOND: dict[str, Any] = {"name": "second_function", "arguments": {"second": 2}, "id": "secondone"}
_OFFERED = {
    "type": "function",
    "function": {
        "name": "offered_function",
        "description": "Does something.",
        "parameters": {"type": "object", "properties": {"first": {"type": "integer", "description": "A number."}}},
    },
}


@dataclass(frozen=True)
class ToolCallFormat:
    """Format of an answer's tool calls.

    The first call is ``opening NAME middle ARGUMENTS``, each further one ``separator NAME middle ARGUMENTS``; the last
    one is followed by ``closing``.

    Args:
        opening: text before the name of the first call.
        middle: text between name and arguments.
        separator: text before the name of a further call; ``None`` if an answer can have only one call.
        closing: text after the arguments of the last call.
        anywhere: whether calls may follow words; else an answer is either calls or words.
        quoted: whether the chat template takes arguments as JSON text instead of an object.
        added: the tokenizer's added tokens by text, except those that end an answer. A model writes such a text as one
            token.
    """

    opening: str
    middle: str
    separator: str | None
    closing: str
    anywhere: bool
    quoted: bool
    added: Mapping[str, int]

    @property
    def marks(self) -> frozenset[int]:
        """Ids of added tokens in the format's texts; their text is kept even if they are special."""
        texts = (self.opening, self.middle, self.separator or "", self.closing)
        return frozenset(token for text, token in self.added.items() if any(text in part for part in texts))

    def without(self, *marks: str) -> "ToolCallFormat":
        """Returns the format without some added tokens, which free text may then not contain."""
        return replace(self, added={text: token for text, token in self.added.items() if text not in marks})

    def pattern(self, text: str) -> str:
        """Returns a regular expression for one of the format's texts."""
        return re.escape(text).replace(re.escape(_ID), _ID_PATTERN)

    def grammar(self, tools: Mapping[str, Schema], *, required: bool, parallel: bool, answer: Schema | None) -> str:
        """Builds the grammar of an answer, in llguidance's dialect of Lark.

        Args:
            tools: schemas of arguments, by function name; at least one.
            required: whether the answer must be calls.
            parallel: whether several calls are allowed, if the template can write them.
            answer: schema of an answer without calls; by default any text.

        Raises:
            ValueError: if calls are plain JSON, so that they look like the JSON of ``answer``.
        """
        further = f"({self._literal(self.separator)} call)*" if parallel and self.separator is not None else ""
        calls = f"call {further} {self._literal(self.closing)}"
        if required:
            rules = [f"start: {self._literal(self.opening)} {calls}"]
        elif answer is not None:
            if self.opening.startswith(("{", "[{")):
                raise ValueError("the model writes calls as plain JSON, like the answer: ask for tools or for JSON")
            rules = [f"start: answer | {self._literal(self.opening)} {calls}", f"answer: %json {embedded(answer)}"]
        else:
            rules = self._words_or(calls)
        names = [f"{self._literal(name + self.middle)} arguments_{index}" for index, name in enumerate(tools)]
        schemas = [f"arguments_{index}: %json {embedded(schema)}" for index, schema in enumerate(tools.values())]
        return "\n".join([*rules, f"call: {' | '.join(names)}", *schemas, f"ID: /{_ID_PATTERN}/"])

    def _words_or(self, calls: str) -> list[str]:
        """Builds the rules of free words that may end in calls.

        Calls begin at a marker: the shortest beginning of the opening that nothing else begins with. After it the
        grammar settles all details, such as blanks.
        """
        first, *_ = filter(None, self._parts.split(self.opening))
        text = "TEXT: /(?s:.+)/"
        if first in self.added:
            # Excludes the marker written character by character: it would look like a call, and be none.
            marker, head = first, self._terminal(first)
            rules = [f"{text} & ~MARKED", f"MARKED: /(?s:.*)/ {lark_string(marker)} /(?s:.*)/"]
        else:
            marker, head = first.partition("{")[0].rstrip() or first, "head"
            rules = [text, f"head[lazy]: {'TEXT? ' if self.anywhere else ''}{lark_string(marker)}"]
        calls = f"{head} {self._literal(self.opening.removeprefix(marker))} {calls}"
        others = [token for added, token in self.added.items() if added != marker]
        words = f"TEXT? (<[{ranges(others)}]> TEXT?)*" if others else "TEXT?"  # TEXT does not match such tokens
        return [f"start: {words} ({calls})?" if self.anywhere else f"start: {words} | {calls}", *rules]

    @cached_property
    def _parts(self) -> re.Pattern[str]:
        """Pattern that splits a text at ids and at added tokens."""
        return re.compile(f"({'|'.join(map(re.escape, [_ID, *sorted(self.added, key=len, reverse=True)]))})")

    def _literal(self, text: str) -> str:
        return " ".join(map(self._terminal, filter(None, self._parts.split(text))))

    def _terminal(self, part: str) -> str:
        return "ID" if part == _ID else f"<[{self.added[part]}]>" if part in self.added else lark_string(part)


def call_format(tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> ToolCallFormat:
    """Finds out how the tokenizer's chat template writes messages that call tools.

    Args:
        tokenizer: tokenizer of the model.
        ends: token ids that end an answer.

    Raises:
        ValueError: if the template knows no tools, or writes calls in a form that no JSON grammar can express.
    """

    def written(*messages: Mapping[str, Any]) -> str:
        conversation: list[Any] = [{"role": "user", "content": "?"}, *messages]
        return str(tokenizer.apply_chat_template(conversation, tools=[_OFFERED], tokenize=False))

    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template, which says how tools are written: ask without tools")
    try:
        offered = written()
    except Exception as error:  # templates may raise any exception
        raise ValueError(f"the model's chat template refuses tools: {error}") from error
    if "offered_function" not in offered:
        raise ValueError("the model's chat template knows no tools: ask without them, or serve a model that does")
    added = added_tokens(tokenizer, ends)
    stops = [str(tokenizer.decode([token])) for token in ends]
    reasons = []
    for quoted in (False, True):
        try:
            texts = _texts(written, quoted, stops)
        except Exception as error:  # templates may raise any exception
            reasons.append((not isinstance(error, ValueError), str(error)))
            continue
        marked = texts["opening"].startswith(tuple(added))  # an added token marks a call at any place
        return ToolCallFormat(**{**texts, "anywhere": marked or texts["anywhere"]}, quoted=quoted, added=added)
    reason = min(reasons, key=lambda known: known[0])[1]  # our own errors first: they say more than a template's
    raise ValueError(f"the model's chat template writes calls in a way that is not supported: {reason}")


def added_tokens(tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> dict[str, int]:
    """Returns the tokenizer's added tokens by text, except those that end an answer."""
    return {str(token.content): index for index, token in tokenizer.added_tokens_decoder.items() if index not in ends}


def _texts(written: Written, quoted: bool, stops: Collection[str]) -> dict[str, Any]:
    def calling(*calls: Mapping[str, Any], words: str = "") -> str:
        message = {"role": "assistant", "content": words, "tool_calls": [_message(call, quoted) for call in calls]}
        return written(message).replace(_FIRST["id"], _ID).replace(_SECOND["id"], _ID)

    text = calling(_FIRST)
    before, middle, after = _around(text, _FIRST)
    rendered = calling(_FIRST, words=_WORDS)
    place = rendered.find(_WORDS)
    anywhere = 0 <= place < rendered.index(_FIRST["name"])
    if anywhere:
        lead = _around(rendered, _FIRST)[0][place + len(_WORDS) :]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(before), reversed(lead), strict=False))
        opening = "".join(char for char, _ in shared)[::-1].lstrip("\n")
    else:
        plain = written({"role": "assistant", "content": _WORDS})
        opening = before.removeprefix(plain[: plain.index(_WORDS)])
        if opening == before:
            raise ValueError("calls are not written in the place of words")
    texts = {"opening": opening, "middle": middle, "separator": None, "closing": _until(after, stops)}
    try:
        rest = calling(_FIRST, _SECOND)[len(before) :]
        _, _, after_first = _around(rest, _FIRST)
        texts["separator"], second_middle, after_second = _around(after_first, _SECOND)
        if (second_middle, _until(after_second, stops)) != (middle, texts["closing"]):
            texts["separator"] = None
    except Exception:  # the template allows one call at a time
        texts["separator"] = None
    if not opening or opening.startswith(_ID):
        raise ValueError("nothing shows where a call begins")
    if any(_FIRST["name"] in (part or "") for part in texts.values()):
        raise ValueError("names of functions are written more than once")
    return {**texts, "anywhere": anywhere}


def _message(call: Mapping[str, Any], quoted: bool) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"]) if quoted else call["arguments"]
    return {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": arguments}}


def _around(text: str, call: Mapping[str, Any]) -> tuple[str, str, str]:
    """Splits a text into the parts before a call's name, between name and arguments, and after the arguments."""
    before, found, after = text.partition(call["name"])
    if not found:
        raise ValueError("it leaves out the names of functions")
    for brace in re.finditer(r"\{", after):
        try:
            arguments, end = json.JSONDecoder().raw_decode(after, brace.start())
        except ValueError:
            continue
        if arguments == call["arguments"]:
            return before, after[: brace.start()], after[end:]
    raise ValueError("arguments are not written as JSON after the name")


def _until(text: str, stops: Collection[str]) -> str:
    """Returns the text before the first stop, else the text without trailing line breaks."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text.rstrip("\n")))]


def embedded(schema: Schema) -> str:
    """Returns the enforceable part of a schema as JSON text, for a grammar."""
    return json.dumps(enforced(schema).schema, ensure_ascii=False)


def ranges(tokens: Collection[int]) -> str:
    """Formats token ids as ranges: some vocabularies have thousands of added tokens."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(tokens)), lambda known: known[1] - known[0]))
    return ",".join(f"{run[0][1]}-{run[-1][1]}" for run in runs)


def lark_string(text: str) -> str:
    """Quotes a text as a string of llguidance's dialect of Lark."""
    return json.dumps(text, ensure_ascii=False)


__all__ = ["ToolCallFormat", "added_tokens", "call_format", "embedded", "lark_string", "ranges"]
