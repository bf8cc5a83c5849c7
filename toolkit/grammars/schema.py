"""Rewrites JSON Schema for the engine: narrows keywords that it reads wrongly, names keywords that it lacks.

Apart from the named keywords, a rewritten schema admits no answer that the original does not admit.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arbordraft.grammars.engine import explained, limits, matcher_class
from arbordraft.grammars.productive import kinds_of, productive

# Keywords that the engine skips, or cannot enforce while a text is written.
_LACKING = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}  # with lists of schemas
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # with schemas by name
_SCHEMA = {"items", "additionalItems", "additionalProperties"}
_EXACT = 2**53  # whole numbers are exact up to here: the engine reads doubles
_MOST = 10**18  # the engine counts in 64 bits
_MARGIN = 1e-9
_NAMES = 5_000  # most letters of an object's names for which an expression excludes these names
# A name that follows an expression spells only these letters with \u: without them, no such name begins with \u.
_CONTROL_CHARS = "\\x00-\\x1f\\x7f"
_WARNINGS = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), lambda found: json.loads(f"[{found[1]}]")),
    (re.compile(r"Unknown format: (.*)"), lambda found: [f"format: {found[1]}"]),
    (re.compile(r"oneOf not fully supported"), lambda found: ["oneOf"]),
    (re.compile(r"min/maxProperties only supported"), lambda found: ["minProperties, maxProperties"]),
)


@dataclass(frozen=True)
class EnforcedSchema:
    """Schema as the engine gets it.

    Args:
        schema: schema to be enforced, with the engine's options.
        unenforced: keywords that are not enforced, sorted.
    """

    schema: Mapping[str, Any]
    unenforced: Sequence[str] = ()


def enforced(schema: Mapping[str, Any], *, whitespace: bool = False) -> EnforcedSchema:
    """Rewrites a schema so that it can be enforced while a text is written.

    Args:
        schema: JSON Schema, as ``json.loads`` reads it.
        whitespace: whether lines may be broken and indented.

    Raises:
        ValueError: if the schema is invalid, or nothing is valid by it.
    """
    if not productive(schema):
        raise ValueError("nothing is valid by it: to end, a value would have to hold itself")
    failures = []
    for named, patterns in ((True, True), (False, True), (False, False)):
        reader = _Reader(named, patterns)
        made = reader.read(schema)
        made["x-guidance"] = {
            **({} if whitespace else {"item_separator": ", ", "key_separator": ": "}),
            "whitespace_flexible": whitespace,
            "json_allow_general_unicode_escapes": True,
            "json_allowed_escapes": None if reader.closed else 'nrbtf\\"',
            "lenient": True,
        }
        failed, messages = _validated(made)
        if not failed:
            lacking = {*reader.lacking, *(name for message in messages for name in _named(message))}
            return EnforcedSchema(made, tuple(sorted(lacking)))
        failures.append("; ".join(map(explained, messages)))
    raise ValueError(failures[1])  # the attempt without added expressions: nearest to the given schema


def _validated(schema: Mapping[str, Any]) -> tuple[bool, list[str]]:
    definition = matcher_class().grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))
    return matcher_class().validate_grammar_with_warnings(definition, limits=limits())


def _named(warning: str) -> list[str]:
    """Returns the keywords that a warning of the engine is about."""
    for pattern, names in _WARNINGS:
        if found := pattern.search(warning):
            return list(names(found))
    return [explained(warning)]


@dataclass
class _Reader:
    """Rewrites a schema.

    Args:
        named: exclude an object's listed names from its other names by an expression.
        patterns: enforce the schema's own expressions on names; they must exclude each other.

    Attributes:
        lacking: keywords that were left out.
        closed: whether no name can be spelt so that it passes for another one.
    """

    named: bool
    patterns: bool
    lacking: set[str] = field(default_factory=set)
    closed: bool = True

    def read(self, schema: Any) -> Any:
        """Returns the rewritten schema; leaves values that are no schemas to the engine."""
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _LACKING:
                if not (key == "uniqueItems" and value is False):
                    self.lacking |= {key, *expressions(value)}
            elif key in _NAMED and isinstance(value, Mapping):
                made[key] = {name: self.read(one) for name, one in value.items()}
            elif key in _SCHEMAS or (key in _SCHEMA and isinstance(value, list)):
                made[key] = [self.read(one) for one in value] if isinstance(value, list) else value
            elif key in _SCHEMA:
                made[key] = self.read(value)
            else:
                counted = key.startswith(("min", "max")) and isinstance(value, float) and value.is_integer()
                made[key] = int(value) if counted else value
        for change in (self._numbers, self._values, self._patterns, self._names, self._counts):
            change(made)
        return made

    def _numbers(self, schema: dict[str, Any]) -> None:
        kinds = kinds_of(schema)
        whole = "integer" in kinds and "number" not in kinds
        for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
            bound = schema.get(key)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            exclusive = key.startswith("e")
            if sign * bound > _MOST:
                del schema[key]
                self.lacking.add(key)
            elif sign * bound < -_MOST:
                schema[key] = -sign * _MOST
            elif abs(bound) > _EXACT or (exclusive and not whole and bound == math.floor(bound)):
                # Larger bounds are rounded away from the forbidden side. A whole exclusive bound is moved, too: the
                # engine would admit the bound itself if the other bound is less than one away.
                del schema[key]
                inner = "minimum" if sign > 0 else "maximum"
                closest = _beyond(bound, sign, exclusive)
                known = schema.get(inner)
                nearer = isinstance(known, int | float) and sign * known > sign * closest
                schema[inner] = known if nearer else closest

    def _values(self, schema: dict[str, Any]) -> None:
        for key in ("const", "enum"):
            if key in schema:
                if (number := _oversized_number(schema[key])) is not None:
                    raise ValueError(f"{key}: the number {number} has too many digits to be held")
                schema[key] = _unsigned(schema[key])

    def _patterns(self, schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str) and not _followed(pattern):
            del schema["pattern"]
            self._left_out("pattern", pattern)
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict) and (
            others := [one for one in patterns if not (self.patterns and _followed(one))]
        ):
            del schema["patternProperties"]
            schema.pop("additionalProperties", None)
            self._left_out("patternProperties", others[0])

    def _left_out(self, key: str, *patterns: str) -> None:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
        self.lacking.add(key)

    def _names(self, schema: dict[str, Any]) -> None:
        """Ensures that no further name of an object is another spelling of a name with its own schema."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list) and {*map(type, required)} <= {str}):
            return  # the engine refuses this, and names the fault
        names = {*properties, *required}
        if not (names or schema.get("patternProperties")) or schema.get("additionalProperties") is False:
            return
        free = not {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & schema.keys()
        if self.named and free and sum(map(len, names)) <= _NAMES:
            others = schema.pop("additionalProperties", True)
            schema["properties"] = {**properties, **{name: others for name in required if name not in properties}}
            schema["patternProperties"] = {f"^(?:{_unlike(names)})$": others}
            schema["additionalProperties"] = False
        else:
            self.closed = False

    def _counts(self, schema: dict[str, Any]) -> None:
        """Marks ``minProperties`` as lacking where further names may come twice, which counts once."""
        least, required = schema.get("minProperties"), schema.get("required", ())
        open_ = schema.get("additionalProperties") is not False or schema.get("patternProperties")
        if open_ and isinstance(least, int) and least > 1 + len(required):
            self.lacking.add("minProperties")


def _beyond(bound: float, sign: int, exclusive: bool) -> float:
    """Returns a double close to a bound, on its admissible side."""
    if abs(bound) <= _EXACT:
        return bound + sign * max(_MARGIN, 2 * math.ulp(bound))
    close = float(bound)
    while sign * (close - bound) < 0 or (exclusive and close == bound):
        close = math.nextafter(close, sign * math.inf)
    return int(close)


def _oversized_number(value: Any) -> int | None:
    """Finds a whole number in a value that the engine would round; ``None`` if there is none."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return value if value != int(float(value)) or abs(value) > 10**300 else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((number for part in parts if (number := _oversized_number(part)) is not None), None)


def _unsigned(value: Any) -> Any:
    """Returns a value whose zeros have no sign: the engine would require it."""
    if isinstance(value, Mapping):
        return {name: _unsigned(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_unsigned(part) for part in value]
    return 0 if value == 0 and isinstance(value, float) else value


def _followed(pattern: str) -> bool:
    """Returns whether the engine can enforce a regular expression."""
    failed, _ = _validated({"type": "string", "pattern": pattern})
    return not failed


def _unlike(names: Collection[str]) -> str:
    """Builds a regular expression of all texts but ``names``, without control letters."""
    heads: dict[str, set[str]] = {}
    for name in names:
        if name:
            heads.setdefault(name[0], set()).add(name[1:])
    first_chars = "".join(f"\\x{{{ord(head):x}}}" for head in sorted(heads))
    ways = [f"[^{_CONTROL_CHARS}{first_chars}][^{_CONTROL_CHARS}]*"]
    ways += [f"\\x{{{ord(head):x}}}(?:{_unlike(rest)})" for head, rest in sorted(heads.items())]
    return "|".join([*ways, *([] if "" in names else [""])])


def expressions(value: Any) -> set[str]:
    """Returns the keywords for regular expressions that occur in a schema, at any depth."""
    if isinstance(value, list):
        return set().union(*map(expressions, value))
    if not isinstance(value, Mapping):
        return set()
    return ({"pattern", "patternProperties"} & value.keys()).union(*map(expressions, value.values()))


__all__ = ["EnforcedSchema", "enforced", "expressions"]
