"""Reading what a training left behind, strictly: nothing is unpickled, guessed or initialised anew."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from arbordraft.heads.base import DraftHead

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
EAGLE, MEDUSA, EXIT_ADAPTER = "arbordraft_eagle", "arbordraft_medusa", "arbordraft_exit_adapter"


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a trained drafter; ``model_type`` tells its kind.

    Raises:
        ValueError: if there are none.
    """
    path = Path(folder)
    if path.suffix in PICKLES and path.is_file():
        raise ValueError(f"{path} is pickled, and loading it could run anything; name a folder with {WEIGHTS}")
    try:
        config = json.loads((path / CONFIG).read_text())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no trained drafter: its {CONFIG} cannot be read ({error}); name the folder that training "
            "published, such as arbordraft-results/best"
        ) from error
    if not isinstance(kind, str):
        raise ValueError(f"{path} holds no trained drafter: the model_type in its {CONFIG} is {kind!r}")
    return dict(config)


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that hold a network's weights.

    Raises:
        ValueError: if there are none, or only pickled ones.
    """
    path = Path(folder)
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is damaged ({error}): copy the checkpoint again") from error
        if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{path / INDEX} names {', '.join(strange)}, which is no safetensors file beside it")
        return [path / name for name in names]
    if pickled := sorted(file.name for file in path.iterdir() if file.suffix in PICKLES):
        raise ValueError(
            f"{path} has its weights pickled ({', '.join(pickled)}), and loading them could run anything. If you trust "
            "their source, load them there and write safetensors: model.save_pretrained(folder)"
        )
    raise ValueError(f"{path} has no {WEIGHTS}: it is not complete; copy or publish it again")


def read_tensors(folder: str | os.PathLike[str]) -> "dict[str, Tensor]":
    """All weights of a folder, by name.

    Raises:
        ValueError: if a file is missing, truncated or damaged, or holds numbers that are none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is truncated or damaged ({error}): copy the checkpoint again") from error
    if broken := [name for name, tensor in found.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
        raise ValueError(
            f"{folder} holds NaN or infinite weights ({_few(broken)}): the training failed or they changed"
        )
    return found


def read_head(folder: str | os.PathLike[str]) -> "DraftHead":
    """A trained EAGLE or Medusa head, in the dtype that it was stored in.

    Raises:
        ValueError: if the folder holds something else, or its weights do not fit its settings.
    """
    from arbordraft.heads.eagle import EagleConfig, EagleHead
    from arbordraft.heads.medusa import MedusaConfig, MedusaHead

    config = read_config(folder)
    kinds: dict[str, tuple[Any, Any]] = {EAGLE: (EagleConfig, EagleHead), MEDUSA: (MedusaConfig, MedusaHead)}
    if config["model_type"] not in kinds:
        raise ValueError(f"{folder} holds a {config['model_type']!r}, not an EAGLE or Medusa head")
    settings, network = kinds[config["model_type"]]
    try:
        head: DraftHead = network(settings.from_dict(config))
    except Exception as error:  # transformers' strict settings raise errors of their own
        raise ValueError(f"{Path(folder) / CONFIG} describes no {network.__name__}: {error}") from error
    tensors = read_tensors(folder)
    expected = {name: tensor.shape for name, tensor in head.state_dict().items()}
    problems = differences(expected, {name: tensor.shape for name, tensor in tensors.items()})
    if problems:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {'; '.join(problems)}")
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floats) != 1:
        raise ValueError(f"the weights in {folder} must share one dtype, got {sorted(map(str, floats))}")
    head.to(floats.pop())  # type: ignore[arg-type]
    head.load_state_dict(tensors)
    if problems := vocabulary_problems(head.d2t, head.t2d):
        raise ValueError(f"the draft vocabulary in {folder} is damaged: {'; '.join(problems)}")
    return head.eval()


def vocabulary_problems(d2t: "Tensor", t2d: "Tensor") -> list[str]:
    """What is wrong with a draft vocabulary: offsets ``[D]`` to the target's ids, and marks ``[V]`` of these ids.

    Shapes: D draft vocabulary, V vocabulary.
    """
    import torch

    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t must be int64 and t2d bool, got {d2t.dtype} and {t2d.dtype}"]
    tokens = d2t + torch.arange(len(d2t))
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(t2d):
        return [f"d2t leads to ids {int(tokens.min())}..{int(tokens.max())}, the target has {len(t2d)}"]
    if len(tokens.unique()) != len(tokens):
        return ["d2t leads two draft tokens to the same id; it holds offsets, id = index + d2t[index]"]
    if not torch.equal(t2d.nonzero().flatten(), tokens.sort().values):
        return [f"t2d marks {int(t2d.sum())} ids, which are not the {len(tokens)} that d2t leads to"]
    return []


def differences(expected: "dict[str, Any]", found: "dict[str, Any]") -> list[str]:
    """What distinguishes two tables, in words; empty if nothing does."""
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {_few(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected {_few(extra)}")
    problems += [
        f"{name} is {_brief(found[name])} instead of {_brief(value)}"
        for name, value in expected.items()
        if name in found and found[name] != value
    ]
    return problems


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _brief(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
