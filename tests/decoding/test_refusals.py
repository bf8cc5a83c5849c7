"""Calls that cannot work are refused early, with the cause and the fix; a bad sample does not affect the others."""

import functools

import numpy as np
import pytest
import torch
from support.models import PROMPTS, VOCAB, greedy_reference, left_padded, new_tokens, ragged, tiny, tiny_tokenizer
from support.refusals import check_refusal, refusals
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TextStreamer,
)

import arbordraft as ad
from arbordraft.checkpoints.vocabulary import TokenizerMismatch
from arbordraft.decoding.engine import Engine
from arbordraft.target.cache import CacheOverflow
from arbordraft.target.hf_cache import cache_argument

pytestmark = pytest.mark.timeout(60)

TREE = ad.TreeTopology([-1, 0, 0, 1])
GREEDY = ad.Coupling.matching(2)
SAMPLED = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
IDS = torch.tensor([PROMPTS[0]])
NAN, INF = float("nan"), float("inf")


def build(**parts):
    """Builds a decoder of fitting parts, except for those that are given."""
    fitting = {"target": ragged(), "drafter": ad.LanguageModelDrafter(ragged(seed=3)), "topology": TREE}
    return ad.SpeculativeDecoder(**fitting | {"coupling": SAMPLED} | parts)


@functools.cache
def decoder():
    return build(drafter=ad.NGramDrafter(), coupling=GREEDY)


def generate(input_ids=IDS, **options):
    return decoder().generate(input_ids, **{"max_new_tokens": 4, **options})


def on_meta():
    with torch.device("meta"):
        return tiny()


def with_tokenizer(*more):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(more))
    return ad.RaggedModel(tiny(), tokenizer, kernels="torch")


def continued():
    """Returns a cache of transformers with all of a prompt but its last token."""
    past, model = DynamicCache(), ragged().model
    with torch.no_grad():
        model(IDS[:, :-1], **{cache_argument(model): past})
    return {cache_argument(model): past}


def some_ignored():
    return RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([0, 1, 0]))


MODELS = [
    (lambda: ad.RaggedModel(None), TypeError, "model must be a causal LM of transformers .*got NoneType"),
    (lambda: ad.RaggedModel("smollm2"), TypeError, "model must be a causal LM .*got str"),
    (lambda: ad.RaggedModel(nn.Linear(2, 2)), TypeError, "model must be a causal LM .*got Linear"),
    (lambda: ad.RaggedModel(ragged()), TypeError, "RaggedModel already"),
    (lambda: ad.RaggedModel(AutoModel.from_config(tiny().config).eval()), TypeError, "no language-model head"),
    (
        lambda: ad.RaggedModel(AutoModelForSequenceClassification.from_config(tiny().config).eval()),
        TypeError,
        "no language-model head.*AutoModelForCausalLM",
    ),
    (lambda: ad.RaggedModel(torch.compile(tiny())), TypeError, r"compiled by torch\.compile.*buckets="),
    (lambda: ad.RaggedModel(on_meta()), ValueError, "meta device, which holds no numbers"),
    (lambda: ad.RaggedModel(tiny().train()), ValueError, r"model\.eval\(\)"),
]
PARTS = [
    (lambda: build(target=None), TypeError, "model must be a causal LM"),
    (lambda: build(drafter=None), TypeError, "drafter must be of type Drafter, got None"),
    (lambda: build(drafter=ad.NGramDrafter), TypeError, "drafter must be of type Drafter"),
    (lambda: build(drafter="ngram"), TypeError, "drafter must be of type Drafter, got 'ngram'"),
    (lambda: build(topology=[-1, 0]), TypeError, "topology must be of type TreeTopology"),
    (lambda: build(coupling=ad.Fixed(2)), TypeError, "coupling must be of type Coupling"),
    (lambda: build(decider="confidence"), TypeError, "decider must be of type Decider"),
    (lambda: build(max_cache_tokens=1.5), TypeError, "max_cache_tokens must be a whole number"),
    (lambda: build(max_cache_tokens=True), TypeError, "max_cache_tokens must be a whole number"),
    (lambda: build(buckets=(8.5,)), TypeError, "bucket"),
    (lambda: build(max_cache_tokens=0), ValueError, "max_cache_tokens must be a whole number of at least 1"),
    (lambda: build(topology=ad.TreeTopology.k_ary(3, 1)), ValueError, r"nodes with 3 children, but .* draws only 2"),
    (
        lambda: build(drafter=ad.LanguageModelDrafter(ad.RaggedModel(tiny(vocab_size=53)))),
        ValueError,
        "53 token ids, the target 61",
    ),
    (
        lambda: build(target=with_tokenizer(), drafter=ad.LanguageModelDrafter(with_tokenizer("another"))),
        TokenizerMismatch,
        "other ids",
    ),
    (lambda: build(drafter=ad.EarlyExitDrafter(ragged(seed=1), 1)), ValueError, "built from the target"),
    (lambda: build(drafter=ad.NGramDrafter()), ValueError, r"Fixed\(2\)"),
]
INPUTS = [
    (lambda: generate([[5, 6]]), TypeError, r"input_ids must be a tensor .*got a list: pass torch\.tensor"),
    (lambda: generate([5, 6]), TypeError, "input_ids must be a tensor"),
    (lambda: generate(np.array([[5, 6]])), TypeError, "input_ids must be a tensor .*got a ndarray"),
    (lambda: generate("hello"), TypeError, "input_ids must be a tensor .*got a str; a tokenizer makes them of text"),
    (lambda: generate({"input_ids": IDS}), TypeError, "input_ids must be a tensor .*got a dict"),
    (lambda: generate(IDS.float()), TypeError, r"input_ids must hold token ids, whole numbers, got torch\.float32"),
    (lambda: generate(IDS.bool()), TypeError, r"whole numbers, got torch\.bool"),
    (lambda: generate(IDS.to(torch.complex64)), TypeError, r"whole numbers, got torch\.complex64"),
    (lambda: generate(IDS[0]), ValueError, r"input_ids must be \[batch, length\]"),
    (lambda: generate(IDS[None]), ValueError, r"input_ids must be \[batch, length\].*\[1, 1, 5\]"),
    (lambda: generate(IDS[:, :0]), ValueError, "at least one token"),
    (lambda: generate(IDS[:0]), ValueError, "at least one token"),
    (lambda: generate(-IDS), ValueError, "outside the target's vocabulary of 61"),
    (lambda: generate(IDS + VOCAB), ValueError, "outside the target's vocabulary of 61"),
    (lambda: generate(attention_mask=[[1] * 5]), TypeError, "attention_mask must be a tensor, got a list"),
    (lambda: generate(attention_mask=np.ones((1, 5))), TypeError, "attention_mask must be a tensor, got a ndarray"),
    (lambda: generate(attention_mask=torch.full((1, 5), 0.5)), ValueError, "1 for tokens and 0 for padding"),
    (lambda: generate(attention_mask=-torch.ones(1, 5)), ValueError, "1 for tokens and 0 for padding"),
    (lambda: generate(attention_mask=torch.full((1, 5), torch.nan)), ValueError, "1 for tokens and 0 for padding"),
    (lambda: generate(attention_mask=torch.full((1, 5), 2)), ValueError, "1 for tokens and 0 for padding"),
    (lambda: generate(attention_mask=torch.zeros(1, 1, 5, 5)), ValueError, r"attention_mask \[1, 1, 5, 5\] must match"),
    (lambda: generate(attention_mask=torch.ones(1, 4)), ValueError, r"attention_mask \[1, 4\] must match"),
    (lambda: generate(attention_mask=torch.tensor([[1, 1, 1, 1, 0]])), ValueError, "not left-padded"),
    (lambda: generate(attention_mask=torch.tensor([[1, 1, 0, 1, 1]])), ValueError, "not left-padded"),
    (
        lambda: generate(torch.ones(2, 3).long(), attention_mask=torch.tensor([[0, 1, 1], [0, 0, 0]])),
        ValueError,
        "prompt of sample 1 is empty",
    ),
    (lambda: generate(**continued()), ValueError, "a cache cannot be continued: pass the whole text"),
]
OPTIONS = [
    (lambda: generate(generation_config={"top_k": 1}), TypeError, "generation_config .*got a dict"),
    (lambda: generate(generation_config="folder"), TypeError, r"GenerationConfig\.from_pretrained"),
    (lambda: generate(top_p=2.0, do_sample=True), ValueError, "top_p must be a number from 0 to 1, got 2.0"),
    (
        lambda: generate(generation_config=GenerationConfig(top_p=0.5, typical_p=7.0, do_sample=True)),
        ValueError,
        "typical_p",
    ),
    (lambda: generate(top_k=2.5, do_sample=True), TypeError, "top_k must be a whole number"),
    (lambda: generate(top_k=-1, do_sample=True), ValueError, "top_k must be a whole number"),
    (lambda: generate(min_p=2.0, do_sample=True), ValueError, "min_p"),
    (lambda: generate(typical_p=2.0, do_sample=True), ValueError, "typical_p"),
    (lambda: generate(epsilon_cutoff=3.0, do_sample=True), ValueError, "epsilon_cutoff"),
    (lambda: generate(temperature=-1.0, do_sample=True), ValueError, "temperature"),
    (lambda: generate(temperature=float("inf"), do_sample=True), ValueError, "temperature"),
    (lambda: generate(temperature="hot", do_sample=True), TypeError, "temperature must be a number"),
    (lambda: generate(repetition_penalty=1e308), ValueError, "repetition_penalty must be a number from"),
    (lambda: generate(temperature=1e308), ValueError, "temperature must be at most 1e6"),
    (lambda: generate(sequence_bias={(5,): 1e308}), ValueError, "sequence_bias"),
    (lambda: generate(repetition_penalty=0.0), ValueError, "repetition_penalty must be above 0"),
    (lambda: generate(max_new_tokens=1.5), TypeError, "max_new_tokens must be a whole number"),
    (lambda: generate(max_new_tokens=-1), ValueError, "max_new_tokens must be a whole number"),
    (lambda: generate(max_new_tokens=True), TypeError, "max_new_tokens must be a whole number"),
    (lambda: generate(seeds=[1.5], do_sample=True), TypeError, "seed must be a whole number"),
    (lambda: generate(seeds=[-1], do_sample=True), ValueError, "seed must be a whole number"),
    (lambda: generate(seeds=[2**64], do_sample=True), ValueError, "seed must be a whole number"),
    (lambda: generate(seeds=3, do_sample=True), TypeError, "seeds must be a list of numbers"),
    (lambda: generate(seeds=[1, 2], do_sample=True), ValueError, "2 seeds for 1 samples"),
    (lambda: generate(assistant_model=tiny(seed=3)), ValueError, "assistant_model asks for another way"),
    (lambda: generate(negative_prompt_ids=IDS), ValueError, "negative_prompt_ids asks for another way"),
    (lambda: generate(num_beams=3), ValueError, "set num_beams=1"),
    (lambda: generate(position_ids=torch.arange(5)[None] + 3), ValueError, "position_ids must number"),
    (lambda: generate(inputs_embeds=torch.zeros(1, 5, 32)), ValueError, "inputs_embeds"),
    (lambda: generate(colour="blue"), ValueError, "colour"),
    (lambda: generate(streamer=object()), TypeError, r"streamer must have put\(\) and end\(\)"),
    (lambda: generate(guidance_scale=2.0), ValueError, "cannot judge the nodes of a tree"),
    (lambda: generate(logits_processor=LogitsProcessorList([3])), TypeError, "function of input_ids and scores"),
    (lambda: generate(stop_strings=["a"]), ValueError, r"stop_strings need a tokenizer: pass tokenizer=\.\.\."),
    (lambda: generate(streamer=[TextStreamer(None)] * 2), ValueError, "2 streamers for 1 samples; pass a list"),
    (
        lambda: generate(**left_padded(PROMPTS), streamer=TextStreamer(None)),
        ValueError,
        "1 streamers for 3 samples; pass a list with one per sample",
    ),
    (
        lambda: generate(**left_padded(PROMPTS), logits_processor=LogitsProcessorList([some_ignored()])),
        ValueError,
        "pass one int for all samples",
    ),
    (
        lambda: ragged(seed=1).model.generate(IDS, custom_generate=decoder().decode_loop),
        ValueError,
        "built for another model",
    ),
]


@refusals(*MODELS, *PARTS, *INPUTS, *OPTIONS)
def test_invalid_arguments_are_named(call, error, words):
    check_refusal(call, error, words)


# Positions


@pytest.mark.parametrize("drafter", [None, "model"], ids=["lookups", "draft model"])
@pytest.mark.parametrize("length", [100, 128])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_more_tokens_than_positions_are_refused(architecture, length, drafter):
    """The last token needs none of the 128 positions: 129 tokens are decoded, and one more is refused."""
    target = ragged(architecture)
    decoder = ad.SpeculativeDecoder(target, ad.NGramDrafter() if drafter is None else ad.LanguageModelDrafter(target))
    ids, new = torch.randint(3, VOCAB, (1, length)), 129 - length
    options = {"eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = target.model.generate(ids, max_new_tokens=new, do_sample=False, **options)
    assert torch.equal(decoder.generate(ids, max_new_tokens=new, do_sample=False, **options), expected)
    assert decoder.generate(ids, max_new_tokens=new, do_sample=True, seeds=[0], **options).shape == expected.shape
    assert Engine(decoder).room(length) == new
    wanted = rf"prompt of {length} tokens and {new + 1} new ones exceed the target's 128 positions"
    with pytest.raises(ValueError, match=wanted):
        decoder.generate(ids, max_new_tokens=new + 1, **options)


# Memory


@pytest.mark.parametrize("parts", [{}, {"drafter": ad.NGramDrafter(), "coupling": GREEDY}], ids=["model", "n-gram"])
def test_a_cache_that_is_too_small_is_refused_before_decoding(parts):
    """A batch that is let in never overflows: the smallest accepted limit is enough to the end."""
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    enough = sum(map(len, PROMPTS)) + 3 * (30 + TREE.num_nodes)
    output = build(**parts, max_cache_tokens=enough).generate(**left_padded(PROMPTS), **options)
    assert output.shape[1] == len(PROMPTS[2]) + 30
    decoder = build(**parts, max_cache_tokens=enough - 1)
    decoder.stepper.step = pytest.fail  # nothing may be decoded
    with pytest.raises(CacheOverflow, match=rf"may hold {enough - 1} tokens .*lower max_new_tokens or decode fewer"):
        decoder.generate(**left_padded(PROMPTS), **options)


# NaN and infinite logits


class Spoiled(ad.RaggedModel):
    """A target with one bad logit in every row that holds a certain token."""

    def __init__(self, model, token, value):
        super().__init__(model, self_test=False)
        self.token, self.value = token, value

    def run(self, tokens, batch, cache, rows=None, *others, **options):
        logits, hidden = super().run(tokens, batch, cache, rows, *others, **options)
        if rows is None:
            logits = logits.clone()
            logits[tokens == self.token, 7] = self.value
        return logits, hidden


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_failing_sample_leaves_the_others_complete(value, sampling):
    """The second prompt ends with the token that spoils logits; the other samples never use it."""
    bad = 11
    decoder = build(target=Spoiled(tiny(), bad, value), drafter=ad.NGramDrafter(3, 1), coupling=GREEDY)
    expected = greedy_reference(ragged().model, PROMPTS, max_new_tokens=10)
    assert bad not in expected[0] + expected[2]
    with pytest.raises(ad.DecodingError, match=r"sample 1: .* NaN or infinite\. The other .*see \.output") as e:
        decoder.generate(**left_padded(PROMPTS), max_new_tokens=10, **sampling)
    assert list(e.value.failures) == [1]
    found = new_tokens(e.value.output.sequences, PROMPTS, e.value.output.stats.emitted)
    assert found == [expected[0], [], expected[2]]


def test_every_sample_may_fail():
    decoder = build(target=Spoiled(tiny(), 11, float("nan")))
    with pytest.raises(ad.DecodingError) as caught:
        decoder.generate(torch.tensor([[11], [11]]), max_new_tokens=5, do_sample=False)
    assert list(caught.value.failures) == [0, 1]
    assert caught.value.output.sequences.tolist() == [[11], [11]]


def test_a_banned_token_is_no_failure():
    """A logit of -inf bans its token."""
    ids = torch.tensor(PROMPTS[:1])
    output = build(target=Spoiled(tiny(), 5, float("-inf"))).generate(ids, max_new_tokens=5, do_sample=False)
    assert output.shape[1] > ids.shape[1]
