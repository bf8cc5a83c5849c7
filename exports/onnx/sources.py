"""Exports the graphs that a name on the command line denotes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from arbordraft import IID, LanguageModelDrafter, RaggedModel
from arbordraft.checkpoints.reader import read_config
from arbordraft.deciders import LearnedDecider
from arbordraft.decoding.prompts import MIXED, VARIED, chat_batch
from arbordraft.exports.folder import Export
from arbordraft.exports.onnx import decisions, noise, plans
from arbordraft.exports.onnx.writing import WriteOptions, write
from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.dflash import DFlashConfig
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.heads.exit_adapter import ExitAdapter, ExitAdapterConfig
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from arbordraft.loading import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS, _LONGEST = 8, 128  # texts to measure quantised graphs on: their number, and the longest in tokens


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str | None = None,
    hidden_layers: Sequence[int] = (),
    **options: Unpack[WriteOptions],
) -> Export:
    """Writes a drafter, a decider, a model, verification or sampling as graphs.

    Args:
        source: folder of a trained drafter or decider, or folder or hub name of a causal LM, which drafts or verifies
            trees. Otherwise ``early-exit:LAYERS``, ``verification:TOPS,TAILS`` or ``draw``, which samples with shared
            noise.
        out: the folder to write.
        target: folder or hub name of the model that the drafter belongs to; by default the one that it was trained
            for.
        hidden_layers: hidden states that a causal LM's graph returns, as transformers numbers them.
        **options: how graphs are written, see :class:`~arbordraft.exports.onnx.writing.WriteOptions`.

    Returns:
        The written files, and their differences from the original.

    Raises:
        FileExistsError: if ``out`` exists and ``force`` is not given.
        ImportError: if onnx, onnxscript or onnxruntime is missing.
        ParityError: if a graph's outputs differ from the original's; nothing is written then.
        UnsupportedModel: if a model cannot be a graph.
        ValueError: if the source is unknown, damaged, or belongs to another target.
    """
    return write(lambda: of(str(source), target, hidden_layers), out, **options)


def of(
    source: str, target: str | plans.Origin | None = None, hidden_layers: Sequence[int] = (), *, causal: bool = False
) -> list[plans.GraphSpec]:
    """Specifies the graphs of a source.

    Args:
        source: see :func:`export`.
        target: name of the target, see :func:`export`, or the loaded target.
        hidden_layers: see :func:`export`.
        causal: see ``plans.causal_lm``.
    """
    if source == "draw":
        return [noise.draw()]
    kind, _, value = source.partition(":")
    if kind == "verification":
        tops, tails = _numbers(source, value, 2)
        return [decisions.verification(tops, tails)]
    if kind == "early-exit":
        (layers,) = _numbers(source, value, 1)
        return [plans.early_exit(_origin_for(source, target), layers, causal=causal)]
    config = read_config(source) if Path(source).is_dir() else {}
    if config.get("class") == LearnedDecider.__name__:
        return [decisions.decider(LearnedDecider.from_pretrained(source))]
    target = target or config.get("target_name")
    match config.get("model_type"):
        case BlockConfig.model_type:
            block = BlockHead.from_pretrained(source, dtype=torch.float32)
            return plans.block(block, _origin_for(source, target))
        case EagleConfig.model_type:
            eagle = EagleHead.from_pretrained(source, dtype=torch.float32)
            return plans.eagle(eagle, _origin_for(source, target))
        case MedusaConfig.model_type:
            heads = MedusaHead.from_pretrained(source, dtype=torch.float32)
            return [plans.medusa(heads, _origin_for(source, target))]
        case DFlashConfig.model_type:
            raise ValueError(
                f"{source} holds a DFlash or DSpark head, which has no graphs: decode with arbordraft itself, or "
                "export it for vLLM (arbordraft export vllm --layout speculators)"
            )
        case ExitAdapterConfig.model_type:
            adapter = ExitAdapter.from_pretrained(source, dtype=torch.float32)
            return [plans.early_exit(_origin_for(source, target), adapter.layers, adapter, causal=causal)]
    own = origin(source)
    model, served = own.target, own if target is None else origin(target)
    if target is not None:
        LanguageModelDrafter(model).check(served.target, IID(1))
        if causal and model.vocab_size != served.target.vocab_size:
            raise ValueError(
                f"onnxruntime-genai takes no padded vocabulary: the draft has {model.vocab_size} token ids, the "
                f"target {served.target.vocab_size}"
            )
    return [plans.causal_lm(model, served, hidden_layers, causal=causal)]


def origin(name: str | plans.Origin) -> plans.Origin:
    """Loads a target by its name, with texts to measure on; returns a loaded one unchanged.

    Raises:
        UnsupportedModel: if it cannot be run on trees.
        ValueError: if it is damaged.
    """
    if isinstance(name, plans.Origin):
        return name
    model, tokenizer = load_model(name, torch.float32)
    target = RaggedModel(model.requires_grad_(False), tokenizer, kernels="torch")
    # Files may be handed on, so they do not tell the path of a folder.
    return plans.Origin(target, Path(name).name if Path(name).is_dir() else name, _texts(target, tokenizer))


def _texts(target: RaggedModel, tokenizer: "PreTrainedTokenizerBase | None") -> list[list[int]]:
    """Returns prompts that come with the package, or random tokens if there is no tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(target.vocab_size, (_TEXTS, 16), generator=generator).tolist()
    chats = chat_batch(tokenizer, [*MIXED, *VARIED][:_TEXTS])
    rows = zip(chats["input_ids"], chats["attention_mask"], strict=True)
    return [ids[mask == 1].tolist()[:_LONGEST] for ids, mask in rows]


def _origin_for(source: str, target: str | plans.Origin | None) -> plans.Origin:
    if target is None:
        raise ValueError(f"{source} does not say which model it drafts for: name it with --target (target=...)")
    return origin(target)


def _numbers(source: str, value: str, count: int) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ValueError(f"{source!r} means nothing: write early-exit:LAYERS or verification:TOPS,TAILS")
    return numbers
