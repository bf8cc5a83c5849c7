"""generate() as Hugging Face users know it: same arguments, same results."""

import math
from functools import cache

import pytest
import torch
from support.models import EOS, PROMPTS, generated, greedy_reference, left_padded, new_tokens, ragged, tiny_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import arbordraft as ad
from arbordraft.deciders import FixedDepth
from arbordraft.decoding import drafting
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.verifiers import KSeq, OptimalTransport, TopTailRule, TypicalAcceptance

CHAIN, TREE = ad.TreeTopology.chain(3), ad.TreeTopology([-1, 0, 0, 1, 1, 2, 3])
COUPLINGS = {
    "iid recursive": ad.Coupling(ad.IID(2), ad.TopDown(ad.RecursiveRejection())),
    "iid k-seq": ad.Coupling(ad.IID(2), ad.TopDown(KSeq())),
    "iid k-seq lifted": ad.Coupling(ad.IID(2), ad.Lifted(KSeq())),
    "wor recursive": ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection())),
    "wor recursive lifted": ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection())),
    "wor transport": ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(OptimalTransport())),
    "top-tail": ad.Coupling(ad.TopTail(1, 1), ad.Lifted(TopTailRule())),
    "spechub": ad.Coupling(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub())),
    "spechub paper": ad.Coupling(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub(order="paper"))),
    "fixed matching": ad.Coupling.matching(2),
    "fixed recursive lifted": ad.Coupling(ad.Fixed(2), ad.Lifted(ad.RecursiveRejection())),
    "typical": ad.Coupling(ad.Fixed(2), TypicalAcceptance()),
}
DRAFTERS = {
    "model": lambda: ad.LanguageModelDrafter(ragged(seed=3)),
    "exit": lambda: ad.EarlyExitDrafter(ragged(), layers=1),
    "n-gram": lambda: ad.NGramDrafter(longest=3, shortest=1),
}
NEVER = {"eos_token_id": None}  # a random model may end at any time; these tests want all tokens


def build(coupling="wor recursive", drafter="model", topology=TREE, **options):
    return ad.SpeculativeDecoder(ragged(), DRAFTERS[drafter](), topology, COUPLINGS[coupling], **options)


def decode(decoder, prompts=PROMPTS, do_sample=False, **options):
    return generated(decoder, prompts, do_sample=do_sample, **options)


def reference(prompts=PROMPTS, **kwargs):
    return greedy_reference(ragged().model, prompts, **kwargs)


@cache
def plain_reference(count):
    return reference(max_new_tokens=count)


# Temperature 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("drafter", "coupling"),
    [(d, c) for d in DRAFTERS for c in COUPLINGS if d != "n-gram" or COUPLINGS[c].law.deterministic],
)
def test_greedy_equals_transformers(drafter, coupling, topology):
    """Token for token, for a ragged batch and for its samples alone, with every law, rule and verifier."""
    decoder = build(coupling, drafter, topology)
    expected = plain_reference(14)
    assert decode(decoder, max_new_tokens=14)[0] == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert decode(decoder, [prompt], max_new_tokens=14)[0] == [tokens]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [1e-11, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("options", [{}, {"buckets": (32,)}], ids=["plain", "static"])
def test_tiny_temperatures_are_greedy(temperature, options):
    """Holds for every way to set them, beside other samples, and where half floats would overflow."""
    decoder = ad.SpeculativeDecoder(ragged(), DRAFTERS["model"](), **options)
    expected, kwargs = plain_reference(14), {"do_sample": True, "max_new_tokens": 14, "eos_token_id": EOS}
    ways = [
        {"temperature": temperature},
        {"generation_config": GenerationConfig(temperature=temperature, pad_token_id=0, **kwargs)},
        {"logits_processor": [TemperatureLogitsWarper(temperature)]},
    ]
    for way in ways:
        assert decode(decoder, **kwargs | way)[0] == expected
    request = Request(prompt=PROMPTS[0], max_new_tokens=14, temperature=temperature, ends=[EOS])
    other = Request(prompt=PROMPTS[1], max_new_tokens=14, temperature=0.9, seed=1)
    engine = Engine(decoder)
    streams = [engine.submit(one) for one in (request, other)]
    engine.run()
    assert streams[0].result()[0].tokens == expected[0]


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_general_path_agrees_with_the_greedy_one(coupling):
    """One-hot rows of top_k=1 go through the rule itself; temperature=0 asks for the same tokens."""
    decoder = build(coupling)
    expected = reference(max_new_tokens=10, **NEVER)
    assert decode(decoder, do_sample=True, top_k=1, max_new_tokens=10, **NEVER)[0] == expected
    assert decode(decoder, do_sample=True, temperature=0, max_new_tokens=10, **NEVER)[0] == expected


def test_a_wrong_greedy_token_would_be_seen():
    """Negative control: a verifier that accepts one token too many."""
    decoder = build()
    judge = decoder.stepper.eager.judge

    def generous(state, tree, *rows):
        found = judge(state, tree, *rows)
        for path in found.paths:
            path += tree.children[path[-1]][:1] if path else []
        return found

    decoder.stepper.eager.judge = generous
    assert decode(decoder, max_new_tokens=14)[0] != plain_reference(14)


@pytest.mark.parametrize("count", range(8))
def test_exactly_max_new_tokens(count):
    decoder = build()
    expected = [tokens[:count] for tokens in reference(max_new_tokens=7, **NEVER)]
    assert decode(decoder, max_new_tokens=count, **NEVER)[0] == expected
    plain = decoder.generate(**left_padded(PROMPTS), max_new_tokens=count, do_sample=False, **NEVER)
    assert plain.shape == (3, len(PROMPTS[2]) + count)


def test_max_length_counts_padding_as_transformers_does():
    output = build().generate(**left_padded(PROMPTS), max_length=len(PROMPTS[2]) + 4, do_sample=False, **NEVER)
    assert output.shape[1] == len(PROMPTS[2]) + 4


def test_min_length_counts_padding_as_transformers_does():
    width, options = len(PROMPTS[2]), {"do_sample": False, "eos_token_id": list(range(1, 50)), "pad_token_id": 0}
    for length in (width, width + 3):
        expected = ragged().model.generate(**left_padded(PROMPTS), min_length=length, max_length=width + 6, **options)
        found = build().generate(**left_padded(PROMPTS), min_length=length, max_length=width + 6, **options)
        assert torch.equal(found, expected)
        assert found.shape[1] > length - 1


@pytest.mark.parametrize("position", range(6))
def test_the_end_may_lie_inside_an_accepted_path(position):
    """The target drafts for itself, so the whole chain is accepted, even after the end token."""
    decoder = ad.SpeculativeDecoder(ragged(), ad.LanguageModelDrafter(ragged()), CHAIN, COUPLINGS["wor recursive"])
    end = reference(PROMPTS[2:], max_new_tokens=6, **NEVER)[0][position]
    tokens, output = decode(decoder, eos_token_id=end, pad_token_id=0, max_new_tokens=12)
    assert tokens == reference(eos_token_id=end, pad_token_id=0, max_new_tokens=12)
    width = output.sequences.shape[1] - len(PROMPTS[2])
    assert width == max(map(len, tokens))
    for row, kept in zip(output.sequences, tokens, strict=True):
        assert row[len(PROMPTS[2]) :].tolist() == kept + [0] * (width - len(kept))


def test_several_end_tokens():
    ends = [tokens[at] for tokens, at in zip(reference(max_new_tokens=9, **NEVER), (2, 5, 8), strict=True)]
    assert decode(build(), eos_token_id=ends, max_new_tokens=12)[0] == reference(eos_token_id=ends, max_new_tokens=12)


class Forbid(LogitsProcessor):
    """Forbids the token that is three places back."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= 3:
            scores[torch.arange(len(scores)), input_ids[:, -3]] = float("-inf")
        return scores


class SumAbove(StoppingCriteria):
    """Ends a text when the sum of its last two tokens exceeds a bound."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(dim=1) > 90


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_custom_processors_and_criteria(drafter):
    kwargs = {
        "max_new_tokens": 15,
        "logits_processor": LogitsProcessorList([Forbid()]),
        "stopping_criteria": StoppingCriteriaList([SumAbove()]),
        **NEVER,
    }
    expected = reference(**kwargs)
    assert decode(build("fixed matching", drafter), **kwargs)[0] == expected
    assert {len(tokens) for tokens in expected} != {15}


class BanByRow(LogitsProcessor):
    """Bans different tokens in each row; needs all rows of the batch."""

    def __init__(self, banned):
        self.banned = banned

    def __call__(self, input_ids, scores):
        for row, tokens in enumerate(self.banned):
            scores[row, tokens] = float("-inf")
        return scores


class EndByRow(StoppingCriteria):
    """Ends each row of the batch at a different length."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= torch.tensor([len(PROMPTS[2]) + 3, len(PROMPTS[2]) + 1, 99])


BIAS = torch.randn(3, 61, generator=torch.Generator().manual_seed(4)) * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafter", ["model", "n-gram"])
@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [BanByRow([list(range(row, 61, 3)) for row in range(3)])]},
        {"logits_processor": [lambda input_ids, scores: scores + BIAS]},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 61, 3))},
        {"logits_processor": [BanByRow([[30], [16], list(range(30))])], "no_repeat_ngram_size": 1},
    ],
    ids=["bans", "biases", "prefixes", "with another processor"],
)
def test_processors_may_tell_rows_apart(options, drafter):
    """Every sample gets the rule of its own row, as in transformers, also when it is sampled."""
    prompts = [PROMPTS[2]] * 3
    kwargs = {"max_new_tokens": 8, "pad_token_id": 0, **NEVER, **options}
    expected = ragged().model.generate(**left_padded(prompts), do_sample=False, **kwargs)
    decoder = build("fixed matching", drafter)
    assert torch.equal(decoder.generate(**left_padded(prompts), do_sample=False, **kwargs), expected)
    assert len(expected.unique(dim=0)) == 3
    if "prefix_allowed_tokens_fn" in options:
        tokens, _ = decode(decoder, do_sample=True, seeds=[1, 2, 3], **kwargs)  # of different lengths
        assert [{token % 3 for token in own} for own in tokens] == [{0}, {1}, {2}]


def test_penalties_of_prompts_refuse_padding():
    """The processor keeps the prompts of all rows as given, so it would penalise padding, too."""
    options = {"encoder_repetition_penalty": 3.0, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **NEVER}
    even = torch.tensor([prompt[-4:] for prompt in (PROMPTS[2], PROMPTS[2][::-1])])
    expected = ragged().model.generate(even, attention_mask=torch.ones_like(even), **options)
    assert torch.equal(build().generate(even, **options), expected)
    with pytest.raises(ValueError, match="takes padding for a part of the prompts; decode one prompt at a time"):
        build().generate(**left_padded(PROMPTS), **options)


def test_criteria_may_tell_rows_apart():
    prompts, criteria = [PROMPTS[2]] * 3, StoppingCriteriaList([EndByRow()])
    tokens, _ = decode(build(), prompts, stopping_criteria=criteria, max_new_tokens=8, **NEVER)
    whole = reference(prompts[:1], max_new_tokens=8, **NEVER)[0]
    assert tokens == [whole[:3], whole[:1], whole]


def test_stop_strings():
    tokenizer = tiny_tokenizer()
    words = [tokenizer.decode(tokens[3:5]) for tokens in reference(max_new_tokens=6, **NEVER)]
    expected = reference(max_new_tokens=12, stop_strings=words, tokenizer=tokenizer, **NEVER)
    assert decode(build(), max_new_tokens=12, stop_strings=words, tokenizer=tokenizer, **NEVER)[0] == expected
    assert max(map(len, expected)) < 12


# Other arguments and results of generate()


class Recorder(BaseStreamer):
    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.chunks.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("ends", [None, *range(4)])
def test_streamers_get_committed_tokens_in_order(ends):
    """Streamers get nothing after the end token, although the target drafts for itself and accepts all drafts."""
    decoder = ad.SpeculativeDecoder(ragged(), ad.LanguageModelDrafter(ragged()), CHAIN, COUPLINGS["wor recursive"])
    eos = None if ends is None else reference(PROMPTS[2:], max_new_tokens=4, **NEVER)[0][ends]
    streamers = [Recorder() for _ in PROMPTS]
    tokens, output = decode(decoder, streamer=streamers, max_new_tokens=12, eos_token_id=eos, pad_token_id=0)
    for streamer, prompt, emitted, forwards in zip(streamers, PROMPTS, tokens, output.stats.forwards, strict=True):
        assert streamer.chunks[0] == prompt
        assert [token for chunk in streamer.chunks[1:] for token in chunk] == emitted
        assert len(streamer.chunks) == 1 + forwards
        assert streamer.ended == 1


def test_tokens_before_a_failing_criterion_are_streamed():
    """A criterion fails amid a run of accepted drafts: the streamer has every token that was committed."""
    prompt, calls = PROMPTS[2], []

    def fails(tokens, scores, **_):
        calls.append(tokens.shape[1])
        if len(calls) == 3:
            raise RuntimeError("no judgement")
        return torch.zeros(len(tokens), dtype=torch.bool)

    decoder = ad.SpeculativeDecoder(ragged(), ad.LanguageModelDrafter(ragged()), CHAIN, COUPLINGS["wor recursive"])
    streamer = Recorder()
    options = {"stopping_criteria": StoppingCriteriaList([fails]), "streamer": [streamer], **NEVER}
    with pytest.raises(RuntimeError, match="no judgement"):
        decode(decoder, [prompt], max_new_tokens=12, **options)
    streamed = [token for chunk in streamer.chunks[1:] for token in chunk]
    assert streamed == reference([prompt], max_new_tokens=3, **NEVER)[0]
    assert len(calls) == 3


def test_a_text_streamer_of_transformers():
    tokenizer = tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    (tokens,), _ = decode(build(), PROMPTS[:1], streamer=streamer, max_new_tokens=9, **NEVER)
    assert "".join(streamer) == tokenizer.decode(tokens)


def test_a_call_without_new_tokens_ends_its_streamer():
    streamer = Recorder()
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(build().generate(ids, max_new_tokens=0, streamer=streamer), ids)
    assert streamer.ended == 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stats_add_up(drafter):
    tokens, output = decode(build("fixed matching", drafter), max_new_tokens=20, **NEVER)
    stats = output.stats
    assert stats.exactness == "exact"
    assert stats.emitted == [len(one) for one in tokens] == [20] * 3
    assert stats.tau == 60 / sum(stats.forwards)
    assert stats.rows == stats.drafted + sum(stats.forwards)
    assert (stats.pad_rows, stats.pad_keys) == (0, 0)
    assert stats.accepted.total() == stats.accepted_rank.total()
    assert all(stats.accepted[depth] <= stats.tried[depth] for depth in stats.tried)
    # Each forward emits its accepted tokens and one more, except where the budget cuts the last of them off.
    assert 60 <= sum(stats.forwards) + stats.accepted.total() <= 63
    assert set(stats.seconds) == {"prefill", "draft", "target", "verify", "commit"}


def test_no_draft_exceeds_the_budget_of_tokens():
    drafted = [decode(build(topology=CHAIN), max_new_tokens=count, **NEVER)[1].stats.drafted for count in (1, 2)]
    assert drafted == [0, 3]


class Resting(FixedDepth):
    """Lets a sample draft in every third step."""

    def start(self):
        return []

    def learn(self, memory, outcome):
        memory.append(outcome)

    def rests(self, memory):
        return len(memory) % 3 > 0


@pytest.mark.parametrize("buckets", [None, (8, 32)])
def test_no_drafter_is_asked_while_all_samples_rest(buckets, monkeypatch):
    decoder = build("fixed matching", decider=Resting(3), buckets=buckets)
    asked, growth = [], drafting.Growth
    monkeypatch.setattr(drafting, "Growth", lambda *arguments: asked.append(1) or growth(*arguments))
    tokens, output = decode(decoder, PROMPTS[:1], max_new_tokens=20, **NEVER)
    assert tokens == [plain_reference(20)[0][:20]]
    assert len(asked) == math.ceil(output.stats.forwards[0] / 3)
    assert output.stats.drafted > 0


def test_the_exactness_is_part_of_the_result():
    assert decode(build("typical"), max_new_tokens=2)[1].stats.exactness == "lossy"


def test_it_runs_as_custom_generate_of_the_model():
    decoder, streamer = build(), Recorder()
    batch, options = left_padded(PROMPTS), {"max_new_tokens": 9, "do_sample": False}
    plain = ragged().model.generate(**batch, custom_generate=decoder.decode_loop, **options)
    assert torch.equal(plain, decoder.generate(**batch, **options))
    ids = torch.tensor(PROMPTS[:1])
    output = ragged().model.generate(
        ids, custom_generate=decoder.decode_loop, spec_streamer=streamer, return_dict_in_generate=True, **options
    )
    assert output.stats.emitted == [len(output.sequences[0]) - len(PROMPTS[0])]
    assert streamer.ended == 1


def test_a_generation_config():
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=EOS, repetition_penalty=1.5)
    expected = reference(generation_config=config)
    output = build().generate(**left_padded(PROMPTS), generation_config=config, return_dict_in_generate=True)
    assert new_tokens(output.sequences, PROMPTS, output.stats.emitted) == expected


def test_several_sequences_per_prompt():
    decoder = build()
    output = decoder.generate(torch.tensor(PROMPTS[:1]), do_sample=True, num_return_sequences=4, max_new_tokens=8)
    assert output.shape[0] == 4
    assert len({tuple(row) for row in output.tolist()}) > 1


def test_calls_do_not_depend_on_each_other():
    decoder = build()
    first = decode(decoder, max_new_tokens=8)[0]
    decode(decoder, PROMPTS[:1], do_sample=True, max_new_tokens=8)
    assert decode(decoder, max_new_tokens=8)[0] == first


# Sampling


def test_manual_seed_makes_a_run_repeatable():
    decoder, runs = build(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(decode(decoder, do_sample=True, max_new_tokens=12, **NEVER)[0])
    assert runs[0] == runs[1] != runs[2]
