"""What a caller can get wrong in Python: every line ends in the right result or in an error that names the argument."""

import functools

import numpy as np
import pytest
import torch
from support.models import PROMPTS, VOCAB, greedy_reference, left_padded, ragged, tiny, tiny_tokenizer
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from arbordraft import (
    IID,
    CostTable,
    Coupling,
    Fixed,
    LanguageModelDrafter,
    Lifted,
    Matching,
    NGramDrafter,
    NoDrafter,
    RaggedModel,
    RecursiveRejection,
    SpeculativeDecoder,
    TopDown,
    TreeTopology,
)
from arbordraft.target.hf_cache import cache_argument

pytestmark = pytest.mark.timeout(60)

TREE = TreeTopology([-1, 0, 0, 1])
GREEDY = Coupling(Fixed(2), TopDown(Matching()))
SAMPLED = Coupling(IID(2), Lifted(RecursiveRejection()))
IDS = torch.tensor([PROMPTS[0]])
NEW = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def decoder():
    return SpeculativeDecoder(ragged(), NGramDrafter(), TREE, GREEDY)


def generate(ids=IDS, **options):
    return decoder().generate(ids, **{"max_new_tokens": 4, **options})


def refused(kind, match, call):
    with pytest.raises(kind, match=match):
        call()


# What is decoded

PROMPT_CASES = {
    "list": ([[5, 6]], TypeError, r"input_ids must be a tensor .*got a list: pass torch\.tensor"),
    "flat list": ([5, 6], TypeError, "input_ids must be a tensor"),
    "numpy": (np.array([[5, 6]]), TypeError, "input_ids must be a tensor .*got a ndarray"),
    "text": ("hello", TypeError, "input_ids must be a tensor .*got a str; a tokenizer makes them of text"),
    "a batch encoding": ({"input_ids": IDS}, TypeError, "input_ids must be a tensor .*got a dict"),
    "float": (IDS.float(), TypeError, r"input_ids must hold token ids, whole numbers, got torch\.float32"),
    "bool": (IDS.bool(), TypeError, r"whole numbers, got torch\.bool"),
    "complex": (IDS.to(torch.complex64), TypeError, r"whole numbers, got torch\.complex64"),
    "no batch": (IDS[0], ValueError, r"input_ids must be \[batch, length\]"),
    "three dimensions": (IDS[None], ValueError, r"input_ids must be \[batch, length\].*\[1, 1, 5\]"),
    "empty": (IDS[:, :0], ValueError, "at least one token"),
    "no samples": (IDS[:0], ValueError, "at least one token"),
    "negative": (-IDS, ValueError, "outside the target's vocabulary of 61"),
    "beyond": (IDS + VOCAB, ValueError, "outside the target's vocabulary of 61"),
}


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_prompts(case):
    ids, kind, match = PROMPT_CASES[case]
    refused(kind, match, lambda: generate(ids))


MASK_CASES = {
    "list": ([[1] * 5], TypeError, "attention_mask must be a tensor, got a list"),
    "numpy": (np.ones((1, 5)), TypeError, "attention_mask must be a tensor, got a ndarray"),
    "half": (torch.full((1, 5), 0.5), ValueError, "1 for tokens and 0 for padding"),
    "negative": (-torch.ones(1, 5), ValueError, "1 for tokens and 0 for padding"),
    "NaN": (torch.full((1, 5), torch.nan), ValueError, "1 for tokens and 0 for padding"),
    "two": (torch.full((1, 5), 2), ValueError, "1 for tokens and 0 for padding"),
    "additive": (torch.zeros(1, 1, 5, 5), ValueError, r"attention_mask \[1, 1, 5, 5\] must match"),
    "another length": (torch.ones(1, 4), ValueError, r"attention_mask \[1, 4\] must match"),
    "all padding": (torch.zeros(1, 5), ValueError, "prompt of sample 0 is empty"),
    "right": (torch.tensor([[1, 1, 1, 1, 0]]), ValueError, "not left-padded"),
    "a hole": (torch.tensor([[1, 1, 0, 1, 1]]), ValueError, "not left-padded"),
}


@pytest.mark.parametrize("case", MASK_CASES)
def test_masks(case):
    mask, kind, match = MASK_CASES[case]
    refused(kind, match, lambda: generate(attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_masks_that_say_the_same(dtype):
    inputs = left_padded(PROMPTS)
    expected = decoder().generate(**inputs, **NEW)
    found = decoder().generate(inputs["input_ids"], attention_mask=inputs["attention_mask"].to(dtype), **NEW)
    assert torch.equal(found, expected)


def test_ids_of_32_bits():
    assert torch.equal(generate(IDS.int()), generate())


# How it is decoded

OPTION_CASES = {
    "generation_config as dict": ({"generation_config": {"top_k": 1}}, TypeError, "generation_config .*got a dict"),
    "generation_config as path": ({"generation_config": "folder"}, TypeError, r"GenerationConfig\.from_pretrained"),
    "top_p=2": ({"top_p": 2.0, "do_sample": True}, ValueError, "top_p must be a number from 0 to 1, got 2.0"),
    "top_p in a config": (
        {"generation_config": GenerationConfig(top_p=0.5, typical_p=7.0, do_sample=True)},
        ValueError,
        "typical_p",
    ),
    "top_p=NaN": ({"top_p": float("nan"), "do_sample": True}, ValueError, "top_p must be a number"),
    "top_k=2.5": ({"top_k": 2.5, "do_sample": True}, TypeError, "top_k must be a whole number"),
    "top_k=-1": ({"top_k": -1, "do_sample": True}, ValueError, "top_k must be a whole number"),
    "min_p=2": ({"min_p": 2.0, "do_sample": True}, ValueError, "min_p"),
    "typical_p=2": ({"typical_p": 2.0, "do_sample": True}, ValueError, "typical_p"),
    "epsilon_cutoff=3": ({"epsilon_cutoff": 3.0, "do_sample": True}, ValueError, "epsilon_cutoff"),
    "temperature=-1": ({"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
    "temperature=NaN": ({"temperature": float("nan"), "do_sample": True}, ValueError, "temperature"),
    "temperature=inf": ({"temperature": float("inf"), "do_sample": True}, ValueError, "temperature"),
    "temperature as text": ({"temperature": "hot", "do_sample": True}, TypeError, "temperature must be a number"),
    "repetition_penalty=1e308": ({"repetition_penalty": 1e308}, ValueError, "repetition_penalty must be a number from"),
    "temperature=1e308": ({"temperature": 1e308}, ValueError, "temperature must be at most 1e6"),
    "sequence_bias=1e308": ({"sequence_bias": {(5,): 1e308}}, ValueError, "sequence_bias"),
    "repetition_penalty=0": ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be above 0"),
    "max_new_tokens=1.5": ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be a whole number"),
    "max_new_tokens=-1": ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be a whole number"),
    "max_new_tokens=True": ({"max_new_tokens": True}, TypeError, "max_new_tokens must be a whole number"),
    "max_new_tokens as text": ({"max_new_tokens": "8"}, TypeError, "max_new_tokens must be a whole number"),
    "float seeds": ({"seeds": [1.5], "do_sample": True}, TypeError, "seed must be a whole number"),
    "seeds that are text": ({"seeds": ["1"], "do_sample": True}, TypeError, "seed must be a whole number"),
    "boolean seeds": ({"seeds": [True], "do_sample": True}, TypeError, "seed must be a whole number"),
    "negative seeds": ({"seeds": [-1], "do_sample": True}, ValueError, "seed must be a whole number"),
    "seeds of 65 bits": ({"seeds": [2**64], "do_sample": True}, ValueError, "seed must be a whole number"),
    "one seed": ({"seeds": 3, "do_sample": True}, TypeError, "seeds must be a list of numbers"),
    "too many seeds": ({"seeds": [1, 2], "do_sample": True}, ValueError, "2 seeds for 1 samples"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, ValueError, "penalty_alpha asks for another way"),
    "dola_layers": ({"dola_layers": "high"}, ValueError, "dola_layers asks for another way"),
    "assistant_model": ({"assistant_model": tiny(seed=3)}, ValueError, "assistant_model asks for another way"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens asks for another way"),
    "force_words_ids": ({"force_words_ids": [[5]], "num_beams": 2}, ValueError, "force_words_ids asks for another way"),
    "negative prompt": ({"negative_prompt_ids": IDS}, ValueError, "negative_prompt_ids asks for another way"),
    "beams": ({"num_beams": 3}, ValueError, "set num_beams=1"),
    "cache_implementation": ({"cache_implementation": "static"}, ValueError, "cache_implementation cannot be chosen"),
    "use_cache=False": ({"use_cache": False}, ValueError, "use_cache=False cannot be honoured"),
    "position_ids": ({"position_ids": torch.arange(5)[None] + 3}, ValueError, "position_ids must number"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(1, 5, 32)}, ValueError, "inputs_embeds"),
    "unknown": ({"colour": "blue"}, ValueError, "colour"),
    "streamer": ({"streamer": object()}, TypeError, r"streamer must have put\(\) and end\(\)"),
    "streamers": ({"streamer": [None]}, TypeError, r"streamer must have put\(\) and end\(\)"),
    "guidance": ({"guidance_scale": 2.0}, ValueError, "cannot judge the nodes of a tree"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, ValueError, "output_scores"),
    "no processor": ({"logits_processor": LogitsProcessorList([3])}, TypeError, "function of input_ids and scores"),
}


@pytest.mark.parametrize("options", [{"max_new_tokens": 3.0}, {"max_length": 8.0, "max_new_tokens": None}], ids=str)
def test_lengths_may_be_whole_floats(options):
    """As arithmetic gives them, and transformers takes them."""
    whole = {name: value and int(value) for name, value in options.items()}
    assert generate(**options).tolist() == generate(**whole).tolist()


@pytest.mark.parametrize("case", OPTION_CASES)
def test_options(case):
    options, kind, match = OPTION_CASES[case]
    refused(kind, match, lambda: generate(**options))


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


def test_a_model_whose_own_settings_name_a_cache():
    """Some checkpoints ask for a cache by default; only a caller's wish is refused."""
    model = tiny()
    expected = greedy_reference(model, PROMPTS[:1], max_new_tokens=4)
    model.generation_config.use_cache = False
    found = SpeculativeDecoder(model, NGramDrafter(), TREE, GREEDY).generate(IDS, max_new_tokens=4)
    assert found[0, 5:].tolist() == expected[0]


@pytest.mark.parametrize("through", ["the decoder", "the model"])
@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids"])
def test_images_are_not_ignored(name, through):
    model = tiny("gemma3")
    target = SpeculativeDecoder(RaggedModel(model, kernels="torch"), NGramDrafter(), TREE, GREEDY)
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


# Processors are told a sample's own tokens


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
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 40))},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(1, 50))},
    "length penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 9},
    "bad words": {"bad_words_ids": [[5, 9], [11], [8]]},
    "sequence_bias": {"sequence_bias": {(8, 3): -9.0, (20,): 4.0}},
}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", PROCESSED)
def test_padding_is_none_of_a_processors_business(case, sampled):
    """What a prompt gets beside longer ones is what it gets alone; greedily that is what transformers says."""
    options = NEW | PROCESSED[case] | {"do_sample": sampled}
    coupling, drafter = (SAMPLED, LanguageModelDrafter(ragged(seed=3))) if sampled else (GREEDY, NGramDrafter())
    target = SpeculativeDecoder(ragged(), drafter, TREE, coupling)
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


def test_processors_and_criteria_see_no_padding():
    watching, criteria = Watching(), []
    stop = StoppingCriteriaList([lambda ids, scores: criteria.append(ids[0].tolist()) or torch.tensor([False])])
    decoder().generate(
        **left_padded(PROMPTS), **NEW, logits_processor=LogitsProcessorList([watching]), stopping_criteria=stop
    )
    for seen in (watching.seen, criteria):
        assert {tuple(next(p for p in PROMPTS if row[: len(p)] == p)) for row in seen} == set(map(tuple, PROMPTS))


class Matcher(LogitsProcessor):
    """Follows one text and asserts that it does."""

    def __init__(self):
        self.length = None

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1)
        self.length = input_ids.shape[1]
        return scores


@pytest.mark.parametrize("said", [bool, lambda over: torch.tensor([over])], ids=["bool", "tensor"])
def test_criteria_that_say_whether_to_stop_as_they_like(said):
    """As transformers takes them; it sees a text grow token by token."""

    def over(ids, scores, **_):
        return said(ids.shape[1] >= 8)

    model = ragged().model
    expected = model.generate(IDS, **NEW, do_sample=False, stopping_criteria=StoppingCriteriaList([over]))
    found = generate(**NEW, stopping_criteria=StoppingCriteriaList([over]))
    assert expected.shape == (1, 8)
    assert torch.equal(found, expected)


def test_processors_that_follow_one_text():
    library = type("Grammar", (Matcher,), {"__module__": "xgrammar.contrib.hf"})
    refused(ValueError, "xgrammar's Grammar follows one text", lambda: generate(logits_processor=[library()]))
    with pytest.raises(ValueError, match="Matcher did not expect a row of a draft tree"):
        decoder().generate(**left_padded(PROMPTS), max_new_tokens=4, logits_processor=[Matcher()])


# Parts of a decoder


def compiled():
    return torch.compile(tiny())


def on_meta():
    with torch.device("meta"):
        return tiny()


MODEL_CASES = {
    "nothing": (lambda: None, TypeError, "model must be a causal LM of transformers .*got NoneType"),
    "a name": (lambda: "smollm2", TypeError, "model must be a causal LM .*got str"),
    "any module": (lambda: nn.Linear(2, 2), TypeError, "model must be a causal LM .*got Linear"),
    "a wrapped model": (lambda: ragged(), TypeError, "RaggedModel already"),
    "a base model": (lambda: AutoModel.from_config(tiny().config).eval(), TypeError, "no language-model head"),
    "a classifier": (
        lambda: AutoModelForSequenceClassification.from_config(tiny().config).eval(),
        TypeError,
        "no language-model head.*AutoModelForCausalLM",
    ),
    "a compiled model": (compiled, TypeError, r"compiled by torch\.compile.*buckets="),
    "the meta device": (on_meta, ValueError, "meta device, which holds no numbers"),
    "training mode": (lambda: tiny().train(), ValueError, r"model\.eval\(\)"),
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_models(case):
    make, kind, match = MODEL_CASES[case]
    refused(kind, match, lambda: RaggedModel(make(), kernels="torch"))


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
    found = SpeculativeDecoder(RaggedModel(model, kernels="torch"), NGramDrafter(), TREE, GREEDY).generate(IDS, **NEW)
    assert found[0, 5:].tolist() == expected[0]


PARTS = {"target": ragged, "drafter": NGramDrafter, "topology": lambda: TREE, "coupling": lambda: GREEDY}
PART_CASES = {
    "no target": ({"target": None}, "model must be a causal LM"),
    "no drafter": ({"drafter": None}, "drafter must be of type Drafter, got None"),
    "a drafter's class": ({"drafter": NGramDrafter}, "drafter must be of type Drafter"),
    "a drafter's name": ({"drafter": "ngram"}, "drafter must be of type Drafter, got 'ngram'"),
    "a list of parents": ({"topology": [-1, 0]}, "topology must be of type TreeTopology"),
    "a law": ({"coupling": Fixed(2)}, "coupling must be of type Coupling"),
    "a decider's name": ({"decider": "confidence"}, "decider must be of type Decider"),
    "costs for a decider": ({"decider": CostTable((1,), (1.0,))}, "decider must be of type Decider"),
    "costs beside a decider": ({"costs": CostTable((1,), (1.0,))}, "unexpected keyword argument 'costs'"),
    "half a token": ({"max_cache_tokens": 1.5}, "max_cache_tokens must be a whole number"),
    "true tokens": ({"max_cache_tokens": True}, "max_cache_tokens must be a whole number"),
    "half a bucket": ({"buckets": (8.5,)}, "bucket"),
    "half a batch": ({"expected_batch": 1.5}, "expected_batch must be a whole number"),
}


@pytest.mark.parametrize("case", PART_CASES)
def test_parts(case):
    given, match = PART_CASES[case]
    parts = {name: make() for name, make in PARTS.items()} | given
    refused(TypeError, match, lambda: SpeculativeDecoder(**parts))


@pytest.mark.parametrize("tokens", [0, -5])
def test_a_cache_of_no_tokens(tokens):
    refused(
        ValueError,
        "max_cache_tokens must be a whole number of at least 1",
        lambda: SpeculativeDecoder(ragged(), NoDrafter(), TreeTopology.chain(0), GREEDY, max_cache_tokens=tokens),
    )


def test_models_of_transformers_are_wrapped():
    model, small = tiny(), tiny(seed=3)
    expected = greedy_reference(model, PROMPTS[:1], **NEW)
    coupling = Coupling(IID(2), Lifted(RecursiveRejection()))
    for drafter in (
        small,
        RaggedModel(small, kernels="torch"),
        LanguageModelDrafter(RaggedModel(small, kernels="torch")),
    ):
        found = SpeculativeDecoder(model, drafter, TREE, coupling).generate(IDS, **NEW)
        assert found[0, 5:].tolist() == expected[0]


# Weights that change behind torch's back


def through_data(weight):
    weight.data.mul_(-1.5)


def through_numpy(weight):
    array = weight.detach().numpy()
    array *= -1.5


def in_inference_mode(weight):
    with torch.inference_mode():
        weight.mul_(-1.5)


def by_low_rank(weight):
    """What PEFT's merge_adapter() does."""
    weight.data += 0.5 * torch.ones(weight.shape[0], 1) @ torch.ones(1, weight.shape[1])


@pytest.mark.parametrize("change", [through_data, through_numpy, in_inference_mode, by_low_rank])
def test_hidden_changes_are_noticed(change, kernels):
    from support.prepacked_models import logits, plain, small

    model = small()
    target = RaggedModel(model, kernels="native")
    before = logits(target)
    change(model.model.layers[1].mlp.down_proj.weight)
    with pytest.warns(UserWarning, match="changed after they were prepacked"):
        found = logits(target)
    torch.testing.assert_close(found, logits(plain(model)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, atol=1e-3)


def test_one_hidden_element_calls_for_refresh(kernels):
    from support.prepacked_models import logits, plain, small

    model = small()
    target = RaggedModel(model, kernels="native")
    before = logits(target)
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 50.0  # none of the few that are compared
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

    from support.prepacked_models import logits, small

    model = small()
    model.model.layers[0].mlp = Switched(model.model.layers[0].mlp)
    target = RaggedModel(model, kernels="torch")
    before = logits(target)
    model.model.layers[0].mlp.on = True
    after = logits(target)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(after, logits(RaggedModel(model, kernels="torch")))


def test_a_tokenizer_is_no_tree():
    refused(TypeError, "topology must be of type", lambda: SpeculativeDecoder(ragged(), NGramDrafter(),
                                                                             tiny_tokenizer(), GREEDY))  # fmt: skip
