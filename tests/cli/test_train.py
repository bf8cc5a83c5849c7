"""``arbordraft train``: the lines that end a training."""

import json
import logging
import shlex

import pytest
import typer
from support.tiny_training import save_config, save_world
from typer.testing import CliRunner

from arbordraft.cli import main as cli


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
