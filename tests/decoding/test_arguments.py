"""Arguments of `generate` in all their forms: the right result, or an error that names the argument."""

import functools

import numpy as np
import pytest
import torch
from support.models import PROMPTS, fusable, greedy_reference, left_padded, ragged, tiny
from support.prepacked_models import logits, plain
from torch import nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import arbordraft as ad
from arbordraft.target.hf_cache import cache_argument

pytestmark = pytest.mark.timeout(60)

TREE = ad.TreeTopology([-1, 0, 0, 1])
GREEDY = ad.Coupling.matching(2)
SAMPLED = ad.Coupling(ad.IID(2), ad.Lifted(ad.RecursiveRejection()))
IDS = torch.tensor([PROMPTS[0]])
NEW = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def decoder():
    return ad.SpeculativeDecoder(ragged(), ad.NGramDrafter(), TREE, GREEDY)


def generate(ids=IDS, **options):
    return decoder().generate(ids, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_masks_of_any_dtype_give_the_same_tokens(dtype):
    inputs = left_padded(PROMPTS)
    expected = decoder().generate(**inputs, **NEW)
    found = decoder().generate(inputs["input_ids"], attention_mask=inputs["attention_mask"].to(dtype), **NEW)
    assert torch.equal(found, expected)


def test_ids_of_32_bits():
    assert torch.equal(generate(IDS.int()), generate())


@pytest.mark.parametrize("options", [{"max_new_tokens": 3.0}, {"max_length": 8.0, "max_new_tokens": None}], ids=str)
def test_lengths_may_be_whole_floats(options):
    """Arithmetic gives such lengths, and transformers accepts them."""
    whole = {name: value and int(value) for name, value in options.items()}
    assert generate(**options).tolist() == generate(**whole).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"position_ids": torch.arange(5)[None]},
        {"use_cache": True},
        {cache_argument(tiny()): DynamicCache()},
        {"generation_config": GenerationConfig(max_new_tokens=4)},
        {"seeds": np.array([3], dtype=np.uint64)},
        {"seeds": torch.tensor([3])},
        {"max_new_tokens": np.int64(4)},
        {"top_p": 1, "top_k": 0},
        {"token_type_ids": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_nothing(options):
    assert torch.equal(generate(**options), generate())


def test_a_cache_setting_of_the_model_is_ignored():
    """Some checkpoints set ``use_cache`` by default; only a caller's setting is refused."""
    model = tiny()
    expected = greedy_reference(model, PROMPTS[:1], max_new_tokens=4)
    model.generation_config.use_cache = False
    found = ad.SpeculativeDecoder(model, ad.NGramDrafter(), TREE, GREEDY).generate(IDS, max_new_tokens=4)
    assert found[0, 5:].tolist() == expected[0]


@pytest.mark.parametrize("through", ["the decoder", "the model"])
@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids"])
def test_images_are_not_ignored(name, through):
    model = tiny("gemma3")
    target = ad.SpeculativeDecoder(ad.RaggedModel(model, kernels="torch"), ad.NGramDrafter(), TREE, GREEDY)
    ids = torch.tensor([[5, 6, 60, 60, 60, 60, 7]])
    given = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 60).long()}[name]
    call = target.generate
    if through == "the model":
        call = functools.partial(model.generate, custom_generate=target.decode_loop)
    with pytest.raises(ValueError, match="besides its tokens would be ignored"):
        call(ids, **{name: given}, max_new_tokens=3)
    text = ids[:, :2]
    expected = greedy_reference(model, text.tolist(), max_new_tokens=3)
    assert call(text, max_new_tokens=3, do_sample=False)[0, 2:].tolist() == expected[0]


# Processors see only a sample's own tokens


class Watching(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


PROCESSED = {
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "forced_bos_token_id": {"forced_bos_token_id": 17},
    "forced_eos_token_id": {"forced_eos_token_id": 19},
    "suppress_tokens": {"suppress_tokens": [39, 18]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 40))},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(1, 50))},
    "length penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 9},
    "bad words": {"bad_words_ids": [[39], [18, 9], [5, 9]]},
    "sequence_bias": {"sequence_bias": {(8, 3): -9.0, (20,): 4.0}},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "eos_token_id": [18, 39]},
}


PARTS = {
    "lookups": lambda: (ad.NGramDrafter(), GREEDY),
    "model": lambda: (ad.LanguageModelDrafter(ragged(seed=3)), GREEDY),
    "exit": lambda: (ad.EarlyExitDrafter(ragged(), 1), GREEDY),
    "sampled": lambda: (ad.LanguageModelDrafter(ragged(seed=3)), SAMPLED),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", PROCESSED)
def test_padding_does_not_change_processed_tokens(case, parts):
    """Processors see each node with its own path, as transformers' see the text of a prompt alone.

    A prompt beside longer ones gets the same tokens as alone; greedy tokens equal those of transformers.
    """
    drafter, coupling = PARTS[parts]()
    sampled = coupling is SAMPLED
    options = NEW | PROCESSED[case] | {"do_sample": sampled}
    target = ad.SpeculativeDecoder(ragged(), drafter, TREE, coupling)
    seeds = {"seeds": [5, 6, 7]} if sampled else {}
    together = target.generate(**left_padded(PROMPTS), **options, **seeds, return_dict_in_generate=True)
    width = max(map(len, PROMPTS))
    for sample, prompt in enumerate(PROMPTS):
        own = {"seeds": [5 + sample]} if sampled else {}
        alone = target.generate(torch.tensor([prompt]), **options, **own, return_dict_in_generate=True)
        count = alone.stats.emitted[0]
        assert together.stats.emitted[sample] == count
        answer = together.sequences[sample, width : width + count].tolist()
        assert answer == alone.sequences[0, len(prompt) : len(prompt) + count].tolist()
        if not sampled:
            (expected,) = greedy_reference(ragged().model, [prompt], **(NEW | PROCESSED[case]))
            assert answer == expected[:count]
    ends = {"eos_token_id": options["eos_token_id"]}
    unprocessed = target.generate(**left_padded(PROMPTS), **(NEW | ends), do_sample=sampled, **seeds)
    assert unprocessed.tolist() != together.sequences.tolist()  # the option does something


def test_processors_and_criteria_see_no_padding():
    watching, criteria = Watching(), []
    stop = StoppingCriteriaList([lambda ids, scores: criteria.append(ids[0].tolist()) or torch.tensor([False])])
    decoder().generate(
        **left_padded(PROMPTS), **NEW, logits_processor=LogitsProcessorList([watching]), stopping_criteria=stop
    )
    for seen in (watching.seen, criteria):
        assert {tuple(next(p for p in PROMPTS if row[: len(p)] == p)) for row in seen} == set(map(tuple, PROMPTS))


class Matcher(LogitsProcessor):
    """Asserts that it sees one text, which grows by a token per call."""

    def __init__(self):
        self.length = None

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1)
        self.length = input_ids.shape[1]
        return scores


@pytest.mark.parametrize("said", [bool, lambda over: torch.tensor([over])], ids=["bool", "tensor"])
def test_criteria_may_return_a_bool_or_a_tensor(said):
    """transformers accepts both. The criterion sees a text grow token by token."""

    def over(ids, scores, **_):
        return said(ids.shape[1] >= 8)

    model = ragged().model
    expected = model.generate(IDS, **NEW, do_sample=False, stopping_criteria=StoppingCriteriaList([over]))
    found = generate(**NEW, stopping_criteria=StoppingCriteriaList([over]))
    assert expected.shape == (1, 8)
    assert torch.equal(found, expected)


def test_processors_that_follow_one_text_are_refused():
    library = type("Grammar", (Matcher,), {"__module__": "xgrammar.contrib.hf"})
    with pytest.raises(ValueError, match="xgrammar's Grammar follows one text"):
        generate(logits_processor=[library()])
    with pytest.raises(ValueError, match="Matcher did not expect a row of a draft tree"):
        decoder().generate(**left_padded(PROMPTS), max_new_tokens=4, logits_processor=[Matcher()])


# Parts of a decoder


@pytest.mark.parametrize("how", ["the model", "its forward", "a layer"])
def test_models_compiled_in_place_run_as_they_are(how):
    model = tiny()
    expected = greedy_reference(model, PROMPTS[:1], **NEW)
    if how == "the model":
        model.compile(backend="eager")
    elif how == "its forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model.model.layers[0].compile(backend="eager")
    target = ad.RaggedModel(model, kernels="torch")
    found = ad.SpeculativeDecoder(target, ad.NGramDrafter(), TREE, GREEDY).generate(IDS, **NEW)
    assert found[0, 5:].tolist() == expected[0]


def test_models_of_transformers_are_wrapped():
    model, small = tiny(), tiny(seed=3)
    expected = greedy_reference(model, PROMPTS[:1], **NEW)
    wrapped = ad.RaggedModel(small, kernels="torch")
    for drafter in (small, wrapped, ad.LanguageModelDrafter(wrapped)):
        found = ad.SpeculativeDecoder(model, drafter, TREE, SAMPLED).generate(IDS, **NEW)
        assert found[0, 5:].tolist() == expected[0]


# Weights that change behind torch's back


def test_an_unnoticed_change_of_one_element_needs_a_refresh(kernels):
    model = fusable()
    target = ad.RaggedModel(model, kernels="native")
    before = logits(target)
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 50.0  # not one of the compared elements
    assert torch.equal(logits(target), before)
    target.refresh()
    torch.testing.assert_close(logits(target), logits(plain(model)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(target), before, atol=1e-3)


def test_attributes_that_change_are_noticed():
    """Adapters are switched by attributes of their modules."""

    class Switched(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.on = base, False

        def forward(self, x):
            return self.base(x) * (-2 if self.on else 1)

    model = fusable()
    model.model.layers[0].mlp = Switched(model.model.layers[0].mlp)
    target = ad.RaggedModel(model, kernels="torch")
    before = logits(target)
    model.model.layers[0].mlp.on = True
    after = logits(target)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(after, logits(ad.RaggedModel(model, kernels="torch")))
