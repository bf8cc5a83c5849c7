"""One run of a benchmark: shows progress and tables, and writes the figures."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from arbordraft.bench.decoding import Decode, in_turns
from arbordraft.bench.measure import precision, provenance, save
from arbordraft.bench.pages import page
from arbordraft.bench.tables import print_tables
from arbordraft.bench.workload import Workload
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.loading import load_target
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checkout import laboratory
from arbordraft.utils.choices import Dtype
from arbordraft.utils.files import write_text
from arbordraft.utils.terminal import bars, terminal


class Report:
    """Collects measurements within a ``with`` block, and prints them as tables at its end.

    Every new row rewrites the file, and every case the page, so that an interrupted run loses little.

    Args:
        json: file for the rows, their settings and their provenance.
        png: file for a picture of the rows.
        page: file for a page of Markdown about the rows, which are those of decoders in turns.
        **settings: written beside the rows; paths are cut to their last name.

    Raises:
        NoCheckoutError: if a picture is wanted outside of a checkout, which holds the plots.
    """

    def __init__(
        self, json: Path | None = None, png: Path | None = None, page: Path | None = None, **settings: Any
    ) -> None:
        self.json, self.png, self.page = json, png, page
        self._plot = None if png is None else laboratory("plots", "bench --png").plot
        self.settings = {name: _serializable(value) for name, value in settings.items()}
        self.rows: list[Any] = []
        self.left_out: list[str] = []
        self.console = terminal()
        self._workloads: list[dict[str, Any]] = []
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._progress = bars(self.console, *columns)
        self._task = self._progress.add_task("loading", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
        if kind is not None:
            return
        print_tables(self.console, self.rows)
        if self._plot is not None:
            self._plot(self.rows, self.png)
        self._write_page()
        for path in (self.json, self.png, self.page):
            if path is not None:
                self.console.print(f"wrote {path}", soft_wrap=True)

    def load(self, model: str, dtype: Dtype | None, device: str | None = "cpu") -> RaggedModel:
        """Loads the model and writes its name and type beside the rows; for arguments see :func:`~arbordraft.load`."""
        target, _ = load_target(model, dtype, device=device)
        self.settings |= {"model": _serializable(model), "dtype": precision(target.model)}
        return target

    def leave_out(self, reason: str) -> None:
        """Notes a case that was asked for and is not measured; page and file list the reasons."""
        self.left_out.append(reason)
        self.settings["left_out"] = self.left_out

    def take(self, rows: Iterable[Any], workload: Workload | None = None) -> list[Any]:
        """Collects rows as they come, notes their workload, and returns them."""
        if workload is not None and (stated := workload.stated()) not in self._workloads:
            self._workloads.append(stated)
        new = []
        for row in rows:
            new.append(row)
            self.rows.append(row)
            self._progress.update(self._task, description=f"{len(self.rows)} measured")
            if self.json is not None:
                save(self.json, self.rows, workloads=self._workloads, **self.settings)
        self._write_page()
        return new

    def decode(
        self, target: RaggedModel, decoders: Mapping[str, SpeculativeDecoder | Decode], workload: Workload
    ) -> list[Any]:
        """Decodes with every decoder in turns and collects the rows."""
        return self.take(in_turns(target, decoders, workload, self.on_progress), workload)

    def _write_page(self) -> None:
        if self.page is not None:
            write_text(self.page, page(self.rows, self.settings, provenance(), self.left_out))

    def on_progress(self, what: str, done: int, of: int) -> None:
        """Moves the progress bar to ``done`` of ``of`` rounds of the current case."""
        description = f"{len(self.rows)} measured, now {what}"
        self._progress.update(self._task, description=description, completed=done, total=of)


def _serializable(value: Any) -> Any:
    """Returns an option for a file of results, with paths on this machine cut to their last name."""
    if isinstance(value, list):
        return [_serializable(each) for each in value]
    return Path(value).name if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()) else value
