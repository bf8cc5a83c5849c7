"""Grammars of answers, as values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arbordraft.grammars.checking import SchemaCheck, checked
from arbordraft.grammars.engine import explained, limits, matcher_class
from arbordraft.grammars.schema import enforced, expressions
from arbordraft.utils.checks import check_instance


@dataclass(frozen=True)
class Grammar:
    """Form that an answer must have; built by its class methods, for any tokenizer.

    At any temperature, an answer follows its grammar from its first token on, and ends where the grammar lets it end.
    Only an answer that reaches ``max_new_tokens`` stops in the middle, and JSON only if none that fits was found: near
    the limit, tokens after which it could no longer be completed and ended in time are forbidden.

    Args:
        kind: name of the class method that built it.
        definition: the grammar as the engine, llguidance, reads it.
        unenforced: keywords of a JSON schema that are not enforced; :meth:`check` tells whether an answer meets them.
        schema: JSON text of the schema, if the grammar is that of a schema.
        bounded: whether answers are completed within ``max_new_tokens``, as those of JSON are.
    """

    kind: str
    definition: str
    unenforced: tuple[str, ...] = ()
    schema: str | None = None
    bounded: bool = False

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], *, whitespace: bool = False, strict: bool = True
    ) -> "Grammar":
        """Builds the grammar of JSON that is valid by a schema.

        Args:
            schema: JSON Schema (2020-12), as a mapping or as text.
            whitespace: let the model break and indent lines. By default JSON is written as ``json.dumps`` does, which
                leaves the model less to decide.
            strict: refuse keywords that cannot be enforced while a text is written, such as ``uniqueItems``. Else the
                grammar enforces the rest, ``unenforced`` names these keywords, and :meth:`check` checks an answer.

        Raises:
            TypeError: if ``schema`` is of another type.
            ValueError: if ``schema`` is no JSON, no schema, too large, admits nothing, or has a keyword that cannot be
                enforced. The message names the reason.
            ModuleNotFoundError: if the extra ``grammar`` is not installed; this holds for all class methods.

        Examples:
            >>> Grammar.json_schema({"enum": ["yes", "no"]}).kind
            'json_schema'
            >>> Grammar.json_schema({"type": "array", "uniqueItems": True})
            Traceback (most recent call last):
            ValueError: invalid json_schema: uniqueItems cannot be held while text is written: strict=False checks it
            >>> pairs = Grammar.json_schema({"type": "array", "uniqueItems": True}, strict=False)
            >>> pairs.check("[1, 1]")
            SchemaCheck(keywords=('uniqueItems',), valid=False, reason='[1, 1] has non-unique elements')
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"the JSON schema is no JSON: {error}") from error
            if not isinstance(schema, Mapping):
                raise ValueError(f"a JSON schema is a mapping, and this text is a {type(schema).__name__} in JSON")
        if not isinstance(schema, Mapping):
            raise TypeError(f"a JSON schema is a mapping or JSON text of one, got {type(schema).__name__}")
        try:
            text = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
            text.encode()
            found = enforced(json.loads(text), whitespace=whitespace)
        except RecursionError as error:
            raise ValueError("invalid json_schema: it is nested too deeply") from error
        except UnicodeEncodeError as error:
            raise ValueError("invalid json_schema: it holds half of a surrogate pair, which is no text") from error
        except TypeError as error:
            raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        except ValueError as error:
            raise ValueError(f"invalid json_schema: {error}") from error
        if strict and found.unenforced:
            raise ValueError(
                f"invalid json_schema: {', '.join(found.unenforced)} cannot be held while text is written: "
                f"strict=False checks {'it' if len(found.unenforced) == 1 else 'them'}"
            )
        definition = matcher_class().grammar_from_json_schema(json.dumps(found.schema, ensure_ascii=False))
        return cls("json_schema", definition, tuple(found.unenforced), text, bounded=True)

    @property
    def runs_expressions(self) -> bool:
        """Whether :meth:`check` runs regular expressions of the schema, which may take any time."""
        found = expressions(json.loads(self.schema or "{}"))
        return "patternProperties" in found or "pattern" in self.unenforced

    def check(self, text: str) -> SchemaCheck:
        """Checks a whole answer against the schema, including the keywords that the grammar does not enforce.

        Args:
            text: the answer, without tokens that end it.

        Raises:
            TypeError: if the grammar is not that of a JSON schema.
        """
        if self.schema is None:
            raise TypeError(f"only grammars of JSON schemas are checked, this one is made by {self.kind}")
        return checked(json.loads(self.schema), self.unenforced, text)

    @classmethod
    def json(cls, *, whitespace: bool = False) -> "Grammar":
        """Builds the grammar of any JSON object; ``whitespace`` as in :meth:`json_schema`."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Builds the grammar of texts that a regular expression matches as a whole.

        Args:
            pattern: in the syntax of Rust's ``regex``: no look-around, no back references, no anchors.

        Raises:
            TypeError: if ``pattern`` is not a text.
            ValueError: if ``pattern`` is not such an expression, or is too complex.
        """
        check_instance("pattern", pattern, str)
        return cls._checked("regex", matcher_class().grammar_from_regex(pattern))

    @classmethod
    def lark(cls, text: str, *, bounded: bool = False) -> "Grammar":
        """Builds a context-free grammar from llguidance's variant of Lark's EBNF.

        Args:
            text: rules; derivations begin with the rule ``start``.
            bounded: complete answers within ``max_new_tokens``, for grammars of JSON.

        Raises:
            TypeError: if ``text`` is not a text, or ``bounded`` is no truth value.
            ValueError: if ``text`` is not such a grammar, or is too complex.

        Examples:
            >>> Grammar.lark('start: "a" inner? "b"\\ninner: "(" start ")"').kind
            'lark'
        """
        check_instance("text", text, str)
        check_instance("bounded", bounded, bool)
        return replace(cls._checked("lark", matcher_class().grammar_from_lark(text)), bounded=bounded)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Builds the grammar of answers that are one of several texts.

        Raises:
            TypeError: if ``texts`` is not a list of texts.
            ValueError: if there is no text, or a text is empty.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"choices must be a list of texts, got {texts!r}")
        if not texts or "" in texts:
            raise ValueError("choices must hold at least one text, and no empty one")
        quoted = " | ".join(json.dumps(text) for text in texts)
        return cls._checked("choice", matcher_class().grammar_from_lark(f"start: {quoted}"))

    @classmethod
    def _checked(cls, kind: str, definition: str) -> "Grammar":
        failed, messages = matcher_class().validate_grammar_with_warnings(definition, limits=limits())
        if failed:
            raise ValueError(f"invalid {kind}: {'; '.join(map(explained, messages))}")
        return cls(kind, definition)


def grammars_of(grammar: Grammar | Sequence[Grammar | None] | None, batch: int) -> list[Grammar | None]:
    """Returns a list with one grammar, or ``None``, per sample.

    Raises:
        TypeError: if an entry is neither a grammar nor ``None``.
        ValueError: if there are more or fewer grammars than samples.
    """
    grammars = list(grammar) if isinstance(grammar, Sequence) else [grammar] * batch
    for one in grammars:
        if one is not None:
            check_instance("grammar", one, Grammar)
    if len(grammars) != batch:
        raise ValueError(
            f"{len(grammars)} grammars for {batch} samples; pass one for all, or a list with one per sample"
        )
    return grammars


__all__ = ["Grammar", "grammars_of"]
