"""Settings of transformers' ``GenerationConfig``: which ones count, and how a model's own ones apply.

A model has its own settings, its ``generation_config``. All decoding follows one rule: a request's setting comes first,
then the model's own. A setting that both leave open is off.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.utils.checks import check_float, check_int, check_penalty, check_temperature

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

SOURCES = ("model", "none")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")

# Every setting of transformers 5.20 to 5.24 is in one of the three tables; a test compares them.
SUPPORTED = frozenset(
    {
        *SPECIAL_TOKENS,
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "begin_suppress_tokens"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("remove_invalid_values", "renormalize_logits", "watermarking_config"),
        *("num_return_sequences", "return_dict_in_generate"),
    }
)
# Settings that change no token, by reason.
IGNORED = {
    "only beam search reads them": ("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups"),
    "only transformers' own ways of drafting read them": (
        *("assistant_confidence_threshold", "assistant_lookbehind", "max_matching_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "target_lookbehind"),
    ),
    "they arrange transformers' own forwards, which do not run": (
        *("cache_config", "compile_config", "disable_compile", "low_memory", "max_cache_len", "prefill_chunk_size"),
    ),
    "only models with an encoder read it": ("decoder_start_token_id",),
    "they say where the settings come from": ("_from_model_config", "transformers_version"),
}
_OTHER_WAY = (
    "{name} asks for another way of decoding than this decoder's: leave it out, or call the model's own generate()"
)
_OUTPUT = "{name}: per-token outputs are not kept when several tokens are decided at once"
_ROWS = "{name} compares every row with one of a second text and cannot judge the nodes of a tree: leave it out"
# Refused settings, with their error messages.
REFUSED = {
    **dict.fromkeys(
        (
            *("assistant_early_exit", "assistant_ensemble_weight", "constraints", "continuous_batching_config"),
            *("dola_layers", "force_words_ids", "is_assistant", "penalty_alpha", "prompt_lookup_num_tokens"),
            *("speculation_type", "token_healing", "use_mtp"),
        ),
        _OTHER_WAY,
    ),
    **dict.fromkeys(EXTRA_OUTPUTS, _OUTPUT),
    "cache_implementation": "{name} cannot be chosen: the cache is this decoder's own; leave it out",
    "guidance_scale": _ROWS,
    "num_beams": "beam search cannot be combined with speculative decoding; set {name}=1",
    "use_cache": "{name}=False cannot be honoured: what was accepted is kept in a cache; leave it out",
}
# Arguments of generate() that are not settings and ask for another way of decoding.
_OTHER_ARGUMENTS = (
    *("assistant_model", "custom_generate", "negative_prompt_attention_mask", "negative_prompt_ids", "synced_gpus"),
)
_MOST_BIAS = 1e6  # larger biases overflow float32 when scores are divided by a temperature
_OWN = "; generation_config='none' leaves the model's own settings out"


def _biases(name: str, given: Any) -> None:
    """Raises ValueError for biases above ``_MOST_BIAS``; -inf is allowed and bans a sequence.

    Args:
        name: name of the setting, for the message.
        given: biases by sequence, or pairs of a sequence and a bias; transformers refuses other forms.
    """
    pairs = given.items() if isinstance(given, Mapping) else given
    for bias in (pair[1] for pair in pairs if isinstance(pair, Sequence) and len(pair) == 2):
        if isinstance(bias, float) and not bias <= _MOST_BIAS:
            raise ValueError(f"{name} must be at most {_MOST_BIAS:g}, got {bias}")


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": partial(check_int, least=0),
    "max_length": partial(check_int, least=1),
    "min_new_tokens": partial(check_int, least=0),
    "min_length": partial(check_int, least=0),
    "temperature": check_temperature,
    "top_k": partial(check_int, least=0),
    "top_p": partial(check_float, least=0, most=1),
    "min_p": partial(check_float, least=0, most=1),
    "typical_p": partial(check_float, least=0, most=1),
    "epsilon_cutoff": partial(check_float, least=0, most=1),
    "eta_cutoff": partial(check_float, least=0, most=1),
    "repetition_penalty": check_penalty,
    "encoder_repetition_penalty": check_penalty,
    "sequence_bias": _biases,
    "no_repeat_ngram_size": partial(check_int, least=0),
    "num_return_sequences": partial(check_int, least=1),
}
# Settings whose processors depend on a text's prompt, its length limit or its end tokens.
_BOUND = (
    *("bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("exponential_decay_length_penalty", "forced_eos_token_id", "min_length", "min_new_tokens"),
)


def own_settings(model: "PreTrainedModel", source: str) -> "GenerationConfig":
    """Returns the model's own settings, or with the source ``none`` its special tokens alone."""
    own = model.generation_config
    assert own is not None  # every generating model of transformers has one
    if source == "model":
        return own
    from transformers import GenerationConfig

    return GenerationConfig(**{name: getattr(own, name) for name in SPECIAL_TOKENS})


def own_temperature(own: "GenerationConfig") -> float | None:
    """Returns the model's own temperature, else 1 if it sets ``do_sample``, else ``None``."""
    if own.temperature is not None:
        return check_temperature("temperature", own.temperature)
    return 1.0 if own.do_sample else None


def changed(config: "GenerationConfig", **changes: Any) -> "GenerationConfig":
    """Returns a copy with some settings replaced."""
    config = copy(config)
    vars(config).update(changes)
    return config


def with_settings(model: "PreTrainedModel", own: "GenerationConfig") -> "PreTrainedModel":
    """Returns the model if its settings are ``own``, else a copy with these settings that shares its modules."""
    if own is model.generation_config:
        return model
    model = copy(model)
    model.generation_config = own
    return model


def effective(options: Mapping[str, Any], own: "GenerationConfig") -> dict[str, Any]:
    """Merges settings: arguments of ``generate()`` first, then their ``generation_config``, then the model's own."""
    config = options.get("generation_config")
    given = {} if config is None else {name: value for name, value in vars(config).items() if value is not None}
    return {**vars(own), **given, **options}


def check_settings(settings: Mapping[str, Any], own: "GenerationConfig") -> None:
    """Raises TypeError or ValueError for settings that are invalid or not supported here.

    Args:
        settings: settings by name; arguments of ``generate()`` may be among them.
        own: the model's own settings.
    """
    for name in _OTHER_ARGUMENTS:
        if says_something(settings.get(name)):
            raise ValueError(_OTHER_WAY.format(name=name))
    for name, reason in REFUSED.items():
        value = settings.get(name)
        if _asks(name, value, settings, own):
            raise ValueError(reason.format(name=name) + (_OWN if value == getattr(own, name, None) else ""))
    for name, check in _CHECKS.items():
        if (value := settings.get(name)) is not None:
            check(name, value)


def _asks(name: str, value: Any, settings: Mapping[str, Any], own: "GenerationConfig") -> bool:
    """Returns whether a setting from ``REFUSED`` asks for something that must be refused."""
    if name in ("cache_implementation", "use_cache"):  # ours replaces a model's own choice
        return value not in (None, True, getattr(own, name))
    if name in EXTRA_OUTPUTS:
        return bool(value and settings.get("return_dict_in_generate"))
    if name in ("guidance_scale", "num_beams"):
        return value not in (None, 1)
    return says_something(value)


def says_something(value: Any) -> bool:
    """Returns whether an option could change an answer: it is a tensor, or neither ``None`` nor false nor empty."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def bound_to_text(own: "GenerationConfig") -> bool:
    """Returns whether processors of the model's own settings depend on the prompt, length limit or end tokens."""
    return any(says_something(getattr(own, name, None)) for name in _BOUND)


def biased(own: "GenerationConfig", bias: Mapping[int, float]) -> list[list[Any]]:
    """Merges biases of single tokens into the model's own ``sequence_bias``, which they override."""
    known = own.sequence_bias or {}
    pairs = known.items() if isinstance(known, Mapping) else known
    merged = {tuple(sequence): value for sequence, value in pairs} | {(token,): value for token, value in bias.items()}
    return [[list(sequence), value] for sequence, value in merged.items()]


def processors_of(
    model: "PreTrainedModel",
    own: "GenerationConfig",
    changes: Mapping[str, Any],
    prompt: Sequence[int],
    processors: "Sequence[LogitsProcessor]" = (),
) -> "list[LogitsProcessor]":
    """Builds the logits processors of one text, in the order in which ``generate()`` applies them.

    Args:
        model: builds the processors.
        own: the model's own settings.
        changes: settings of the request by name, including ``max_length`` and ``eos_token_id``; they override ``own``.
        prompt: token ids of the prompt.
        processors: further processors of the request. A processor replaces the one that a setting would create of its
            class.
    """
    from transformers import LogitsProcessorList

    config = changed(own, **changes)
    if not config.min_p:
        config.min_p = None  # min_p=0 would only add a processor that keeps all tokens
    if config.min_new_tokens is not None:
        config.min_length = None  # as generate() takes them
    if not config.eos_token_id:
        config.eos_token_id = None
        config.exponential_decay_length_penalty = None  # it favours end tokens, of which there are none
    maker: Any = model
    maker._prepare_special_tokens(config, device=model.device, batch_size=1)
    made = maker._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([list(prompt)], device=model.device),
        logits_processor=LogitsProcessorList(processors),
        device=model.device,
    )
    return list(made)


__all__ = [
    "EXTRA_OUTPUTS",
    "IGNORED",
    "REFUSED",
    "SOURCES",
    "SUPPORTED",
    "biased",
    "bound_to_text",
    "changed",
    "check_settings",
    "effective",
    "own_settings",
    "own_temperature",
    "processors_of",
    "says_something",
    "with_settings",
]
