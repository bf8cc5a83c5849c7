"""A small causal LM in the layout of any other model: a draft model, in the terms of engines."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from arbordraft.checkpoints.reader import CONFIG, INDEX, load_network, load_tokenizer, read_config, weight_files
from arbordraft.checkpoints.vocabulary import check_tokenizers
from arbordraft.exports.engines.target import Target

# Other files of the folder are not copied.
_COPIED_WITH_WEIGHTS = (
    INDEX,
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
    """Copies a causal LM of transformers, with its rotary settings under their newer and their older names.

    Args:
        source: the folder that it was saved in.
        folder: the folder to write.
        target: the target that it drafts for.
        card: contents of ``README.md``.

    Raises:
        ValueError: if it is no causal LM, is damaged, or has another vocabulary or tokenizer than the target.
    """
    try:
        model = load_network(AutoModelForCausalLM.from_pretrained, source, dtype="auto")
    except ValueError as error:
        raise ValueError(
            f"{source} cannot be exported: engines serve EAGLE heads, Medusa heads and causal language models, and "
            f"this cannot be read as one ({error})"
        ) from error
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
    for file in [*weight_files(source), *(source / name for name in _COPIED_WITH_WEIGHTS)]:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / CONFIG).write_text(json.dumps(in_both_dialects(read_config(source)), indent=2) + "\n")
    (folder / "README.md").write_text(card)


def in_both_dialects(config: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with the rotary embedding and the dtype under their newer and their older names."""
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
