"""Trainings end with the time or the steps that they were given, and longer ones go on from before the cool-down."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from tiny_training import TRAINER, data, module, same, save_world

from arbordraft.training.drafter_module import Phase
from arbordraft.training.recording import Recorder
from arbordraft.training.schedule import BEFORE_COOLDOWN

LR = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


class Seen(Callback):
    """The learning rate and the phase of every step, and when there were validations."""

    def __init__(self):
        self.rates, self.steps, self.validations = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[-1]["lr"] / LR)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(len([name for name in trainer.callback_metrics if name.startswith("train/agreement")]))

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)


class Clock(Callback):
    """Every step takes a second, and nothing else takes any time."""

    now = 1000.0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        Clock.now += 1


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=lambda: Clock.now))
    return Clock()


def train(world, folder, *callbacks, resumed=None, model=None, **settings):
    """Trains without noise; returns what was seen, the folder of checkpoints, and the weights."""
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
    assert seen.validations == [20], "what comes out of it is looked at"
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_a_longer_training_goes_on_as_if_it_had_been_one(world, tmp_path):
    """To the last bit, though the one before had cooled down in the meantime."""
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


def test_going_on_from_within_the_cooldown_keeps_nothing_anew(world, tmp_path):
    _, before, _ = train(world, tmp_path, max_steps=10, max_epochs=-1)
    last = before.with_name("cooling.ckpt")
    before.rename(last)
    train(world, tmp_path, resumed=last, max_steps=10, max_epochs=-1)
    assert not before.exists()


def test_time_ends_a_training_and_epochs_do_not(world, tmp_path, clock):
    """Forty seconds are five epochs; phases are shares of the time, too."""
    phases = (Phase(0.5, 1, "kl"), Phase(1.0, 2, "lk_hybrid"))
    seen, before, _ = train(world, tmp_path, clock, max_time={"seconds": 40}, model={"phases": phases})
    assert len(seen.rates) == 40
    assert seen.rates[3:33] == pytest.approx([1.0] * 30)
    assert seen.rates[33:] == pytest.approx([1 - ((at - 32) / 8) ** 0.5 for at in range(33, 40)])
    assert [seen.steps.count(count) for count in (1, 2)] == [20, 20]
    assert torch.load(before, weights_only=True)["global_step"] == 32
    assert seen.validations == [40]


def test_more_time_goes_on_from_before_the_cooldown(world, tmp_path, clock):
    """Hours later, by the clock."""
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


class Weights(Callback):
    """The weights after every step, and what training made of them."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(deepcopy(dict(pl_module.student.network.named_parameters())))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_average_is_what_is_published(world, tmp_path, accumulated):
    """Weight by weight as its definition says; the student itself is left alone."""
    weights, options = Weights(), {"max_steps": 6, "max_epochs": -1, "accumulate_grad_batches": accumulated}
    _, _, found = train(world, tmp_path / "average", weights, model={"ema_decay": 0.5}, **options)
    _, _, plain = train(world, tmp_path / "plain", **options)
    assert same({name: found[name] for name in plain}, plain)
    folders = [tmp_path / name / "best" / "model.safetensors" for name in ("average", "plain")]
    published, last = (load_file(folder) for folder in folders)
    for name, tensor in published.items():
        steps = [seen[name] for seen in weights.seen[accumulated - 1 :: accumulated] if name in seen]
        if not steps:
            assert torch.equal(tensor, last[name]), "what is not trained"
            continue
        assert len(steps) == 6
        expected = steps[0]
        for count, step in enumerate(steps[1:], start=1):
            decay = min(0.5, (1 + count) / (10 + count))
            expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(tensor.float(), expected.half().float(), rtol=2e-3, atol=1e-6)
        assert not torch.equal(tensor, last[name])


def test_the_average_goes_on_exactly(world, tmp_path):
    options = {"max_epochs": -1, "model": {"ema_decay": 0.9}}
    _, before, _ = train(world, tmp_path / "short", max_steps=10, **options)
    _, _, found = train(world, tmp_path / "long", resumed=before, max_steps=20, **options)
    _, _, expected = train(world, tmp_path / "whole", max_steps=20, **options)
    assert same(found, expected)
    with pytest.raises(ValueError, match="that of another training"):
        train(world, tmp_path / "other", resumed=before, max_steps=20, max_epochs=-1)


@pytest.mark.parametrize("decay", [-0.1, 1, "much"])
def test_a_decay_out_of_range(decay):
    with pytest.raises((ValueError, TypeError), match="ema_decay"):
        module(ema_decay=decay)
