"""Checks of plain arguments; messages name the argument, its range and the value given."""

import math
import operator
from collections.abc import Callable, Mapping, Set
from itertools import islice
from typing import Any, TypeVar

Checked = TypeVar("Checked")


def check_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Returns a whole number as Python's own ``int``.

    Args:
        name: name of the argument, for the message.
        value: an ``int``, an integer of numpy or an integer tensor without dimensions.
        least: lowest value allowed; ``None`` for no bound.
        most: highest value allowed; ``None`` for no bound.

    Raises:
        TypeError: for anything else; ``True``, ``2.0`` and ``"2"`` are no whole numbers here.
        ValueError: if the number is out of range.
    """
    wanted = f"{name} must be a whole number{_between(least, most)}, got "
    try:
        number = operator.index(_scalar(value))
    except TypeError:
        raise TypeError(f"{wanted}{_shown(value)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{wanted}{number}")
    return number


def check_float(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Returns a finite number as Python's own ``float``.

    Args:
        name: name of the argument, for the message.
        value: an ``int``, a ``float``, a number of numpy or a tensor without dimensions.
        least: lowest value allowed.
        most: highest value allowed.

    Raises:
        TypeError: for anything else; ``True`` and ``"0.5"`` are no numbers here.
        ValueError: if the number is NaN, infinite or out of range.
    """
    wanted = f"{name} must be a number{_between(least, most)}, got "
    try:
        number = float(_scalar(value))
    except (TypeError, RuntimeError):  # torch raises either
        raise TypeError(f"{wanted}{_shown(value)}") from None
    except OverflowError:
        raise ValueError(f"{wanted}{_shown(value)}") from None
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"{wanted}{number}")
    return number


def check_positive(name: str, value: Any) -> float:
    """Returns a finite number above 0; otherwise works as :func:`check_float`."""
    number = check_float(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def check_temperature(name: str, value: Any) -> float:
    """Returns a temperature from 0 to 1e6; values below 1e-10 become 0.0, which decodes greedily.

    Below 1e-10 the most probable token always wins, and quotients would leave the range of float32.

    Raises:
        TypeError: as :func:`check_float`.
        ValueError: as :func:`check_float`.
    """
    number = check_float(name, value, 0)
    if number > 1e6:
        raise ValueError(f"{name} must be at most 1e6, got {number}")
    return number if number >= 1e-10 else 0.0


def check_penalty(name: str, value: Any) -> float:
    """Returns a factor of scores from 1e-5 to 1e5, which keeps them within float32; see :func:`check_float`."""
    return check_float(name, check_positive(name, value), 1e-5, 1e5)


def check_sequence(
    name: str, values: Any, check: Callable[[str, Any], Checked], most: int | None = None
) -> tuple[Checked, ...]:
    """Returns the checked numbers of a sequence, an array or a tensor, as a tuple.

    Args:
        name: name of the argument, for the message.
        values: the numbers; at most ``most + 1`` of them are read.
        check: check of one number, called with its name and value.
        most: greatest length allowed; ``None`` for no bound.

    Raises:
        TypeError: for anything else, such as one number, a text or a mapping.
        ValueError: if there are too many.
    """
    try:
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError
        entries = list(islice(values, None if most is None else most + 1))
    except TypeError:
        raise TypeError(f"{name} must be a list of numbers, got {_shown(values)}") from None
    if most is not None and len(entries) > most:
        raise ValueError(f"{name} must have at most {most} entries, got more")
    return tuple(check(f"{name}[{index}]", value) for index, value in enumerate(entries))


def check_instance(name: str, value: Any, *kinds: type[Checked]) -> Checked:
    """Returns the value; raises TypeError unless it is of one of these types."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be of type {' or '.join(kind.__name__ for kind in kinds)}, got {_shown(value)}")
    return value


def _scalar(value: Any) -> Any:
    """Returns the value; raises TypeError for booleans, texts and arrays, which `int` or `float` might accept."""
    truth = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.") == "bool"
    if truth or isinstance(value, str | bytes) or getattr(value, "ndim", 0) > 0:
        raise TypeError
    return value


def _between(least: float | None, most: float | None) -> str:
    low, high = least not in (None, -math.inf), most not in (None, math.inf)
    if low and high:
        return f" from {least} to {most}"
    return f" of at least {least}" if low else f" of at most {most}" if high else ""


def _shown(value: Any) -> str:
    text = " ".join(line.strip() for line in repr(value).splitlines())  # modules are printed in several lines
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


__all__ = [
    "check_float",
    "check_instance",
    "check_int",
    "check_penalty",
    "check_positive",
    "check_sequence",
    "check_temperature",
]
