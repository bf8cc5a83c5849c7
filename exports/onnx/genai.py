"""Writes a folder for onnxruntime-genai: target and draft model, for chains at batch 1."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from arbordraft import RaggedModel
from arbordraft.exports.folder import Export
from arbordraft.exports.onnx import plans
from arbordraft.exports.onnx.sources import of, origin
from arbordraft.exports.onnx.writing import WriteOptions, write

CONFIG, TARGET, DRAFT = "genai_config.json", "target.onnx", "draft.onnx"
_LONGEST_CHAIN = 16  # tokens that onnxruntime-genai drafts


def export_ort_genai(
    draft: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str,
    length: int = 4,
    **options: Unpack[WriteOptions],
) -> Export:
    """Writes a target and a draft model in the form that onnxruntime-genai decodes with.

    Errors are those of :func:`~arbordraft.exports.onnx.export`.

    Args:
        draft: folder or hub name of a causal LM with the target's tokenizer, ``early-exit:LAYERS``, or the folder of a
            trained early exit.
        out: the folder to write.
        target: folder or hub name of the target.
        length: drafted tokens per step, 1 to 16.
        **options: how graphs are written, see :class:`~arbordraft.exports.onnx.writing.WriteOptions`. Only the draft
            model's matrices are quantised; the target, whose law is kept, stays in float32.

    Raises:
        ValueError: if the length is out of range, the draft is of another kind, or the vocabularies differ.
    """
    if not 1 <= length <= _LONGEST_CHAIN:
        raise ValueError(f"onnxruntime-genai drafts 1 to {_LONGEST_CHAIN} tokens, got {length}")
    made: list[plans.GraphSpec] = []
    targets: list[plans.Origin] = []  # one, once the graphs are planned

    def graphs() -> list[plans.GraphSpec]:
        targets.append(origin(target))
        drafting = of(str(draft), targets[0], causal=True)[-1]
        if drafting.about["kind"] not in ("causal-lm", "early-exit"):
            raise ValueError(f"{draft} is no model that drafts by itself: onnxruntime-genai takes causal LMs")
        verifying = plans.causal_lm(targets[0].target, targets[0], causal=True)
        made.extend([replace(verifying, file=TARGET, quantizable=False), replace(drafting, file=DRAFT)])
        return made

    def finish_folder(folder: Path) -> None:
        model = targets[0].target
        config = _config(model, [_decoder(spec) for spec in made], length)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)

    return write(graphs, out, **options, finish_folder=finish_folder)


def _config(target: RaggedModel, decoders: list[dict[str, Any]], length: int) -> dict[str, Any]:
    generation, config = target.model.generation_config, target.model.config.get_text_config()
    longest = target.max_positions or 2048
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    pad = generation.pad_token_id if generation.pad_token_id is not None else config.pad_token_id
    begin = generation.bos_token_id if generation.bos_token_id is not None else config.bos_token_id
    return {
        "model": {
            "type": "speculative",
            "vocab_size": target.vocab_size,
            "context_length": longest,
            "bos_token_id": first_end if begin is None else begin,
            "eos_token_id": ends,
            "pad_token_id": first_end if pad is None else pad,
            "decoder": decoders[0],
            "draft": decoders[1],
        },
        "search": {"max_length": longest, "do_sample": False, "past_present_share_buffer": False},
        "speculative": {"max_draft_tokens": length},
    }


def _decoder(spec: plans.GraphSpec) -> dict[str, Any]:
    """Describes a graph for ``genai_config.json``."""
    network: Any = spec.network
    config = network.model.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "filename": spec.file,
        "session_options": {"provider_options": []},
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
