"""``arbordraft train``: the lines that end a training."""

import json
import logging
import re
import shlex
from types import SimpleNamespace

import pytest
import typer
from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress
from support.tiny_training import save_config, save_world
from typer.testing import CliRunner

from arbordraft.cli import main as cli
from arbordraft.cli.train import ALL, OF_DECIDERS, OF_DRAFTERS, USUAL
from arbordraft.training.progress import TrainingProgress, _Pace


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


def train(world, *options):
    config = save_config(world / "config.yaml", world, results={"output": str(world / "out")})
    result = CliRunner().invoke(cli.app, ["train", "drafter", "fit", "--config", str(config), *options])
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if line.strip()]


def test_a_training_ends_by_naming_its_best_step_and_the_next_command(world):
    *_, reached, wrote, following = train(world, "--trainer.max_epochs=2")
    curve = json.loads((world / "out" / "curve.json").read_text())
    best = max(curve, key=lambda point: point["val/tau"])
    assert reached == f"best of {len(curve)} validations: val/tau {best['val/tau']:.4g} at step {best['step']}"
    assert wrote == f"wrote {world / 'out' / 'best'}"
    name, *arguments = shlex.split(following.removeprefix("measure it: "))
    assert name == "arbordraft"
    assert arguments[:2] == ["bench", "decode"]
    command = typer.main.get_command(cli.app).commands["bench"].commands["decode"]
    given = command.make_context("decode", arguments[2:]).params
    assert given["drafter"] == [str(world / "out" / "best")]
    assert given["model"] == str(world / "target")


def test_a_training_without_validation_says_so(world):
    assert train(world, "--trainer.limit_val_batches=0", "--trainer.max_epochs=1")[-1].startswith(
        "nothing was published"
    )


def test_advertisements_of_lightning_are_silenced(world):
    train(world, "--trainer.max_epochs=1")
    assert not any(logging.getLogger(f"lightning.{part}").isEnabledFor(logging.INFO) for part in ("pytorch", "fabric"))


@pytest.mark.parametrize(("command", "own"), [("drafter", OF_DRAFTERS), ("decider", OF_DECIDERS)])
def test_help_lists_options_that_exist(command, own):
    short = CliRunner().invoke(cli.app, ["train", command, "fit", "--help"])
    assert short.exit_code == 0
    assert all(option in short.output for option in {**USUAL, **own})
    assert len(short.output.splitlines()) < 30
    whole = CliRunner().invoke(cli.app, ["train", command, "fit", ALL])
    assert whole.exit_code == 0
    known = set(re.findall(r"--[\w.]+", whole.output))
    assert {option.split()[0] for option in {**USUAL, **own}} <= known


def test_progress_counts_epochs_from_one_and_shows_validations():
    bar = TrainingProgress()
    bar._trainer = SimpleNamespace(max_epochs=3)
    assert bar._get_train_description(0).strip() == "Epoch 1 of 3"
    bar._trainer.max_epochs = -1
    assert bar._get_train_description(1).strip() == "Epoch 2"
    bar.progress = CustomProgress()
    task = bar._add_task(4, "Validation", visible=False)
    assert bar.progress.tasks[task].visible
    pace = _Pace(style="")
    for speed, expected in ((None, ""), (0.25, "4.0 s per step"), (3.14, "3.1 steps/s")):
        assert pace.render(SimpleNamespace(finished_speed=None, speed=speed)).plain == expected
