"""Times of forwards and steps on this machine: rows cost time on a CPU, and on a GPU once a batch is large."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from arbordraft.utils.checks import check_float, check_instance, check_int, check_positive, check_sequence
from arbordraft.utils.files import write_text


@dataclass(frozen=True)
class _Measured:
    """Times that are stored as JSON."""

    _kind: ClassVar[str]  # for messages

    @classmethod
    def load(cls, path: Path) -> Self:
        """Loads a file that :meth:`save` wrote.

        Raises:
            ValueError: if the file has other content.
        """
        try:
            return cls.from_fields(json.loads(Path(path).read_text()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no {cls._kind}: {error}; measure them again") from error

    def save(self, path: Path) -> None:
        """Writes JSON; the file appears only when it is complete."""
        write_text(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Inverts ``dataclasses.asdict``, also after a detour through JSON."""
        return cls(**fields)


def levelled(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Returns the rising values that are nearest to some values in squares (pool adjacent violators).

    Args:
        values: the values.
        weights: how much each counts, above 0; by default all count alike.
    """
    pools: list[tuple[float, float, int]] = []  # average, weight and number of values
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            before, heavy, more = pools.pop()
            value, weight, count = (before * heavy + value * weight) / (heavy + weight), heavy + weight, count + more
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


@dataclass(frozen=True)
class CostTable(_Measured):
    """Seconds of a target forward by its number of packed rows, interpolated in between.

    Args:
        rows: measured numbers of rows, ascending from 1.
        seconds: their times, above 0. A drop with more rows can only be noise: such times are averaged.

    Raises:
        TypeError: if an argument is not a list of numbers.
        ValueError: unless rows ascend from 1 and every time is positive and finite.

    Examples:
        >>> costs = CostTable((1, 8, 16), (0.010, 0.010, 0.020))
        >>> costs(8), round(costs(12), 3)
        (0.01, 0.015)
    """

    _kind = "cost table"
    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rows = check_sequence("rows", self.rows, check_int)
        seconds = check_sequence("seconds", self.seconds, check_positive)
        if list(rows) != sorted(set(rows)) or rows[:1] != (1,) or len(rows) != len(seconds):
            raise ValueError(
                f"a cost table needs ascending rows from 1 and a time for each, got rows {list(rows)} and "
                f"{len(seconds)} times"
            )
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "seconds", tuple(levelled(seconds)))

    def __call__(self, rows: float) -> float:
        """Returns the seconds of a forward with ``rows`` packed rows; beyond the table, extends its last slope."""
        at = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        if len(self.rows) == 1:
            return self.seconds[0] * rows
        (low, high), (first, second) = self.rows[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return first + (second - first) * (rows - low) / (high - low)

    @property
    def slope(self) -> float:
        """Average seconds of a further row, up to the most rows; 0 if only one is known."""
        widest = self.rows[-1]
        return 0.0 if widest == 1 else (self.seconds[-1] - self.seconds[0]) / (widest - 1)

    def within(self, seconds: float, most: int) -> int:
        """Returns the most rows, 1 to ``most``, of a forward within ``seconds``; 1 if even that takes longer."""
        return max(1, bisect_right(range(1, most + 1), seconds, key=self))

    def least_slope(self, rows: int, more: int) -> float:
        """Returns the least seconds per row that 1 to ``more`` further rows add to a forward of ``rows``."""
        base, last = self(rows), rows + more
        ends = {rows + 1, last}.union(measured for measured in self.rows if rows < measured < last)
        return min((self(end) - base) / (end - rows) for end in ends)  # least at the end of a straight piece


@dataclass(frozen=True)
class StepCosts(_Measured):
    """Seconds of the parts of a decoding step.

    Args:
        target: time of the target's forward by its rows.
        draft: time that a level adds besides the target's rows, by the rows that the drafter is given.
        decide: time to ask a learned decider about a level, if there is one.
        rest: time of verification and bookkeeping in a step without drafts.
        start: time of drafting besides its levels, once per step.
        joining: time that each sample beyond the first adds to ``start``.
        lookup: time of looked-up drafts besides their rows, once per step.
        finding: time that each sample beyond the first adds to ``lookup``.
        reading: time in which the drafter reads a token of a prompt; by default that of a further row of a level.

    Raises:
        TypeError: if a table is not a :class:`CostTable`, or a time is not a number.
        ValueError: if a time is negative or not finite.

    Examples:
        >>> forward, level = CostTable((1, 5), (1.0, 2.0)), CostTable((1,), (0.25,))
        >>> StepCosts(forward, level).step(samples=1, levels=4)
        3.0
    """

    _kind = "step costs"
    target: CostTable
    draft: CostTable
    decide: float = 0.0
    rest: float = 0.0
    start: float = 0.0
    joining: float = 0.0
    lookup: float = 0.0
    finding: float = 0.0
    reading: float | None = None

    def __post_init__(self) -> None:
        check_instance("target", self.target, CostTable)
        check_instance("draft", self.draft, CostTable)
        for name in ("decide", "rest", "start", "joining", "lookup", "finding"):
            object.__setattr__(self, name, check_float(name, getattr(self, name), 0))
        if self.reading is not None:
            object.__setattr__(self, "reading", check_float("reading", self.reading, 0))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{**fields, "target": CostTable(**fields["target"]), "draft": CostTable(**fields["draft"])})

    def step(self, samples: int, levels: float) -> float:
        """Returns the seconds of a step that drafts and verifies ``samples`` chains of ``levels`` drafts on average."""
        rows = samples * (1 + levels)
        drafting = self.starting(samples) + levels * (self.draft(samples) + self.decide) if levels else 0.0
        return self.rest + self.target(rows) + drafting

    @property
    def per_draft(self) -> float:
        """Seconds that a further row adds to a level of drafts."""
        return self.draft.slope

    @property
    def per_read(self) -> float:
        """Seconds in which the drafter reads a token of a prompt."""
        return self.per_draft if self.reading is None else self.reading

    def starting(self, samples: int) -> float:
        """Returns the seconds of drafting for some samples besides its levels."""
        return self.start + self.joining * (samples - 1)

    def looking(self, samples: int) -> float:
        """Returns the seconds of looked-up drafts for some samples, besides their rows."""
        return self.lookup + self.finding * (samples - 1)
