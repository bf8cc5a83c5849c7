"""Finds out whether anything can be valid by a JSON Schema that refers to itself."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

_MOST = 20_000


def kinds_of(schema: Mapping[str, Any]) -> Collection[str]:
    """Returns the types that a schema names; empty if it leaves them open."""
    kinds = schema.get("type", ())
    return [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else ()


def productive(root: Mapping[str, Any]) -> bool:
    """Returns whether some finite value can be valid by a schema, judged by its references only."""
    return _Search(root).ends(root, frozenset())


class _Search:
    """Follows references a bounded number of times, as they can multiply; beyond that it accepts all schemas.

    Args:
        root: document that references point into.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST
        self._known: set[int] = set()  # ids of schemas for which some value is valid

    def ends(self, schema: Any, above: frozenset[int]) -> bool:
        """Returns whether some value is valid that needs none of the schemas whose ids are ``above``."""
        if not isinstance(schema, Mapping) or id(schema) in self._known:
            return True
        if id(schema) in above:
            return False
        self._left -= 1
        if self._left > 0 and not self._found(schema, above | {id(schema)}):
            return False
        self._known.add(id(schema))
        return True

    def _found(self, schema: Mapping[str, Any], above: frozenset[int]) -> bool:
        def ends(one: Any) -> bool:
            return self.ends(one, above)

        if "enum" in schema or "const" in schema:
            return True
        target = _target(schema.get("$ref"), self._root)
        if target is not None and not ends(target):
            return False
        if not all(map(ends, _list(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            if (options := _list(schema.get(key))) and not any(map(ends, options)):
                return False
        kinds = kinds_of(schema)
        if not kinds or set(kinds) - {"object", "array"}:
            return True
        if "object" in kinds and _object_ends(schema, ends):
            return True
        return "array" in kinds and _array_ends(schema, ends)


def _object_ends(schema: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    properties = schema.get("properties")
    needed = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    return all(ends(properties.get(name, True)) for name in needed) if isinstance(properties, Mapping) else True


def _array_ends(schema: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return True
    first = _list(schema.get("prefixItems"))[:least]
    return all(map(ends, first)) and (len(first) >= least or ends(schema.get("items", True)))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Any) -> Any:
    """Returns the target of a local reference; ``None`` if it is not in this document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, Mapping) and part in place:
            place = place[part]
        else:
            return None
    return place if reference == "#" or reference.startswith("#/") else None


__all__ = ["kinds_of", "productive"]
