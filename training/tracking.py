"""MLflow tracking by Lightning's own logger; if tracking fails, the training goes on.

A run is recorded by one :class:`MLFlowLogger`. If its server fails, at the start or later, a second logger records the
rest in the local database. Checkpoints and published networks lie on the disk and never depend on either.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from arbordraft.utils.mlflow_server import (
    CANDIDATE,
    DEFAULT_URI,
    check_names,
    check_store,
    import_mlflow,
    limits,
    public,
    reason,
    register,
    resolve_uri,
)

RETRIES, TIMEOUT = 1, 10  # retries, and seconds per try: the cost of a hung server, once per training

P = ParamSpec("P")
R = TypeVar("R")
StrPath = str | os.PathLike[str]


def _guarded(
    method: Callable[Concatenate[MLflowTracker, P], R],
) -> Callable[Concatenate[MLflowTracker, P], R | None]:
    """Runs a method on rank zero, and again on the local store if the server fails; logs all other errors."""

    @functools.wraps(method)
    def guarded(self: MLflowTracker, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._off:
            return None
        try:
            with limits(RETRIES, TIMEOUT):
                return method(self, *args, **kwargs)
        except Exception as error:  # from servers, a full disk, or the caller's figures and metrics
            if not self._turn_to_local_store(error):
                self._warn_of_loss(method.__name__, error)
                return None
        return guarded(self, *args, **kwargs)

    return rank_zero_only(guarded)


class MLflowTracker(Logger):  # type: ignore[misc]  # Lightning is not type-checked here
    """Tracks one run, on rank zero. Only the constructor raises; later failures warn once, and training goes on.

    Args:
        experiment: name of the experiment on the server.
        run_name: name of the run; MLflow invents one by default.
        uri: tracking server; by default ``$MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db``, the local store. A
            hung server delays the training by 20 s, once, unless ``MLFLOW_HTTP_REQUEST_TIMEOUT`` is set. A database
            server without MLflow in front may delay it by 100 s.
        registered_model: name under which ``register`` registers networks.
        tags: tags of the run.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if MLflow does not allow the name of the registered model.
    """

    def __init__(
        self,
        experiment: str = "arbordraft",
        run_name: str | None = None,
        uri: str | None = None,
        registered_model: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        import_mlflow()
        check_names(registered_model)
        self._experiment, self._run_name, self._registered_model = experiment, run_name, registered_model
        self._uri, self._tags = resolve_uri(uri), dict(tags or {})
        self.registers = registered_model is not None
        self._runs: dict[str, str] = {}
        self._logger: MLFlowLogger | None = None
        self._goes_on = self._lost = self._off = False
        self._models: dict[Path, str] = {}

    @property
    def name(self) -> str:
        return self._experiment

    @property
    def version(self) -> str | None:
        """The id of the run, which begins if needed; ``None`` if no store takes the run, and on other ranks."""
        logger = self.begin()
        return None if logger is None else logger.run_id

    def resume(self, runs: dict[str, str]) -> None:
        """Goes on with those runs of an interrupted training that still exist.

        Args:
            runs: ids of the runs, by experiment and store. Runs that begin now are added, for checkpoints to keep.
        """
        runs |= self._runs
        self._runs = runs

    @_guarded
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Logs a configuration; a resumed run keeps its first one, since MLflow does not change parameters."""
        logger = self._begin()
        if not self._goes_on:
            logger.log_hyperparams(params)

    @_guarded
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs numbers at an optimizer step."""
        self._begin().log_metrics(metrics, step)

    @_guarded
    def finalize(self, status: str = "success") -> None:
        """Records how the run ended; for an interrupt Lightning reports ``failed``, which becomes ``KILLED``."""
        killed = isinstance(sys.exception(), KeyboardInterrupt | SystemExit)
        if self._logger is not None:
            self._logger.finalize("KILLED" if killed else status)

    @_guarded
    def log_config(self, yaml_text: str) -> None:
        """Logs the resolved configuration as ``config.yaml``, and its values as parameters."""
        import yaml

        self.log_text(yaml_text, "config.yaml")
        self.log_hyperparams(yaml.safe_load(yaml_text) or {})

    @_guarded
    def log_provenance(self, seed: int, target: Mapping[str, Any]) -> None:
        """Logs the conditions of a training as tags: seed, commit, versions, hardware, and the target model."""
        from mlflow.entities import RunTag

        from arbordraft.bench.measure import provenance

        run = self._begin()
        facts = {"seed": seed, **provenance()}
        versions = facts.pop("versions") | {name: version(name) for name in ("lightning", "mlflow")}
        tags = {
            **{name: facts[name] for name in ("seed", "commit", "python", "machine", "cpu", "gpu", "threads")},
            **{f"versions.{name}": value for name, value in versions.items()},
            **{f"target.{name}": value for name, value in target.items()},
        }
        run.experiment.log_batch(run.run_id, tags=[RunTag(name, str(value)) for name, value in tags.items()])

    @_guarded
    def log_dataset(self, name: str, digest: str, rows: int, source: str, profile: Mapping[str, Any]) -> None:
        """Logs a data set as an input of the run.

        Args:
            name: name of the data set, which it identifies together with the digest.
            digest: hash of the contents; MLflow takes its first 36 characters, the profile keeps all.
            rows: number of examples.
            source: path or URL.
            profile: further facts, such as the chat template.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        kind, key = ("http", "url") if re.match("https?://", source) else ("local", "uri")
        facts = json.dumps({"num_rows": rows, "digest": digest, **profile}, default=str)
        dataset = Dataset(name[:500], digest[:36], kind, json.dumps({key: source}), profile=facts)
        run = self._begin()
        run.experiment.log_inputs(run.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])])

    @_guarded
    def log_figure(self, figure: Any, name: str) -> None:
        """Logs a matplotlib figure as a PNG."""
        run = self._begin()
        run.experiment.log_figure(run.run_id, figure, f"{name}.png")

    @_guarded
    def log_text(self, text: str, name: str) -> None:
        """Logs a text as an artifact."""
        run = self._begin()
        run.experiment.log_text(run.run_id, text, name)

    @_guarded
    def log_table(self, columns: Mapping[str, Sequence[Any]], name: str) -> None:
        """Logs columns of equal length in the form that MLflow shows as a table."""
        run = self._begin()
        run.experiment.log_table(run.run_id, dict(columns), f"{name}.json")

    @_guarded
    def log_checkpoint(self, folder: StrPath, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Logs a published checkpoint as a model of the run, with its metrics.

        Args:
            folder: folder of the checkpoint, copied as it is; nothing is pickled.
            step: optimizer step.
            metrics: metrics to link to the model.
        """
        from mlflow.entities import LoggedModelOutput, Metric

        run = self._begin()
        client, at = run.experiment, time.time_ns() // 1_000_000
        # To MLflow, checkpoints of one name are steps of one model; names of such models have stricter rules.
        name = re.sub(r"[^\w -]", "-", self._registered_model or self._experiment)
        model = client.create_logged_model(run.experiment_id, name, run.run_id, params={"step": str(step)}).model_id
        client.log_model_artifacts(model, str(folder))
        points = {name: value for name, value in (metrics or {}).items() if not math.isnan(value)}  # NaN is linked as 0
        client.log_batch(run.run_id, [Metric(name, points[name], at, step, model_id=model) for name in points])
        client.log_outputs(run.run_id, [LoggedModelOutput(model, step)])
        client.finalize_logged_model(model, "READY")
        self._models[Path(folder).absolute()] = model

    @_guarded
    def register(self, folder: StrPath, alias: str = CANDIDATE) -> None:
        """Registers a checkpoint, logged before or not, as a version of the registered model, with an alias."""
        if self._registered_model is None:
            raise ValueError("give the tracker a registered_model")
        path = Path(folder).absolute()
        if path not in self._models:
            self.log_checkpoint(folder, step=0)
        run = self._begin()
        register(run.experiment, self._registered_model, alias, self._models[path], run.run_id)

    def _begin(self) -> MLFlowLogger:
        """Returns Lightning's logger of the run; begins or resumes the run when it is first needed."""
        from mlflow import MlflowClient, MlflowException

        if self._logger is None:
            check_store(self._uri)
            place = f"{self._experiment} in {public(self._uri)}"
            run = self._runs.get(place)
            logger = MLFlowLogger(self._experiment, self._run_name, self._uri, dict(self._tags), run_id=run)
            try:
                if run is not None:
                    logger.experiment.update_run(run, "RUNNING")
            except MlflowException:  # the run was deleted; if the server is away, the next lines raise
                run, logger = None, MLFlowLogger(self._experiment, self._run_name, self._uri, dict(self._tags))
            client = MlflowClient(self._uri)
            if run is None and client.get_experiment_by_name(self._experiment) is None:
                client.create_experiment(self._experiment)  # Lightning's logger would warn that it is new
            with _unseeded():
                self._runs[place] = logger.run_id
            self._goes_on, self._logger = run is not None, logger
        return self._logger

    begin = _guarded(_begin)

    def _turn_to_local_store(self, error: Exception) -> bool:
        """Turns to the local store if the server failed, and not the request; tells whether it did."""
        if self._uri == DEFAULT_URI or (self._logger is not None and not _of_server(error)):
            return False
        begun = "" if self._logger is None else f" after it began as run {self._logger.run_id}"
        if self._logger is not None:
            self._tags["arbordraft.continues"] = self._logger.run_id
        _log(
            f"MLflow at {public(self._uri)} failed ({reason(error)}){begun}; the training goes on and is recorded in "
            f"{Path('mlflow.db').absolute()}, from which mlflow-export-import copies it to a server later"
        )
        self._uri, self._logger = DEFAULT_URI, None
        self._models.clear()
        return True

    def _warn_of_loss(self, method: str, error: Exception) -> None:
        self._off = self._logger is None  # no store takes the run: every further call might wait again
        if not self._lost:
            self._lost = True
            what = "everything" if self._off else f"something in {method}"
            _log(f"tracking loses {what} ({reason(error)}); the training goes on")


@contextlib.contextmanager
def _unseeded() -> Iterator[None]:
    """Lets MLflow invent names by chance: by the training's seed, all its runs would have one name."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _of_server(error: Exception) -> bool:
    from mlflow import MlflowException
    from requests import RequestException

    if isinstance(error, MlflowException):
        return bool(error.get_http_status_code() >= 500)
    return isinstance(error, RequestException)


def _log(message: str) -> None:
    """Logs a warning; Python's own warnings can be turned into errors, which would end the training."""
    logging.getLogger("arbordraft").warning(message)
