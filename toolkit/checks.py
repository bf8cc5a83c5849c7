"""Checks of plain arguments: the message names the argument, its range and what was given."""

import math
import operator
from typing import Any


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number as Python's own ``int``.

    Args:
        name: of the argument, for the message.
        value: an ``int``, or what stands for one: numpy's integers and integer tensors without dimensions.
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


def real(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number as Python's own ``float``.

    Args:
        name: of the argument, for the message.
        value: an ``int`` or a ``float``, or what stands for one: numpy's numbers and tensors without dimensions.
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


def _scalar(value: Any) -> Any:
    """The value, unless Python, numpy or torch would read a boolean, a text or an array of one as a number."""
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
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


__all__ = ["real", "whole"]
