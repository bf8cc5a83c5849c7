"""Full and unwritable disks and missing folders give errors of one line, and existing files stay."""

import errno
import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.tiny_training import TRAINER, data, module, save_config, save_world
from support.writers import FILES, FOLDERS, WRITERS, everything, place, several

from arbordraft.exports.folder import contents
from arbordraft.training.fit import data_of
from arbordraft.training.recording import Recorder
from arbordraft.utils.files import WriteError, check_writable, new_file, new_folder, write_text


@contextmanager
def no_file_above(size: int):
    """Limits files to ``size`` bytes, by a real limit of the system.

    Modules imported meanwhile write no bytecode: Python 3.11 would keep the truncated file, and every later import
    would fail with ``EOFError``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = kept


@pytest.fixture
def full_at_last(monkeypatch):
    """Simulates a disk that reports only at the final sync that it is full."""

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_fills(tmp_path, writer, before):
    path = place(tmp_path, writer)
    if before:
        WRITERS[writer](path)
        if writer == "shards":
            (path / "manifest.json").unlink()
    elif writer in FOLDERS:
        path.mkdir()
    kept = everything(tmp_path)
    with no_file_above(16), pytest.raises(WriteError, match=r"out.* cannot be written: File too large; .*ulimit"):
        WRITERS[writer](path)
    assert everything(tmp_path) == kept
    WRITERS[writer](path)  # later writes work
    assert everything(tmp_path) != kept or before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_full_at_the_final_sync(tmp_path, full_at_last, writer):
    path = place(tmp_path, writer)
    if writer in FOLDERS:
        path.mkdir()
    kept = everything(tmp_path)
    with pytest.raises(WriteError, match=r"out.* cannot be written: No space left on device; .*free some space") as e:
        WRITERS[writer](path)
    assert e.value.errno == errno.ENOSPC
    assert "\n" not in str(e.value)
    assert everything(tmp_path) == kept


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_where_a_folder_should_be(tmp_path, writer):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(WriteError, match=r"file is a file, not a folder; name another path"):
        WRITERS[writer](place(tmp_path / "file", writer))
    assert everything(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("writer", FILES)
def test_a_folder_where_a_file_should_be(tmp_path, writer):
    path = place(tmp_path, writer)
    (path / "inner").mkdir(parents=True)
    kept = everything(tmp_path)
    with pytest.raises(WriteError, match="is a folder, not a file; name another path"):
        FILES[writer](path)
    assert everything(tmp_path) == kept


@pytest.mark.parametrize("writer", ["published", "exported"])
def test_a_file_where_the_folder_itself_should_be(tmp_path, writer):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(FileExistsError, match="out is no folder; only folders are replaced"):
        FOLDERS[writer](tmp_path / "out")
    assert everything(tmp_path) == {"out": b"precious"}


@pytest.mark.parametrize("writer", ["cost table", "tuned", "benchmark", "plot", "tree", "text"])
def test_a_device_is_written_and_never_replaced(writer):
    """As in ``--json /dev/stdout``; this one is always full."""
    with pytest.raises(WriteError, match="/dev/full cannot be written: No space left on device"):
        FILES[writer](Path("/dev/full"))
    FILES[writer](Path("/dev/null"))
    assert all(Path("/dev", name).is_char_device() for name in ("full", "null"))


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the user of the tests may have all permissions
    with pytest.raises(WriteError, match=r"x/y cannot be written: Permission denied; name a place that you may write"):
        check_writable(tmp_path / "x" / "y", folder=folder)
    assert everything(tmp_path) == {}


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        write_text(tmp_path / ("x" * 300), "text")
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), FileNotFoundError(errno.ENOENT, "no", "elsewhere/x"), OSError("hub")], ids=repr
)
@pytest.mark.parametrize("write", [new_file, new_folder], ids=["file", "folder"])
def test_other_errors_are_raised_unchanged(tmp_path, write, error):
    """A read within the block may fail, too; such errors are not about the written file."""
    with pytest.raises(type(error)) as caught, write(tmp_path / "out"):
        raise error
    assert caught.value is error
    assert everything(tmp_path) == {}


def test_a_whole_folder_has_every_file(tmp_path):
    several(tmp_path / "deep" / "out")
    assert [file.name for file in contents(tmp_path / "deep" / "out")] == ["README.md", "graphs/model.onnx"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


# Generating and training


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


def test_generation_resumes_after_a_full_disk(world, tmp_path, monkeypatch):
    """The disk fills at the second shard; the first one is kept, and nothing is generated twice."""
    config = save_config(tmp_path / "config.yaml", world, data={"folder": str(tmp_path / "data"), "cache": False})
    arguments = ["--config", str(config)]
    synced, shards = os.fsync, []

    def fail(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        shards.append(name)
        if "tokens-00001" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match=r"tokens-00001.*No space left.*files before it are kept.*free some space"):
        data_of(arguments).generate()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "manifest.json",
        "minutes-0.json",
        "tokens-00000.safetensors",
    ]
    monkeypatch.undo()
    first = (tmp_path / "data" / "tokens-00000.safetensors").stat().st_mtime_ns
    data_of(arguments).generate()
    assert (tmp_path / "data" / "tokens-00000.safetensors").stat().st_mtime_ns == first
    assert len(list((tmp_path / "data").glob("tokens-*"))) == 3


class Steps(Callback):
    """Logs a metric that every validation improves."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/steps", float(trainer.global_step))


@pytest.mark.parametrize("full", ["last", "curve", "model.safetensors"])
def test_a_training_keeps_files_saved_before_the_disk_was_full(world, tmp_path, monkeypatch, full):
    """The disk fills when the file is written for the second time."""
    synced, seen = os.fsync, []

    def fail(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if full in name:
            seen.append(name)
            if len(seen) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    keep = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2, save_last=True)
    settings = TRAINER | {"enable_checkpointing": True, "max_steps": 8, "val_check_interval": 2}
    recorder = Recorder(str(tmp_path / "results"), monitor="val/steps")
    trainer = Trainer(**settings, callbacks=[Steps(), recorder, keep])
    with pytest.raises(WriteError, match=r"No space left on device; what was saved before is kept, and --ckpt_path"):
        trainer.fit(module(), data(world, validation=1))
    names = {path.name for path in tmp_path.rglob("*")}
    assert not [name for name in names if name.startswith(".")]
    assert {"best", "model.safetensors", "curve.json"} <= names
    for path in (tmp_path / "checkpoints").glob("*.ckpt"):
        torch.load(path, weights_only=True)


def test_a_training_without_a_place_for_results_fails_at_once(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"file/results cannot be written: .*file is a file, not a folder"):
        Recorder(str(tmp_path / "file" / "results"))
