"""Ways to spoil a checkpoint."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Harm = Callable[[Path], Any]


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Harm:
    """Writes the weights again, edited."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def drop(name: str) -> Harm:
    return tensors(lambda weights: weights.pop(name))


def put(name: str, value: Tensor) -> Harm:
    return tensors(lambda weights: weights.update({name: value}))


def fill(name: str, value: float) -> Harm:
    """One element of a tensor."""
    return tensors(lambda weights: weights[name].view(-1)[:1].fill_(value))


def cast(name: str, dtype: torch.dtype) -> Harm:
    return tensors(lambda weights: weights.update({name: weights[name].to(dtype)}))


def config(**changes: Any) -> Harm:
    """Other settings; ``...`` removes one."""

    def harm(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return harm


def content(file: str, change: Callable[[bytes], bytes] | bytes) -> Harm:
    """Other bytes in a file."""

    def harm(folder: Path) -> None:
        path = folder / file
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return harm


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": 1}))


def absent(file: str) -> Harm:
    return lambda folder: (folder / file).unlink()


WEIGHTS = "model.safetensors"
# What may befall the files of any checkpoint, and what is said then.
FILES: dict[str, tuple[Harm, str]] = {
    "truncated": (content(WEIGHTS, lambda data: data[:-100]), r"model\.safetensors is truncated or damaged .*copy"),
    "half a header": (content(WEIGHTS, lambda data: data[:40]), r"model\.safetensors is truncated or damaged"),
    "empty": (content(WEIGHTS, b""), r"model\.safetensors is truncated or damaged"),
    "garbage": (content(WEIGHTS, b"\x07garbage" * 99), r"model\.safetensors is truncated or damaged"),
    "text": (content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n" * 4), "is truncated or damaged"),
    "pickled": (pickled, r"weights pickled \(pytorch_model\.bin\), and loading them could run anything.*save_pret"),
    "no weights": (absent(WEIGHTS), r"has no model\.safetensors: it is not complete"),
    "no config": (absent("config.json"), r"its config\.json cannot be read"),
    "half a config": (content("config.json", lambda data: data[: len(data) // 2]), r"config\.json cannot be read"),
    "empty config": (content("config.json", b""), r"config\.json cannot be read"),
    "binary config": (content("config.json", b"\xff\xfe\x00"), r"config\.json cannot be read"),
    "config a list": (content("config.json", b"[1]"), r"config\.json cannot be read"),
    "extra tensor": (put("spare.weight", torch.ones(2)), r"unexpected keys: spare\.weight"),
}
