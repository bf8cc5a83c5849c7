"""A drafter as files: what an engine's layout asks for, and the check that nothing is missing, extra or misshapen.

Engines skip tensors that they do not know and leave what is missing as it happens to be, so it has to be noticed here.

Shapes: D draft vocabulary, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from arbordraft.checkpoints import CONFIG, WEIGHTS
from arbordraft.exports.checkpoints import differences
from arbordraft.heads.base import vocabulary_problems

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VOCABULARY = {"d2t": torch.int64, "t2d": torch.bool}  # all other tensors are weights

Shapes = dict[str, tuple[int, ...]]


class LayoutError(ValueError):
    """Files would not be what an engine loads; the message says where they differ."""


@dataclass(frozen=True)
class Layout:
    """What is written.

    Args:
        config: contents of ``config.json``.
        tensors: contents of ``model.safetensors``.
        shapes: of every tensor that the engine builds for such a config, worked out from the config alone.
        card: contents of ``README.md``: how it is served.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shapes: Shapes
    card: str

    def write(self, folder: Path) -> None:
        """Writes the three files and checks what can be read back.

        Raises:
            LayoutError: if it is not what the engine loads.
        """
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        contiguous = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})  # which transformers insists on
        (folder / "README.md").write_text(self.card)
        self.check(folder)

    def check(self, folder: Path) -> None:
        """Raises LayoutError if the files in a folder are not what the engine loads."""
        try:
            config = json.loads((folder / CONFIG).read_text())
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise LayoutError(f"{folder} cannot be read back: {error}") from error
        problems = differences(self.config, config)
        problems += tensor_problems(tensors, self.shapes, str(find(config, "dtype")))
        if problems:
            raise LayoutError(f"{folder} would not be loaded as it should: {'; '.join(problems)}")


def tensor_problems(tensors: dict[str, Tensor], shapes: Shapes, dtype: str) -> list[str]:
    """How tensors differ from those that an engine builds; empty if they do not.

    Args:
        tensors: what a file holds.
        shapes: what the engine builds.
        dtype: of the weights.
    """
    problems = differences(dict(shapes), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    wanted = {name: VOCABULARY.get(name, DTYPES.get(dtype)) for name in tensors}
    problems += differences(wanted, {name: tensor.dtype for name, tensor in tensors.items()})
    if not problems and "d2t" in tensors:
        problems += vocabulary_problems(tensors["d2t"], tensors["t2d"])
    return problems


def find(config: dict[str, Any], name: str) -> Any:
    """A setting, wherever a layout keeps the settings of the network itself."""
    return config.get(name, config.get("transformer_layer_config", {}).get(name))


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in configurations.

    Raises:
        ValueError: if engines do not serve it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"weights in {name} are not served; name one of {', '.join(DTYPES)} with --dtype")
    return name
