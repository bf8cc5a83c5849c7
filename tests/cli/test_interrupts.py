"""Ctrl-C and SIGTERM at any moment leave no half-written files, and set the exit status."""

import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.models import tiny_checkpoint
from support.tiny_training import save_config, save_world
from support.writers import FILES, WRITERS, everything, place

from arbordraft.cli.failures import Terminated, ending
from arbordraft.cli.main import main
from arbordraft.kernels.native import build

STEPS = [  # all disk operations of a writer
    (os, "fsync"),
    (shutil, "rmtree"),
    *((Path, name) for name in ("mkdir", "replace", "rename", "unlink", "open", "write_text", "is_dir", "exists")),
]
NAMES = {"published": ["a"], "exported": ["README.md"], "decider": ["config.json", "model.safetensors"]}


class Interrupt:
    """Raises KeyboardInterrupt just before or after the n-th disk operation; counts the operations."""

    def __init__(self, monkeypatch, at: int, behind: bool) -> None:
        self.at, self.behind, self.count = at, behind, 0
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, step):
        def run(*args, **options):
            self.count += 1
            mine = self.count == self.at
            if mine and not self.behind:
                raise KeyboardInterrupt
            found = step(*args, **options)
            if mine:
                if hasattr(found, "close"):
                    found.close()
                raise KeyboardInterrupt
            return found

        return run


@pytest.mark.parametrize("behind", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("writer", ["text", "tuned", "shard", "checkpoint", "published", "exported", "decider"])
def test_an_interrupt_at_any_step_leaves_the_old_or_the_new_files(tmp_path, writer, before, behind):
    complete = tmp_path / "complete"
    complete.mkdir()
    WRITERS[writer](place(complete, writer))
    new = everything(complete)
    for at in range(1, 200):
        root = tmp_path / str(at)
        root.mkdir()
        if before:
            old_file(writer, place(root, writer))
        elif writer == "decider":
            place(root, writer).mkdir()
        old = everything(root)
        with pytest.MonkeyPatch.context() as patch:
            interrupt = Interrupt(patch, at, behind)
            try:
                WRITERS[writer](place(root, writer))
            except KeyboardInterrupt:
                assert interrupt.count >= at
            finally:
                patch.undo()
            done = interrupt.count < at
        found = everything(root)
        if writer == "decider":  # two files, each replaced as a whole
            assert set(found) <= set(old) | set(new)
            assert all(found[name] in (old.get(name), new.get(name)) for name in found)
        else:
            assert found in (old, new), f"interrupted at step {at}"
        if done:
            break
    else:
        pytest.fail("the writer never finished")
    assert found == new
    assert at > 5


def old_file(writer, path):
    """Writes other contents under the same names, as an earlier version."""
    if writer in FILES:
        path.write_text("old")
        return
    path.mkdir()
    for name in NAMES[writer]:
        (path / name).write_text("old")


def test_a_timeout_of_the_compiler_ends_its_child_processes(tmp_path, monkeypatch):
    """Like g++, the command starts a process for the work, which holds a pipe open until it ends."""
    monkeypatch.setattr(build, "COMPILER_LIMIT", 0.5)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        with pytest.raises(subprocess.TimeoutExpired):
            build._finished(["sh", "-c", f"(sleep 60 > {pipe}) & wait"], dict(os.environ))
        assert select.select([held], [], [], 10)[0]
        assert held.read() == b""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyboardInterrupt, 130, "interrupted\n"), (Terminated, 143, "terminated\n")],
    ids=["SIGINT", "SIGTERM"],
)
@pytest.mark.parametrize("by_lightning", [False, True], ids=["as it is", "turned into SystemExit(1)"])
def test_an_interrupt_has_its_own_status(capsys, error, status, said, by_lightning):
    def interrupted():
        try:
            raise error
        except KeyboardInterrupt:
            if by_lightning:
                sys.exit(1)
            raise

    with pytest.raises(SystemExit) as stopped, ending():
        interrupted()
    assert stopped.value.code == status
    assert capsys.readouterr().err == said


def test_signal_handlers_are_restored_after_a_command():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def terminated():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does on an interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the signal ends this sleep

    with pytest.raises(SystemExit) as stopped, ending():
        terminated()
    assert stopped.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# Real processes: a thread watches the main thread and sends the signal when a given function runs.


def interrupted_command(arguments, folder, said, moment, number):
    """Runs a command and sends the signal soon after a function was entered or a file was written."""

    def reached():
        if isinstance(moment, Path):
            return moment.exists()
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code.co_name != moment:
            frame = frame.f_back
        return frame is not None

    def stop():
        while not reached():
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    with Path(os.devnull).open("w") as text, said.open("w") as file:
        os.dup2(text.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    sys.argv = ["arbordraft", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script ignore SIGINT
    torch.set_num_threads(1)
    threading.Thread(target=stop, daemon=True).start()
    main()


@pytest.fixture(scope="module")
def processes():
    """Returns a context for processes that start with everything imported, which would take most of their time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "onnx", "arbordraft.cli.main", "arbordraft.training.fit"])
    return context


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns a folder with a target, prompts and a configuration of a training."""
    root = save_world(tmp_path_factory.mktemp("world"))
    tiny_checkpoint(root / "model")
    save_config(
        root / "config.yaml", root, trainer={"max_epochs": 10_000}, results={"output": str(root / "out" / "results")}
    )
    return root


def commands(world: Path) -> dict[str, list[str]]:
    """Returns commands that run for minutes."""
    model, long = str(world / "model"), ["--new-tokens", "2000", "--prompts", str(world / "prompts.jsonl")]
    out = world / "out"
    return {
        "generate": ["generate", "a b", "--raw", "--model", model, "--max-new-tokens", "2000"],
        "tune": ["tune", "--model", model, "--dtype", "float32", *long, "--output", str(out / "tuned.json")],
        "train": ["train", "drafter", "fit", "--config", str(world / "config.yaml")],
        "export": ["export", "onnx", model, str(out / "onnx")],
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("command", "moment", "number"),
    [
        ("generate", "load_decoder", signal.SIGINT),
        ("generate", "decode_loop", signal.SIGTERM),
        ("tune", "measure_costs", signal.SIGINT),
        ("train", "prepare_data", signal.SIGTERM),
        ("train", "curve.json", signal.SIGINT),
        ("train", "curve.json", signal.SIGTERM),
        ("export", "trace", signal.SIGTERM),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_a_signal_ends_a_command(world, processes, tmp_path, command, moment, number):
    out, said = world / "out", tmp_path / "said"
    shutil.rmtree(out, ignore_errors=True)
    reached = out / "results" / moment if "." in moment else moment
    given = commands(world)[command], world, said, reached, number
    process = processes.Process(target=interrupted_command, args=given)
    process.start()
    process.join(120)
    stderr = said.read_text()
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"the command goes on: {stderr}")
    assert process.exitcode == (130 if number == signal.SIGINT else 143), stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == ("interrupted" if number == signal.SIGINT else "terminated")
    assert ("the training goes on with the same command" in stderr) is (command == "train")
    left = list(out.rglob("*"))
    assert not [path for path in left if path.name.startswith(".")]
    if moment == "curve.json":
        assert json.loads((out / "results" / "curve.json").read_text())
    else:
        assert not [path for path in left if path.is_file()]
