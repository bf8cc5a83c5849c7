"""Trainings end at their limit of time or steps; longer ones resume from the checkpoint before the cool-down."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.tiny_training import TRAINER, data, module, same, save_world

from arbordraft.training.drafter_module import Phase
from arbordraft.training.recording import Recorder
from arbordraft.training.schedule import BEFORE_COOLDOWN

LR = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


class Seen(Callback):
    """Records the learning rate and the phase of every step, and the steps of validations."""

    def __init__(self):
        self.rates, self.steps, self.validations = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[-1]["lr"] / LR)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(len([name for name in trainer.callback_metrics if name.startswith("train/agreement")]))

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)


class Clock(Callback):
    """Clock on which every step takes one second and nothing else takes time."""

    now = 1000.0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        Clock.now += 1


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=lambda: Clock.now))
    return Clock()


def train(world, folder, *callbacks, resumed=None, model=None, **settings):
    """Trains without noise; returns the records, the path of the checkpoint before the cool-down, and the weights."""
    torch.manual_seed(0)
    seen, keep = Seen(), ModelCheckpoint(folder / "checkpoints", save_last=True)
    settings = {**TRAINER, "enable_checkpointing": True, "check_val_every_n_epoch": None, **settings}
    trainer = Trainer(
        **{"val_check_interval": 1000, **settings}, callbacks=[*callbacks, Recorder(str(folder)), keep, seen]
    )
    learner = module(**{"lr": LR, "warmup": 4, "phases": (Phase(1.0, 2, "kl"),), "decoded": 0, **(model or {})})
    trainer.fit(learner, data(world), ckpt_path=resumed)
    return seen, folder / "checkpoints" / BEFORE_COOLDOWN, learner.state_dict()


def test_rates_of_a_training_of_steps(world, tmp_path):
    seen, before, _ = train(world, tmp_path, max_steps=20, max_epochs=-1)
    cooled = [1 - (share / 0.2) ** 0.5 for share in (0, 0.05, 0.1, 0.15)]
    assert seen.rates == pytest.approx([0.25, 0.5, 0.75, *[1] * 13, *cooled])
    assert torch.load(before, weights_only=True)["global_step"] == 16
    assert seen.validations == [20], "the cooled weights must be validated"
    assert (tmp_path / "best" / "model.safetensors").exists()


class Batches(Callback):
    """Counts the batches of training before every validation, and those of the validation."""

    def __init__(self):
        self.trained, self.validated = [0], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained[-1] += 1

    def on_validation_start(self, trainer, pl_module):
        self.trained.append(0)
        self.validated.append(0)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.validated[-1] += 1


@pytest.mark.parametrize(
    ("interval", "lines"),
    [
        ({"val_check_interval": 1}, 1),
        ({"val_check_interval": 0.25, "check_val_every_n_epoch": 1}, 1),
        ({"val_check_interval": "00:00:00:00"}, 0),  # by time: always due
        ({"val_check_interval": 7}, 0),
    ],
    ids=str,
)
def test_validations_never_read_more_batches_than_trainings(world, tmp_path, interval, lines, caplog):
    count = Batches()
    with caplog.at_level(logging.WARNING, "arbordraft"):
        train(world, tmp_path, count, max_steps=18, max_epochs=-1, **interval)
    *before, last, after = count.trained
    assert after == 0, "the final network must be validated"
    assert len(before) > 1
    assert all(trained >= read > 1 for trained, read in zip(before, count.validated, strict=False))
    assert count.validated[-1] == count.validated[0]
    assert sum([*before, last]) == 18
    assert len([message for message in caplog.messages if "lower data.validation" in message]) == lines


def test_a_resumed_training_validates_at_the_same_steps(world, tmp_path):
    options = {"max_steps": 18, "max_epochs": -1, "val_check_interval": 1}
    whole, before, _ = train(world, tmp_path / "whole", **options)
    stands = torch.load(before, weights_only=True)["global_step"]
    assert max(step for step in whole.validations if step < stands) < stands - 1, "it must stand between validations"
    rest, _, _ = train(world, tmp_path / "rest", resumed=before, **options)
    assert rest.validations == [step for step in whole.validations if step >= stands]


def test_a_longer_training_resumes_as_one_uninterrupted_training(world, tmp_path):
    """Weights agree to the last bit, although the shorter training has cooled down."""
    _, before, _ = train(world, tmp_path / "short", max_steps=10, max_epochs=-1)
    assert torch.load(before, weights_only=True)["global_step"] == 8
    rest, later, found = train(world, tmp_path / "long", resumed=before, max_steps=30, max_epochs=-1)
    whole, other, expected = train(world, tmp_path / "whole", max_steps=30, max_epochs=-1)
    assert rest.rates == whole.rates[8:]
    assert same(found, expected)
    kept, wanted = (torch.load(path, weights_only=True) for path in (later, other))
    assert kept["global_step"] == 24
    for name in ("state_dict", "optimizer_states", "SelfDistillationDataModule"):
        assert same(kept[name], wanted[name]), name


def test_resuming_within_the_cooldown_writes_no_checkpoint_from_before_it(world, tmp_path):
    _, before, _ = train(world, tmp_path, max_steps=10, max_epochs=-1)
    last = before.with_name("cooling.ckpt")
    before.rename(last)
    train(world, tmp_path, resumed=last, max_steps=10, max_epochs=-1)
    assert not before.exists()


def test_time_ends_a_training_and_epochs_do_not(world, tmp_path, clock):
    """Forty seconds are five epochs. Phases, too, are shares of the time."""
    phases = (Phase(0.5, 1, "kl"), Phase(1.0, 2, "lk_hybrid"))
    seen, before, _ = train(world, tmp_path, clock, max_time={"seconds": 40}, model={"phases": phases})
    assert len(seen.rates) == 40
    assert seen.rates[3:33] == pytest.approx([1.0] * 30)
    assert seen.rates[33:] == pytest.approx([1 - ((at - 32) / 8) ** 0.5 for at in range(33, 40)])
    assert [seen.steps.count(count) for count in (1, 2)] == [20, 20]
    assert torch.load(before, weights_only=True)["global_step"] == 32
    assert seen.validations == [40]


def test_a_training_with_more_time_resumes_from_before_the_cooldown(world, tmp_path, clock):
    """The longer training starts hours later by the clock."""
    _, before, _ = train(world, tmp_path / "short", clock, max_time={"seconds": 20})
    Clock.now += 10_000
    rest, _, found = train(world, tmp_path / "long", clock, resumed=before, max_time={"seconds": 40})
    whole, _, expected = train(world, tmp_path / "whole", clock, max_time={"seconds": 40})
    assert rest.rates == pytest.approx(whole.rates[16:])
    assert len(rest.rates) == 24
    assert same(found, expected)


def test_a_training_without_checkpoints_keeps_none(world, tmp_path):
    settings = {**TRAINER, "max_steps": 5, "max_epochs": -1, "limit_val_batches": 0}
    Trainer(**settings, default_root_dir=tmp_path).fit(module(), data(world))
    assert not [*tmp_path.rglob("*.ckpt")]
