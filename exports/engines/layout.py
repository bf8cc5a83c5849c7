"""The files of a drafter in an engine's layout, and the check that nothing is missing, extra or misshapen.

Engines skip tensors that they do not know and leave missing ones uninitialised, so the check has to be made here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from arbordraft.checkpoints.reader import CONFIG, WEIGHTS, few
from arbordraft.heads.base import vocabulary_problems
from arbordraft.utils.choices import Dtype

VOCABULARY = {"d2t": torch.int64, "t2d": torch.bool}  # all other tensors are weights

Shapes = dict[str, tuple[int, ...]]


class LayoutError(ValueError):
    """Files differ from the layout that an engine loads; the message says where."""


@dataclass(frozen=True)
class Layout:
    """The files of a drafter for an engine.

    Args:
        config: contents of ``config.json``.
        tensors: contents of ``model.safetensors``.
        shapes: shape of every tensor that the engine builds for such a config, worked out from the config alone.
        card: contents of ``README.md``, which tells how to serve it.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shapes: Shapes
    card: str

    def write(self, folder: Path) -> None:
        """Writes the three files, reads them back and checks them; raises LayoutError as :meth:`check` does."""
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        contiguous = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})  # required by transformers
        (folder / "README.md").write_text(self.card)
        self.check(folder)

    def check(self, folder: Path) -> None:
        """Raises LayoutError if the files in a folder differ from the layout."""
        try:
            config = json.loads((folder / CONFIG).read_text())
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise LayoutError(f"{folder} cannot be read back: {error}") from error
        weights = getattr(torch, self.config["dtype"])
        problems = [
            *_differences(self.config, config),
            *_differences(self.shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()}),
            *_differences(
                {name: VOCABULARY.get(name, weights) for name in tensors},
                {name: tensor.dtype for name, tensor in tensors.items()},
            ),
        ]
        if not problems and "d2t" in tensors:
            problems = vocabulary_problems(tensors["d2t"], tensors["t2d"])
        if problems:
            raise LayoutError(f"{folder} would not be loaded as it should: {'; '.join(problems)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in configurations; raises ValueError if engines do not serve it."""
    name = str(dtype).removeprefix("torch.")
    if name not in list(Dtype):
        raise ValueError(f"weights in {name} are not served; name one of {', '.join(Dtype)} with --dtype")
    return name


def _differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Lists the differences of two tables in words; empty if there are none."""
    problems = []
    if missing := expected.keys() - actual.keys():
        problems.append(f"missing {few(missing)}")
    if extra := actual.keys() - expected.keys():
        problems.append(f"unexpected {few(extra)}")
    problems += [
        f"{name} is {_shown(actual[name])} instead of {_shown(value)}"
        for name, value in expected.items()
        if name in actual and actual[name] != value
    ]
    return problems


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
