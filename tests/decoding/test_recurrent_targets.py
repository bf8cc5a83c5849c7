"""Decoding with recurrent layers, in the target and in draft models: the target's own tokens, and its own law."""

from functools import cache

import pytest
from support.fragile import Fragile
from support.models import LETTERS, PROMPTS, check_greedy, decode, greedy_reference, ragged, tiny_tokenizer
from support.recurrent_models import FUSED, QUICK, UNEVEN, own_greedy, recurrent, recurrent_target
from support.request_law import BUSH, FEW, fit
from support.traffic import answers_amid_others, requests, text

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.states import RecurrentStates

CHAIN, TREE = ad.TreeTopology.chain(4), ad.TreeTopology([-1, 0, 0, 1, 1, 2, 3])
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": (1, 2, 3)}
KINDS = ("lfm2", "qwen3_next", "mamba2", "granitemoehybrid")
DRAWN = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))


@cache
def drafter(name):
    """Returns a drafter for any target of the tests."""
    if name == "lookups":
        return ad.NGramDrafter()
    if name == "draft model":
        return ad.LanguageModelDrafter(ragged(seed=3))
    if name == "both":
        return ad.HybridDrafter(ad.NGramDrafter(), drafter("mamba2"))
    return ad.LanguageModelDrafter(recurrent_target(name))


@cache
def plain(architecture, **options):
    """Returns the texts of the target alone."""
    target = ragged() if architecture == "llama" else recurrent_target(architecture)
    return decode(ad.builders.plain(target), max_new_tokens=16, **options)[0]


# Tokens


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("architecture", QUICK)
def test_greedy_tokens_are_those_of_transformers(architecture, topology):
    """A ragged batch, with a prompt of one token, and its samples alone; a copy of the target drafts."""
    decoder = ad.SpeculativeDecoder(recurrent_target(architecture), drafter(architecture), topology)
    if architecture in UNEVEN:
        expected = own_greedy(decoder.target.model, PROMPTS, 16)
    else:
        expected = greedy_reference(decoder.target.model, PROMPTS, max_new_tokens=16, eos_token_id=None)
    found, stats = decode(decoder, max_new_tokens=16)
    assert found == expected
    assert sum(stats.accepted.values()) > 0.8 * sum(stats.tried.values()) / topology.width > 0
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert decode(decoder, [prompt], max_new_tokens=16)[0] == [tokens]


@pytest.mark.parametrize("name", ["lookups", "draft model", "lfm2", "qwen3_next", "mamba2", "both"])
@pytest.mark.parametrize("architecture", [*KINDS, "llama"])
def test_texts_do_not_depend_on_the_drafter(architecture, name):
    """Greedy and sampled with shared noise, in trees and chains; models with recurrent layers draft, too."""
    target = ragged() if architecture == "llama" else recurrent_target(architecture)
    for options in ({}, SAMPLED):
        for topology in (CHAIN, TREE):
            decoder = ad.SpeculativeDecoder(target, drafter(name), topology, ad.Coupling.shared(topology.width))
            assert decode(decoder, max_new_tokens=16, **options)[0] == plain(architecture, **options)


def test_a_model_drafts_for_itself_without_a_miss():
    """All drafts of a copy of the target are accepted, so its states are right after any accepted path."""
    for architecture in KINDS:
        model = ad.LanguageModelDrafter(recurrent_target(architecture))
        decoder = ad.SpeculativeDecoder(recurrent_target(architecture), model, CHAIN)
        stats = check_greedy(decoder, count=20)
        assert sum(stats.accepted.values()) == sum(stats.tried.values()) > 0


def test_states_of_a_wrong_node_would_be_seen(monkeypatch):
    """Negative control: commits keep the state of the root."""
    commit = RecurrentStates.commit

    def wrong(self, kept, lengths):
        commit(self, {handle: rows[:1] for handle, rows in kept.items()}, lengths)

    monkeypatch.setattr(RecurrentStates, "commit", wrong)
    decoder = ad.SpeculativeDecoder(recurrent_target("mamba2"), drafter("mamba2"), CHAIN)
    with pytest.raises(AssertionError):
        check_greedy(decoder, count=20)


def test_drafts_of_another_tokenizer():
    target = ad.RaggedModel(recurrent("lfm2"), tiny_tokenizer(), kernels="torch")
    for kind in (ad.IntersectionDrafter, ad.RetokenizedDrafter):
        model = ad.RaggedModel(recurrent("mamba2"), tiny_tokenizer(LETTERS[::-1]), kernels="torch")
        decoder = ad.SpeculativeDecoder(target, kind(model, target), CHAIN)
        check_greedy(decoder, count=16)


@pytest.mark.usefixtures("kernels")
def test_a_target_drafts_with_fewer_bits_from_its_own_states():
    target = recurrent_target("qwen3_next", "native")
    decoder = ad.SpeculativeDecoder(target, ad.SelfDrafter(target, "int8"), CHAIN)
    stats = check_greedy(decoder, count=20)
    assert sum(stats.accepted.values()) > 0.5 * sum(stats.tried.values()) > 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", FUSED)
def test_tokens_of_fused_layers(architecture):
    """Greedily those of transformers, with drafts of the target's own states, too; sampled those of any drafter."""
    target = ad.RaggedModel(recurrent(architecture, **FUSED[architecture]), kernels="native")
    assert target.prepacking.fused == target.num_layers
    greedy = greedy_reference(target.model, PROMPTS, max_new_tokens=20, eos_token_id=None)
    expected, _ = decode(ad.builders.plain(target), max_new_tokens=16, **SAMPLED)
    for made in (ad.SelfDrafter(target, "int8"), ad.LanguageModelDrafter(target), ad.NGramDrafter()):
        for topology in (CHAIN, TREE):
            decoder = ad.SpeculativeDecoder(target, made, topology, ad.Coupling.shared(topology.width))
            found, stats = decode(decoder, max_new_tokens=20)
            assert found == greedy
            likely = isinstance(made, ad.NGramDrafter) or sum(stats.accepted.values()) > 0.3 * sum(stats.tried.values())
            assert likely
            assert isinstance(made, ad.NGramDrafter) or made._network._native[1] is not None  # in one call
            assert decode(decoder, max_new_tokens=16, **SAMPLED)[0] == expected


def test_a_head_reads_hidden_states():
    target = recurrent_target("qwen3_next")
    head = EagleHead.for_target(target.model, list(range(40)), hidden_layers=[0, 1, 3])
    stats = check_greedy(ad.SpeculativeDecoder(target, ad.EagleDrafter(head, target), TREE), count=16)
    assert sum(stats.tried.values()) > 0


# The law


def test_sampling_has_the_law_of_the_target():
    target = ad.RaggedModel(recurrent("qwen3_next", vocab_size=FEW, eos_token_id=None), kernels="torch")
    model = ad.LanguageModelDrafter(ad.RaggedModel(recurrent("mamba2", vocab_size=FEW), kernels="torch"))
    assert fit(ad.SpeculativeDecoder(target, model, BUSH, DRAWN)) > 1e-3


def test_a_law_of_wrong_states_would_be_seen(monkeypatch):
    """Negative control: commits leave the states as they were."""
    monkeypatch.setattr(RecurrentStates, "_replay", lambda *_: None)
    target = ad.RaggedModel(recurrent("qwen3_next", vocab_size=FEW, eos_token_id=None), kernels="torch")
    model = ad.LanguageModelDrafter(ad.RaggedModel(recurrent("mamba2", vocab_size=FEW), kernels="torch"))
    assert fit(ad.SpeculativeDecoder(target, model, BUSH, DRAWN)) < 1e-6


# Requests that come and go


def alone(made, request):
    engine = Engine(made, max_cache_tokens=4000)
    return [answer.tokens for answer in engine.submit(request).result()]


KINDS_OF_REQUESTS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("architecture", KINDS)
def test_answers_are_those_of_a_request_alone(architecture, reuse):
    """Late joins, chunked prompts, and requests that are cancelled while others go on."""
    made = ad.SpeculativeDecoder(recurrent_target(architecture), drafter("both"), TREE)
    engine = Engine(made, max_cache_tokens=400, max_samples=4, max_rows=16, reuse=reuse)
    asked = requests(12, KINDS_OF_REQUESTS)
    assert answers_amid_others(engine, asked) == [alone(made, one) for one in asked]


class Counted(RaggedKVCache):
    """Counts the tokens that are copied."""

    copied = 0

    def share(self, source, handle, tokens):
        type(self).copied += tokens
        super().share(source, handle, tokens)


@pytest.mark.parametrize("rows", [40, 200])
@pytest.mark.parametrize("architecture", KINDS)
def test_prefixes_are_copied_where_states_are(monkeypatch, architecture, rows):
    monkeypatch.setattr("arbordraft.decoding.runner.RaggedKVCache", Counted)
    monkeypatch.setattr(Counted, "copied", 0)
    made = ad.SpeculativeDecoder(recurrent_target(architecture), drafter("mamba2"), TREE)
    first, more = text(60, 1), text(9, 2)
    asked = [
        Request(prompt=first, max_new_tokens=6, n=3, seed=1, temperature=1.0),  # the same prompt three times
        Request(prompt=[*first, *more], max_new_tokens=6),  # the prompt goes on
        Request(prompt=[*first[:50], *more], max_new_tokens=6),  # no state is there after 50 tokens
    ]
    expected = [alone(made, request) for request in asked]
    engine = Engine(made, max_cache_tokens=4000, max_samples=3, max_rows=rows, reuse=True)
    copied = []
    for request, tokens in zip(asked, expected, strict=True):
        assert [answer.tokens for answer in engine.submit(request).result()] == tokens
        copied.append(Counted.copied)
    assert copied[:2] == [2 * 58, 3 * 58]
    assert copied[2] == 3 * 58 + (39 if rows == 40 else 0)  # the end of the first portion


def test_a_longer_text_goes_on_from_an_answer():
    """The next turn of a chat begins with all tokens of the turn before."""
    made = ad.SpeculativeDecoder(recurrent_target("qwen3_next"), drafter("lookups"), TREE)
    engine, prompt = Engine(made, max_cache_tokens=4000, reuse=True), text(40, 1)
    (answer,) = engine.submit(Request(prompt=prompt, max_new_tokens=12, ends=())).result()
    turn = Request(prompt=[*prompt, *answer.tokens, *text(8, 3)], max_new_tokens=12, ends=())
    found = engine.submit(turn).result()
    assert found[0].stats.copied == 40 + 12 - 1
    assert found[0].tokens == alone(made, turn)[0]


def test_a_failing_request_leaves_the_others_as_they_are():
    made = ad.SpeculativeDecoder(recurrent_target("lfm2"), drafter("both"), TREE)
    engine, asked = Engine(made, max_cache_tokens=2000, max_samples=3), requests(3, KINDS_OF_REQUESTS)[1:]
    broken = engine.submit(Request(prompt=text(5, 9), max_new_tokens=20, processors=(Fragile(9),)))
    streams = [engine.submit(request) for request in asked]
    engine.run()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        broken.result()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == [alone(made, one) for one in asked]


def test_costs_are_measured():
    made = ad.builders.lookup(recurrent_target("mamba2"))
    check_greedy(made, count=30)


def test_compiled_steps_are_refused():
    with pytest.raises(ValueError, match="compile_backend cannot trace recurrent layers"):
        ad.SpeculativeDecoder(
            recurrent_target("lfm2"), drafter("lookups"), CHAIN, buckets=(8,), compile_backend="aot_eager"
        )


def test_an_early_exit_is_refused():
    with pytest.raises(ad.UnsupportedModel, match="whose states an early exit would leave undefined"):
        ad.EarlyExitDrafter(recurrent_target("lfm2"), 1)
