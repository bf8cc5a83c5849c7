"""``export_vllm`` and ``export_sglang``: a trained drafter as a folder that an engine loads."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from arbordraft.checkpoints import read_config
from arbordraft.exports.engines.draft_model import write_draft_model
from arbordraft.exports.engines.eagle3 import eagle3, speculators
from arbordraft.exports.engines.layout import Layout
from arbordraft.exports.engines.medusa import medusa
from arbordraft.exports.engines.target import Target, describe_target
from arbordraft.exports.folder import Export, contents
from arbordraft.files import new_folder
from arbordraft.heads.block import BlockConfig
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.heads.exit_adapter import ExitAdapterConfig
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from arbordraft.loading import Dtype

LAYOUTS = ("eagle3", "speculators")
BLOCK = BlockConfig.model_type
EAGLE, MEDUSA, EXIT_ADAPTER = EagleConfig.model_type, MedusaConfig.model_type, ExitAdapterConfig.model_type
# Wherever one of these stands in the path, vLLM takes the drafter for what it says, whatever it is told.
_MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


def export_vllm(
    drafter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    layout: str = "eagle3",
    target: str | None = None,
    speculative_tokens: int = 4,
    dtype: str | None = None,
    force: bool = False,
    tell: Callable[[str], object] = lambda what: None,
) -> Export:
    """Writes a trained drafter for vLLM, which drafts chains with it.

    Args:
        drafter: folder of an EAGLE head, of Medusa heads, or of a small causal LM.
        folder: where it goes.
        layout: of EAGLE heads: ``eagle3``, or ``speculators``, which names its target, so that ``vllm serve FOLDER`` is
            enough.
        target: hub name or folder of the target; by default the one that the drafter names.
        speculative_tokens: length of the chains, at least 1; written into the ``speculators`` layout and the card.
        dtype: of the weights, by default as they are stored.
        force: replace a folder that is there.
        tell: is told what is going on.

    Returns:
        What was written.

    Raises:
        ValueError: if the drafter is damaged, or not one that the engine serves.
        FileExistsError: if the folder exists and ``force`` is not given.
        WriteError: if the disk is full, or the folder cannot be written.
    """
    return _export("vllm", drafter, folder, layout, target, speculative_tokens, dtype, force, tell)


def export_sglang(
    drafter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    layout: str = "eagle3",
    target: str | None = None,
    speculative_tokens: int = 4,
    dtype: str | None = None,
    force: bool = False,
    tell: Callable[[str], object] = lambda what: None,
) -> Export:
    """The same as :func:`export_vllm` for SGLang, which drafts chains or trees.

    It serves no Medusa heads, and reads EAGLE heads in the layout ``eagle3`` only.
    """
    return _export("sglang", drafter, folder, layout, target, speculative_tokens, dtype, force, tell)


def _export(
    engine: str,
    drafter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    layout: str,
    target: str | None,
    speculative_tokens: int,
    dtype: str | None,
    force: bool,
    tell: Callable[[str], object],
) -> Export:
    config = read_config(drafter)
    kind = str(config.get("model_type", config.get("class")))
    _check_request(engine, kind, layout, speculative_tokens, dtype)
    _check_path(engine, kind, folder)
    with new_folder(folder, force=force) as staging:
        tell("reading the target's settings")
        name = target or config.get("target_name")
        if not name:
            raise ValueError(f"{drafter} does not say what it drafts for: name its target with --target")
        described = describe_target(name)
        card = _card(engine, kind, layout, described.name, speculative_tokens)
        tell("reading, checking and writing the drafter")
        if kind in (EAGLE, MEDUSA):
            _head_layout(engine, kind, drafter, layout, described, speculative_tokens, dtype, card).write(staging)
        else:
            write_draft_model(Path(drafter), staging, described, card)
        written = contents(staging)
    return Export(Path(folder), written)


def _head_layout(
    engine: str,
    kind: str,
    drafter: str | os.PathLike[str],
    layout: str,
    target: Target,
    speculative_tokens: int,
    dtype: str | None,
    card: str,
) -> Layout:
    if kind == MEDUSA:
        heads = MedusaHead.from_pretrained(drafter, dtype=dtype or "auto")
        return medusa(heads, target, card)
    head = EagleHead.from_pretrained(drafter, dtype=dtype or "auto")
    if layout == "speculators":
        return speculators(head, target, speculative_tokens, card)
    return eagle3(head, target, engine, card)


def _check_request(engine: str, kind: str, layout: str, speculative_tokens: int, dtype: str | None) -> None:
    """What cannot work, before anything is done."""
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if engine == "sglang" and layout != "eagle3":
        raise ValueError("SGLang reads EAGLE heads in the layout 'eagle3' only")
    if layout == "speculators" and kind != EAGLE:
        raise ValueError(f"the layout 'speculators' is for EAGLE heads, and the drafter is of type {kind!r}")
    if kind == BLOCK:
        raise ValueError(
            f"{engine} has no drafter of this kind: block heads cannot be served there; train an EAGLE head "
            "(arbordraft train drafter fit --config drafter/eagle)"
        )
    if kind == EXIT_ADAPTER:
        raise ValueError(
            f"{engine} has no drafter that runs the target's own first layers: early exits cannot be served there; "
            "train an EAGLE head (arbordraft train drafter fit --config drafter/eagle)"
        )
    if engine == "sglang" and kind == MEDUSA:
        raise ValueError("SGLang serves no Medusa heads; vLLM does (arbordraft export vllm), or train an EAGLE head")
    if speculative_tokens < 1:
        raise ValueError(f"chains have at least one token, got {speculative_tokens}")
    if dtype is not None and dtype not in list(Dtype):
        raise ValueError(f"weights in {dtype} are not served; name one of {', '.join(Dtype)}")
    if dtype is not None and kind not in (EAGLE, MEDUSA):
        raise ValueError("a draft model keeps its dtype: engines cast it to the target's")


def _check_path(engine: str, kind: str, folder: str | os.PathLike[str]) -> None:
    misleading = [word for word in _MISLEADING if word in os.fspath(folder).lower()]
    if engine == "vllm" and kind != EAGLE and misleading:
        raise ValueError(
            f"vLLM would take a drafter in {folder} for one of another kind, because of {misleading[0]!r} in its path: "
            "name another folder"
        )


def _card(engine: str, kind: str, layout: str, target: str, speculative_tokens: int) -> str:
    """Contents of ``README.md``: how the drafter is served."""
    if engine == "sglang":
        command = (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'EAGLE3' if kind == EAGLE else 'STANDALONE'} \\\n"
            f"  --speculative-draft-model-path THIS_FOLDER --speculative-num-steps {speculative_tokens} \\\n"
            f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {speculative_tokens + 1}"
        )
    elif layout == "speculators":
        command = "vllm serve THIS_FOLDER"
    else:
        method = {EAGLE: "eagle3", MEDUSA: "medusa"}.get(kind, "draft_model")
        settings = {"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": speculative_tokens}
        command = f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"
    text = f"# Drafter for {target}\n\nWritten by arbordraft for {engine}:\n\n```\n{command}\n```\n"
    if engine == "vllm" and kind != EAGLE:
        text += f"\nvLLM guesses what a drafter is: keep {', '.join(map(repr, _MISLEADING))} out of its path.\n"
    return text
