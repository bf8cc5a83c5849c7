"""Two processes under PyTorch's launcher train as one process does, with DDP and with FSDP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from support.tiny_training import TRAINER, data, fit, module, same, save_world, stored

from arbordraft import EagleDrafter

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


def launched(world, folder, strategy):
    """Trains with two processes and returns the folder of their files."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, str(HERE / "support" / "ddp_process.py"), str(world), str(folder), strategy],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def ddp(world, tmp_path_factory):
    return launched(world, tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.fixture(scope="module")
def fsdp(ddp, world, tmp_path_factory):
    """Runs after DDP, which generates the data of both."""
    return launched(world, tmp_path_factory.mktemp("fsdp"), "fsdp")


STRATEGIES = ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)]
TOLERANCE = {
    "ddp": 1e-6,
    "fsdp": 1e-3,
}  # FSDP splits matrices, and Muon, which rounds to half precision, amplifies that


def test_data_are_generated_once(ddp, world, tmp_path):
    lines = (ddp / "generated").read_text().split("\n")
    assert lines == ["0 0", "0 1", "0 2", ""]
    own = data(world, folder=str(tmp_path))
    own.trainer = Trainer(**TRAINER)
    own.trainer.strategy.connect(module())
    own.prepare_data()
    assert same(stored(tmp_path), stored(world / "data"))


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """Trains one process on the batches of both."""
    return fit(world, tmp_path_factory.mktemp("alone"), noise=0.0, accumulate_grad_batches=2, gradient_clip_val=0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_end_with_the_weights_of_one_that_sees_the_same_batches(request, alone, strategy):
    folder = request.getfixturevalue(strategy)
    (plain, seen), (other, seen_by_other) = (torch.load(folder / str(rank))["plain"] for rank in (0, 1))
    assert same(plain, other)
    expected, batches = alone
    assert [text for pair in zip(seen, seen_by_other, strict=True) for _, text in pair] == [text for _, text in batches]
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(plain["state_dict"][name], tensor, rtol=0, atol=TOLERANCE[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_resume_exactly(request, strategy):
    for rank in (0, 1):
        runs = torch.load(request.getfixturevalue(strategy) / str(rank))
        (expected, seen), (found, rest) = runs["whole"], runs["resumed"]
        assert rest == seen[4:]
        for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert same(found[name], expected[name]), name


def published(folder, world):
    """Returns the weights that the processes published, after checking their record."""
    results = folder / "whole" / "results"
    assert [point["step"] for point in json.loads((results / "curve.json").read_text())] == [4, 8]
    return EagleDrafter.from_pretrained(results / "best", data(world).target).head.state_dict()


def test_processes_publish_a_network(ddp, world):
    assert published(ddp, world)


@pytest.mark.soak
def test_processes_publish_one_whole_network(ddp, fsdp, world):
    expected, found = published(ddp, world), published(fsdp, world)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE["fsdp"])
