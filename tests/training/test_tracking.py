"""Runs are recorded in their store or in the local one; failures of tracking never stop a training."""

import json
import logging
import os
import pickle
import random
import re
import runpy
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import matplotlib.figure
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
import mlflow
from mlflow import MlflowClient, MlflowException
from support import tiny_training as training

from arbordraft.training import tracking
from arbordraft.training.recording import Recorder
from arbordraft.training.tracking import MLflowTracker

LOCAL = "sqlite:///mlflow.db"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    mlflow.set_tracking_uri(None)  # Lightning's logger sets it


@pytest.fixture
def warned(caplog):
    """Returns a function that lists the package's warnings so far."""
    caplog.set_level(logging.WARNING, "arbordraft")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "arbordraft"]


@pytest.fixture
def experiment(request):
    return request.node.name


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def dead_uri(userinfo=""):
    """Returns the address of a server that refuses connections: its port was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://{userinfo}127.0.0.1:{free.getsockname()[1]}"


class Line(pl.LightningModule):
    """Fits one weight in four steps and uses every part of the tracker."""

    def __init__(self, checkpoint, lr=0.5, dies=None):
        super().__init__()
        self.save_hyperparameters("lr")
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.checkpoint, self.dies = checkpoint, dies

    def training_step(self, batch, index):
        if self.dies and index == 2:
            raise self.dies
        self.log("train/loss", (self.weight - 1) ** 2)
        return (self.weight - batch.mean()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_train_start(self):
        self.logger.log_config("lr: 0.5\n")
        self.logger.log_dataset("chats", "0123456789abcdef" * 4, 8, "chats.jsonl", {"template": "chatml"})

    def on_train_end(self):
        self.logger.log_checkpoint(self.checkpoint, 4, {"val/tau": 2.5, "val/loss": float("nan")})
        self.logger.register(self.checkpoint)


def fit(tracker, checkpoint, **kwargs):
    trainer = pl.Trainer(**training.TRAINER | {"max_epochs": 1, "logger": tracker})
    model = Line(checkpoint, **kwargs)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 1)))
    assert trainer.global_step == 4
    assert abs(model.weight.item() - 1) < 0.1


def runs(client, experiment):
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time"]) if found else []


def files(client, run, folder=None):
    found = []
    for entry in client.list_artifacts(run.info.run_id, folder):
        found += files(client, run, entry.path) if entry.is_dir else [entry.path]
    return found


def test_a_training_is_recorded(uri, client, experiment, checkpoint, warned, caplog):
    tracker = MLflowTracker(experiment, "first", uri, "drafter", {"drafter": "medusa"})
    fit(tracker, checkpoint)
    assert "not found" not in caplog.text  # Lightning's logger warns of new experiments

    (run,) = runs(client, experiment)
    assert tracker.version == run.info.run_id
    assert (run.info.run_name, run.info.status, run.data.tags["drafter"]) == ("first", "FINISHED", "medusa")
    assert run.data.params == {"lr": "0.5"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [0, 1, 2, 3]
    assert history[0].value == 1
    assert history[3].value < 1
    assert Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text() == "lr: 0.5\n"

    (entry,) = run.inputs.dataset_inputs
    assert entry.dataset.digest == ("0123456789abcdef" * 4)[:36]
    profile = {"num_rows": 8, "digest": "0123456789abcdef" * 4, "template": "chatml"}
    assert json.loads(entry.dataset.profile) == profile
    assert mlflow.data.get_source(entry.dataset).uri == "chats.jsonl"
    assert [(tag.key, tag.value) for tag in entry.tags] == [("mlflow.data.context", "train")]

    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (model.status, model.source_run_id) == ("READY", run.info.run_id)
    assert [(point.key, point.step, point.value) for point in model.metrics] == [("val/tau", 4, 2.5)]
    version = client.get_model_version_by_alias("drafter", "candidate")
    assert version.run_id == run.info.run_id
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "drafter", "version": version.version}]
    local = mlflow.artifacts.download_artifacts(version.source)
    assert sorted(os.listdir(local)) == ["config.json", "model.safetensors"]
    assert warned() == []
    assert mlflow.active_run() is None


def test_runs_of_one_seed_have_different_names(uri, client, experiment):
    drawn = []
    for _ in range(3):
        random.seed(0)
        MLflowTracker(experiment, uri=uri).log_metrics({"loss": 1.0}, 1)
        drawn.append(random.random())
    assert len({run.info.run_name for run in runs(client, experiment)}) == 3
    assert drawn == [random.Random(0).random()] * 3  # trackers draw from another generator than the training


def test_artifacts_and_provenance(uri, client, experiment, warned):
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_figure(matplotlib.figure.Figure(), "acceptance")
    tracker.log_text("Hällo", "samples/text.md")
    tracker.log_table({"prompt": ["a", "b"], "tau": [1.5, 2]}, "samples")
    tracker.log_config("model: {lr: 0.1, phases: [1, 2]}\n")
    tracker.log_provenance(7, {"model": "smollm2", "fingerprint": "ab"})

    (run,) = runs(client, experiment)
    assert sorted(files(client, run)) == ["acceptance.png", "config.yaml", "samples.json", "samples/text.md"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text())
    assert table == {"columns": ["prompt", "tau"], "data": [["a", 1.5], ["b", 2.0]]}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert Path(client.download_artifacts(run.info.run_id, "samples/text.md")).read_text("utf-8") == "Hällo"
    assert run.data.params == {"model/lr": "0.1", "model/phases": "[1, 2]"}
    tags = run.data.tags
    assert (tags["seed"], tags["target.fingerprint"], tags["versions.torch"]) == ("7", "ab", version("torch"))
    assert warned() == []


def test_the_local_store_replaces_an_absent_server(experiment, checkpoint, warned, tmp_path):
    """The local store holds all that the server would have; one warning names it."""
    tracker = MLflowTracker(experiment, "late", dead_uri("me:secret@"), "late")
    fit(tracker, checkpoint)
    (warning,) = warned()
    assert str(tmp_path / "mlflow.db") in warning
    assert "mlflow-export-import" in warning
    assert "secret" not in warning
    client = MlflowClient(LOCAL)
    (run,) = runs(client, experiment)
    assert (tracker.version, run.info.status) == (run.info.run_id, "FINISHED")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [0, 1, 2, 3]
    assert files(client, run) == ["config.yaml"]
    assert client.get_model_version_by_alias("late", "candidate").run_id == run.info.run_id


@pytest.mark.parametrize("call", ["log_batch", "log_model_artifacts", "set_registered_model_alias"])
def test_the_local_store_replaces_a_server_that_dies(uri, client, experiment, checkpoint, warned, monkeypatch, call):
    """The local store gets the rest, including the call that failed, in a run that names the first run."""
    calls, method = [], getattr(MlflowClient, call)

    def dying(self, *args, **kwargs):
        calls.append(self.tracking_uri)
        if self.tracking_uri == uri and (call != "log_batch" or len(calls) > 4):
            raise MlflowException("broken")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, call, dying)
    fit(MLflowTracker(experiment, None, uri, call), checkpoint)
    (warning,) = warned()
    assert re.search(r"MlflowException: broken.*the training goes on and is recorded in .*mlflow\.db", warning)
    local, (begun,) = MlflowClient(LOCAL), runs(client, experiment)
    (rest,) = runs(local, experiment)
    assert rest.data.tags["arbordraft.continues"] == begun.info.run_id
    assert begun.info.run_id in warning
    assert rest.info.status == "FINISHED"
    steps = [
        [point.step for point in store.get_metric_history(run.info.run_id, "train/loss")]
        for store, run in ((client, begun), (local, rest))
    ]
    assert steps == ([[0, 1], [2, 3]] if call == "log_batch" else [[0, 1, 2, 3], []])
    assert local.get_model_version_by_alias(call, "candidate").run_id == rest.info.run_id


def test_a_refusal_is_not_a_dead_server(uri, client, experiment, warned):
    """A refused or invalid call loses only its own data."""
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_hyperparams({"lr": 1})
    tracker.log_hyperparams({"lr": 2})
    tracker.log_figure(None, "figure")
    tracker.log_table({"a": [1], "b": [1, 2]}, "table")
    tracker.log_checkpoint("absent", 1)
    tracker.register("absent")
    (warning,) = warned()
    assert "log_hyperparams" in warning
    tracker.log_metrics({"a": 1.0})
    (run,) = runs(client, experiment)
    assert (run.data.params, run.data.metrics) == ({"lr": "1"}, {"a": 1.0})


def test_stores_that_cannot_be_made_do_not_stop_a_training(tmp_path, experiment, checkpoint, warned):
    """The local database replaces one that cannot be written; without either, nothing is recorded."""
    (tmp_path / "file").touch()
    started = time.monotonic()
    fit(MLflowTracker(experiment, None, f"sqlite:///{tmp_path}/file/mlflow.db", "lost"), checkpoint)
    assert len(runs(MlflowClient(LOCAL), experiment)) == 1
    Path("mlflow.db").unlink()
    Path("mlflow.db").mkdir()
    tracker = MLflowTracker(experiment)
    fit(tracker, checkpoint)
    assert time.monotonic() - started < 30  # MLflow alone would retry for 100 s each time
    assert tracker.version is None
    assert len(warned()) == 2
    assert "loses everything" in warned()[1]


@pytest.mark.parametrize("limit", ["ours", "the user's"])
def test_a_hung_server_is_waited_for_once(limit, experiment, warned, monkeypatch):
    monkeypatch.setattr(tracking, "TIMEOUT", 1 if limit == "ours" else 100)
    if limit != "ours":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    before = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_HTTP")}
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        tracker = MLflowTracker(experiment, uri=f"http://127.0.0.1:{mute.getsockname()[1]}")
        started = time.monotonic()
        tracker.begin()
        assert time.monotonic() - started >= 2
        for step in range(3):
            tracker.log_metrics({"a": 1.0}, step)
    assert len(warned()) == 1
    assert {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_HTTP")} == before
    (run,) = runs(MlflowClient(LOCAL), experiment)
    assert run.data.metrics == {"a": 1.0}


@pytest.mark.parametrize("deleted", [False, True])
def test_a_resumed_training_records_into_its_run(tmp_path, uri, client, experiment, deleted):
    """A resumed training records into the run that its checkpoint names, unless that run was deleted."""
    world = training.save_world(tmp_path)
    options = {"logger": [MLflowTracker(experiment, uri=uri)], "every": 2}
    training.fit(world, tmp_path / "a", kill=3, **options)
    (run,) = runs(client, experiment)
    if deleted:
        client.delete_run(run.info.run_id)
    options["logger"] = [MLflowTracker(experiment, uri=uri)]
    training.fit(world, tmp_path / "a", **options)
    (found,) = runs(client, experiment)
    assert (found.info.run_id == run.info.run_id) is not deleted
    assert found.info.status == "FINISHED"
    steps = {point.step for point in client.get_metric_history(found.info.run_id, "train/loss")}
    assert (min(steps) < 2) is not deleted
    assert max(steps) > 3


def test_results_in_another_folder_are_another_run(tmp_path):
    one, other = Recorder(str(tmp_path / "one")), Recorder(str(tmp_path / "other"))
    one._runs["place"] = "run"
    other.load_state_dict(one.state_dict())
    assert other.state_dict()["runs"] == {}
    again = Recorder(str(tmp_path / "one"))
    again.load_state_dict(one.state_dict())
    assert again.state_dict() == one.state_dict()
    again.load_state_dict({"curve": []})  # as in checkpoints from before runs were kept


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("dead"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(), "KILLED")]
)
def test_the_status_tells_how_a_run_ended(uri, client, experiment, checkpoint, error, status):
    with pytest.raises((RuntimeError, SystemExit)):
        fit(MLflowTracker(experiment, uri=uri), checkpoint, dies=error)
    (run,) = runs(client, experiment)
    assert run.info.status == status


def test_the_server_is_chosen_when_the_tracker_is_made(uri, client, experiment, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = MLflowTracker(experiment)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead_uri())
    tracker.log_metrics({"a": 1.0})
    assert [run.data.metrics["a"] for run in runs(client, experiment)] == [1.0]


def test_only_rank_zero_tracks(uri, client, experiment, checkpoint, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    tracker = pickle.loads(pickle.dumps(MLflowTracker(experiment, uri=uri)))  # pickled, as for spawned processes
    fit(tracker, checkpoint)
    assert tracker.version is None
    assert runs(client, experiment) == []


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    runpy.run_path(tracking.__file__)  # importing the module does not need MLflow
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[mlops\]'"):
        MLflowTracker()
    assert list(Path.cwd().iterdir()) == []


def test_bad_names_are_refused_at_once(tmp_path):
    for name in ("a/b", "a:b", "../a", "", "it's"):
        with pytest.raises(ValueError, match="registered_model"):
            MLflowTracker(registered_model=name)
    for alias in ("v1", "latest", "a b"):
        with pytest.raises(ValueError, match="an alias consists"):
            Recorder(str(tmp_path), alias=alias)
