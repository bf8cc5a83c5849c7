"""A small language model in the layout of any other one: what engines call a draft model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from arbordraft.checkpoints import CONFIG, INDEX, load_tokenizer, read_config, read_tensors, weight_files
from arbordraft.exports.checkpoints import differences
from arbordraft.exports.engines.layout import LayoutError
from arbordraft.exports.engines.target import Target
from arbordraft.vocabulary import check_tokenizers

# Beside the weights, as far as they are there; whatever else lies in the folder stays where it is.
_COMPANY = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def write_draft_model(source: Path, folder: Path, target: Target, card: str) -> None:
    """Copies a causal LM of transformers, with its rotary embedding in both dialects.

    Args:
        source: the folder that it was saved in.
        folder: where it goes.
        target: what it drafts for.
        card: contents of ``README.md``.

    Raises:
        ValueError: if it is no causal LM, is damaged, or has another vocabulary or tokenizer than the target.
        LayoutError: if weights are missing, extra or of another shape than its settings say.
    """
    config = read_config(source)
    model = _empty(source)
    if Path(target.name).is_dir():
        ours, theirs = load_tokenizer(source), load_tokenizer(target.name)
        if ours is not None and theirs is not None:
            check_tokenizers(ours, theirs)
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary != target.config.vocab_size:
        raise ValueError(
            f"the draft model has {vocabulary} token ids, the target {target.name} {target.config.vocab_size}: both "
            "must share one tokenizer"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in read_tensors(source).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.get("tie_word_embeddings") else set()
    problems = differences(
        {name: shape for name, shape in expected.items() if name not in tied - shapes.keys()}, shapes
    )
    if problems:
        raise LayoutError(f"the weights in {source} do not fit its {CONFIG}: {'; '.join(problems)}")
    for file in [*weight_files(source), *(source / name for name in (*_COMPANY, INDEX))]:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / CONFIG).write_text(json.dumps(in_both_dialects(config), indent=2) + "\n")
    (folder / "README.md").write_text(card)


def in_both_dialects(config: dict[str, Any]) -> dict[str, Any]:
    """Settings with the rotary embedding and the dtype under their newer and their older names."""
    config = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
        config.setdefault("rope_scaling", scaled if rope.get("rope_type", "default") != "default" else None)
    elif rope is None and "rope_theta" in config:
        config["rope_parameters"] = {
            "rope_type": "default",
            **(config.get("rope_scaling") or {}),
            "rope_theta": config["rope_theta"],
        }
    if known := config.get("dtype") or config.get("torch_dtype"):
        config |= {"dtype": known, "torch_dtype": known}
    return config


def _empty(source: Path) -> Any:
    """The model that the settings describe, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{source} cannot be exported: engines serve EAGLE heads, Medusa heads and causal language models, and "
            f"its {CONFIG} describes none of these ({error})"
        ) from error
