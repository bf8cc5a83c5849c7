"""Tracking arrives complete and once, and whatever happens to it, the training goes on."""

import contextlib
import json
import logging
import os
import pickle
import resource
import runpy
import socket
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
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

from arbordraft.training import tracking
from arbordraft.training.delivery import deliver, sync
from arbordraft.training.tracking import MLflowTracker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    """One database for all tests, as MLflow takes seconds to set one up; each test has its own experiment."""
    folder = tmp_path_factory.mktemp("mlflow")
    before = Path.cwd()
    os.chdir(folder)  # MLflow puts artifacts below the folder in which a database is first used
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    os.chdir(before)
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def client(uri):
    return MlflowClient(uri)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def warned(caplog):
    """What the package logged so far."""
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


@dataclass
class Point:
    x: int


def dead_uri(userinfo=""):
    """A server that refuses connections: a port that was free a moment ago."""
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
        self.logger.log_metrics({"val/tau": 2.5}, step=4)
        self.logger.log_checkpoint(self.checkpoint, 4, {"val/tau": 2.5, "val/loss": 0.5})
        self.logger.log_metrics({"val/loss": 0.5}, step=4)
        self.logger.register(self.checkpoint)


def fit(tracker, checkpoint, **kwargs):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        log_every_n_steps=1,
        logger=tracker,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
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


def everything(client, experiment, model):
    """All that MLflow knows of an experiment, with what differs between equal experiments left out."""
    known = []
    for run in runs(client, experiment):
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        tags = {k: v for k, v in run.data.tags.items() if k not in ("arbordraft.record", "mlflow.runName")}
        known += [
            run.info.status,
            run.data.params,
            tags,
            {name: [(point.step, str(point.value)) for point in points] for name, points in history.items()},
            sorted(files(client, run)),
            [entry.dataset.to_dictionary() for entry in run.inputs.dataset_inputs],
            len(run.outputs.model_outputs),
        ]
    for logged in client.search_logged_models([client.get_experiment_by_name(experiment).experiment_id]):
        known += [logged.status, [(m.key, m.step, m.value) for m in logged.metrics], logged.params]
        known.append(sorted(path.name for path in Path(logged.artifact_location).iterdir()))
    return [*known, client.get_registered_model(model).aliases, len(client.search_model_versions(f"name = '{model}'"))]


def test_a_training_arrives(uri, client, experiment, checkpoint, warned):
    before = mlflow.get_tracking_uri()
    tracker = MLflowTracker(experiment, "first", uri, "drafter", {"drafter": "medusa"})
    fit(tracker, checkpoint)

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
    linked = sorted((point.key, point.step, point.value) for point in model.metrics)
    assert linked == [("val/loss", 4, 0.5), ("val/tau", 4, 2.5)]
    for name in ("val/loss", "val/tau"):  # the linked point is the logged one
        assert len(client.get_metric_history(run.info.run_id, name)) == 1
    version = client.get_model_version_by_alias("drafter", "candidate")
    assert version.run_id == run.info.run_id
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "drafter", "version": version.version}]
    local = mlflow.artifacts.download_artifacts(version.source)
    assert sorted(os.listdir(local)) == ["config.json", "model.safetensors"]

    assert warned() == []
    assert not [path for path in Path("mlflow-outbox").rglob("files/*") if path.exists()]  # delivered files are gone
    assert sync("mlflow-outbox", uri) == {}
    assert (mlflow.get_tracking_uri(), mlflow.active_run()) == (before, None)


def test_artifacts_and_provenance(uri, client, experiment, warned):
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_figure(matplotlib.figure.Figure(), "figures/acceptance")
    tracker.log_text("Hällo", "samples/text.md")
    tracker.log_table({"prompt": ["a", "b"], "tau": [1.5, 2]}, "samples")
    tracker.log_table({"prompt": ["a"]}, "others.json")
    tracker.log_provenance(7, {"model": "smollm2", "shape": {"layers": 30}})
    tracker.log_metrics({})
    tracker.log_hyperparams(None)

    (run,) = runs(client, experiment)
    assert sorted(files(client, run)) == ["figures/acceptance.png", "others.json", "samples.json", "samples/text.md"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text())
    assert table == {"columns": ["prompt", "tau"], "data": [["a", 1.5], ["b", 2]]}
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": "samples.json", "type": "table"}, {"path": "others.json", "type": "table"}]
    assert Path(client.download_artifacts(run.info.run_id, "samples/text.md")).read_text("utf-8") == "Hällo"
    assert run.data.params["seed"] == "7"
    assert run.data.params["versions.torch"] == version("torch")
    assert run.data.tags["target.shape.layers"] == "30"
    assert "git.dirty" not in run.data.tags  # the test runs outside of the checkout
    assert warned() == []


def test_commit_and_dirt_of_a_checkout(uri, client, experiment, tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "--quiet", "--message", "one")
    MLflowTracker(experiment, uri=uri).log_provenance(0, {})
    (tmp_path / "code.py").write_text("2")
    MLflowTracker(experiment, uri=uri).log_provenance(0, {})
    clean, dirty = runs(client, experiment)
    assert clean.data.tags["mlflow.source.git.commit"] == git("rev-parse", "HEAD")
    assert (clean.data.tags["git.dirty"], dirty.data.tags["git.dirty"]) == ("False", "True")


def test_what_mlflow_would_refuse_is_made_to_fit(uri, client, experiment, warned):
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_hyperparams({"long": "x" * 10_000, "a@b": {"c": [1, 2], "empty": {}}})
    tracker.log_hyperparams(Namespace(long="another", new=None, inner=Namespace(depth=2), point=Point(1)))
    tracker.log_hyperparams({f"p{index}": index for index in range(250)})
    tracker.log_metrics({"ce@pos=1": torch.tensor(2.0), "../up": 1, "/a//b/": float("nan"), "": 3.0, "é" * 300: 1})
    tracker.log_metrics({f"m{index}": index for index in range(1100)}, step=2)
    (run,) = runs(client, experiment)
    params = dict(run.data.params)
    assert len(params.pop("long")) == 6000
    for index in range(250):
        assert params.pop(f"p{index}") == str(index)
    assert params == {"a_b.c": "[1, 2]", "a_b.empty": "{}", "new": "None", "inner.depth": "2", "point.x": "1"}
    assert {"ce_pos_1", "up", "a/b", "_", "é" * 250, "m1099"} <= set(run.data.metrics)
    assert warned() == []


def test_server_down_from_the_start(uri, client, experiment, checkpoint, warned):
    tracker = MLflowTracker(experiment, "late", dead_uri("me:secret@"), "late")
    fit(tracker, checkpoint)
    (warning,) = warned()
    assert str(Path("mlflow-outbox").absolute()) in warning
    assert "`arbordraft train sync`" in warning
    assert "secret" not in warning
    assert tracker.version == tracker._journal.key
    (checkpoint / "model.safetensors").write_text("overwritten meanwhile")

    records = [record for _, record in tracker._journal.pending(0)]
    with pytest.raises(MlflowException):
        sync("mlflow-outbox", dead_uri())
    assert sync("mlflow-outbox", uri) == {tracker._journal.key: len(records)}
    first = everything(client, experiment, "late")
    assert sync("mlflow-outbox", uri) == {}
    assert everything(client, experiment, "late") == first

    (run,) = runs(client, experiment)
    assert (run.info.start_time, run.info.end_time) == (records[0]["at"], records[-1]["at"])
    points = [point for record in records if record["kind"] == "metrics" for point in record["points"]]
    for name in ("train/loss", "val/tau", "val/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [[m.key, m.value, m.timestamp, m.step] for m in history] == [p for p in points if p[0] == name]
    version = client.get_model_version_by_alias("late", "candidate")
    assert Path(version.source, "model.safetensors").read_text() == "weights"


CALLS = [
    "create_experiment",
    "create_run",
    "log_batch",
    "log_artifact",
    "log_inputs",
    "create_logged_model",
    "log_model_artifacts",
    "log_outputs",
    "finalize_logged_model",
    "create_registered_model",
    "create_model_version",
    "set_logged_model_tags",
    "set_registered_model_alias",
    "set_terminated",
]
ERRORS = [MlflowException("broken"), OSError(28, "No space left on device"), ValueError("anything")]


def dying_client(call, carried_out, error):
    """A client whose server dies at a call, carried out or not, and answers nothing from then on."""
    dead = False

    class Dying(MlflowClient):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            return guard(name, value) if callable(value) and not name.startswith("_") else value

    def guard(name, method):
        def guarded(*args, **kwargs):
            nonlocal dead
            if not dead and (name != call or carried_out):
                result = method(*args, **kwargs)
            dead = dead or name == call
            if dead:
                raise error
            return result

        return guarded

    return Dying


@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_anywhere(uri, client, undisturbed, checkpoint, warned, monkeypatch, call, carried_out, experiment):
    """The server dies in a training, and again in a delivery that is killed there: nothing is lost or doubled."""
    name, error = f"{call}-{carried_out}", ERRORS[CALLS.index(call) % len(ERRORS)]
    tracker = MLflowTracker(experiment, uri=uri, registered_model=name)
    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "MlflowClient", dying_client(call, carried_out, error))
        work(tracker, checkpoint)
    (warning,) = warned()
    assert type(error).__name__ in warning
    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "MlflowClient", dying_client(call, carried_out, KeyboardInterrupt()))
        with contextlib.suppress(KeyboardInterrupt):  # a call that was carried out may not be needed again
            sync("mlflow-outbox", uri)
    sync("mlflow-outbox", uri)
    assert sync("mlflow-outbox", uri) == {}
    assert everything(client, experiment, name) == undisturbed


@pytest.fixture(scope="session")
def undisturbed(uri, tmp_path_factory):
    """What MLflow knows when nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "checkpoint" / "model.safetensors").write_text("weights")
    tracker = MLflowTracker("undisturbed", uri=uri, registered_model="undisturbed", outbox=folder / "outbox")
    work(tracker, folder / "checkpoint")
    assert not tracker._link.said
    return everything(MlflowClient(uri), "undisturbed", "undisturbed")


def work(tracker, checkpoint):
    """What a training does with a tracker, without the training."""
    tracker.log_hyperparams({"lr": 0.1})
    tracker.log_config("lr: 0.1")
    tracker.log_dataset("chats", "abc", 3, "https://example.org/chats")
    for step in range(3):
        tracker.log_metrics({"loss": 1 / (step + 1), "nan": float("nan") if step == 1 else 0.0}, step)
    tracker.log_metrics({"val/tau": 2.0}, 2)
    tracker.log_checkpoint(checkpoint, 2, {"val/tau": 2.0})
    tracker.register(checkpoint)
    tracker.finalize("success")


def test_a_store_that_cannot_be_made(tmp_path, experiment, checkpoint, warned):
    (tmp_path / "file").touch()
    started = time.monotonic()
    fit(MLflowTracker(experiment, None, f"sqlite:///{tmp_path}/file/mlflow.db", "lost"), checkpoint)
    fit(MLflowTracker(experiment, None, f"sqlite:///{tmp_path}", "lost", outbox="other"), checkpoint)
    assert time.monotonic() - started < 10  # MLflow alone would retry for 100 s
    assert len(warned()) == 2
    assert "other" in warned()[1]


def test_a_read_only_store(uri, experiment, checkpoint, warned):
    path = uri.removeprefix("sqlite:///")
    fit(MLflowTracker(experiment, None, f"sqlite:///file:{path}?mode=ro&uri=true", "lost"), checkpoint)
    (warning,) = warned()
    assert "readonly" in warning


def test_an_outbox_that_cannot_be_written(uri, client, experiment, tmp_path, checkpoint, warned):
    (tmp_path / "file").touch()
    fit(MLflowTracker(experiment, uri=uri, outbox=tmp_path / "file" / "outbox"), checkpoint)
    (warning,) = warned()
    assert str(tmp_path / "file" / "outbox") in warning
    assert "the training goes on" in warning
    assert runs(client, experiment) == []


def test_a_disk_that_is_full_for_a_while(uri, client, experiment, tmp_path, warned):
    """Records that do not fit are lost whole: those around them arrive."""
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_metrics({"a": 1.0}, 1)
    before = tracker._journal.records.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))  # room for a part of the next line
    try:
        tracker.log_metrics({"a": 2.0}, 2)
        tracker.log_text("x" * 10_000, "large.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tracker._journal.records.read_bytes() == before
    assert len(warned()) == 1
    assert list(tmp_path.glob("mlflow-outbox/*/files/*")) == []
    tracker.log_metrics({"a": 3.0}, 3)
    (run,) = runs(client, experiment)
    assert [point.step for point in client.get_metric_history(run.info.run_id, "a")] == [1, 3]


def test_an_outbox_that_fails_at_first_still_begins_with_the_run(uri, client, experiment, warned):
    Path("mlflow-outbox").touch()
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_metrics({"a": 1.0})
    Path("mlflow-outbox").unlink()
    tracker.log_metrics({"a": 2.0})
    (run,) = runs(client, experiment)
    assert run.data.metrics == {"a": 2.0}
    assert len(warned()) == 1


def test_what_callers_pass_wrongly_only_warns(uri, client, experiment, warned):
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_figure(None, "figure")
    tracker.log_metrics({"a": "text"})
    tracker.log_table({"a": [1], "b": [1, 2]}, "table")
    tracker.log_checkpoint("absent", 1)
    tracker.register("absent")
    (warning,) = warned()
    assert "log_figure" in warning
    tracker.log_metrics({"a": 1.0})
    assert runs(client, experiment)[0].data.metrics == {"a": 1.0}


@pytest.mark.parametrize("limit", ["ours", "the user's"])
def test_a_hung_server_is_waited_for_once(limit, experiment, warned, monkeypatch):
    monkeypatch.setattr(tracking, "TIMEOUT", 1 if limit == "ours" else 100)
    if limit != "ours":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    before = dict(os.environ)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        tracker = MLflowTracker(experiment, uri=f"http://127.0.0.1:{mute.getsockname()[1]}")
        started = time.monotonic()
        for step in range(100):
            tracker.log_metrics({"a": 1.0}, step)
        assert 2 <= time.monotonic() - started < 5
    assert len(warned()) == 1
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("dead"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(), "KILLED")]
)
def test_how_a_run_ended(uri, client, experiment, checkpoint, error, status):
    with pytest.raises((RuntimeError, SystemExit)):
        fit(MLflowTracker(experiment, uri=uri), checkpoint, dies=error)
    (run,) = runs(client, experiment)
    assert run.info.status == status


def test_the_server_is_chosen_when_the_tracker_is_made(uri, client, experiment, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    from_environment = MLflowTracker(experiment)
    explicit = MLflowTracker(experiment, uri=dead_uri(), outbox="other")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead_uri())
    from_environment.log_metrics({"a": 1.0})
    explicit.log_metrics({"a": 2.0})
    assert [run.data.metrics["a"] for run in runs(client, experiment)] == [1.0]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert len(sync("other")) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert MLflowTracker(experiment)._link.uri == "sqlite:///mlflow.db"


def test_only_rank_zero_tracks(uri, client, experiment, checkpoint, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    tracker = pickle.loads(pickle.dumps(MLflowTracker(experiment, uri=uri)))  # as spawned processes get it
    work(tracker, checkpoint)
    assert isinstance(tracker.version, str)
    assert not Path("mlflow-outbox").exists()
    assert runs(client, experiment) == []


def test_a_late_delivery_leaves_the_alias_with_the_newer_version(uri, client, experiment, checkpoint):
    late = MLflowTracker(experiment, uri=dead_uri(), registered_model="race")
    late.register(checkpoint)
    MLflowTracker(experiment, uri=uri, registered_model="race", outbox="other").register(checkpoint)
    sync("mlflow-outbox", uri)
    assert len(client.search_model_versions("name = 'race'")) == 2
    assert client.get_registered_model("race").aliases == {"candidate": 1}


def test_sync_beside_a_training(uri, client, experiment, warned):
    """While somebody delivers a journal nobody else does, and what piles up meanwhile comes next."""
    tracker = MLflowTracker(experiment, uri=uri)
    tracker.log_metrics({"a": 1.0}, 1)
    with tracker._journal.exclusively() as free:
        assert free
        tracker.log_metrics({"a": 2.0}, 2)
        assert deliver(tracker._journal, uri) == 0
    with tracker._journal.records.open("ab") as file:
        file.write(b'{"kind": "metrics", ')  # the writer has not finished its line
    assert sync("mlflow-outbox", uri) == {tracker._journal.key: 1}
    (run,) = runs(client, experiment)
    assert [point.value for point in client.get_metric_history(run.info.run_id, "a")] == [1, 2]
    assert warned() == []


def test_sync_names_what_still_waits(uri, client, experiment):
    lost, fine = (MLflowTracker(experiment, uri=uri) for _ in range(2))
    lost.begin()
    client.delete_run(lost.version)
    lost.log_metrics({"a": 1.0})
    fine._link.online = False
    fine.log_metrics({"a": 2.0})
    Path("mlflow-outbox", "notes.txt").touch()  # none of ours
    with pytest.raises(RuntimeError, match=rf"1 runs in .*mlflow-outbox still wait:\n{lost._journal.key}: .*deleted"):
        sync("mlflow-outbox", uri)
    assert [run.data.metrics for run in runs(client, experiment)] == [{"a": 2.0}]
    with pytest.raises(FileNotFoundError, match=r"no outbox at .*absent"):
        sync("absent", uri)


def test_missing_libraries_are_named_when_they_are_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    runpy.run_path(tracking.__file__)  # importing it does not need MLflow
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[mlops\]'"):
        MLflowTracker()
    assert list(Path.cwd().iterdir()) == []


def test_a_bad_name_is_refused_at_once():
    for name in ("a/b", "a:b", "../a", "", "it's"):
        with pytest.raises(ValueError, match="registered_model"):
            MLflowTracker(registered_model=name)


def test_imports_stay_light():
    script = (
        "import sys, arbordraft.training, arbordraft.training.delivery;"
        "assert not {'lightning', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
