"""The choices of ``arbordraft tune``: the fastest way of speculating for a target, a drafter and a batch size."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from arbordraft import builders
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checks import check_int, check_temperature
from arbordraft.utils.files import write_text


@dataclass(frozen=True)
class Setting:
    """A way of speculating.

    Args:
        kind: ``plain``, ``lookup``, ``tree``, or ``lookup or tree``: looks up if that brings more, else drafts a tree.
        size: most nodes of a tree, root included.
    """

    kind: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}" if self.size else self.kind

    def decoder(self, target: RaggedModel, drafter: Drafter, costs: StepCosts, batch: int = 1) -> SpeculativeDecoder:
        """Builds the decoder of this setting.

        Args:
            batch: prompts to decode at a time.

        Raises:
            ValueError: if ``kind`` is unknown.
        """
        match self.kind:
            case "plain":
                return builders.plain(target)
            case "lookup":
                return builders.lookup(target, costs, expected_batch=batch)
            case "tree" | "lookup or tree":
                return builders.cost_aware(target, drafter, self.size, lookup=self.kind != "tree", costs=costs)
        raise ValueError(f"there is no way of speculating called {self.kind!r}")


@dataclass(frozen=True)
class Choice:
    """The best setting for a batch size.

    Args:
        batch: prompts at a time.
        setting: the fastest setting.
        tokens_per_second: speed of this setting on the prompts of tuning.
        plain: speed of decoding without drafts.
        rivals: speeds of all settings, fastest first, each from the last round that it took part in.
    """

    batch: int
    setting: Setting
    tokens_per_second: float
    plain: float
    rivals: dict[str, float] = field(default_factory=dict)

    @property
    def pays(self) -> bool:
        """Whether any speculation is faster than plain decoding."""
        return self.setting.kind != "plain"


@dataclass(frozen=True)
class Tuned:
    """The choices of tuning, and the costs behind them.

    Args:
        drafter: name of the drafter, as for :func:`~arbordraft.drafter_names.drafter_named`.
        temperature: 0 for greedy.
        choices: by batch size, ascending.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if a value is out of range, or ``choices`` is empty.
    """

    drafter: str
    temperature: float
    costs: StepCosts
    choices: list[Choice]

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature)
        if not self.choices:
            raise ValueError("it holds no choice for any batch size")
        for index, choice in enumerate(self.choices):
            check_int(f"choices[{index}].batch", choice.batch, 1)

    def choice(self, batch: int) -> Choice:
        """Returns the choice for the largest tuned batch size up to ``batch``, or else for the smallest."""
        batch = check_int("batch", batch, 1)
        below = [choice for choice in self.choices if choice.batch <= batch]
        return below[-1] if below else self.choices[0]

    def decoder(self, target: RaggedModel, batch: int, drafter: Drafter | None = None) -> SpeculativeDecoder:
        """Builds the decoder chosen for a batch size.

        Args:
            batch: prompts at a time.
            drafter: by default loaded by the stored name.
        """
        from arbordraft.drafter_names import drafter_named

        drafter = drafter or drafter_named(self.drafter, target)
        setting = self.choice(batch).setting
        return setting.decoder(target, drafter, self.costs, batch)

    def save(self, path: Path) -> None:
        """Writes JSON; the file appears only when it is complete."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that :meth:`save` wrote.

        Raises:
            ValueError: if the file holds anything else.
        """
        try:
            fields = json.loads(path.read_text())
            fields["costs"] = StepCosts.from_fields(fields["costs"])
            fields["choices"] = [Choice(**row | {"setting": Setting(**row["setting"])}) for row in fields["choices"]]
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a result of tuning: {error}; run 'arbordraft tune' again") from error


__all__ = ["Choice", "Setting", "Tuned"]
