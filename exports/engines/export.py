"""``export_vllm`` and ``export_sglang``: a trained drafter as a folder that an engine loads."""

import os
from collections.abc import Callable
from pathlib import Path

from arbordraft.checkpoints import read_config
from arbordraft.exports.checkpoints import EAGLE, EXIT_ADAPTER, MEDUSA
from arbordraft.exports.folder import Export, contents
from arbordraft.files import new_folder

LAYOUTS = ("eagle3", "speculators")
# Wherever one of these stands in the path, vLLM takes the drafter for what it says, whatever it is told.
_MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")
_KINDS = {EAGLE: "EAGLE-3 head", MEDUSA: "Medusa heads"}


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
        speculative_tokens: length of the chains; written into the ``speculators`` layout, and into the card.
        dtype: of the weights, by default as they are stored.
        force: replace a folder that is there.
        tell: is told what is going on.

    Returns:
        What was written.

    Raises:
        ValueError: if the drafter is damaged, or not one that vLLM serves.
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
    """Writes a trained drafter for SGLang, which drafts chains or trees with it.

    Args:
        drafter: folder of an EAGLE head or of a small causal LM.
        folder: where it goes.
        layout: of EAGLE heads; SGLang reads ``eagle3`` only.
        target: hub name or folder of the target; by default the one that the drafter names.
        speculative_tokens: length of the chains in the card.
        dtype: of the weights, by default as they are stored.
        force: replace a folder that is there.
        tell: is told what is going on.

    Returns:
        What was written.

    Raises:
        ValueError: if the drafter is damaged, or not one that SGLang serves.
        FileExistsError: if the folder exists and ``force`` is not given.
        WriteError: if the disk is full, or the folder cannot be written.
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
    from arbordraft.exports.engines.cards import card

    config = read_config(drafter)
    kind = str(config.get("model_type", config.get("class")))
    _check_request(engine, kind, layout, speculative_tokens, dtype)
    _check_path(engine, kind, folder)
    with new_folder(folder, force=force) as staging:
        from arbordraft.exports.engines.target import describe_target

        tell("reading the target's settings")
        name = target or config.get("target_name")
        if not name:
            raise ValueError(f"{drafter} does not say what it drafts for: name its target with --target")
        described = describe_target(name)
        text = card(engine, kind, layout, described.name, speculative_tokens)
        if kind not in _KINDS:
            from arbordraft.exports.engines.draft_model import write_draft_model

            tell("checking and copying the draft model")
            write_draft_model(Path(drafter), staging, described, text)
        else:
            import torch

            from arbordraft.exports.checkpoints import read_head
            from arbordraft.exports.engines.eagle3 import eagle3, speculators
            from arbordraft.exports.engines.medusa import medusa

            tell(f"reading the {_KINDS[kind]}")
            head = read_head(drafter)
            if dtype is not None:
                head.to(getattr(torch, dtype))
            tell("writing and checking")
            if kind == MEDUSA:
                files = medusa(head, described, text)  # type: ignore[arg-type]
            elif layout == "speculators":
                files = speculators(head, described, speculative_tokens, text)  # type: ignore[arg-type]
            else:
                files = eagle3(head, described, engine, text)  # type: ignore[arg-type]
            files.write(staging)
        written = contents(staging)
    return Export(Path(folder), written)


def _check_request(engine: str, kind: str, layout: str, speculative_tokens: int, dtype: str | None) -> None:
    """What cannot work, before anything is done."""
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if engine == "sglang" and layout != "eagle3":
        raise ValueError("SGLang reads EAGLE heads in the layout 'eagle3' only")
    if layout == "speculators" and kind != EAGLE:
        raise ValueError(f"the layout 'speculators' is for EAGLE heads, and the drafter is {_KINDS.get(kind, kind)!r}")
    if kind == EXIT_ADAPTER:
        raise ValueError(
            f"{engine} has no drafter that runs the target's own first layers: early exits cannot be served there; "
            "train an EAGLE head (arbordraft train drafter fit --config drafter/eagle)"
        )
    if engine == "sglang" and kind == MEDUSA:
        raise ValueError("SGLang serves no Medusa heads; vLLM does (arbordraft export vllm), or train an EAGLE head")
    if speculative_tokens < 1:
        raise ValueError(f"chains have at least one token, got {speculative_tokens}")
    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"weights in {dtype} are not served; name float32, bfloat16 or float16")
    if dtype is not None and kind not in _KINDS:
        raise ValueError("a draft model keeps its dtype: engines cast it to the target's")


def _check_path(engine: str, kind: str, folder: str | os.PathLike[str]) -> None:
    misleading = [word for word in _MISLEADING if word in os.fspath(folder).lower()]
    if engine == "vllm" and kind != EAGLE and misleading:
        raise ValueError(
            f"vLLM would take a drafter in {folder} for one of another kind, because of {misleading[0]!r} in its path: "
            "name another folder"
        )
