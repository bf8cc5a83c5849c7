"""Settings of transformers: honoured, harmless or refused by name; a model's own settings work the same everywhere."""

from itertools import chain

import pytest
import torch
from support.models import PROMPTS, tiny, tiny_tokenizer
from support.served import serving
from transformers import CompileConfig, GenerationConfig, StoppingCriteriaList, StopStringCriteria, WatermarkingConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from arbordraft import Engine, NGramDrafter, RaggedModel, Request, SpeculativeDecoder, load
from arbordraft.decoding.settings import EXTRA_OUTPUTS, IGNORED, REFUSED, SUPPORTED
from arbordraft.serving.service import Service

IDS = torch.tensor(PROMPTS[:1])
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def decoder(source="model", tokenizer=True, **own):
    """Builds a decoder of one letter per token; the model's settings are ``own``, by default without end tokens."""
    model = tiny()
    vars(model.generation_config).update({"eos_token_id": None, "pad_token_id": 0, **own})
    target = RaggedModel(model, tiny_tokenizer() if tokenizer else None, kernels="torch", self_test=False)
    return SpeculativeDecoder(target, NGramDrafter(), generation_config=source)


# All settings

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
    """A new setting must be honoured, proved harmless or refused before callers can use it."""
    known = [*SUPPORTED, *chain.from_iterable(IGNORED.values()), *REFUSED]
    assert len(known) == len(set(known))
    assert set(vars(GenerationConfig())) <= set(known)
    assert set(ASKING) == set(REFUSED)
    assert set(IDLE) == set(chain.from_iterable(IGNORED.values())) - {"_from_model_config"}


@pytest.mark.parametrize("how", ["argument", "config", "the model's own"])
@pytest.mark.parametrize("name", ASKING)
def test_unsupported_settings_are_refused_by_name(name, how):
    own = {name: ASKING[name]} if how == "the model's own" else {}
    options = {**GREEDY, "return_dict_in_generate": name in EXTRA_OUTPUTS}
    if how == "config":
        options["generation_config"] = GenerationConfig()
        vars(options["generation_config"])[name] = ASKING[name]
    elif how == "argument":
        options[name] = ASKING[name]
    made = decoder(**own)
    if own and name in ("cache_implementation", "use_cache"):  # the kind of cache changes no token
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
def test_unsupported_arguments_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} asks for another way"):
        decoder().generate(IDS, **GREEDY, **{name: torch.ones_like(IDS) if "mask" in name else True})


@pytest.mark.parametrize("own", [False, True], ids=["argument", "the model's own"])
def test_harmless_settings_change_no_token(own):
    expected = decoder().generate(IDS, **GREEDY)
    for name, value in {**IDLE, **dict.fromkeys(EXTRA_OUTPUTS, True)}.items():
        given = {name: value}
        found = decoder(**given).generate(IDS, **GREEDY) if own else decoder().generate(IDS, **GREEDY, **given)
        assert torch.equal(found, expected), name


def test_output_settings_of_a_model_do_not_change_texts():
    words = decoder().complete("hello", max_new_tokens=8)
    assert decoder(output_scores=True).complete("hello", max_new_tokens=8) == words


# Stop strings


def stops():
    """Returns a plain text, a stop string inside it, and the text up to the end of that string."""
    words = decoder().complete("hello", max_new_tokens=12)
    return words, words[4:6], words[: words.index(words[4:6]) + 2]


@pytest.mark.parametrize("own", [False, True], ids=["a config", "the model's own"])
@pytest.mark.parametrize("given", [False, True], ids=["the target's tokenizer", "a given tokenizer"])
def test_stop_strings_in_a_config_are_transformers_stop_strings(own, given):
    _, stop, _ = stops()
    made = decoder(tokenizer=not given, **({"stop_strings": stop} if own else {}))
    options = {"max_new_tokens": 12, "do_sample": False}
    if not own:
        options = {"generation_config": GenerationConfig(**options, stop_strings=[stop])}
    tokens = torch.tensor([tiny_tokenizer()("hello")["input_ids"]])
    expected = made.target.model.generate(tokens, **options, tokenizer=tiny_tokenizer())
    assert expected.shape[1] < 5 + 12
    for _ in range(2):  # the first call removes them from neither config nor model
        found = made.generate(tokens, **options, **({"tokenizer": tiny_tokenizer()} if given else {}))
        assert torch.equal(found, expected)


def test_a_text_ends_with_the_models_own_stop_strings_unless_others_are_given():
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
    """transformers drops the tokenizer for custom methods, and then refuses the setting."""
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


def written(made, **settings):
    """Returns the text of ``complete``."""
    return made.complete("hello", **{"max_new_tokens": 12, **settings})


def requested(made, **settings):
    """Returns the text of an engine."""
    prompt = made.target.tokenizer("hello")["input_ids"]
    request = Request(**{"prompt": prompt, "max_new_tokens": 12, **settings})
    (answer,) = Engine(made, max_cache_tokens=400).submit(request).result()
    return made.target.tokenizer.decode(answer.tokens)


PLAIN = decoder().target.tokenizer(written(decoder()))["input_ids"]
FIRST, THIRD = PLAIN[0], PLAIN[2]
OWN = {
    "bad_words_ids": {"bad_words_ids": [PLAIN[1:3]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [FIRST]},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[10], 20.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "eos_token_id": {"eos_token_id": THIRD},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 5.0), "eos_token_id": 60},
    "forced_eos_token_id": {"forced_eos_token_id": 60},
    "max_time": {"max_time": 0.0},
    "min_length": {"min_length": 8, "eos_token_id": THIRD},
    "min_new_tokens": {"min_new_tokens": 4, "min_length": 12, "eos_token_id": [THIRD]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 8.0},
    "sequence_bias": {"sequence_bias": {(FIRST,): -50.0, (7, 8): 9.0}},
    "stop_strings": {"stop_strings": tiny_tokenizer().decode(PLAIN[3:5])},
    "suppress_tokens": {"suppress_tokens": [FIRST]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
}
DRAWN = {
    "epsilon_cutoff": 0.9,
    "eta_cutoff": 0.9,
    "min_p": 0.9,
    "top_h": 0.1,
    "top_k": 2,
    "top_p": 0.1,
    "typical_p": 0.1,
}


@pytest.mark.parametrize("name", OWN)
def test_all_entry_points_use_the_models_own_settings(name):
    made = decoder(**OWN[name])
    tokens = torch.tensor([made.target.tokenizer("hello")["input_ids"]])
    plain = made.target.model.generate(tokens, max_new_tokens=12, do_sample=False, tokenizer=made.target.tokenizer)
    expected = made.target.tokenizer.decode(plain[0, 5:])
    assert expected != written(decoder())
    assert requested(made) == written(made) == made.chat([{"role": "user", "content": "hello"}], max_new_tokens=12)
    assert written(made) == expected
    without = decoder("none", **{**OWN[name], "eos_token_id": None})
    assert requested(without) == written(without) == written(decoder())


@pytest.mark.parametrize("name", DRAWN)
def test_all_entry_points_truncate_by_the_models_own_settings(name):
    made, drawn = decoder(**{name: DRAWN[name]}), {"temperature": 3.0, "seed": 7}
    assert requested(made) == written(made) == written(decoder())  # no effect on greedy decoding
    assert requested(made, **drawn) == written(made, **drawn) != written(decoder(), **drawn)


def test_settings_of_a_request_override_the_models_own():
    plain, drawn = requested(decoder()), {"temperature": 3.0, "seed": 7}
    made = decoder(repetition_penalty=8.0, stop_strings=plain[2:4], eos_token_id=THIRD, temperature=3.0)
    assert requested(made) != plain
    assert requested(made, repetition_penalty=1, stop=(), ends=()) == plain
    patient = decoder(min_new_tokens=8, eos_token_id=THIRD)
    assert requested(patient, min_new_tokens=0) == plain[:3] != requested(patient)[:3]
    assert requested(made, repetition_penalty=1, stop=(), ends=(), temperature=None, seed=7) == written(
        decoder(), **drawn
    )
    for name, off in {"top_k": 0, "top_p": 1, "min_p": 0}.items():
        truncated = decoder(**{name: DRAWN[name]})
        assert requested(truncated, **drawn, **{name: off}) == written(decoder(), **drawn)
    biased = decoder(sequence_bias=[[[FIRST], -50.0], [[9], 50.0]])
    assert set(requested(biased)) == {"j"}
    assert requested(biased, logit_bias={9: 0.0}) == requested(decoder(), logit_bias={FIRST: -50.0})
    assert requested(decoder(exponential_decay_length_penalty=(1, 5.0), eos_token_id=60), ends=()) == plain


@pytest.mark.parametrize(
    ("own", "kinds"), [({}, 5), ({"repetition_penalty": 1.5, "min_p": 0.1}, 5), ({"min_new_tokens": 2}, 8)], ids=str
)
def test_requests_with_equal_settings_are_processed_together(own, kinds):
    """The model's own settings keep them apart if they depend on the text."""
    prompt, engine = PROMPTS[0], Engine(decoder(eos_token_id=2, **own), max_cache_tokens=4000)
    asked = [Request(prompt=prompt, max_new_tokens=4, temperature=temperature) for temperature in (0, 0, 0.5, 0.5, 0.5)]
    asked += [Request(prompt=prompt[:2], max_new_tokens=6, logit_bias={3: 1.0}, n=n) for n in (1, 2)]
    for request in (*asked, Request(prompt=prompt, max_new_tokens=4, repetition_penalty=1)):  # not the model's
        engine.submit(request)
    engine.step()
    assert len({id(sample.pipeline) for sample in engine._scheduler.state.samples if sample}) == kinds
    engine.run()


def test_an_engine_refuses_unsupported_settings_of_the_model_at_once():
    with pytest.raises(ValueError, match="set num_beams=1; generation_config='none' leaves"):
        Engine(decoder(num_beams=4))
    with pytest.raises(ValueError, match="top_p must be a number from 0 to 1"):
        Engine(decoder(top_p=3.0))
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        Engine(decoder(tokenizer=False, stop_strings="x"))
    assert requested(decoder("none", num_beams=4)) == requested(decoder(output_scores=True)) == written(decoder())


def test_a_server_samples_as_the_model_recommends():
    """OpenAI's default temperature of 1 is for models that recommend none."""
    made = decoder(temperature=0.0, repetition_penalty=8.0, top_k=2, top_p=0.5)
    with serving(made, max_tokens=400) as served:
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 7}
        complete = served.client.completions.create
        assert complete(**asked).choices[0].text == written(made) != written(decoder())
        hot = complete(**asked, temperature=3.0, extra_body={"repetition_penalty": 1.0}).choices[0].text
        assert hot == requested(decoder(), temperature=3.0, top_k=2, top_p=0.5, seed=7)
        reply = served.client.responses.create(model="tiny", input="hello", max_output_tokens=12)
        assert (reply.output_text, reply.temperature, reply.top_p) == (written(made), 0.0, 0.5)
    assert [Service(Engine(decoder(**own)), "tiny").temperature for own in RECOMMENDED] == [1.0, 1.0, 1.0, 0.6, 0.6]


RECOMMENDED = [
    {},
    {"do_sample": False},
    {"do_sample": True},
    {"temperature": 0.6},
    {"do_sample": True, "temperature": 0.6},
]


def test_complete_takes_open_settings_from_the_model():
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
def test_source_none_ignores_all_settings_but_special_tokens(config):
    own = {"repetition_penalty": 8.0, "stop_strings": "x", "suppress_tokens": [5, 9], "num_beams": 3, "max_length": 3}
    made, options = decoder("none", **own), dict(GREEDY)
    if config:
        options = {"generation_config": GenerationConfig(**options, no_repeat_ngram_size=2)}
    assert torch.equal(made.generate(IDS, **options), decoder().generate(IDS, **options))
    assert made.target.model.generation_config.repetition_penalty == 8.0
    assert made.own_settings.repetition_penalty is None


def test_source_none_keeps_end_tokens():
    answer = decoder().generate(IDS, **GREEDY)[0, 5:]
    end = answer[2].item()
    found = decoder("none", eos_token_id=end, repetition_penalty=8.0).generate(IDS, **GREEDY)[0, 5:]
    assert found.tolist() == answer[: answer.tolist().index(end) + 1].tolist()


def test_the_source_of_settings_must_be_model_or_none():
    with pytest.raises(ValueError, match="generation_config must be one of model, none, got 'vllm'"):
        decoder("vllm")
    assert load(tiny(), "none", costs=None, generation_config="none").generation_config == "none"


def test_a_temperature_of_zero_is_greedy_from_any_source():
    expected = decoder().generate(IDS, **GREEDY)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.0)
    assert torch.equal(decoder().generate(IDS, generation_config=config), expected)
    assert torch.equal(decoder(do_sample=True, temperature=0.0).generate(IDS, max_new_tokens=8), expected)
