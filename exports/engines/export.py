"""Writes a trained drafter as a folder that vLLM or SGLang loads."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from arbordraft.checkpoints.reader import read_config
from arbordraft.exports.engines.dflash import dflash
from arbordraft.exports.engines.draft_model import write_draft_model
from arbordraft.exports.engines.eagle3 import eagle3, speculators
from arbordraft.exports.engines.medusa import medusa
from arbordraft.exports.engines.target import describe_target
from arbordraft.exports.folder import Export, contents
from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.dflash import DFlashConfig, DFlashHead
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.heads.exit_adapter import ExitAdapterConfig
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from arbordraft.utils.choices import Dtype
from arbordraft.utils.files import new_folder

LAYOUTS = ("eagle3", "speculators")
BLOCK, DFLASH = BlockConfig.model_type, DFlashConfig.model_type
EAGLE, MEDUSA, EXIT_ADAPTER = EagleConfig.model_type, MedusaConfig.model_type, ExitAdapterConfig.model_type
# If the path contains one of these words, vLLM takes the drafter for one of that kind, against its settings.
_MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


def export_engine(
    engine: str,
    drafter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    layout: str = "eagle3",
    target: str | None = None,
    speculative_tokens: int = 4,
    dtype: str | None = None,
    force: bool = False,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Export:
    """Writes a trained drafter for an engine: vLLM drafts chains with it, SGLang chains or trees.

    SGLang serves no Medusa or block heads, and reads EAGLE heads in the layout ``eagle3`` only. DFlash and DSpark heads
    are written in the layout ``speculators``.

    Args:
        engine: ``vllm`` or ``sglang``.
        drafter: folder of an EAGLE head, a block head of P-EAGLE's form, a DFlash or DSpark head, Medusa heads, or a
            small causal LM.
        folder: the folder to write.
        layout: layout of EAGLE and block heads: ``eagle3``, or ``speculators``, which names its target, so that
            ``vllm serve FOLDER`` is enough.
        target: hub name or folder of the target; by default the one that the drafter names.
        speculative_tokens: length of the chains, at least 1 and at most the depth of a block head; written into the
            ``speculators`` layout and the card.
        dtype: dtype of the weights; by default that of the stored weights.
        force: whether to replace an existing folder.
        on_progress: receives messages on the progress.

    Returns:
        The written folder and its files.

    Raises:
        ValueError: if the drafter is damaged, or the engine does not serve its kind.
        FileExistsError: if the folder exists and ``force`` is not given.
        WriteError: if the disk is full, or the folder cannot be written.
    """
    config = read_config(drafter)
    kind = str(config.get("model_type", config.get("class")))
    _check_request(engine, kind, config, layout, speculative_tokens, dtype)
    _check_path(engine, kind, folder)
    with new_folder(folder, force=force) as staging:
        on_progress("reading the target's settings")
        name = target or config.get("target_name")
        if not name:
            raise ValueError(f"{drafter} does not tell which model it drafts for: name its target with --target")
        described = describe_target(name)
        card = _card(engine, kind, layout, described.name, speculative_tokens)
        on_progress("reading, checking and writing the drafter")
        options = {"dtype": dtype or "auto"}
        if kind == MEDUSA:
            medusa(MedusaHead.from_pretrained(drafter, **options), described, card).write(staging)
        elif kind == DFLASH:
            spark = DFlashHead.from_pretrained(drafter, **options)
            _check_length(spark.config.depths, speculative_tokens)
            dflash(spark, described, speculative_tokens, card).write(staging)
        elif kind in (EAGLE, BLOCK):
            head = (BlockHead if kind == BLOCK else EagleHead).from_pretrained(drafter, **options)
            if isinstance(head, BlockHead):
                _check_length(head.config.block_size, speculative_tokens)
            if layout == "speculators":
                speculators(head, described, speculative_tokens, card).write(staging)
            else:
                eagle3(head, described, engine, card).write(staging)
        else:
            write_draft_model(Path(drafter), staging, described, card)
        written = contents(staging)
    return Export(Path(folder), written)


export_vllm = partial(export_engine, "vllm")
export_sglang = partial(export_engine, "sglang")


def _check_length(depths: int, speculative_tokens: int) -> None:
    if speculative_tokens > depths:
        raise ValueError(
            f"the head looks {depths} tokens ahead, and chains of {speculative_tokens} are wanted: "
            "name fewer with --speculative-tokens"
        )


def _check_request(
    engine: str, kind: str, config: Mapping[str, Any], layout: str, speculative_tokens: int, dtype: str | None
) -> None:
    """Refuses requests that cannot work, before anything is read or written."""
    if engine not in ("vllm", "sglang"):
        raise ValueError(f"there is no engine {engine!r}; known are vllm and sglang")
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if engine == "sglang" and layout != "eagle3":
        raise ValueError("SGLang reads EAGLE heads in the layout 'eagle3' only")
    if layout == "speculators" and kind not in (EAGLE, BLOCK, DFLASH):
        raise ValueError(
            f"the layout 'speculators' is for EAGLE, block, DFlash and DSpark heads, the drafter is of type {kind!r}"
        )
    if kind == DFLASH and engine == "sglang":
        raise ValueError("DFlash and DSpark heads are written for vLLM: arbordraft export vllm --layout speculators")
    if kind == DFLASH and layout != "speculators":
        raise ValueError("DFlash and DSpark heads are written with --layout speculators, which vLLM reads")
    if kind == BLOCK and engine == "sglang":
        raise ValueError("SGLang serves no block heads; vLLM does (arbordraft export vllm), or train an EAGLE head")
    if kind == BLOCK and config.get("mask_token_id") is None:
        raise ValueError(
            "vLLM computes block heads of P-EAGLE's form, this one has a mask for every depth: train one with "
            "--model.student.init_args.mask_token_id ID --model.student.init_args.markov_rank 0"
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
    if dtype is not None and kind not in (EAGLE, BLOCK, DFLASH, MEDUSA):
        raise ValueError("a draft model keeps its dtype: engines cast it to the target's")


def _check_path(engine: str, kind: str, folder: str | os.PathLike[str]) -> None:
    misleading = [word for word in _MISLEADING if word in os.fspath(folder).lower()]
    if engine == "vllm" and kind not in (EAGLE, BLOCK, DFLASH) and misleading:
        raise ValueError(
            f"vLLM would take a drafter in {folder} for one of another kind, because of {misleading[0]!r} in its path: "
            "name another folder"
        )


def _card(engine: str, kind: str, layout: str, target: str, speculative_tokens: int) -> str:
    """Returns the contents of ``README.md``, which tells how to serve the drafter."""
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
        method = {EAGLE: "eagle3", BLOCK: "eagle3", MEDUSA: "medusa"}.get(kind, "draft_model")
        settings: dict[str, Any] = {"method": method, "model": "THIS_FOLDER"}
        settings |= {"num_speculative_tokens": speculative_tokens}
        if kind == BLOCK:
            settings["parallel_drafting"] = True
        command = f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"
    text = f"# Drafter for {target}\n\nWritten by arbordraft for {engine}:\n\n```\n{command}\n```\n"
    if engine == "vllm" and kind not in (EAGLE, BLOCK, DFLASH):
        text += f"\nvLLM guesses what a drafter is: keep {', '.join(map(repr, _MISLEADING))} out of its path.\n"
    return text
