"""Failed trainings name the cause and the fix, and leave earlier results intact."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.tiny_training import TRAINER, data, module, save_config, save_target, save_world

from arbordraft import EagleDrafter, RaggedModel
from arbordraft.training import drafter_module
from arbordraft.training.drafter_module import DrafterModule, TrainingDiverged, TrainingOutOfMemory
from arbordraft.training.fit import run
from arbordraft.training.recording import Recorder
from arbordraft.training.shards import ShardError
from arbordraft.training.targets import Target


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns a folder with data and a published drafter."""
    world = save_world(tmp_path_factory.mktemp("world"))
    fit(world, world / "results", max_steps=2)
    return world


@pytest.fixture
def world(finished, tmp_path):
    """Returns a copy that a test may damage."""
    copy = shutil.copytree(finished, tmp_path / "world")
    manifest = copy / "data" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(finished), str(copy)))
    return copy


def fit(world, output, *callbacks, every=3, model=None, source=None, **settings):
    keep = ModelCheckpoint(output / "checkpoints", every_n_train_steps=every, save_last=True)
    settings = {**TRAINER, "enable_checkpointing": True, "max_steps": 8, "val_check_interval": 4, **settings}
    trainer = Trainer(**settings, callbacks=[Recorder(str(output)), keep, *callbacks])
    trainer.fit(model or module(), source or data(world))


def save_begun(folder, world):
    """Saves the configuration of a training that begins with a network that is not there."""
    config = yaml.safe_load(save_config(folder / "begun.yaml", world).read_text())
    config["model"]["begin_with"] = str(folder / "nothing")
    (folder / "begun.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "begun.yaml")


def test_faults_of_the_data_are_found_before_the_target_is_loaded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"12 conversations leave nothing to train on.*lower data.validation"):
        data(world, validation=12)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"message": [{"role": "user", "content": "Hello"}]}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: a row must have a list called messages"):
        data(world, prompts=str(prompts))
    prompts.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    with pytest.raises(ValueError, match=r"1 conversations leave nothing to train on"):
        data(world, prompts=str(prompts), validation=None)
    with pytest.raises(ValueError, match="no trained drafter"):
        run(DrafterModule, ["fit", "--config", save_begun(tmp_path, world)])


@pytest.mark.parametrize(("conversations", "held"), [(2, 1), (7, 1), (12, 3), (192, 48), (10_000, 48)])
def test_the_share_that_is_held_out_follows_the_data(world, conversations, held):
    assert data(world, validation=None)._held_out_of(conversations) == held


def test_a_network_that_is_trained_on_brings_its_vocabulary(world, tmp_path):
    best = world / "results" / "best"
    fit(world, tmp_path, model=module(begin_with=str(best), vocabulary=17), max_steps=1, val_check_interval=1)
    vocabularies = [load_file(folder / "model.safetensors")["d2t"] for folder in (tmp_path / "best", best)]
    assert torch.equal(*vocabularies)


def test_damaged_shards_are_refused(world, tmp_path):
    shard = world / "data" / "tokens-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ShardError, match=r"tokens-00001.* is damaged.*delete it and run"):
        fit(world, tmp_path)
    shard.unlink()
    fit(world, tmp_path, max_steps=1)
    assert load_file(shard).keys() == {"tokens", "roles", "offsets", "temperatures"}


def test_changed_hidden_states_are_refused(world, tmp_path):
    path = world / "data" / "hidden-00000.safetensors"
    with safe_open(path, "pt") as file:
        known = file.metadata()
    tensors = load_file(path)
    tensors["inputs"][:, :4] = 0
    save_file(tensors, path, known)
    with pytest.raises(ShardError, match=r"hidden-00000.*differ from a fresh forward.*delete the file"):
        fit(world, tmp_path)
    path.unlink()
    fit(world, tmp_path, max_steps=1)


def test_hidden_states_without_normalisers_are_replaced(world, tmp_path):
    """Hidden states are computed again, with their normalisers."""
    path = world / "data" / "hidden-00000.safetensors"
    with safe_open(path, "pt") as file:
        known = file.metadata()
    expected = load_file(path)
    save_file({name: expected[name] for name in ("inputs", "final")}, path, known)
    fit(world, tmp_path, max_steps=1)
    real = expected["final"].any(dim=-1)  # padding has no states
    found = load_file(path)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name][real], tensor[real], rtol=1e-4, atol=1e-4)


def test_data_of_a_replaced_target_are_refused(world, tmp_path):
    save_target(world / "target", seed=1)
    with pytest.raises(ShardError, match=r"begun with another target.*choose another folder"):
        fit(world, tmp_path)


def test_training_begins_where_another_ended(world, tmp_path):
    """At learning rate 0, training publishes the network that it began with."""
    best = world / "results" / "best"
    fit(world, tmp_path, model=module(begin_with=str(best), lr=0.0), max_steps=1, val_check_interval=1)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "best", best))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Spoil(Callback):
    """Sets a weight before a step, or a gradient within it, to NaN."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and self.what == "weight":
            pl_module.student.network.fc.weight.data[0, 0] = torch.nan

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step and self.what == "gradient":
            pl_module.student.network.fc.weight.grad[0, 0] = torch.nan


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:the drafter produced NaN")  # in the validation after step 8
@pytest.mark.parametrize("what", ["weight", "gradient"])
@pytest.mark.parametrize(("step", "every"), [(4, 1), (5, 3), (5, 4)])
def test_diverged_trainings_keep_their_good_checkpoints(world, tmp_path, what, step, every):
    with pytest.raises(TrainingDiverged, match=rf"at step {step}|at step {step + 1}") as raised:
        fit(world, tmp_path, Spoil(step, what), every=every)
    assert "checkpoints written before are good. Lower model.lr or trainer.gradient_clip_val" in str(raised.value)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [point["step"] for point in curve] == [4]
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == step // every * every
    assert all(tensor.isfinite().all() for tensor in last["state_dict"].values())
    best = EagleDrafter.from_pretrained(tmp_path / "best", data(world).target)
    assert all(tensor.isfinite().all() for tensor in best.head.state_dict().values())


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_lack_of_memory_names_the_settings_to_lower(world, tmp_path, monkeypatch, error, place):
    def fail(*_, **__):
        raise error

    if place == "forward":
        monkeypatch.setattr(drafter_module, "distillation_loss", fail)
    else:
        monkeypatch.setattr(torch.Tensor, "backward", fail)
    helps = r"memory.*Lower data.batch_tokens \(now 128\), model.chunk \(now 256\)"
    with pytest.raises(TrainingOutOfMemory, match=helps):
        fit(world, tmp_path)


def test_other_errors_stay_unchanged(world, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(drafter_module, "distillation_loss", fail)
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        fit(world, tmp_path)


def test_a_tracker_without_mlflow_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    logger = {"class_path": "arbordraft.training.tracking.MLflowTracker"}
    config = save_config(tmp_path / "config.yaml", world, trainer={"logger": logger})
    with pytest.raises(ValueError, match=r"MLflow cannot be imported .*run: pip install 'arbordraft\[mlops\]'"):
        run(DrafterModule, ["fit", "--config", str(config)])


def test_a_target_on_another_device_is_refused(world, tmp_path, monkeypatch):
    source = data(world, cache=False)
    assert source.target.device == torch.device("cpu")
    monkeypatch.setattr(RaggedModel, "device", torch.device("meta"))
    with pytest.raises(ValueError, match=r"target is on meta, the training on cpu; leave data.target.device at auto"):
        fit(world, tmp_path, source=source)


def test_phases_that_do_not_fill_the_training_are_refused():
    for phases in ((), ((0.5, 1, "kl"),), ((1.0, 1, "kl"), (0.5, 1, "kl"))):
        with pytest.raises(ValueError, match=r"phases must end in ascending order, the last one at 1.0"):
            module(phases=tuple(drafter_module.Phase(*phase) for phase in phases))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phases": ((0.5, 1, "kl"), (1.0, 1, "tvd"))}, "no loss 'tvd'; choose one of kl"),
        ({"phases": ((0.5, 1, "kl"), (1.0, 0, "kl"))}, "at least one step"),
        ({"decay": 1.5}, r"a decay in \(0, 1\]"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"cooldown": 1.5}, r"cooldown must be a number .*1.*, got 1.5"),
        ({"lookup_weight": -1}, r"lookup_weight must be a number .*, got -1"),
        ({"walked_tokens": 0}, "walked_tokens must be a whole number of at least 1, got 0"),
    ],
    ids=["loss", "steps", "decay", "chunk", "cooldown", "lookup weight", "walk"],
)
def test_settings_that_would_fail_midway_are_refused_at_once(settings, message):
    if "phases" in settings:
        settings = {"phases": tuple(drafter_module.Phase(*phase) for phase in settings["phases"])}
    with pytest.raises(ValueError, match=message):
        module(**settings)
