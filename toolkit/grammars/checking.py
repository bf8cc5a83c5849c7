"""Whole answers against whole schemas: for keywords that no grammar holds."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

_MOST = 50_000  # evaluated keywords: schemas come from clients, and references can multiply


class SchemaCheck(NamedTuple):
    """Whether an answer is valid by its schema.

    Args:
        keywords: those that the answer was not held to while it was written.
        valid: whether it is valid by all keywords.
        reason: why it is not, or could not be checked; ``None`` if it is.
    """

    keywords: tuple[str, ...]
    valid: bool
    reason: str | None = None


def checked(schema: Mapping[str, Any], unheld: Sequence[str], text: str) -> SchemaCheck:
    """Checks an answer.

    Args:
        schema: that of the answer.
        unheld: keywords that the answer was not held to.
        text: the answer.

    Raises:
        ModuleNotFoundError: without the extra ``grammar``.
    """
    try:
        from jsonschema import Draft202012Validator, FormatChecker
        from jsonschema.exceptions import best_match
        from jsonschema.validators import extend, validator_for
        from referencing import Registry
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("checks need jsonschema: pip install 'arbordraft[grammar]'") from error
    kind = validator_for(schema, default=Draft202012Validator)
    evaluated = count(1)
    # Texts follow patterns that the grammar holds: there is no need to run an expression that may take for ever.
    needed = {name: check for name, check in kind.VALIDATORS.items() if name != "pattern" or name in unheld}
    held = dict.fromkeys(kind.VALIDATORS.keys() - needed.keys(), lambda *_: ())
    bounded = extend(kind, {**{name: _counting(check, evaluated) for name, check in needed.items()}, **held})
    try:
        # A registry of its own: without one, references would be fetched from wherever they point to.
        validator = bounded(schema, registry=Registry(), format_checker=FormatChecker())
        worst = best_match(validator.iter_errors(json.loads(text)))
    except Exception as problem:  # whatever a schema makes the library stumble over
        return SchemaCheck(tuple(unheld), False, f"it could not be checked: {type(problem).__name__}: {problem}")
    return SchemaCheck(tuple(unheld), worst is None, None if worst is None else worst.message[:500])


def _counting(check: Callable[..., Any], evaluated: Iterator[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Iterator[Any]:
        if next(evaluated) > _MOST:
            raise ValueError(f"more than {_MOST} keywords were evaluated")
        yield from check(*arguments) or ()

    return counted


__all__ = ["SchemaCheck", "checked"]
