"""What forwards and steps cost on this machine, and how many drafts are worth it.

Rows are not free on a CPU, nor on a GPU once a batch is large: a draft pays only if its chance of being accepted is
worth more than the time of its row.
"""

import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from arbordraft.cache import RaggedKVCache
from arbordraft.target import RaggedModel

_TABLES = ("target", "draft")
_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class CostTable:
    """Seconds of a target forward by its number of packed rows, interpolated in between.

    Args:
        rows: measured numbers of rows, ascending.
        seconds: their times; made not to fall with more rows, since a drop can only be noise.

    Raises:
        ValueError: unless rows ascend from 1 and every time is positive.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = list(self.rows) == sorted(set(self.rows)) and self.rows[:1] == (1,)
        if not ascending or len(self.rows) != len(self.seconds) or min(self.seconds) <= 0:
            raise ValueError("a cost table needs ascending rows from 1 and a positive time for each")
        highest, rising = 0.0, []
        for second in self.seconds:
            highest = max(highest, second)
            rising.append(highest)
        object.__setattr__(self, "seconds", tuple(rising))

    @classmethod
    def measure(cls, target: RaggedModel, rows: Sequence[int] = _ROWS, *, context: int = 256, repeats: int = 5) -> Self:
        """Times forwards of a chain behind ``context`` tokens: the best of ``repeats``, which noise disturbs least."""
        if target.max_positions is not None:
            context = min(context, target.max_positions - max(rows))
        cache = RaggedKVCache()
        sample = cache.open(context + max(rows))
        target.prefill({sample: [0] * context}, cache)
        best = dict.fromkeys(rows, float("inf"))
        for _ in range(repeats):
            for count in rows:  # in turns, so that a slow spell does not hit one number alone
                batch, tokens = cache.plan([sample], [range(count)]), torch.zeros(count, dtype=torch.int64)
                start = time.perf_counter()
                target(tokens, batch, cache)
                best[count] = min(best[count], time.perf_counter() - start)
                cache.drop([sample])
        return cls(tuple(rows), tuple(best.values()))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what :meth:`save` wrote."""
        fields = json.loads(path.read_text())
        return cls(tuple(fields["rows"]), tuple(fields["seconds"]))

    def save(self, path: Path) -> None:
        """Writes JSON; the file appears only when it is complete."""
        _write(path, asdict(self))

    def __call__(self, rows: float) -> float:
        """Seconds of a forward with ``rows`` packed rows; beyond the table along its last slope."""
        at = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        if len(self.rows) == 1:
            return self.seconds[0] * rows
        (low, high), (first, second) = self.rows[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return first + (second - first) * (rows - low) / (high - low)

    def floor(self, samples: int, chances: Sequence[float] = ()) -> float:
        """Acceptance below which no number of drafts, up to 16 per sample, makes decoding faster."""
        return _floor(self, samples)

    def worthwhile(self, samples: int, chances: Sequence[float]) -> int:
        """How many drafts give the most tokens per second.

        Args:
            samples: samples that take part; each emits one token without any draft.
            chances: probability that each draft is reached and accepted, descending.
        """
        best, count, expected = samples / self(samples), 0, float(samples)
        for drafts, chance in enumerate(chances, 1):
            expected += chance
            if (rate := expected / self(samples + drafts)) > best:
                best, count = rate, drafts
        return count


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a decoding step.

    Args:
        target: the target's forward by its rows.
        draft: a level of drafting by the rows that the drafter is given.
        decide: asking a learned decider about a level, if there is one.
        rest: verification and bookkeeping, once per step.

    Raises:
        ValueError: if a time is negative.
    """

    target: CostTable
    draft: CostTable
    decide: float = 0.0
    rest: float = 0.0

    def __post_init__(self) -> None:
        if self.decide < 0 or self.rest < 0:
            raise ValueError(f"times must not be negative, got decide={self.decide} and rest={self.rest}")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: if it is something else.
        """
        try:
            return cls.from_fields(json.loads(path.read_text()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no step costs: {error}; measure them again") from error

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of ``dataclasses.asdict``, also after a detour through JSON."""
        tables = {name: CostTable(**{key: tuple(row) for key, row in fields[name].items()}) for name in _TABLES}
        return cls(**{**fields, **tables})

    def save(self, path: Path) -> None:
        """Writes JSON; the file appears only when it is complete."""
        _write(path, asdict(self))

    def step(self, samples: int, levels: float) -> float:
        """Seconds of a step in which ``samples`` chains of ``levels`` drafts, on average, are drafted and verified."""
        rows = samples * (1 + levels)
        return self.rest + self.target(rows) + levels * (self.draft(samples) + self.decide)

    def level(self, planned: int, rows: int) -> float:
        """Seconds that one level more takes: its drafting, and its rows in the target's forward.

        Args:
            planned: rows that the target gets without it.
            rows: nodes that get children; each is taken to get one.
        """
        return self.draft(rows) + self.decide + self.target(planned + rows) - self.target(planned)


@dataclass(frozen=True)
class NodeBudget:
    """As many of the likeliest drafts as fit into a budget, whatever their rows cost.

    With a topology that offers more nodes than the budget, trees take the shape that suits each step: what EAGLE-2
    (Li et al., 2024) calls expanding and reranking.

    Args:
        nodes: per sample, root included. Samples of a batch share their budgets.
    """

    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"a budget has at least the root, got {self.nodes} nodes")

    def floor(self, samples: int, chances: Sequence[float] = ()) -> float:
        """The chance of the last draft that fits so far: what is less likely has no descendants that fit either."""
        count = samples * (self.nodes - 1)
        return sorted(chances, reverse=True)[count - 1] if 0 < count <= len(chances) else 0.0

    def worthwhile(self, samples: int, chances: Sequence[float]) -> int:
        """How many of the drafts, likeliest first, are kept."""
        return min(len(chances), samples * (self.nodes - 1))


def _write(path: Path, fields: dict[str, Any]) -> None:
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps(fields) + "\n")
    partial.replace(path)


@cache
def _floor(costs: CostTable, samples: int) -> float:
    base = costs(samples)
    slopes = ((costs(samples + more) - base) / more for more in range(1, 16 * samples + 1))
    return samples / base * min(slopes)
