"""The examples for Ray, with two processes on this machine."""

import runpy
import sys
from pathlib import Path

import pytest
import ray
import torch
from support.tiny_training import fit, same, save_config, save_world, stored

from arbordraft.training.fit import data_of

HERE = Path(__file__).resolve().parents[1]
EXAMPLES = HERE.parent / "examples"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # or they wait for all the tests beside them
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}})
        yield
        ray.shutdown()


@pytest.fixture
def run_example(monkeypatch, capfd):
    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


def test_two_actors_write_what_one_process_writes(world, tmp_path, run_example):
    config = save_config(tmp_path / "config.yaml", world, data={"folder": str(tmp_path / "shared")})
    shown = run_example("ray_generate.py", "--actors", 2, "--config", config)
    assert "3 shards are in" in shown
    own = save_config(tmp_path / "own.yaml", world, data={"folder": str(tmp_path / "own")})
    data_of(["--config", str(own)]).generate()
    assert same(stored(tmp_path / "shared"), stored(tmp_path / "own"))


def test_workers_train_and_go_on_after_a_failure(world, tmp_path, run_example):
    """The result is that of one process with the batches of both, and nothing of the failure remains."""
    lost = {"class_path": "support.tiny_training.FailOnce", "init_args": {"mark": str(tmp_path / "mark")}}
    config = save_config(tmp_path / "config.yaml", world, trainer={"callbacks": [lost]})
    own = ["--workers", 2, "--retries", 1, "--storage", tmp_path / "ray"]
    shown = run_example("ray_train.py", *own, "--config", config)
    assert "8 steps, " in shown
    assert (tmp_path / "mark").exists()
    expected, _ = fit(world, tmp_path / "alone", noise=0.0, accumulate_grad_batches=2)
    found = [torch.load(path, weights_only=True) for path in (tmp_path / "ray").rglob("checkpoint.ckpt")]
    (last,) = [checkpoint for checkpoint in found if checkpoint["global_step"] == 8]
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(last["state_dict"][name], tensor, rtol=0, atol=1e-6)
