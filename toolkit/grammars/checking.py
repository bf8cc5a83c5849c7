"""Checks whole answers against whole schemas, for keywords that no grammar enforces."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

_MOST = 50_000  # most keywords evaluated: schemas come from clients, and references can multiply


class SchemaCheck(NamedTuple):
    """Result of checking an answer against its schema.

    Args:
        keywords: keywords that were not enforced while the answer was written.
        valid: whether the answer is valid by all keywords.
        reason: why the answer is invalid or could not be checked; ``None`` if it is valid.
    """

    keywords: tuple[str, ...]
    valid: bool
    reason: str | None = None


def checked(schema: Mapping[str, Any], unenforced: Sequence[str], text: str) -> SchemaCheck:
    """Checks an answer against its schema.

    Args:
        schema: schema of the answer.
        unenforced: keywords that were not enforced while the answer was written.
        text: the answer.

    Raises:
        ModuleNotFoundError: if the extra ``grammar`` is not installed.
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
    # Texts follow the patterns that the grammar enforces: these expressions, which may take for ever, need not run.
    needed = {name: check for name, check in kind.VALIDATORS.items() if name != "pattern" or name in unenforced}
    enforced = dict.fromkeys(kind.VALIDATORS.keys() - needed.keys(), lambda *_: ())
    bounded = extend(kind, {**{name: _counting(check, evaluated) for name, check in needed.items()}, **enforced})
    try:
        # An empty registry: without one, references would be fetched from any place.
        validator = bounded(schema, registry=Registry(), format_checker=FormatChecker())
        worst = best_match(validator.iter_errors(json.loads(text)))
    except Exception as problem:  # a schema may make the library raise any exception
        return SchemaCheck(tuple(unenforced), False, f"it could not be checked: {type(problem).__name__}: {problem}")
    return SchemaCheck(tuple(unenforced), worst is None, None if worst is None else worst.message[:500])


def _counting(check: Callable[..., Any], evaluated: Iterator[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Iterator[Any]:
        if next(evaluated) > _MOST:
            raise ValueError(f"more than {_MOST} keywords were evaluated")
        yield from check(*arguments) or ()

    return counted


__all__ = ["SchemaCheck", "checked"]
