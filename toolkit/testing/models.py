"""Small random models, prompts for them, and the tokens that transformers itself generates.

Shapes: B samples, L prompt columns (padding included).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def tiny_model(
    config: "PretrainedConfig | None" = None, *, seed: int = 0, sharpness: float = 1.0, **settings: Any
) -> "PreTrainedModel":
    """Builds a random causal LM in eval mode whose matrices are large enough for every token to matter.

    Args:
        config: config of any causal LM; by default of a Llama of two layers and 61 tokens.
        seed: seed of the weights; torch's global generator keeps its state.
        sharpness: factor of the logits.
        **settings: changes to the default config, such as ``vocab_size=32``.

    Raises:
        TypeError: if both a config and settings are given.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    if config is not None and settings:
        raise TypeError(f"{', '.join(settings)}: set these in the config that you pass")
    if config is None:
        small: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = LlamaConfig(**{**small, **settings})
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
        head = model.get_output_embeddings().weight
        assert isinstance(head, Tensor)
        head.copy_(torch.randn(head.shape) * sharpness / head.shape[1] ** 0.5)
    torch.random.set_rng_state(generator)
    return model


def left_padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> dict[str, Tensor]:
    """Returns ``[B, L]`` ``input_ids`` and ``attention_mask``, padded on the left as ``generate`` wants them."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def new_tokens(sequences: Tensor, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Returns the tokens that a batch emitted after left-padded prompts.

    Args:
        sequences: ``[B, L + longest answer]``, as ``generate`` returns them.
        prompts: as given to :func:`left_padded`.
        lengths: number of tokens of every answer, ``stats.emitted``.
    """
    columns = max(map(len, prompts))
    return [row[columns : columns + length].tolist() for row, length in zip(sequences, lengths, strict=True)]


def greedy_reference(model: "PreTrainedModel", prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Returns the new tokens of transformers' own greedy search, decoding one prompt at a time.

    Args:
        model: the target.
        prompts: token ids.
        **options: further arguments of ``model.generate``, such as ``max_new_tokens``.
    """
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        output: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **options
        )
        found.append(output[0, len(prompt) :].tolist())
    return found
