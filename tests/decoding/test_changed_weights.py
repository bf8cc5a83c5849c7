"""Weights and modules that change under a living engine: answers follow them, or say that they cannot."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import PROMPTS, fusable, left_padded

import arbordraft as ad
from arbordraft.decoding.step import Stepper
from arbordraft.target.weight_watch import WeightsChanged
from arbordraft.testing import greedy_reference

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:the model's weights or modules changed")]

NEW = 16
LONG = [3 + token % 40 for token in range(70)]  # long enough for its rows to be copied when it is repeated
TREE = ad.TreeTopology([-1, 0, 0, 1, 1, 2])


def adapted():
    """Returns a model with an adapter that is switched off."""
    model = get_peft_model(fusable(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.4)
    model.base_model.disable_adapter_layers()
    return model


def scaled(name):
    """Returns a change of the weights of a module in place."""

    def change(model):
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * weight.std())

    return change


def replaced(model):
    weight = model.model.layers[1].self_attn.q_proj.weight
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(-2 * weight.detach(), requires_grad=False)


def moved(model):
    norm = model.model.norm.weight
    norm.data = torch.linspace(-2, 2, len(norm))


CHANGES = {
    "embedding": scaled("model.embed_tokens"),
    "head": scaled("lm_head"),
    "norm": moved,
    "linear": scaled("model.layers.0.mlp.down_proj"),
    "replaced": replaced,
}


def engine_of(model, kernels, static=False, **options):
    target = ad.RaggedModel(model, kernels=kernels)
    decoder = ad.SpeculativeDecoder(target, ad.NGramDrafter(), TREE, buckets=(8, 16) if static else None)
    return ad.Engine(decoder, max_cache_tokens=1000, max_samples=2, **options)


def answer(engine, prompt):
    stream = engine.submit(ad.Request(prompt=prompt, max_new_tokens=NEW, ends=()))
    engine.run()
    return list(stream.result()[0].tokens)


def expected(model, *prompts):
    return greedy_reference(model, prompts, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)


RUNNERS = pytest.mark.parametrize(
    ("kernels", "static"), [("native", False), ("torch", False), ("torch", True)], ids=["native", "torch", "static"]
)


@pytest.mark.one_in(3)
@RUNNERS
@pytest.mark.parametrize("name", CHANGES)
def test_an_idle_engine_follows_its_weights(kernels, static, name):
    model = fusable()
    engine = engine_of(model, kernels, static, reuse=True)
    before = answer(engine, LONG)
    assert before == expected(model, LONG)[0]
    CHANGES[name](model)
    for prompt in (LONG, PROMPTS[0]):  # a known prompt and a new one
        assert answer(engine, prompt) == expected(model, prompt)[0]
    assert answer(engine, LONG) != before  # the change matters


@RUNNERS
def test_an_idle_engine_follows_its_adapters(kernels, static):
    model = adapted()
    engine = engine_of(model, kernels, static, reuse=True)
    known = [answer(engine, LONG)]
    for switch in (model.base_model.enable_adapter_layers, model.base_model.disable_adapter_layers):
        switch()
        known.append(answer(engine, LONG))
        assert known[-1] == expected(model, LONG)[0]
    assert known[0] == known[2] != known[1]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_engine_that_notices_nothing_gives_answers_of_neither_model(kernels, monkeypatch):
    """Negative control: kept rows of the old weights are mixed with rows of the new ones."""
    monkeypatch.setattr(Stepper, "current", lambda self, state: True)
    monkeypatch.setattr(ad.RaggedModel, "check_unchanged", lambda self, cache: None)
    model = fusable()
    engine = engine_of(model, kernels, reuse=True)
    before = answer(engine, LONG)
    CHANGES["embedding"](model)
    assert answer(engine, LONG) not in (before, expected(model, LONG)[0])


def test_running_answers_keep_prepacked_layers_and_later_ones_wait():
    model = fusable()
    engine = engine_of(model, "native")
    before = expected(model, PROMPTS[0])[0]
    running = engine.submit(ad.Request(prompt=PROMPTS[0], max_new_tokens=NEW, ends=()))
    engine.step()
    CHANGES["linear"](model)
    later = engine.submit(ad.Request(prompt=PROMPTS[1], max_new_tokens=NEW, ends=()))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)  # though a slot is free
    engine.run()
    assert running.result()[0].tokens == before
    assert later.result()[0].tokens == expected(model, PROMPTS[1])[0]


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("native", "embedding"), ("native", "head"), *(("torch", name) for name in CHANGES)],
)
def test_running_answers_that_would_mix_weights_fail(kernels, name):
    model = fusable()
    engine = engine_of(model, kernels)
    running = engine.submit(ad.Request(prompt=PROMPTS[0], max_new_tokens=NEW, ends=()))
    engine.step()
    later = engine.submit(ad.Request(prompt=PROMPTS[1], max_new_tokens=NEW, ends=()))
    CHANGES[name](model)
    with pytest.raises(WeightsChanged, match="only when nothing is being decoded"):
        engine.step()
    with pytest.raises(WeightsChanged):
        running.result()
    engine.run()
    assert later.result()[0].tokens == expected(model, PROMPTS[1])[0]
    assert engine.healthy


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_batch_that_would_mix_weights_fails(kernels):
    model = fusable()
    decoder = ad.SpeculativeDecoder(ad.RaggedModel(model, kernels=kernels), ad.NGramDrafter(), TREE)

    class Changing:
        def put(self, tokens):
            CHANGES["embedding"](model)

        def end(self):
            pass

    inputs = left_padded(PROMPTS[:1])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(WeightsChanged):
        decoder.generate(**inputs, **options, streamer=Changing())
    assert decoder.generate(**inputs, **options)[0, len(PROMPTS[0]) :].tolist() == expected(model, PROMPTS[0])[0]


def test_an_idle_engine_follows_the_weights_of_its_drafter():
    """A seeded text that depends on drafts must not depend on rows that the old drafter left behind."""
    small = fusable()
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(fusable(), ad.LanguageModelDrafter(small), TREE, coupling)
    asked = ad.Request(prompt=LONG, max_new_tokens=NEW, ends=(), temperature=1.0, seed=4)

    def sampled(engine):
        stream = engine.submit(asked)
        engine.run()
        return list(stream.result()[0].tokens)

    living = ad.Engine(decoder, max_cache_tokens=1000, max_samples=2, reuse=True)
    before = sampled(living)
    CHANGES["embedding"](small)
    assert sampled(living) == sampled(ad.Engine(decoder, max_cache_tokens=1000, max_samples=2)) != before


def test_training_mode_ends_waiting_answers_and_nothing_leaks():
    model = fusable()
    engine = engine_of(model, "torch")
    assert answer(engine, PROMPTS[0]) == expected(model, PROMPTS[0])[0]
    model.train()
    stream = engine.submit(ad.Request(prompt=PROMPTS[1], max_new_tokens=NEW, ends=()))
    for _ in range(3):
        with pytest.raises(ValueError, match=r"call model\.eval"):
            engine.step()
    with pytest.raises(ValueError, match=r"call model\.eval"):
        stream.result()
    model.eval()
    assert answer(engine, PROMPTS[1]) == expected(model, PROMPTS[1])[0]
    assert engine.healthy
