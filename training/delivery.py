"""Delivery of journals to MLflow, at once or later.

A training and ``sync`` deliver alike: records are written to the journal first and sent from there, in order. Sending
directly and keeping only failures would be no simpler, and would leave open whether a request that timed out was
carried out. Here that does not matter, as sending a record twice changes nothing: MLflow's databases keep one point per
metric, step, time and value, and runs, models and versions carry the id of their record as a tag, by which they are
looked up before they are created.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.training.outbox import OUTBOX, Journal, Progress, Record
from arbordraft.utils.errors import UserError
from arbordraft.utils.mlflow_server import MODEL, connect, limits, reason, resolve_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

RECORD = "arbordraft.record"  # tag with the id of the record that made a run, a model or a version
REGISTERED = "arbordraft.registered"  # tag of a version with the time of its record, in ms

Point = tuple[str, float, int, int]  # name, value, time in ms, step


def sync(outbox: str | os.PathLike[str] = OUTBOX, uri: str | None = None) -> dict[str, int]:
    """Deliver what trainings could not deliver, oldest run first; safe to repeat, and beside a running training.

    Args:
        outbox: the folder that the trainings named.
        uri: tracking server; defaults as in ``MLflowTracker``. A run stays with the server that it was begun on.

    Returns:
        How many records of each run were delivered; runs without pending records are left out.

    Raises:
        FileNotFoundError: if there is no such outbox.
        UserError: naming the runs that could not be delivered completely; the others were.
        Exception: whatever MLflow raises, if the server does not answer at all.
    """
    if not Path(outbox).is_dir():
        raise FileNotFoundError(
            f"there is no outbox at {Path(outbox).absolute()}; name the one that the training named"
        )
    uri = resolve_uri(uri)
    with limits():
        connect(uri).search_experiments(max_results=1)  # one wait for a dead server, not one per run
    delivered, failures = {}, []
    for records in sorted(Path(outbox).glob("*/records.jsonl")):
        journal = Journal(records.parent)
        try:
            if count := deliver(journal, uri):
                delivered[journal.key] = count
        except Exception as error:  # MLflow passes on what its many stores raise
            failures.append(f"{journal.key}: {reason(error)}")
    if failures:
        raise UserError(f"{len(failures)} runs in {Path(outbox).absolute()} still wait:\n" + "\n".join(failures))
    return delivered


def deliver(journal: Journal, uri: str) -> int:
    """Send the pending records of a journal, in order; returns how many, none if somebody else is just doing so.

    Args:
        journal: notes each record that has arrived, so that an interruption costs nothing.
        uri: tracking server.

    Raises:
        Exception: whatever MLflow and its stores raise, if a record fails twice.
    """
    if next(journal.pending(journal.progress().offset), None) is None:
        return 0
    count = 0
    with journal.exclusively() as free, limits():
        progress = journal.progress()
        delivery = _Delivery(connect(uri), journal, progress)
        for end, record in journal.pending(progress.offset) if free else ():
            try:
                delivery.send(record)
            except Exception:  # a connection gone stale, or an experiment that somebody else has just created
                delivery.send(record)
            progress.offset = end
            journal.note(progress)
            shutil.rmtree(journal.files(record), ignore_errors=True)
            count += 1
    return count


@dataclass
class _Delivery:
    """Carries out records; every method may be called again after it failed halfway."""

    client: MlflowClient
    journal: Journal
    progress: Progress

    def send(self, record: Record) -> None:
        from mlflow import entities

        run, files = self.progress.run, self.journal.files(record)
        match record:
            case {"kind": "run"}:
                self._run(record)
            case {"kind": "params", "values": values}:
                self.client.log_batch(run, params=[entities.Param(*item) for item in values.items()])
            case {"kind": "tags", "values": values}:
                self.client.log_batch(run, tags=[entities.RunTag(*item) for item in values.items()])
            case {"kind": "metrics", "points": points}:
                self._metrics(points)
            case {"kind": "artifact", "name": name}:
                folder, _, base = name.rpartition("/")
                self.client.log_artifact(run, str(files / base), folder or None)
            case {"kind": "dataset", "dataset": dataset, "context": context}:
                tags = [entities.InputTag("mlflow.data.context", context)]
                self.client.log_inputs(run, [entities.DatasetInput(entities.Dataset(**dataset), tags)])
            case {"kind": "model"}:
                self._model(record, files)
            case {"kind": "version"}:
                self._version(record)
            case {"kind": "end", "status": status, "at": at}:
                self.client.set_terminated(run, status, end_time=at)
            case _:
                raise ValueError(f"unknown record {record['kind']!r}: a newer arbordraft wrote {self.journal.folder}")

    def _run(self, record: Record) -> None:
        known = self.client.get_experiment_by_name(record["experiment"])
        experiment = known.experiment_id if known else self.client.create_experiment(record["experiment"])
        runs = self.client.search_runs([experiment], f"tags.`{RECORD}` = '{record['id']}'", max_results=1)
        if not runs:
            tags = {**record["tags"], RECORD: record["id"]}
            runs = [self.client.create_run(experiment, record["at"], tags, record["name"])]
        self.progress.experiment, self.progress.run = experiment, runs[0].info.run_id

    def _metrics(self, points: Sequence[Point], model_id: str | None = None) -> None:
        from mlflow.entities import Metric

        self.client.log_batch(self.progress.run, [Metric(*point, model_id=model_id) for point in points])

    def _model(self, record: Record, files: Path) -> None:
        from mlflow.entities import LoggedModelOutput

        run, experiment = self.progress.run, self.progress.experiment
        models = self.client.search_logged_models([experiment], f"tags.`{RECORD}` = '{record['id']}'", max_results=1)
        tags, params = {RECORD: record["id"]}, {"step": str(record["step"])}
        model = models[0] if models else self.client.create_logged_model(experiment, record["name"], run, tags, params)
        self.client.log_model_artifacts(model.model_id, str(files))
        numbers = [point for point in record["points"] if not math.isnan(point[1])]  # MLflow would link NaN as 0
        self._metrics(numbers, model.model_id)
        self._metrics([point for point in record["points"] if point not in numbers])
        outputs = self.client.get_run(run).outputs
        if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run, [LoggedModelOutput(model.model_id, record["step"])])
        self.client.finalize_logged_model(model.model_id, "READY")
        self.progress.models[record["id"]] = model.model_id

    def _version(self, record: Record) -> None:
        from mlflow import MlflowException

        name, alias = record["name"], record["alias"]
        with contextlib.suppress(MlflowException):  # it exists; any other trouble shows in the next line
            self.client.create_registered_model(name)
        registered = self.client.get_registered_model(name)
        model = self.client.get_logged_model(self.progress.models[record["model"]])
        versions = self.client.search_model_versions(f"name = '{name}' and tags.`{RECORD}` = '{record['id']}'")
        version = versions[0] if versions else self._create_version(record, model)

        # The server does this too, but MLflow does not when it works on a database itself.
        known = json.loads(model.tags.get("mlflow.modelVersions", "[]"))
        if (name, str(version.version)) not in [(entry["name"], str(entry["version"])) for entry in known]:
            known.append({"name": name, "version": version.version})
            self.client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(known)})

        if holder := registered.aliases.get(alias):  # a late delivery must not take the alias from a newer version
            tags = self.client.get_model_version(name, str(holder)).tags
            if int(tags.get(REGISTERED, 0)) > record["at"]:
                return
        self.client.set_registered_model_alias(name, alias, str(version.version))

    def _create_version(self, record: Record, model: Any) -> Any:
        return self.client.create_model_version(
            record["name"],
            model.artifact_location,  # of `models:/m-…` MLflow would ask the global server instead of ours
            self.progress.run,
            tags={RECORD: record["id"], MODEL: model.model_id, REGISTERED: str(record["at"])},
            await_creation_for=0,
            model_id=model.model_id,
        )
