"""Saves a mixture of experts with random weights, for measurements of speed: no small trained one is at hand.

Its answers are nonsense that does not end, but every expert is read as in a trained model. It spells its texts with the
tokenizer of another model::

    python examples/benchmarks/mixtures.py moe-64 folder
    arbordraft bench policy --matrix --model folder --page moe-64.md
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, Qwen3MoeConfig

from arbordraft.checkpoints.smollm2 import fetch_smollm2
from arbordraft.cli.options import SeedOption
from arbordraft.cli.program import run_script
from arbordraft.testing import tiny_model
from arbordraft.utils.files import new_folder
from arbordraft.utils.terminal import terminal

_SHARPNESS = 4.0  # factor of the logits: the likeliest token of 50,000 has a chance of about a third


class Shape(StrEnum):
    """Sizes of a mixture."""

    tiny = "tiny"
    moe_64 = "moe-64"


SIZES: dict[Shape, dict[str, Any]] = {
    Shape.tiny: {
        "hidden_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    Shape.moe_64: {
        "hidden_size": 512,
        "head_dim": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 256,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}


def main(
    shape: Annotated[Shape, typer.Argument(help="moe-64 has 8 layers of 64 experts, 8 per token: 233M parameters.")],
    folder: Annotated[Path, typer.Argument(help="New folder for the model and its tokenizer.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub name or folder with a tokenizer; by default SmolLM2's.")
    ] = None,
    seed: SeedOption = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Save a mixture of experts with random weights in bfloat16."""
    spelling = AutoTokenizer.from_pretrained(tokenizer or fetch_smollm2())
    ends = {"eos_token_id": spelling.eos_token_id, "pad_token_id": spelling.pad_token_id}
    config = Qwen3MoeConfig(
        vocab_size=len(spelling), max_position_embeddings=32_768, tie_word_embeddings=True, **SIZES[shape], **ends
    )
    model = tiny_model(config, seed=seed, sharpness=_SHARPNESS).to(torch.bfloat16)  # type: ignore[arg-type]
    with new_folder(folder, force=force) as staging:
        model.save_pretrained(staging)
        spelling.save_pretrained(staging)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    terminal(highlight=False).print(f"wrote {folder}: {millions:.0f}M parameters", soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
