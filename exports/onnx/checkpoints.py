"""Reading what is to be exported: all of it, or an error that says what is wrong."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.exports.checkpoints import read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def settings(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        ValueError: if there is none.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no checkpoint: its config.json cannot be read ({error})") from error
    return found


def load(kind: Any, source: str, **options: Any) -> Any:
    """A model or a trained network in float32 and eval mode, from a folder or a hub.

    Args:
        kind: its class, which has ``from_pretrained``.
        source: where it is.
        **options: for ``from_pretrained``.

    Raises:
        ValueError: if it is damaged, incomplete, or holds more than belongs to it.
    """
    if Path(source).is_dir():
        read_tensors(source)
    try:
        model, found = kind.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
        )
    except RuntimeError as error:
        raise ValueError(f"{source} does not fit its own config.json: {str(error).splitlines()[0]}") from error
    wrong = {what: sorted(map(str, found[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        text = "; ".join(f"{what.replace('_', ' ')}: {', '.join(names[:4])}" for what, names in wrong.items() if names)
        raise ValueError(f"{source} does not fit its own config.json ({text}): copy, train or fetch it again")
    return model.eval().requires_grad_(False)


def load_model(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """A causal LM and its tokenizer, if it has one.

    Raises:
        ValueError: if it is damaged or incomplete.
    """
    if name == "smollm2":
        from arbordraft.pretrained import load_smollm2

        return load_smollm2(torch.float32)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if Path(name).is_dir():
        settings(Path(name))
    model = load(AutoModelForCausalLM, name)
    try:
        return model, AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError):
        return model, None
