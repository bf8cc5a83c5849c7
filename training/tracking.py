"""MLflow tracking for Lightning trainings, which can be lost without losing the training.

The tracker writes a journal of its run into an outbox, and delivers it at once as long as the server takes it. The
first failure ends that for the process, with one warning; the journal goes on, and ``delivery.sync`` delivers it later.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import platform
import posixpath
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from getpass import getuser
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from arbordraft.training.delivery import Point, deliver
from arbordraft.training.outbox import OUTBOX, Journal
from arbordraft.utils.git import git
from arbordraft.utils.mlflow_server import ALIASES, NAMES, limits, reason, resolve_uri

TIMEOUT = 20  # seconds; a hung server costs twice that, once per training
VALUE_LIMIT = 6000  # characters of a parameter; tags may have more
STATUS = {"success": "FINISHED", "finished": "FINISHED", "killed": "KILLED"}  # else FAILED

P = ParamSpec("P")
R = TypeVar("R")
StrPath = str | os.PathLike[str]


def _harmless(
    method: Callable[Concatenate[MLflowTracker, P], R],
) -> Callable[Concatenate[MLflowTracker, P], R | None]:
    """Run a method on rank zero only, and turn whatever it raises into a warning."""

    @functools.wraps(method)
    def guarded(self: MLflowTracker, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # figures, metrics and folders of the caller's, and a disk that may be full
            lost = f"Tracking lost something in {method.__name__} ({reason(error)}); the training goes on."
            self._link.warn("loss", f"{lost} See that {self._link.outbox} can be written, or choose another outbox.")
            return None

    return rank_zero_only(guarded)


@dataclass
class _Link:
    """The way to the server, and what was said about it."""

    uri: str
    outbox: Path
    online: bool = True
    said: set[str] = field(default_factory=set)

    def deliver(self, journal: Journal) -> None:
        """Deliver a journal unless that failed before."""
        try:
            with limits(TIMEOUT):
                if self.online:
                    deliver(journal, self.uri)
        except Exception as error:  # whatever it is, it must not end the training
            self.online = False
            kept = f"MLflow failed ({reason(error)}); the training goes on and its tracking is kept in {self.outbox}."
            self.warn("offline", f"{kept} Deliver it with `arbordraft train sync`, afterwards or at any time.")

    def warn(self, kind: str, message: str) -> None:
        """Log a warning once; Python's own warnings can be turned into errors, and then they would end the training."""
        if kind not in self.said:
            self.said.add(kind)
            logging.getLogger("arbordraft").warning(message)


class MLflowTracker(Logger):  # type: ignore[misc]  # Lightning is not type-checked here
    """Tracks one run, on rank zero; only the constructor raises, all else at most warns.

    Args:
        experiment: its name on the server.
        run_name: name of the run; MLflow invents one by default.
        uri: tracking server; by default ``$MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db``. If it hangs, a
            training waits 40 s, once, unless ``MLFLOW_HTTP_REQUEST_TIMEOUT`` says otherwise; a database server
            without MLflow in front may take 100 s to be given up.
        registered_model: name for ``register``.
        tags: of the run.
        outbox: folder of the journals. Checkpoints are copied there, and deleted once delivered. Keep the rest while
            anything is to be delivered; afterwards it can be deleted.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if MLflow would not take the name of the registered model.
    """

    def __init__(
        self,
        experiment: str = "arbordraft",
        run_name: str | None = None,
        uri: str | None = None,
        registered_model: str | None = None,
        tags: Mapping[str, Any] | None = None,
        outbox: StrPath = OUTBOX,
    ) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ImportError(f"MLflow cannot be imported ({error}); run: pip install 'arbordraft[mlops]'") from error
        if registered_model is not None and not re.fullmatch(NAMES, registered_model):
            raise ValueError(f"registered_model may hold letters, digits, '_', '-', '.', ' ', not {registered_model!r}")
        self._experiment, self._run_name, self._registered_model = experiment, run_name, registered_model
        self._tags = {_legal(key): _clip(value) for key, value in (tags or {}).items()}
        self.registers = registered_model is not None
        self._link = _Link(resolve_uri(uri), Path(outbox).absolute())
        self._journal = Journal.new(self._link.outbox)
        self._begun = False
        self._params: set[str] = set()
        self._tables: list[dict[str, str]] = []
        self._latest: dict[str, Point] = {}
        self._checkpoints: dict[Path, str] = {}

    @property
    def name(self) -> str:
        return self._experiment

    @functools.cached_property  # folders are named after it, so it must not change when somebody else delivers
    def version(self) -> str:
        """The id of the run, or else, while the server does not answer, the name of its journal."""
        self.begin()
        return (self._link.online and self._journal.progress().run) or self._journal.key

    @property
    def save_dir(self) -> str:
        """``runs`` beside the outbox: Lightning adds the name of the experiment, and ``./arbordraft`` would hide us."""
        return str(self._link.outbox.parent / "runs")

    @_harmless
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace | None, *_: Any, **__: Any) -> None:
        """Log a configuration with nested names joined by dots; MLflow keeps the first value of each."""
        values = {_legal(name): _clip(value) for name, value in _flatten(params or {})}
        if new := {name: value for name, value in values.items() if name not in self._params}:
            self._record("params", values=new)
            self._params |= new.keys()

    @_harmless
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers at an optimiser step; what MLflow forbids in names becomes an underscore."""
        if metrics:
            self._record("metrics", points=self._points(metrics, step or 0))

    @_harmless
    def finalize(self, status: str = "success") -> None:
        """Note how the run ended; Lightning says ``failed`` for an interrupt too, which MLflow calls ``KILLED``."""
        if not self._begun:
            return
        killed = isinstance(sys.exception(), KeyboardInterrupt | SystemExit)
        self._record("end", status="KILLED" if killed else STATUS.get(status.lower(), "FAILED"))

    @_harmless
    def log_config(self, yaml_text: str) -> None:
        """Log the resolved configuration as ``config.yaml``."""
        self.log_text(yaml_text, "config.yaml")

    @_harmless
    def log_provenance(self, seed: int, target: Mapping[str, Any]) -> None:
        """Log what a training depends on: seed, versions, hardware, target model, and the commit of a git checkout."""
        versions = {"python": platform.python_version()}
        for package in ("arbordraft", "torch", "transformers", "lightning", "mlflow"):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        hardware = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": ", ".join(gpus) or "none"}
        self.log_hyperparams({"seed": seed, "versions": versions, "hardware": hardware})
        tags = {f"target.{name}": value for name, value in _flatten(target)}
        if commit := git("rev-parse", "HEAD"):
            tags["mlflow.source.git.commit"] = commit
            tags["git.dirty"] = bool(git("status", "--porcelain", "--untracked-files=no"))
        self._record("tags", values={_legal(name): _clip(value) for name, value in tags.items()})

    @_harmless
    def log_dataset(
        self,
        name: str,
        digest: str,
        rows: int,
        source: str,
        profile: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a data set as an input of the run.

        Args:
            name: with the digest it identifies the data set.
            digest: hash of the contents; of a long one MLflow takes 36 characters, the profile keeps all.
            rows: number of examples.
            source: path or URL.
            profile: further facts, such as the chat template.
        """
        kind, key = ("http", "url") if re.match("https?://", source) else ("local", "uri")
        dataset = {
            "name": name[:500],
            "digest": digest[:36],
            "source_type": kind,
            "source": json.dumps({key: source}),
            "profile": json.dumps({"num_rows": rows, "digest": digest, **(profile or {})}, default=str),
        }
        self._record("dataset", dataset=dataset, context="train")

    @_harmless
    def log_figure(self, figure: Any, name: str) -> None:
        """Log a matplotlib figure as an artifact, as PNG if its name has no suffix."""
        self._artifact(name if Path(name).suffix else f"{name}.png", lambda path: figure.savefig(path))

    @_harmless
    def log_text(self, text: str, name: str) -> None:
        self._artifact(name, lambda path: path.write_text(text, encoding="utf-8"))

    @_harmless
    def log_table(self, columns: Mapping[str, Sequence[Any]], name: str) -> None:
        """Log columns of equal length in the form that MLflow shows as a table."""
        name = f"{name.removesuffix('.json')}.json"
        table = {"columns": list(columns), "data": list(zip(*columns.values(), strict=True))}
        self.log_text(json.dumps(table, default=str), name)
        self._tables.append({"path": name, "type": "table"})
        self._record("tags", values={"mlflow.loggedArtifacts": json.dumps(self._tables)})

    @_harmless
    def log_checkpoint(self, folder: StrPath, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Log a published checkpoint as a model of the run, with the metrics that speak for it.

        Args:
            folder: is copied as it is, so that it may be overwritten or deleted; nothing is pickled.
            step: optimiser step.
            metrics: linked to the model.
        """
        points = self._points(metrics or {}, step)
        # To MLflow, checkpoints of one name are steps of one model; its name has stricter rules.
        name = re.sub(r"[^\w -]", "-", self._registered_model or self._experiment)
        copy = functools.partial(shutil.copytree, folder, dirs_exist_ok=True)
        self._checkpoints[Path(folder).absolute()] = self._record("model", copy, name=name, step=step, points=points)

    @_harmless
    def register(self, folder: StrPath, alias: str = "candidate") -> None:
        """Make a checkpoint, logged before or not, a version of the registered model, known by an alias."""
        if not self.registers:
            raise ValueError("give the tracker a registered_model")
        if not re.fullmatch(ALIASES, alias):
            raise ValueError(f"an alias consists of letters, digits, '_' and '-', and is no version: {alias!r}")
        if Path(folder).absolute() not in self._checkpoints:
            self.log_checkpoint(folder, step=0)
        model = self._checkpoints[Path(folder).absolute()]
        self._record("version", name=self._registered_model, model=model, alias=alias)

    def _begin(self) -> None:
        if self._begun:
            return
        tags = {"mlflow.source.name": Path(sys.argv[0]).name, "mlflow.source.type": "LOCAL", **self._tags}
        with suppress(OSError, KeyError):  # a container's user may have no name
            tags.setdefault("mlflow.user", getuser())
        self._journal.append("run", tags=tags, experiment=self._experiment, name=self._run_name)
        self._begun = True
        self._link.deliver(self._journal)

    begin = _harmless(_begin)

    def _record(self, kind: str, attach: Callable[[Path], object] | None = None, **fields: Any) -> str:
        self._begin()
        record = self._journal.append(kind, attach, **fields)
        self._link.deliver(self._journal)
        return record

    def _points(self, metrics: Mapping[str, float], step: int) -> list[Point]:
        """Points in time; what a training logs and then links to a checkpoint, or the reverse, stays one point."""
        points, now = [], time.time_ns() // 1_000_000
        for name, value in metrics.items():
            point = (_legal(name), float(value), now, step)
            latest = self._latest.get(point[0], point)
            points.append(latest if (latest[1], latest[3]) == (point[1], step) else point)
        self._latest |= {point[0]: point for point in points}
        return points

    def _artifact(self, name: str, write: Callable[[Path], object]) -> None:
        name = _legal(name)
        self._record("artifact", lambda files: write(files / posixpath.basename(name)), name=name)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings, with their names joined by dots."""
    if isinstance(value, Namespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping) and (value or not prefix):
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def _legal(name: str) -> str:
    """A name that MLflow takes: a relative path of up to 250 letters, digits, ``_``, ``-``, ``.`` and spaces."""
    return posixpath.normpath(re.sub(r"[^\w/. -]", "_", name)[:250]).lstrip("./") or "_"


def _clip(value: Any) -> str:
    text = str(value)
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 1] + "…"
