"""Settings of transformers: honoured, harmless or refused by name; and a model's own ones mean the same everywhere."""

from itertools import chain

import pytest
import torch
from models import PROMPTS, tiny, tiny_tokenizer
from transformers import (
    CompileConfig,
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, load
from arbordraft.generation import EXTRA_OUTPUTS, HARMLESS, HONOURED, REFUSED

IDS = torch.tensor(PROMPTS[:1])
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def decoder(source="model", tokenizer=True, **own):
    """One letter per token; the model's own settings are these and nothing ends a text."""
    model = tiny()
    vars(model.generation_config).update({"eos_token_id": None, "pad_token_id": 0, **own})
    target = RaggedModel(model, tiny_tokenizer() if tokenizer else None, kernels="torch", self_test=False)
    return SpeculativeDecoder(target, NGramDrafter(), generation_config=source)


# Which settings there are

ASKING = {
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "cache_implementation": "static",
    "constraints": ["something"],
    "continuous_batching_config": ContinuousBatchingConfig(),
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "guidance_scale": 2.0,
    "is_assistant": True,
    "num_beams": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "speculation_type": "dflash",
    "token_healing": True,
    "use_cache": False,
    "use_mtp": True,
}
IDLE = {
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "cache_config": {"max_batch_size": 1},
    "compile_config": CompileConfig(),
    "decoder_start_token_id": 5,
    "disable_compile": True,
    "diversity_penalty": 3.0,
    "early_stopping": True,
    "length_penalty": 9.0,
    "low_memory": True,
    "max_cache_len": 500,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "prefill_chunk_size": 2,
    "target_lookbehind": 3,
    "transformers_version": "4.0",
}


def test_every_setting_of_the_installed_transformers_is_known():
    """A new one has to be honoured, proved harmless or refused before it can be given."""
    known = [*HONOURED, *chain.from_iterable(HARMLESS.values()), *REFUSED]
    assert len(known) == len(set(known))
    assert set(vars(GenerationConfig())) <= set(known)
    assert set(ASKING) == set(REFUSED)
    assert set(IDLE) == set(chain.from_iterable(HARMLESS.values())) - {"_from_model_config"}


@pytest.mark.parametrize("how", ["argument", "config", "the model's own"])
@pytest.mark.parametrize("name", ASKING)
def test_other_ways_are_refused_by_name(name, how):
    own = {name: ASKING[name]} if how == "the model's own" else {}
    options = {**GREEDY, "return_dict_in_generate": name in EXTRA_OUTPUTS}
    if how == "config":
        options["generation_config"] = GenerationConfig()
        vars(options["generation_config"])[name] = ASKING[name]
    elif how == "argument":
        options[name] = ASKING[name]
    made = decoder(**own)
    if own and name in ("cache_implementation", "use_cache"):  # whose cache it is changes no token
        assert torch.equal(made.generate(IDS, **options), decoder().generate(IDS, **options))
        return
    with pytest.raises(ValueError, match=name) as refused:
        made.generate(IDS, **options)
    assert ("generation_config='none'" in str(refused.value)) == bool(own)


@pytest.mark.parametrize("name", ["assistant_ensemble_weight", "is_assistant", "speculation_type", "use_mtp"])
def test_the_models_generate_reaches_the_same_refusals(name):
    made = decoder()
    with pytest.raises(ValueError, match=f"{name} asks for another way"):
        made.target.model.generate(IDS, custom_generate=made.decode_loop, **GREEDY, **{name: ASKING[name]})


@pytest.mark.parametrize("name", ["custom_generate", "synced_gpus", "negative_prompt_attention_mask"])
def test_arguments_that_ask_for_another_way(name):
    with pytest.raises(ValueError, match=f"{name} asks for another way"):
        decoder().generate(IDS, **GREEDY, **{name: torch.ones_like(IDS) if "mask" in name else True})


@pytest.mark.parametrize("own", [False, True], ids=["argument", "the model's own"])
def test_harmless_settings_change_no_token(own):
    expected = decoder().generate(IDS, **GREEDY)
    for name, value in {**IDLE, **dict.fromkeys(EXTRA_OUTPUTS, True)}.items():
        given = {name: value}
        found = decoder(**given).generate(IDS, **GREEDY) if own else decoder().generate(IDS, **GREEDY, **given)
        assert torch.equal(found, expected), name


def test_outputs_that_a_model_asks_for_are_none_of_a_texts_business():
    words = decoder().complete("hello", max_new_tokens=8)
    assert decoder(output_scores=True).complete("hello", max_new_tokens=8) == words


# Stop strings


def stops():
    """What plain decoding says, and a string inside."""
    words = decoder().complete("hello", max_new_tokens=12)
    return words, words[4:6], words[: words.index(words[4:6]) + 2]


@pytest.mark.parametrize("own", [False, True], ids=["a config", "the model's own"])
@pytest.mark.parametrize("given", [False, True], ids=["the target's tokenizer", "a tokenizer"])
def test_stop_strings_in_a_config_are_transformers_stop_strings(own, given):
    _, stop, _ = stops()
    made = decoder(tokenizer=not given, **({"stop_strings": stop} if own else {}))
    options = {"max_new_tokens": 12, "do_sample": False}
    if not own:
        options = {"generation_config": GenerationConfig(**options, stop_strings=[stop])}
    tokens = torch.tensor([tiny_tokenizer()("hello")["input_ids"]])
    expected = made.target.model.generate(tokens, **options, tokenizer=tiny_tokenizer())
    assert expected.shape[1] < 5 + 12
    for _ in range(2):  # neither the config nor the model has lost them
        found = made.generate(tokens, **options, **({"tokenizer": tiny_tokenizer()} if given else {}))
        assert torch.equal(found, expected)


def test_a_text_ends_with_the_models_own_stop_strings_unless_it_is_told_others():
    words, stop, until = stops()
    made = decoder(stop_strings=[stop])
    assert made.complete("hello", max_new_tokens=12) == until
    assert "".join(made.complete("hello", max_new_tokens=12, stream=True)) == until
    assert made.complete("hello", max_new_tokens=12, stop=[]) == words
    assert made.complete("hello", max_new_tokens=12, stop=words[8:]) == words[:8]


def test_stop_strings_need_a_tokenizer():
    for made, options in ((decoder(tokenizer=False, stop_strings="x"), {}), (decoder(tokenizer=False), {"x": 1})):
        config = {"generation_config": GenerationConfig(stop_strings="x")} if options else {}
        with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
            made.generate(IDS, **GREEDY, **config)


def test_the_models_generate_takes_stop_strings_as_a_criterion():
    """It drops the tokenizer for methods that are not its own, and then refuses the setting."""
    _, stop, _ = stops()
    made, tokens = decoder(), torch.tensor([tiny_tokenizer()("hello")["input_ids"]])
    criteria = StoppingCriteriaList([StopStringCriteria(tiny_tokenizer(), stop)])
    options = {"max_new_tokens": 12, "do_sample": False}
    found = made.target.model.generate(tokens, custom_generate=made.decode_loop, stopping_criteria=criteria, **options)
    assert torch.equal(found, made.generate(tokens, stop_strings=stop, **options))
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        made.target.model.generate(
            tokens, custom_generate=made.decode_loop, stop_strings=stop, tokenizer=tiny_tokenizer(), **options
        )


# The model's own settings


def test_a_texts_open_settings_are_the_models_own():
    greedy = decoder().complete("hello", max_new_tokens=12)
    hot = {"max_new_tokens": 12, "temperature": 3.0, "seed": 0}
    drawn = decoder().complete("hello", **hot)
    assert drawn != greedy
    assert decoder(top_k=1).complete("hello", **hot) == greedy
    assert decoder(top_p=1e-9).complete("hello", **hot) == greedy
    assert decoder(top_k=1).complete("hello", **hot, top_k=0) == drawn
    assert decoder(top_p=1e-9).complete("hello", **hot, top_p=1) == drawn
    assert decoder(do_sample=True, temperature=3.0).complete("hello", max_new_tokens=12) == greedy
    own = decoder(temperature=3.0)
    assert own.complete("hello", **(hot | {"temperature": None})) == drawn
    assert decoder().complete("hello", **(hot | {"temperature": None})) == greedy


@pytest.mark.parametrize("config", [False, True], ids=["argument", "config"])
def test_none_leaves_all_but_the_special_tokens_out(config):
    own = {"repetition_penalty": 8.0, "stop_strings": "x", "suppress_tokens": [5, 9], "num_beams": 3, "max_length": 3}
    made, options = decoder("none", **own), dict(GREEDY)
    if config:
        options = {"generation_config": GenerationConfig(**options, no_repeat_ngram_size=2)}
    assert torch.equal(made.generate(IDS, **options), decoder().generate(IDS, **options))
    assert made.target.model.generation_config.repetition_penalty == 8.0
    assert made.own_settings.repetition_penalty is None


def test_none_keeps_what_ends_a_text():
    answer = decoder().generate(IDS, **GREEDY)[0, 5:]
    end = answer[2].item()
    found = decoder("none", eos_token_id=end, repetition_penalty=8.0).generate(IDS, **GREEDY)[0, 5:]
    assert found.tolist() == answer[: answer.tolist().index(end) + 1].tolist()


def test_where_settings_come_from_is_one_of_two():
    with pytest.raises(ValueError, match="generation_config must be one of model, none, got 'vllm'"):
        decoder("vllm")
    assert load(tiny(), "none", costs=None, generation_config="none").generation_config == "none"


def test_a_temperature_of_zero_is_greedy_wherever_it_stands():
    expected = decoder().generate(IDS, **GREEDY)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.0)
    assert torch.equal(decoder().generate(IDS, generation_config=config), expected)
    assert torch.equal(decoder(do_sample=True, temperature=0.0).generate(IDS, max_new_tokens=8), expected)
