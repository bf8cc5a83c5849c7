"""Tiny random models, prompts for them, and reference outputs of plain transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_letters, digits

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from arbordraft import CostTable, DecodeStats, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.deciders import Decider, FixedDepth
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Limits, Situation, StepView
from arbordraft.decoding.output import SpeculativeOutput
from arbordraft.drafters import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grow import grow
from arbordraft.drafters.stage import DeviceDrafts
from arbordraft.sampling.corrections import Changes, TextCorrections
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import PathState
from arbordraft.target.cache import RaggedKVCache
from arbordraft.testing import greedy_reference as greedy_reference
from arbordraft.testing import left_padded as left_padded
from arbordraft.testing import new_tokens as new_tokens
from arbordraft.testing import tiny_model
from arbordraft.trees.draft_tree import DraftTree

VOCAB = 61
EOS = 2
PAYS = StepCosts(CostTable((1, 64), (1.0, 1.1)), CostTable((1, 64), (0.01, 0.01)))  # any plausible draft pays
PROMPTS = [[5, 9, 7, 5, 9], [11], [8, 3, 8, 3, 8, 3, 8, 20, 21, 22, 8, 3, 30]]

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_ENDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
_WINDOW = {**_SMALL, "sliding_window": 4}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 8}
_HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, **_ENDS}
ARCHITECTURES = {
    "llama": _SMALL,
    "qwen2": _SMALL,
    "qwen3": _SMALL,
    "mistral": _WINDOW,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma3": {  # the language model is one part of several
        "text_config": _GEMMA,
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **_ENDS},
    "opt": {**_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": _SMALL,
    "gpt_oss": {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {**_HEADS, "intermediate_size": 48},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 80,
        "layer_types": ["full_attention"] * 2,
    },
    "olmoe": {**_SMALL, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo2": _SMALL,
    "glm4": _SMALL,
    "cohere": _SMALL,
    "cohere2": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {**_WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "phi": _SMALL,
    "deepseek_v3": {
        **_HEADS,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
    },
    "falcon": _HEADS,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **_ENDS},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **_ENDS},
    "qwen3_next": {
        **_SMALL,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def tiny(architecture: str = "llama", seed: int = 0, sharpness: float = 1.0, **overrides: object) -> PreTrainedModel:
    """Returns a random model of an architecture; see :func:`arbordraft.testing.tiny_model`."""
    config = AutoConfig.for_model(architecture, **{**ARCHITECTURES[architecture], **overrides})
    return tiny_model(config, seed=seed, sharpness=sharpness)


def fusable(architecture: str = "llama", **overrides: object) -> PreTrainedModel:
    """Returns a tiny model of sizes that the native kernels can fuse."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    match architecture:
        case "gemma3":
            text = {**ARCHITECTURES["gemma3"]["text_config"], **sizes, **overrides}
            return tiny(architecture, text_config=text)
        case "opt":
            sizes = {"hidden_size": 64, "word_embed_proj_dim": 64}
        case "gpt2":
            sizes = {"n_embd": 64}
        case "gpt_neox" | "deepseek_v3":
            sizes = {"hidden_size": 64}
    return tiny(architecture, **{**sizes, **overrides})


def varied(architecture: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Returns a fusable model with random norms and biases, so that leaving one out shows."""
    model, generator = fusable(architecture, seed=seed, **overrides), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for vector in model.parameters():
            if vector.ndim == 1:
                vector.add_(0.3 * torch.randn(vector.shape, generator=generator))
    return model


@cache
def ragged(architecture: str = "llama", seed: int = 0, sharpness: float = 1.0, **overrides: object) -> RaggedModel:
    """Returns a wrapped tiny model that all tests share; they must not change it."""
    return RaggedModel(tiny(architecture, seed, sharpness, **overrides), kernels="torch")


def next_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Returns ``[V]`` logits after ``tokens``, by the model alone: no cache, no batch, no tree."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def generated(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]] = PROMPTS, **options: object
) -> tuple[list[list[int]], SpeculativeOutput]:
    """Returns the new tokens of a batch, and the whole output of ``generate``."""
    output = decoder.generate(**left_padded(prompts), return_dict_in_generate=True, **options)
    return new_tokens(output.sequences, prompts, output.stats.emitted), output


def decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]] = PROMPTS, **options: object
) -> tuple[list[list[int]], DecodeStats]:
    """Returns new tokens and counts of a batch; by default of 12 greedy tokens that no stop token ends."""
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    tokens, output = generated(decoder, prompts, **options)
    return tokens, output.stats


def check_greedy(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 12
) -> DecodeStats:
    """Checks greedy tokens against those of transformers; returns the counts."""
    found, stats = decode(decoder, prompts, max_new_tokens=count)
    assert found == greedy_reference(decoder.target.model, prompts, max_new_tokens=count, eos_token_id=None)
    return stats


LETTERS = (ascii_letters + digits)[:VOCAB]


def tiny_tokenizer(letters: str = LETTERS, **options: object) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one letter or digit per token id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.WordLevel({letter: token for token, letter in enumerate(letters)}, unk_token=letters[0])
    spelling = Tokenizer(model)
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spelling.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=spelling, padding_side="left", **options)


def tiny_checkpoint(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: object) -> Path:
    """Saves a model and a tokenizer for ``from_pretrained``; by default with one letter per token."""
    tiny(**{"max_position_embeddings": 2048, **overrides}).save_pretrained(folder)
    (tokenizer or tiny_tokenizer(eos_token=LETTERS[EOS])).save_pretrained(folder)
    return folder


@dataclass
class Text:
    """A sample as drafters see it."""

    number: int
    tokens: list[int]
    pipeline: LogitsPipeline
    memory: object = None
    path_state: PathState | None = None
    max_drafts: int | None = None
    prediction: Sequence[int] = ()

    @property
    def prompt(self) -> int:
        return len(self.tokens)

    def path(self, drafted: Sequence[int] = ()) -> list[int]:
        return [*self.tokens, *drafted]

    def state(self, drafted: Sequence[int]) -> PathState:
        assert self.path_state is not None
        return self.path_state.along(drafted)

    def corrections(self) -> Changes:
        return TextCorrections(self.pipeline.processors)(self.tokens)


class Asked(Decider):
    """Asks a function before every level."""

    def __init__(self, decide: Callable[[StepView], Sequence[bool]]) -> None:
        super().__init__()
        self.decide = decide

    def forward(self, view: StepView) -> Sequence[bool]:
        return self.decide(view)


class Planned(Decider):
    """Plans with a function."""

    can_plan = True

    def __init__(self, plan: Callable[[Situation], Limits]) -> None:
        super().__init__()
        self.by = plan

    def plan(self, situation: Situation) -> Limits:
        return self.by(situation)


def context(
    tokens: Sequence[Sequence[int]],
    topology: TreeTopology,
    law: DraftLaw,
    *,
    greedy: bool = False,
    max_depth: Sequence[int | None] | None = None,
    processors: Sequence[object] = (),
    seed: int = 0,
    **options: object,
) -> DraftContext:
    """Returns the context of a step, as a decoder gives it to its grower."""
    pipeline = LogitsPipeline(processors, len(tokens), greedy=greedy)
    generators = [Noise.source(seed + sample) for sample in range(len(tokens))]
    noise: Noise | GumbelNoise | None = None if greedy else Noise.draw(generators, topology.num_nodes)
    if law.shared and not greedy:
        sources = [SharedSource(seed + sample) for sample in range(len(tokens))]
        noise = GumbelNoise(sources, [len(text) for text in tokens])
    return DraftContext(
        samples=[Text(number, list(text), pipeline) for number, text in enumerate(tokens)],
        max_depth=[topology.max_depth] * len(tokens) if max_depth is None else max_depth,
        topology=topology,
        law=law,
        certain_law=Fixed(law.k),
        shared=law.shared,
        noise=noise,
        **options,
    )


def grown(
    drafter: Drafter,
    state: object,
    step: DraftContext,
    *,
    decide: Decider | Callable[[StepView], Sequence[bool]] | None = None,
    plan: Callable[[Situation], Limits] | None = None,
    device: DeviceDrafts | None = None,
) -> DraftTree:
    """Returns the trees of a step.

    Args:
        decide: a decider, or a function to ask before every level.
        plan: a function that plans, in place of the decider.
        device: grows whole trees in fixed shapes.
    """
    decider = FixedDepth() if decide is None else decide if isinstance(decide, Decider) else Asked(decide)
    if plan is not None:
        decider = Planned(plan)
    for sample in step.samples:
        sample.memory = decider.start()
    return grow(step, decider, drafter, state, device)


def joined(
    drafter: Drafter, prompts: Sequence[Sequence[int]], cache: RaggedKVCache | None = None, handles: Sequence[int] = ()
) -> object:
    """Returns a drafter's state of a batch whose prompts the target has read."""
    cache = RaggedKVCache() if cache is None else cache
    handles = handles or [cache.open(len(prompt)) for prompt in prompts]
    state = drafter.open(cache)
    for sample, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
        drafter.add(state, sample, prompt, handle)
    drafter.prefill(state, {sample: prompt[:-1] for sample, prompt in enumerate(prompts)})
    return state
