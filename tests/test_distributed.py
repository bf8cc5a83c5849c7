"""Two processes train as one does: by PyTorch's own launcher, and by Ray."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_training import TRAINER, data, module, same, save_world, stored

from arbordraft.training.data import SelfDistillationDataModule

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def processes(world, tmp_path_factory):
    """What two processes left behind."""
    folder = tmp_path_factory.mktemp("processes")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, str(HERE / "ddp_process.py"), str(world), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Interleaved:
    """The batches of two processes in turn."""

    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return sum(map(len, self.parts))

    def __iter__(self):
        return chain.from_iterable(zip(*self.parts, strict=True))


class Alone(SelfDistillationDataModule):
    """One process with the data of two."""

    def train_dataloader(self):
        return Interleaved([self._loader(self._train, self.seed, part, 2) for part in (0, 1)])


def test_data_are_generated_once(processes, world, tmp_path):
    lines = (processes / "generated").read_text().split("\n")
    assert lines == ["0 0", "0 1", "0 2", ""]
    own = data(world, folder=str(tmp_path))
    own.trainer = Trainer(**TRAINER)
    own.trainer.strategy.connect(module())
    own.prepare_data()
    assert same(stored(tmp_path), stored(world / "data"))


def test_processes_end_with_the_weights_of_one_that_sees_the_same_batches(processes, world):
    one, other = (torch.load(processes / f"weights-{rank}") for rank in (0, 1))
    assert same(one, other)
    torch.manual_seed(0)
    model = module()
    settings = {**TRAINER, "max_epochs": 2, "gradient_clip_val": 0.5, "limit_val_batches": 0}
    alone = data(world)
    alone.__class__ = Alone
    Trainer(**settings, accumulate_grad_batches=2).fit(model, alone)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(one[name], expected, rtol=1e-5, atol=1e-6)


def test_processes_share_batches_and_go_on_exactly(processes):
    (whole, rest), (other, other_rest) = (torch.load(processes / f"resumed-{rank}") for rank in (0, 1))
    for (expected, seen), (found, seen_again) in ((whole, rest), (other, other_rest)):
        assert seen_again == seen[4:]
        assert same(found["state_dict"], expected["state_dict"])
        assert same(found["optimizer_states"], expected["optimizer_states"])
    texts, others = ([sequence for _, batch in run[1] for sequence in batch] for run in (whole, other))
    assert texts != others
    assert len(whole[1]) == len(other[1])
