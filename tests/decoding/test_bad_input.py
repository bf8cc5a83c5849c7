"""What cannot work is refused early, with the cause and the fix; one bad sample does not cost the others."""

import pytest
import torch
from support.models import (
    EOS,
    PROMPTS,
    VOCAB,
    greedy_reference,
    left_padded,
    new_tokens,
    ragged,
    tiny,
    tiny_tokenizer,
)
from transformers import DynamicCache, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TextStreamer

from arbordraft import (
    IID,
    Coupling,
    DecodingError,
    EarlyExitDrafter,
    Fixed,
    LanguageModelDrafter,
    Lifted,
    Matching,
    NGramDrafter,
    RaggedModel,
    RecursiveRejection,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.decoding.engine import Engine
from arbordraft.target.cache import CacheOverflow
from arbordraft.target.hf_cache import cache_argument
from arbordraft.verifiers import KSeq

TREE = TreeTopology([-1, 0, 0, 1])
SAMPLED = Coupling(WithoutReplacement(2), TopDown(RecursiveRejection()))


def build(target=None, drafter=None, topology=TREE, coupling=SAMPLED, **options):
    target = target or ragged()
    return SpeculativeDecoder(target, drafter or LanguageModelDrafter(ragged(seed=3)), topology, coupling, **options)


# Parts that do not fit, when the decoder is built


def test_more_children_than_the_law_draws():
    with pytest.raises(ValueError, match=r"nodes with 3 children, but .* draws only 2"):
        build(topology=TreeTopology.k_ary(3, 1))


@pytest.mark.parametrize(
    ("law", "verifier"), [(WithoutReplacement(2), KSeq()), (IID(2), SpecHub()), (Fixed(2), KSeq())]
)
def test_a_verifier_that_would_change_the_law(law, verifier):
    for lift in (TopDown, Lifted):
        with pytest.raises(ValueError, match=r"not valid for children drawn by .*the output law would change"):
            Coupling(law, lift(verifier))


def test_a_rule_is_not_a_verifier():
    with pytest.raises(TypeError, match=r"wrap a rule as TopDown\(rule\) or Lifted\(rule\)"):
        Coupling(IID(2), RecursiveRejection())


def test_another_vocabulary_or_tokenizer():
    with pytest.raises(ValueError, match="53 token ids, the target 61"):
        build(drafter=LanguageModelDrafter(RaggedModel(tiny(vocab_size=53), kernels="torch")))
    other = tiny_tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(ValueError, match="other ids"):
        build(
            RaggedModel(tiny(), tiny_tokenizer(), kernels="torch"),
            LanguageModelDrafter(RaggedModel(tiny(), other, kernels="torch")),
        )


def test_the_drafter_of_another_target():
    with pytest.raises(ValueError, match="built from the target"):
        build(drafter=EarlyExitDrafter(ragged(seed=1), 1))


def test_lookups_under_a_random_law():
    with pytest.raises(ValueError, match=r"Fixed\(2\)"):
        build(drafter=NGramDrafter())


# Prompts


def test_an_empty_prompt():
    with pytest.raises(ValueError, match="at least one token"):
        build().generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt of sample 1 is empty"):
        build().generate(torch.ones(2, 3, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1], [0, 0, 0]]))


def test_ids_that_are_none():
    for ids in ([[1, VOCAB]], [[-1, 3]]):
        with pytest.raises(ValueError, match="outside the target's vocabulary of 61 tokens"):
            build().generate(torch.tensor(ids), max_new_tokens=2)


def test_padding_on_the_right():
    with pytest.raises(ValueError, match=r"sample 1 is not left-padded; set tokenizer.padding_side = 'left'"):
        build().generate(
            torch.tensor([[5, 6], [7, 0]]), attention_mask=torch.tensor([[1, 1], [1, 0]]), max_new_tokens=2
        )


def test_a_mask_of_another_shape():
    with pytest.raises(ValueError, match=r"attention_mask \[1, 3\] must match input_ids \[1, 2\]"):
        build().generate(torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 3), max_new_tokens=2)


@pytest.mark.parametrize("drafter", [None, "model"], ids=["lookups", "draft model"])
@pytest.mark.parametrize("length", [100, 128])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_more_tokens_than_positions(architecture, length, drafter):
    """128 positions, of which the last token needs none: the last one that fits is decoded, one more is refused."""
    target = ragged(architecture)
    decoder = SpeculativeDecoder(target, NGramDrafter() if drafter is None else LanguageModelDrafter(target))
    ids, new = torch.randint(3, VOCAB, (1, length)), 129 - length
    options = {"eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = target.model.generate(ids, max_new_tokens=new, do_sample=False, **options)
    assert torch.equal(decoder.generate(ids, max_new_tokens=new, do_sample=False, **options), expected)
    assert decoder.generate(ids, max_new_tokens=new, do_sample=True, seeds=[0], **options).shape == expected.shape
    assert Engine(decoder).room(length) == new
    wanted = rf"prompt of {length} tokens and {new + 1} new ones exceed the target's 128 positions"
    with pytest.raises(ValueError, match=wanted):
        decoder.generate(ids, max_new_tokens=new + 1, **options)


# Options of generate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search .*set num_beams=1"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: per-token outputs are not kept"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"seeds": [1, 2]}, "2 seeds for 1 samples"),
        ({"stop_strings": ["a"]}, r"stop_strings need a tokenizer: pass tokenizer=\.\.\."),
        ({"streamer": [TextStreamer(None), TextStreamer(None)]}, "2 streamers for 1 samples; pass a list"),
        ({"guidance_scale": 2.0}, "cannot judge the nodes of a tree"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_honoured(options, message):
    with pytest.raises(ValueError, match=message):
        build().generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, **options)


def test_one_streamer_for_several_samples():
    with pytest.raises(ValueError, match="1 streamers for 3 samples; pass a list with one per sample"):
        build().generate(**left_padded(PROMPTS), streamer=TextStreamer(None), max_new_tokens=4)


def test_a_cache_to_continue():
    ids, past = torch.tensor(PROMPTS[:1]), DynamicCache()
    with torch.no_grad():
        ragged().model(ids[:, :-1], **{cache_argument(ragged().model): past})
    with pytest.raises(ValueError, match="a cache cannot be continued: pass the whole text"):
        build().generate(ids, max_new_tokens=4, **{cache_argument(ragged().model): past})


def test_embeddings_for_tokens():
    with pytest.raises(ValueError, match="inputs_embeds are not supported"):
        build().generate(torch.tensor([[5]]), inputs_embeds=torch.zeros(1, 1, 32), max_new_tokens=4)


def test_the_generate_of_another_model():
    with pytest.raises(ValueError, match="built for another model"):
        ragged(seed=1).model.generate(torch.tensor([[5]]), custom_generate=build().decode_loop, max_new_tokens=4)


def test_a_penalty_that_skips_some_prompts_only():
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="pass one int for all samples"):
        build().generate(**left_padded(PROMPTS), logits_processor=LogitsProcessorList([penalty]), max_new_tokens=4)


# Memory


@pytest.mark.parametrize("drafter", [None, NGramDrafter()], ids=["model", "n-gram"])
def test_a_cache_that_is_too_small_is_refused_before_decoding(drafter):
    """What is let in never overflows: the smallest limit that is accepted is enough to the end."""
    coupling = Coupling(Fixed(2), TopDown(Matching())) if drafter else SAMPLED
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    enough = sum(map(len, PROMPTS)) + 3 * (30 + TREE.num_nodes)
    output = build(drafter=drafter, coupling=coupling, max_cache_tokens=enough).generate(
        **left_padded(PROMPTS), **options
    )
    assert output.shape[1] == len(PROMPTS[2]) + 30
    decoder = build(drafter=drafter, coupling=coupling, max_cache_tokens=enough - 1)
    decoder.stepper.step = pytest.fail  # nothing may be decoded
    with pytest.raises(CacheOverflow, match=rf"may hold {enough - 1} tokens .*lower max_new_tokens or decode fewer"):
        decoder.generate(**left_padded(PROMPTS), **options)


# Numbers that are none


class Spoiled(RaggedModel):
    """A target whose logits go bad for the rows that hold a certain token."""

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
    """The second prompt ends with the token that the target cannot bear; nobody else ever uses it."""
    bad = 11
    decoder = build(Spoiled(tiny(), bad, value), NGramDrafter(3, 1), coupling=Coupling(Fixed(2), TopDown(Matching())))
    expected = greedy_reference(ragged().model, PROMPTS, max_new_tokens=10)
    assert bad not in expected[0] + expected[2]
    with pytest.raises(DecodingError, match=r"sample 1: .* NaN or infinite\. The other .*see \.output") as e:
        decoder.generate(**left_padded(PROMPTS), max_new_tokens=10, **sampling)
    assert list(e.value.failures) == [1]
    found = new_tokens(e.value.output.sequences, PROMPTS, e.value.output.stats.emitted)
    assert found == [expected[0], [], expected[2]]


def test_every_sample_may_fail():
    decoder = build(Spoiled(tiny(), 11, float("nan")))
    with pytest.raises(DecodingError) as caught:
        decoder.generate(torch.tensor([[11], [11]]), max_new_tokens=5, do_sample=False)
    assert list(caught.value.failures) == [0, 1]
    assert caught.value.output.sequences.tolist() == [[11], [11]]


def test_a_banned_token_is_no_failure():
    """-inf is how a token is banned."""
    ids = torch.tensor(PROMPTS[:1])
    output = build(Spoiled(tiny(), 5, float("-inf"))).generate(ids, max_new_tokens=5, do_sample=False)
    assert output.shape[1] > ids.shape[1]


def test_a_batch_whose_samples_end_at_different_times():
    plain = greedy_reference(ragged().model, PROMPTS, max_new_tokens=9, eos_token_id=None)
    ends = [tokens[at] for tokens, at in zip(plain, (0, 4, 8), strict=True)]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": ends, "pad_token_id": EOS}
    output = build().generate(**left_padded(PROMPTS), return_dict_in_generate=True, **options)
    del options["do_sample"]
    assert new_tokens(output.sequences, PROMPTS, output.stats.emitted) == greedy_reference(
        ragged().model, PROMPTS, **options
    )
    assert len(set(output.stats.emitted)) == 3
    assert (output.stats.pad_rows, output.stats.pad_keys) == (0, 0)
