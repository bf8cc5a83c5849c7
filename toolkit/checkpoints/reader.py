"""Reads checkpoints strictly: nothing is unpickled, guessed or newly initialised.

A checkpoint is a folder with ``config.json`` and safetensors, or a repository of such files on a hub.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from arbordraft.utils.pages import drop_pages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
# Dtypes that may be cast to that of a weight, by their names in safetensors and torch.
_FRACTIONS = {"F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64"}
_ELSEWHERE = {"gguf_file", "subfolder", "variant"}  # options that name other weight files
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "*.tiktoken")  # files of a tokenizer


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the settings of a checkpoint; ``model_type``, or ``class`` for a decider, gives its kind.

    Raises:
        ValueError: if there are none, or they name no kind.
    """
    path = Path(folder)
    if path.suffix in PICKLES and path.is_file():
        raise ValueError(f"{path} is pickled, and loading it could run anything; name a folder with {WEIGHTS}")
    try:
        config = json.loads((path / CONFIG).read_text(), object_hook=_number)
        kind = config["model_type"] if "model_type" in config else config["class"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} holds no trained drafter and no model: its {CONFIG} cannot be read ({reason}); name the folder "
            "that training published, such as arbordraft-results/best, or that of a model"
        ) from error
    if not isinstance(kind, str):
        raise ValueError(f"{path} holds no trained drafter and no model: its {CONFIG} gives {kind!r} as its kind")
    return dict(config)


def _number(found: dict[str, Any]) -> Any:
    """Returns a number that JSON lacks, which transformers writes as an object, or any other object as it is."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that hold a network's weights.

    Raises:
        ValueError: if one is missing, or there are only pickled ones.
    """
    path = Path(folder)
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is damaged ({error}): copy the checkpoint again") from error
        if invalid := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{path / INDEX} names {', '.join(invalid)}, which is no safetensors file beside it")
        if missing := [name for name in names if not (path / name).is_file()]:
            raise ValueError(f"{path} lacks {few(missing)}, which its {INDEX} names: copy the checkpoint again")
        return [path / name for name in names]
    if pickled := sorted(file.name for file in path.iterdir() if file.suffix in PICKLES):
        raise ValueError(
            f"{path} has its weights pickled ({', '.join(pickled)}), and loading them could run anything. If you trust "
            "their source, load them there and write safetensors: model.save_pretrained(folder)"
        )
    raise ValueError(f"{path} has no {WEIGHTS}: it is not complete; copy or publish it again")


def read_tensors(folder: str | os.PathLike[str], prefix: str = "") -> dict[str, Tensor]:
    """Returns the weights of a folder whose names begin with ``prefix``, by name.

    Raises:
        ValueError: if a file is missing, truncated or damaged, or holds NaN or infinities.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with _explained(file), safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118
    check_finite(tensors, folder)
    return tensors


def load_network(read: Callable[..., Any], source: str | os.PathLike[str], **options: Any) -> Any:
    """Loads a network from a folder or a hub in eval mode; its weights must match the files exactly.

    Args:
        read: a ``from_pretrained`` of transformers.
        source: a folder, or a name on the hub.
        **options: options of ``read``.

    Raises:
        ImportError: if transformers lacks a library that this checkpoint needs.
        ValueError: if files are damaged, incomplete or pickled, or hold other weights than the network. Also if weights
            have another shape or kind of number than the configuration says, or are NaN or infinite.
    """
    place = Path(source)
    if place.is_file():
        raise ValueError(f"{place} is a file: name the folder that holds {CONFIG} and {WEIGHTS}")
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    if place.is_dir() and not _ELSEWHERE & options.keys():
        read_config(place)
        stored = stored_tensors(place)
    try:
        with _without_reports():
            network, info = read(
                os.fspath(source),
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # otherwise it raises without naming the weights
                output_loading_info=True,
                **options,
            )
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from a dozen libraries, without a common base
        raise ValueError(f"{source} cannot be loaded ({_one_line(error)})") from error
    problems = [f"{what} keys: {few(names)}" for what in ("missing", "unexpected") if (names := info[f"{what}_keys"])]
    mismatched = [f"{name} is {list(theirs)} instead of {list(ours)}" for name, theirs, ours in info["mismatched_keys"]]
    if not getattr(network.config, "quantization_config", None):  # quantised weights are stored in other dtypes
        mismatched += _other_numbers(network, stored)
    if mismatched:
        problems.append(f"mismatched keys: {few(mismatched)}")
    if problems:
        file = place / WEIGHTS if (place / WEIGHTS).is_file() else source
        raise ValueError(
            f"{file} does not fit its own {CONFIG} ({'; '.join(problems)}): copy, train or fetch the checkpoint again"
        )
    check_finite(network.state_dict(), source)
    return network.eval()


def load_causal_lm(source: str | os.PathLike[str], dtype: torch.dtype, **options: Any) -> "PreTrainedModel":
    """Loads a causal LM in eval mode with weights of ``dtype``; raises the errors of :func:`load_network`."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = load_network(AutoModelForCausalLM.from_pretrained, source, dtype=dtype, **options)
    return model


def load_tokenizer(source: str | os.PathLike[str], **options: Any) -> "PreTrainedTokenizerBase | None":
    """Loads the tokenizer of a folder or a hub, padding on the left; returns ``None`` if there is none.

    Args:
        source: a folder, or a name on the hub.
        **options: options of ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: if the tokenizer is damaged.
    """
    from transformers import AutoTokenizer

    place = Path(source)
    # transformers may make an empty tokenizer if there is none.
    if place.is_dir() and not _ELSEWHERE & options.keys() and not any(any(place.glob(name)) for name in _TOKENIZERS):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
    except ImportError:
        raise
    except Exception as error:  # the tokenizers' own library raises plain ones
        if not place.is_dir() and isinstance(error, OSError):
            return None
        raise ValueError(
            f"the tokenizer in {source} cannot be read ({_one_line(error)}): copy the checkpoint again"
        ) from error
    return tokenizer


def check_finite(tensors: Mapping[str, Tensor], source: str | os.PathLike[str]) -> None:
    """Raises ValueError if a tensor holds NaN or an infinity."""
    if bad := [name for name, tensor in tensors.items() if not _finite(tensor)]:
        dtype = tensors[bad[0]].dtype
        raise ValueError(
            f"{source} holds NaN or infinite weights ({few(bad)}): its training failed, they changed, or they are "
            f"too large for {str(dtype).removeprefix('torch.')}"
        )


def few(names: Sequence[str] | set[str]) -> str:
    """Returns at most three of the names and the number of the others, for messages."""
    ordered = sorted(map(str, names))
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point() or tensor.element_size() == 1:
        return True  # nothing to look at, or quantised
    finite = all(bool(end.isfinite()) for end in tensor.aminmax())  # NaN is both minimum and maximum; takes no memory
    if tensor.is_cpu and tensor.is_contiguous() and type(tensor) in (Tensor, nn.Parameter):
        drop_pages([(tensor.data_ptr(), tensor.nbytes)])
    return finite


def stored_tensors(folder: str | os.PathLike[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype of every stored tensor, as safetensors calls it, and its shape; raises as `weight_files`."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        with _explained(path), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                part = file.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def _other_numbers(network: nn.Module, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Lists stored tensors whose kind of number (fraction, integer, truth) differs, which a cast would hide."""

    def kind(dtype: str) -> str:
        return "fractions" if dtype in _FRACTIONS else "truth" if dtype in ("BOOL", "bool") else "integers"

    ours = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in network.state_dict().items()}
    return [
        f"{name} is stored as {dtype} instead of {ours[name]}"
        for name, (dtype, _) in stored.items()
        if name in ours and kind(dtype) != kind(ours[name])
    ]


def _one_line(error: Exception) -> str:
    """Shortens the message of a library to its first statement."""
    text = " ".join(str(error).split("\n\n")[0].partition("Model type should be one of")[0].split())
    return text[:300] or type(error).__name__


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is truncated or damaged ({error}): copy the checkpoint again") from error


@contextmanager
def _without_reports() -> Iterator[None]:
    """Keeps transformers from printing tables of mismatched weights: our error names them."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "utils.loading_report")]

    def keep_record(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text and "checkpoint seem corrupted" not in text

    for logger in loggers:
        logger.addFilter(keep_record)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep_record)
