"""Finds the fastest way of speculating for a target and a drafter, on this machine and with given prompts.

Tuning measures costs, then lets settings compete: all decode some prompts in turns, the slower half drops out, and the
rest decode more. By these costs every setting drafts only as far as it pays. The competition chooses the drafter and
the size of the tree.

Shapes: B samples.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from arbordraft import builders
from arbordraft.bench.decoding import take_turns, warm_up
from arbordraft.bench.workload import Workload
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import measure_costs
from arbordraft.decoding.prompts import chat_batches
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checks import check_int, check_sequence, check_temperature
from arbordraft.utils.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TREES = (8, 16, 32)
_LARGEST = 4096  # largest batch size to tune for


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
                return builders.fitted(target, drafter, self.size, lookup=self.kind != "tree", costs=costs)
        raise ValueError(f"there is no way of speculating called {self.kind!r}")


_PLAIN = Setting("plain")


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


def tune(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
    drafter: Drafter,
    prompts: Sequence[str],
    *,
    batches: Sequence[int] = (1, 8),
    temperature: float = 0.0,
    new_tokens: int = 96,
    tell: Callable[[str], None] = lambda what: None,
) -> Tuned:
    """Measures costs and chooses the fastest setting for every batch size.

    Args:
        name: name of the drafter.
        prompts: first user turns like those to decode later; at least one.
        batches: batch sizes to choose for, 1 to 4096.
        temperature: 0 for greedy.
        new_tokens: most tokens of an answer, 1 or more.

    Raises:
        TypeError: if a number is of the wrong type, or ``prompts`` is not a list of texts.
        ValueError: if an argument is out of range, or there is no prompt or batch size.
    """
    batches = check_sequence("batches", batches, lambda name, value: check_int(name, value, 1, _LARGEST))
    if not batches:
        raise ValueError("batches must hold at least one batch size, got none")
    temperature, new_tokens = check_temperature("temperature", temperature), check_int("new_tokens", new_tokens, 1)
    tell("measuring forwards and drafts")
    costs = measure_costs(target, drafter, tokenizer, prompts)
    choices = []
    for batch in sorted(set(batches)):
        decoders = {each: each.decoder(target, drafter, costs, batch) for each in grid(drafter)}
        inputs = chat_batches(tokenizer, list(islice(cycle(prompts), max(batch, len(prompts)))), batch)
        choices.append(_compete(batch, decoders, inputs, temperature, new_tokens, tell))
    return Tuned(name, temperature, costs, choices)


def grid(drafter: Drafter) -> list[Setting]:
    """Returns all settings that tuning tries for a drafter."""
    settings = [_PLAIN, Setting("lookup")]
    if isinstance(drafter, NGramDrafter):
        return settings
    return settings + [Setting(kind, nodes) for kind in ("tree", "lookup or tree") for nodes in _TREES]


def _compete(
    batch: int,
    decoders: Mapping[Setting, SpeculativeDecoder],
    batches: Sequence[dict[str, Any]],
    temperature: float,
    new_tokens: int,
    tell: Callable[[str], None],
) -> Choice:
    """Chooses a setting by successive halving; plain decoding stays to the end as the reference."""
    workload = Workload(batch=batch, new_tokens=new_tokens, temperature=temperature, repeats=1)
    warm_up(decoders, batches[0], workload)
    left, speeds = list(decoders), dict[Setting, float]()

    def told(setting: str, done: int, of: int) -> None:
        tell(f"batch {batch}: {len(left)} settings left, decoding with {setting}")

    for more in reversed(range(max(1, (len(left) - 1).bit_length()))):
        counts, seconds = dict.fromkeys(left, 0), dict.fromkeys(left, 0.0)
        # Early rounds decode fewer prompts, not shorter answers: lookups need some text to find anything.
        some = batches[: max(2, len(batches) >> more)]
        for setting, spent, stats in take_turns({key: decoders[key] for key in left}, some, workload, told):
            seconds[setting] += spent
            counts[setting] += sum(stats.emitted)
        speeds |= {setting: counts[setting] / seconds[setting] for setting in left}
        left.sort(key=speeds.__getitem__, reverse=True)
        best = left[0]
        kept = left[: max(2, (len(left) + 1) // 2)]
        left = kept if _PLAIN in kept else [*kept, _PLAIN]
    rivals = {str(setting): speeds[setting] for setting in sorted(speeds, key=speeds.__getitem__, reverse=True)}
    return Choice(batch, best, speeds[best], speeds[_PLAIN], rivals)


__all__ = ["Choice", "Setting", "Tuned", "grid", "tune"]
