"""What the commands of ``arbordraft bench`` share: their options, and how figures are shown and written."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from arbordraft.bench.decoding import Decode, in_turns
from arbordraft.bench.measure import save
from arbordraft.bench.plots import plot
from arbordraft.bench.tables import print_rows
from arbordraft.bench.workload import Workload
from arbordraft.cli.display import bars, terminal
from arbordraft.cli.options import LimitOption, ModelOption, PromptsOption, numbers, output_file
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.prompts import MIXED, VARIED, read_prompts
from arbordraft.loading import Dtype, Kernels, load_target
from arbordraft.target.model import RaggedModel

app = typer.Typer(
    no_args_is_help=True,
    help="Measure forwards, verification and decoding; whatever is compared takes turns in one run.",
)
console = terminal()


def whole(text: str) -> str:
    """Refuses at once what is no list of whole numbers from 1."""
    numbers(text, int)
    return text


def _temperatures(text: str) -> str:
    numbers(text, float, 0)
    return text


BatchesOption = Annotated[
    str,
    typer.Option("--batches", "--batch", callback=whole, help="Prompts at a time, one size or several, as in 1,4,8."),
]
# What commands share: type and default by the name that :func:`measurement` knows an option by.
SHARED: dict[str, tuple[Any, Any]] = {
    "model": (ModelOption, "smollm2"),
    "dtype": (Annotated[Dtype, typer.Option(help="Precision of the weights.")], Dtype.bfloat16),
    "dtypes": (
        Annotated[list[Dtype] | None, typer.Option("--dtype", help="Precisions; bfloat16 and float32 if none.")],
        None,
    ),
    "new_tokens": (Annotated[int, typer.Option(min=1, help="Tokens per prompt when decoding.")], 128),
    "prompts": (PromptsOption, None),
    "limit": (LimitOption, None),
    "batches": (BatchesOption, "8"),
    "temperatures": (
        Annotated[
            str,
            typer.Option(
                "--temperatures",
                "--temperature",
                callback=_temperatures,
                help="Temperatures, as in 0,1; 0 is greedy.",
            ),
        ],
        "0",
    ),
    "repeats": (Annotated[int, typer.Option(min=1, help="Timings per case; medians are reported.")], 3),
    "seed": (Annotated[int, typer.Option(min=0, help="Of sampled tokens and of random inputs.")], 0),
    "json": (
        Annotated[
            Path | None, typer.Option(callback=output_file, help="Write the figures and their provenance to this file.")
        ],
        None,
    ),
    "png": (
        Annotated[
            Path | None,
            typer.Option(callback=output_file, help="Draw the figures to this PNG file (needs matplotlib)."),
        ],
        None,
    ),
}
WORKLOAD = ("prompts", "limit", "new_tokens", "batches", "temperatures", "repeats", "seed")
CASES = {"model", "dtypes", "repeats", "seed", "json"}  # of commands that time what happens inside a step
DECODING = {"model", "dtype", *WORKLOAD, "json", "png"}  # of commands that time whole answers


class Run:
    """One command's measurements: loads what is measured, shows progress and tables, and writes the figures.

    They are saved row by row, so that an interrupted run loses little. Values of the options that commands share come
    apart from those of the command's own, which are only written beside the figures.
    """

    def __init__(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.shared = shared
        self.rows: list[Any] = []
        self.stated: list[dict[str, Any]] = []
        named = {name: value for name, value in shared.items() if name not in (*WORKLOAD, "json", "png")}
        self.settings = {name: _nameable(value) for name, value in (named | own).items()}
        self.batches = numbers(shared.get("batches", "8"), int)
        self.temperatures = numbers(shared.get("temperatures", "0"), float, 0)
        counts = {name: shared[name] for name in ("new_tokens", "repeats", "seed") if name in shared}
        self.workload = Workload(tuple(texts(shared.get("prompts"), shared.get("limit"))), **counts)

    def workloads(self) -> Iterator[Workload]:
        """The workload at every temperature and in batches of every size."""
        for temperature in self.temperatures:
            for batch in self.batches:
                yield replace(self.workload, temperature=temperature, batch=batch)

    def target(self, kernels: Kernels = Kernels.auto, dtype: Dtype | None = None) -> RaggedModel:
        """The model to measure."""
        return load_target(self.shared["model"], dtype or self.shared["dtype"], kernels)[0]

    def targets(self, kernels: Kernels = Kernels.auto) -> Iterator[RaggedModel]:
        """The model to measure in every precision."""
        for dtype in self.shared["dtypes"] or [Dtype.bfloat16, Dtype.float32]:
            yield self.target(kernels, dtype)

    def take(self, rows: Iterable[Any], workload: Workload) -> list[Any]:
        """Collects what was measured with a workload as it comes, and returns it."""
        axes = {"batches": "batch", "temperatures": "temperature"}
        known = {axes.get(name, name) for name in WORKLOAD if name in self.shared}
        stated = {name: value for name, value in workload.stated().items() if name in known}
        if stated not in self.stated:
            self.stated.append(stated)
        new = []
        for row in rows:
            new.append(row)
            self.rows.append(row)
            self._progress.update(self._task, description=f"{len(self.rows)} measured")
            if path := self.shared["json"]:
                save(path, self.rows, workloads=self.stated, **self.settings)
        return new

    def decode(
        self, target: RaggedModel, decoders: Mapping[str, SpeculativeDecoder | Decode], workload: Workload
    ) -> None:
        """Decodes with every decoder in turns."""
        self.take(in_turns(target, decoders, workload, self.tell), workload)

    def tell(self, what: str, done: int, of: int) -> None:
        """Moves the bar: ``done`` rounds of what is being measured are over."""
        description = f"{len(self.rows)} measured, now {what}"
        self._progress.update(self._task, description=description, completed=done, total=of)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Shows what is going on with a bar, and the results at the end."""
        torch.manual_seed(self.workload.seed)
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with bars(console, *columns) as self._progress:
            self._task = self._progress.add_task("loading the model" if "model" in self.shared else "", total=None)
            yield
        tables: dict[Any, list[Any]] = {}
        for row in self.rows:
            tables.setdefault((type(row), getattr(row, "table", None)), []).append(row)
        for rows in tables.values():
            print_rows(console, rows)
        png = self.shared.get("png")
        if png is not None:
            plot(self.rows, png)
        for path in (self.shared["json"], png):
            if path is not None:
                console.print(f"wrote {path}", soft_wrap=True)


def measurement(
    names: Iterable[str], command: str | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function of a :class:`Run` and of the command's own options.

    Args:
        names: of the shared options that it has besides.
        command: its name, by default the function's.
        **defaults: of shared options, where they are others than in ``SHARED``.
    """
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=kind)
        for name, (kind, default) in SHARED.items()
        if name in names
    ]

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        def run(**options: Any) -> None:
            values = {parameter.name: options.pop(parameter.name) for parameter in shared}
            measured = Run(values, options)
            with measured.progress():
                function(measured, **options)

        # What typer reads instead of the generic **options.
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return app.command(command)(run)

    return register


def texts(prompts: Path | None, limit: int | None) -> list[str]:
    """The prompts to decode."""
    known = read_prompts(prompts) if prompts else [*MIXED, *VARIED]
    if not known:
        raise ValueError(f"{prompts} holds no prompts")
    return known[:limit]


def _nameable(value: Any) -> Any:
    """An option as it may stand in a file: of what lies on this machine the last name only."""
    if isinstance(value, list):
        return [_nameable(each) for each in value]
    return Path(value).name if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()) else value
