"""Drafters by name: a keyword, a folder with a trained drafter of any kind, or a draft model."""

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import tempfile
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from arbordraft.checkpoints.reader import CONFIG, INDEX, read_config, weight_files
from arbordraft.checkpoints.vocabulary import TokenizerMismatch
from arbordraft.drafters import (
    BlockDrafter,
    DFlashDrafter,
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    HybridDrafter,
    IntersectionDrafter,
    LanguageModelDrafter,
    MedusaDrafter,
    MtpDrafter,
    NGramDrafter,
    NoDrafter,
    RetokenizedDrafter,
    SelfDrafter,
)
from arbordraft.drafters.base import check_ragged
from arbordraft.drafters.mtp import has_mtp
from arbordraft.drafters.onnx_networks import OnnxBlock, OnnxEagle, OnnxMedusa, OnnxModel
from arbordraft.kernels.machine import available_memory, cache_folder
from arbordraft.onnx.graph import FUSE, MARKOV, MODEL, Graph
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.memory import FEW_BITS, bits_per_weight, copy_bytes
from arbordraft.utils.files import new_folder
from arbordraft.utils.mlflow_server import explained, fetch_drafter, find_drafter

DRAFTERS = (
    "auto",
    "ngram",
    "none",
    "self",
    "mtp",
    "early-exit:LAYERS",
    "retokenized:NAME",
    "MODULE:CLASS",
    "a folder",
    "a GGUF file",
    "a hub name",
)
_LARGE = 1 << 26  # bytes of weights from which reading them dominates a forward
_MIN_SPEEDUP = 1.15  # least speed-up over plain decoding that a drafter must promise to be chosen
_SMALL = 0.6  # most bytes of a draft model, as a share of the target's
_MOST_TRIED = 3  # draft models that are loaded to find one that pays

# By the model_type in config.json; any other type that transformers can load counts as a language model.
_KINDS: dict[str, Any] = {
    "arbordraft_block": BlockDrafter,
    "arbordraft_dflash": DFlashDrafter,
    "arbordraft_eagle": EagleDrafter,
    "arbordraft_exit_adapter": EarlyExitDrafter,
    "arbordraft_medusa": MedusaDrafter,
}


def drafter_named(name: str, target: RaggedModel) -> Drafter:
    """Returns the drafter of a keyword (``auto``, ``ngram``, ``none``, ``self``, ``mtp``...), a folder or a hub name.

    Args:
        name: see :func:`~arbordraft.load`. ``auto`` stands for the choice of :func:`choose_drafter`. A hub name is that
            of a draft model or a published head.
        target: the model to draft for.

    Raises:
        ValueError: if the name is unknown, or its drafter is damaged.
    """
    if name == "auto":
        return choose_drafter(target)[0]
    if name in ("ngram", "none"):
        return NGramDrafter() if name == "ngram" else NoDrafter()
    if name == "mtp":
        return MtpDrafter(target)
    if name == "self":
        return SelfDrafter.fitted(target)
    if name.startswith("self:"):
        return SelfDrafter(target, name.partition(":")[2])
    if name.startswith("early-exit:"):
        layers = name.partition(":")[2]
        if not layers.isdecimal():
            raise ValueError(f"drafter {name!r}: write early-exit:LAYERS, such as early-exit:4")
        return EarlyExitDrafter(target, int(layers))
    if name.startswith("retokenized:"):
        found: Drafter = RetokenizedDrafter.from_pretrained(name.partition(":")[2], target)
        return found
    if name and Path(name).is_dir():
        return load_drafter(name, target)
    if name.startswith("models:/"):
        return load_drafter(_registered(name), target)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return _own(name, target)
    if close := get_close_matches(name, DRAFTERS[:5], 1, 0.75):  # before the hub is asked
        raise ValueError(f"drafter {name!r} is none of {', '.join(DRAFTERS)}; did you mean {close[0]!r}?")
    try:
        return _language_model(name, target)
    except ValueError as error:
        if (folder := fetched(name)) is not None:
            return load_drafter(folder, target)
        raise ValueError(f"drafter {name!r} is none of {', '.join(DRAFTERS)}, and as a model: {error}") from error


def _registered(name: str) -> Path:
    """Downloads a drafter that MLflow knows, once per version, to the cache folder; its weights are read from there."""
    with explained(None):
        digest = hashlib.sha256(find_drafter(name).encode()).hexdigest()[:16]
        folder = cache_folder() / "registered" / digest
        if not folder.exists():
            with new_folder(folder) as staging, tempfile.TemporaryDirectory() as scratch:
                shutil.copytree(fetch_drafter(name, scratch)[0], staging, dirs_exist_ok=True)
    return folder


def _own(name: str, target: RaggedModel) -> Drafter:
    """Imports a class or function of the user's and returns the drafter that it makes for a target."""
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(
            f"drafter {name!r}: the module {module} cannot be imported ({error}); PYTHONPATH must hold its "
            "folder, as in PYTHONPATH=. arbordraft ..."
        ) from error
    except AttributeError:
        raise ValueError(f"drafter {name!r}: the module {module} has no {attribute}") from None
    try:
        drafter = make(target)
    except TypeError as error:
        raise ValueError(f"drafter {name!r} must be callable with the target as its only argument: {error}") from error
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter {name!r} returns a {type(drafter).__name__}, not an arbordraft.Drafter")
    return drafter


def choose_drafter(target: RaggedModel, *, weighed: bool = True) -> tuple[Drafter, str]:
    """Returns the drafter that suits a target best, and the reason.

    A trained drafter is one that :func:`trained_for` finds, or else the target's layer for multi-token prediction.

    The target itself with weights of fewer bits (:meth:`~arbordraft.SelfDrafter.fitted`), after lookups, is chosen if
    it pays. Its estimated speed-up must be at least 1.15 x, and at least 1.15 x that of a trained drafter. The estimate
    follows from its rate of agreement and the share of bytes it reads. Weights of fewer than 6 bits, as in most GGUF
    files, are not tried. Otherwise the trained drafter is chosen. Without one, it is a draft model that lies beside the
    target (:func:`draft_models_beside`), after lookups, if it promises 1.15 x as well. Else lookups in the text remain.

    Args:
        target: the model to draft for.
        weighed: whether a decider weighs drafts against their costs. If so, lookups offer all that they find.
    """
    trained: Drafter | None = None
    why, least = "nothing was trained for this model", _MIN_SPEEDUP
    if (folder := trained_for(target)) is not None:
        trained, why = load_drafter(folder, target), f"trained for this model: {folder}"
    elif has_mtp(target):
        try:
            trained, why = MtpDrafter(target), "trained with this model: its layer for multi-token prediction"
        except ValueError as error:
            why = f"{why}; {error}"
    if trained is not None:
        least *= max(1.0, trained.gain(target))
    lookups = NGramDrafter(longest=8, shortest=1) if weighed else NGramDrafter()
    if (problem := _not_itself(target)) is not None:
        why = f"{why}; it does not draft for itself, as {problem}"
        return (trained, why) if trained is not None else _small_model(target, lookups, why)
    own = SelfDrafter.fitted(target)
    gain = own.gain(target)
    about = f"with {own.weights} weights it agrees in {own.acceptance[0]:.0%}, reads {own.effort(target):.0%}"
    about = f"{about} and should bring {gain:.1f} x"
    if gain < least:
        why = f"{why}; the model itself would bring less: {about}"
        return (trained, why) if trained is not None else _small_model(target, lookups, why)
    return HybridDrafter(lookups, own), f"lookups, and the model itself: {about}"


def _small_model(target: RaggedModel, lookups: NGramDrafter, why: str) -> tuple[Drafter, str]:
    """Returns lookups before the first draft model beside the target that pays, or lookups alone; and the reason."""
    beside = draft_models_beside(target)
    if not beside:
        return lookups, f"{why}; no smaller model of a similar name lies beside it"
    for path in beside:
        try:
            small = LanguageModelDrafter.fitted(path, target)
        except (ValueError, ImportError) as error:
            why = f"{why}; {path.name} does not draft: {error}"
            continue
        gain = small.gain(target)
        about = f"{path.name} agrees in {small.acceptance[0]:.0%}, reads {small.effort(target):.0%}"
        if gain >= _MIN_SPEEDUP:
            return HybridDrafter(lookups, small), f"lookups, and a draft model: {about} and should bring {gain:.1f} x"
        why = f"{why}; {about} and would bring {gain:.2f} x"
    return lookups, why


def draft_models_beside(target: RaggedModel) -> list[Path]:
    """Returns files and folders beside the target's own that may hold draft models of its family, likeliest first.

    They have a similar name and at most 0.6 of its bytes, and are at most three.
    """
    tokenizer, folder = target.tokenizer, getattr(target.model, "name_or_path", "")
    own = Path(getattr(tokenizer, "name_or_path", "") or folder)
    if not own.is_file():
        own = Path(folder)
    if not folder or not own.exists():
        return []
    most = _SMALL * _model_bytes(own)
    small = {path.stem: path for path in own.resolve().parent.iterdir() if 0 < _model_bytes(path) <= most}
    return [small[name] for name in get_close_matches(own.stem, small, _MOST_TRIED, 0.6)]


def _model_bytes(path: Path) -> int:
    """Returns the bytes of a GGUF file or of a folder's safetensors; 0 if it is neither."""
    if path.is_file():
        return path.stat().st_size if path.suffix == ".gguf" else 0
    if not (path / CONFIG).is_file():
        return 0
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _not_itself(target: RaggedModel) -> str | None:
    """Returns why a target cannot be its own drafter, or ``None`` if it can be tried."""
    if target.backend == "triton":
        return "it was never timed on a GPU: ask for it with drafter='self'"
    if target.backend != "native" or target.prepacking is None:
        return f"kernels={target.backend!r} know no weights of fewer bits"
    if not target.prepacking.fused:
        return "its layers are not recognised"
    if target.prepacking.nbytes < _LARGE:
        return "it is too small"
    if (bits := bits_per_weight(target.prepacking.nbytes, target.model)) < FEW_BITS:
        return f"its weights have {bits:.1f} bits each, and a copy of fewer would be read hardly faster"
    if (room := available_memory()) is not None and room < 2 * copy_bytes(target.model, "int8"):
        return f"a copy of fewer bits needs memory, of which {room / 2**30:.1f} GiB are free"
    return None


def fetched(name: str) -> Path | None:
    """Downloads a published head from the hub and returns its folder; ``None`` if the repository holds none.

    Args:
        name: repository whose ``config.json`` is in the hub's cache, where an attempt to load it as a model leaves it.

    Raises:
        ValueError: if the head has no safetensors.
    """
    from huggingface_hub import snapshot_download

    from arbordraft.heads.published import is_published

    if Path(name).exists():
        return None
    try:
        folder = Path(snapshot_download(name, allow_patterns=[CONFIG], local_files_only=True))
        if not is_published(folder):
            return None
        folder = Path(snapshot_download(name, allow_patterns=[CONFIG, "*.safetensors", INDEX]))
    except (OSError, ValueError):  # no such repository, or no network
        return None
    weight_files(folder)
    return folder


def trained_for(target: RaggedModel, *others: Path) -> Path | None:
    """Returns the folder of the best drafter trained for this very target, by its fingerprint, if one is known.

    Searches the folders in the target's own folder, those beside it, and those in ``drafters`` in the cache folder.

    Args:
        target: the model to draft for.
        *others: folders to search besides these.
    """
    from arbordraft.heads.base import fingerprint

    places = [cache_folder() / "drafters", *others]
    source = getattr(target.model, "name_or_path", "")
    if source and Path(source).is_dir():
        places += [Path(source), Path(source).resolve().parent]
    known: list[tuple[float, str]] = []
    wanted = ""
    for config in sorted({file for place in places for file in place.glob("*/config.json")}):
        try:
            about = json.loads(config.read_text())
            trained = about["target_fingerprint"] if about["model_type"] in _KINDS else None
            rate = float((about.get("acceptance") or [0.0])[0])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the configuration of something else
            continue
        wanted = wanted or fingerprint(target.model)
        if trained == wanted:
            known.append((rate, str(config.parent)))
    return Path(max(known)[1]) if known else None


def load_drafter(path: str | os.PathLike[str], target: RaggedModel) -> Drafter:
    """Loads the drafter in a folder: trained, published, exported or a small language model.

    Published heads have the layouts of other projects (:mod:`arbordraft.heads.published`).

    Args:
        path: the folder.
        target: the model to draft for.

    Raises:
        ImportError: if the drafter was exported and onnxruntime is not installed.
        ValueError: if the folder holds no drafter, a damaged one, or one for another target or tokenizer.
    """
    if (Path(path) / MODEL).exists():
        return _exported(Path(path), target)
    from arbordraft.heads.published import is_published, published_head

    if is_published(path):
        check_ragged(target)
        head = published_head(path, target.model)
        found: Drafter = _KINDS[head.config.model_type](head, target)
        return found
    config = read_config(path)
    if "model_type" not in config:
        raise ValueError(f"{path} holds no trained drafter but a {config['class']}: name the folder of a drafter")
    if (kind := _KINDS.get(config["model_type"])) is None:
        return _language_model(path, target)
    drafter: Drafter = kind.from_pretrained(path, target)
    return drafter


def _language_model(name: str | os.PathLike[str], target: RaggedModel) -> Drafter:
    """Loads a causal LM as drafter; if its tokenizer is not the target's, it drafts tokens that both have."""
    try:
        return LanguageModelDrafter.fitted(name, target)
    except TokenizerMismatch:
        drafter = IntersectionDrafter.from_pretrained(name, target)
        about = "%s has another tokenizer: %d of %d tokens can be drafted; retokenized:%s drafts all"
        logging.getLogger("arbordraft").info(about, name, drafter.shared, target.vocab_size, name)
        return drafter


def _exported(folder: Path, target: RaggedModel) -> Drafter:
    """Loads a drafter from exported graphs: the drafter class of its kind, around a network that runs them."""
    check_ragged(target)
    graph = Graph(folder / MODEL)
    match graph.kind:
        case "causal-lm" | "early-exit":
            return LanguageModelDrafter(OnnxModel(graph, target))
        case "block":
            markov = Graph(folder / MARKOV) if graph.about["markov_rank"] else None
            return BlockDrafter(OnnxBlock(graph, Graph(folder / FUSE), markov, target), target)
        case "eagle":
            return EagleDrafter(OnnxEagle(graph, Graph(folder / FUSE), target), target)
        case "medusa":
            return MedusaDrafter(OnnxMedusa(graph, target), target)
    raise ValueError(f"{folder} holds a graph of the kind {graph.kind!r}, which is no drafter")


__all__ = ["DRAFTERS", "choose_drafter", "draft_models_beside", "drafter_named", "load_drafter", "trained_for"]
