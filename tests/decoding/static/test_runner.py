"""Decoding in steps of fixed shapes: the tokens of the ordinary step, in buckets, with padding that changes nothing."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from support.companions import drafter as trained_drafter
from support.companions import target as trained_target
from support.models import EOS, PAYS, PROMPTS, greedy_reference, left_padded, new_tokens, ragged, tiny
from support.recording import as_on_a_gpu, record_on_cpu

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
    NoDrafter,
    RaggedModel,
    RecursiveRejection,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.deciders import CostAware, EntropyBound, NodeBudget
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.static import step
from arbordraft.decoding.static.drafted_step import DraftedStep
from arbordraft.decoding.static.recording import Recording
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.decoding.static.step import StaticStep
from arbordraft.sampling.laws import AdaptiveTopTail, DraftLaw
from arbordraft.target.cache import CacheOverflow
from arbordraft.verifiers import KSeq, TopTailRule

CHAIN, TREE = TreeTopology.chain(3), TreeTopology([-1, 0, 0, 1, 1, 2, 3])
WIDE = TreeTopology.from_k_config((3, 3, 3, 2))  # 94 nodes: two ancestor words
BUCKETS = (8, 16, 32, 64)
NEVER = {"eos_token_id": None, "pad_token_id": 0}
COUPLINGS = {
    "iid": Coupling(IID(3), TopDown(RecursiveRejection())),
    "iid lifted": Coupling(IID(3), Lifted(RecursiveRejection())),
    "wor": Coupling(WithoutReplacement(3), TopDown(RecursiveRejection())),
    "wor lifted": Coupling(WithoutReplacement(3), Lifted(RecursiveRejection())),
    "two tops": Coupling(TopTail(2, 1), Lifted(RecursiveRejection())),
    "top-tail rule": Coupling(TopTail(1, 2), TopDown(TopTailRule())),
    "adaptive": Coupling(AdaptiveTopTail(3, 0.1), Lifted(RecursiveRejection())),
    "fixed": Coupling(Fixed(3), Lifted(RecursiveRejection())),
    "shared": Coupling.shared(3),
}
DRAFTERS = {
    "model": lambda: LanguageModelDrafter(ragged(seed=3)),
    "exit": lambda: EarlyExitDrafter(ragged(), layers=1),
    "lookup": lambda: NGramDrafter(longest=3, shortest=1),
}


def build(coupling="wor lifted", drafter="model", topology=TREE, buckets=BUCKETS, **options):
    drafter = DRAFTERS[drafter]() if isinstance(drafter, str) else drafter
    coupling = COUPLINGS[coupling] if isinstance(coupling, str) else coupling
    return SpeculativeDecoder(options.pop("target", ragged()), drafter, topology, coupling, buckets=buckets, **options)


def decode(decoder, prompts=PROMPTS, **options):
    """Returns the new tokens of every sample, and the statistics."""
    options = {"max_new_tokens": 16, "do_sample": False, "seeds": list(range(len(prompts))), **options}
    output = decoder.generate(**left_padded(prompts), return_dict_in_generate=True, **options)
    return new_tokens(output.sequences, prompts, output.stats.emitted), output.stats


def compare(*parts, prompts=PROMPTS, requests=({},), **options):
    """Decodes every request with and without buckets; returns the static decoder and its statistics."""
    static, found = build(*parts, **options), []
    plain = build(*parts, **{**options, "buckets": None})
    for request in requests:
        tokens, stats = decode(static, prompts, **request)
        expected, other = decode(plain, prompts, **request)
        assert tokens == expected
        assert (stats.emitted, stats.forwards, stats.accepted_rank) == (
            other.emitted, other.forwards, other.accepted_rank
        )  # fmt: skip
        found.append(stats)
    return static, found


# The same tokens

SAMPLED = {"do_sample": True, **NEVER}
WARPED = {"do_sample": True, "temperature": 0.6, "top_k": 30, "top_p": 0.95}


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_samples_equal_the_ordinary_steps(coupling):
    """The noise is the same. The batch is ragged, plain or warped, and some samples end early."""
    _, found = compare(coupling, "exit", TreeTopology.from_k_config((3, 2, 1)), requests=(SAMPLED, WARPED))
    ranks = sum((stats.accepted_rank for stats in found), Counter())
    assert sum(ranks.values()) > 10
    assert ranks[1] + ranks[2] > 2  # rows had to move


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [CHAIN, WIDE], ids=["chain", "wide"])
@pytest.mark.parametrize("coupling", ["iid lifted", "two tops"])
def test_chains_and_trees_of_more_than_one_ancestor_word(coupling, topology):
    compare(coupling, "model", topology, requests=(SAMPLED, NEVER), prompts=PROMPTS[:2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", [SAMPLED, {**SAMPLED, "temperature": 0.5}, WARPED], ids=["T=1", "T=0.5", "top-p"])
def test_shared_noise_gives_the_text_of_plain_decoding(drafter, settings):
    """This holds in buckets of every size, with any drafter and in any batch; other seeds give another text."""
    plain = build("shared", NoDrafter(), TreeTopology.chain(0), buckets=None)
    seeds = [3, 2**63 + 1, 2**64 - 1]
    expected, _ = decode(plain, **settings, seeds=seeds)
    decoder = build("shared", drafter)
    assert decode(decoder, **settings, seeds=seeds)[0] == expected
    for prompt, seed, tokens in zip(PROMPTS, seeds, expected, strict=True):
        assert decode(decoder, [prompt], **settings, seeds=[seed])[0] == [tokens]
    assert decode(decoder, **settings, seeds=[4, 2**63, 1])[0] != expected
    assert len({bucket.rows for bucket in decoder.static.shapes}) > 1


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss", "gpt2"])
def test_windows_caps_sinks_and_learned_positions(architecture):
    target = ragged(architecture)
    drafter = LanguageModelDrafter(ragged(architecture, seed=3))
    compare("wor lifted", drafter, target=target, requests=(SAMPLED, NEVER))
    compare("shared", drafter, target=target, requests=(SAMPLED,))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("coupling", [Coupling(TopTail(1, 1), Lifted(RecursiveRejection())), Coupling.shared(2)],
                         ids=["top-tail", "shared"])  # fmt: skip
@pytest.mark.parametrize("name", ["block", "eagle", "medusa", "exit"])
def test_drafters_that_read_the_targets_hidden_states(name, coupling):
    drafter = trained_drafter(name)
    requests = (NEVER, {**SAMPLED, "temperature": 0.4})
    _, found = compare(coupling, drafter, target=trained_target(), requests=requests)
    assert all(stats.tau > 1.3 for stats in found)


def test_samples_that_end_at_different_times():
    plain = greedy_reference(ragged().model, PROMPTS, max_new_tokens=9, eos_token_id=None)
    ends = [tokens[at] for tokens, at in zip(plain, (0, 4, 8), strict=True)]
    static, (stats,) = compare("wor", requests=({"eos_token_id": ends, "pad_token_id": EOS},))
    assert len(set(stats.emitted)) == 3
    assert {bucket.rows for bucket in static.static.shapes} > {32}  # the remaining batch takes a smaller bucket


def test_pruned_trees_early_stops_and_no_drafts_at_all():
    compare("fixed", decider=CostAware(PAYS, nodes=4), requests=(NEVER, SAMPLED))
    compare("wor lifted", decider=EntropyBound(), requests=(NEVER, SAMPLED))
    compare("shared", decider=NodeBudget(4), requests=(SAMPLED,))
    compare("shared", decider=EntropyBound(), requests=(SAMPLED,))
    compare(Coupling(Fixed(1), Lifted(RecursiveRejection())), NoDrafter(), TreeTopology.chain(0),
            requests=(NEVER, SAMPLED))  # fmt: skip


@pytest.mark.parametrize(
    "processors",
    [{"min_p": 0.05}, {"typical_p": 0.9}, {"epsilon_cutoff": 0.02}, {"renormalize_logits": True, "temperature": 2.0},
     {"remove_invalid_values": True}],
    ids=str,
)  # fmt: skip
def test_processors_that_look_at_scores_alone(processors):
    compare("wor lifted", requests=({**SAMPLED, **processors},))


def test_many_samples_and_prompts_of_one_token():
    prompts = [[token, token + 1, token][: token - 3] for token in range(4, 15)]
    static, _ = compare("wor lifted", prompts=prompts, requests=(SAMPLED, NEVER))
    assert {bucket.samples for bucket in static.static.shapes} == {16}


def test_a_step_that_moves_nothing_would_be_seen(monkeypatch):
    """Negative control: the cache then holds the keys of rejected tokens."""
    monkeypatch.setattr(step, "compact_rows", lambda *_: None)
    with pytest.raises(AssertionError):
        compare("iid", requests=(SAMPLED,))


# Buckets


def record_shapes(monkeypatch):
    seen, forward = [], StaticStep.forward

    def recorded(self, table, draft, memory):
        seen.append((self.bucket.rows, tuple(table.shape), tuple(draft.shape), len(memory.rows)))
        result, hidden = forward(self, table, draft, memory)
        assert result.shape == (self.bucket.samples + 1, 3)
        assert hidden.shape[:2] == (self.bucket.samples + 1, self.bucket.depth + 1)
        return result, hidden

    monkeypatch.setattr(StaticStep, "forward", recorded)
    return seen


@pytest.mark.parametrize("settings", [NEVER, SAMPLED], ids=["greedy", "sampled"])
def test_all_shapes_are_those_of_buckets(monkeypatch, settings):
    seen = record_shapes(monkeypatch)
    decoder = build("iid lifted", decider=EntropyBound())
    _, stats = decode(decoder, **{**settings, "max_new_tokens": 60})
    rows = {shape[0] for shape in seen}
    assert rows <= set(BUCKETS)
    assert len(set(seen)) == len(rows) == len(decoder.static.shapes) > 1
    assert stats.rows == sum(shape[0] for shape in seen)
    assert 0 < stats.pad_rows < stats.rows
    decode(decoder, **{**settings, "max_new_tokens": 60})
    assert len(set(seen)) == len(rows)  # another batch, the same shapes


def test_above_the_largest_bucket_come_powers_of_two(monkeypatch):
    seen = record_shapes(monkeypatch)
    compare("wor", topology=WIDE, buckets=(4,), prompts=PROMPTS[:2], requests=({**NEVER, "max_new_tokens": 4},))
    rows = {shape[0] for shape in seen}
    assert max(rows) > 64
    assert all(row & (row - 1) == 0 for row in rows)


@pytest.mark.parametrize("buckets", [(), (0, 8), (8, -1)])
def test_invalid_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match=r"at least one number of rows|must be a whole number from 1 to 65536"):
        build(buckets=buckets)


# The dummy


@contextmanager
def poison(where):
    """Writes NaN to some pool rows before every step."""
    called = StaticStepping.__call__

    def spoiled(self, tree, batch, noise, cache, *rest):
        for rows in where(cache, tree):
            for pool in cache.rows():
                pool[rows] = float("nan")
        return called(self, tree, batch, noise, cache, *rest)

    StaticStepping.__call__ = spoiled
    try:
        yield
    finally:
        StaticStepping.__call__ = called


def dummys(cache, tree):
    yield slice(cache.dummy_start, cache.dummy_start + cache.capacity(cache.dummy))


def nobodys(cache, tree):
    """Yields all rows but the committed rows of samples."""
    living = [slab for slab in cache._slabs.values() if slab.start != cache.dummy_start]
    free = torch.ones(cache._rows, dtype=torch.bool)
    for slab in living:
        free[slab.start : slab.start + slab.length] = False
    yield free


def somebodys(cache, tree):
    slab = max(cache._slabs.values(), key=lambda slab: slab.length)
    yield slab.start


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", [dummys, nobodys])
@pytest.mark.parametrize("settings", [NEVER, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("coupling", ["wor lifted", "shared"])
def test_poisoned_rows_of_the_dummy_reach_no_sample(where, settings, coupling):
    decoder = build(coupling)
    expected, _ = decode(build(coupling, buckets=None), **settings)
    with poison(where):
        found, stats = decode(decoder, **settings)
    assert found == expected
    assert stats.pad_rows


def test_poison_in_a_sample_is_seen():
    """Negative control: NaN in the first row of the longest slab."""
    with poison(somebodys), pytest.raises(DecodingError):
        decode(build("wor lifted"), **NEVER)


@pytest.mark.parametrize("coupling", ["fixed", "shared"])
@pytest.mark.parametrize("settings", [NEVER, {**SAMPLED, "top_k": 1}], ids=["greedy", "sampled"])
def test_a_failing_sample_leaves_the_others_complete(settings, coupling):
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = float("nan")
    decoder = build(coupling, "lookup", target=RaggedModel(model, self_test=False, kernels="torch"))
    expected = greedy_reference(ragged().model, PROMPTS, max_new_tokens=10, eos_token_id=None)
    assert 11 not in expected[0] + expected[2]
    with pytest.raises(DecodingError, match=r"sample 1: .* NaN or infinite") as caught:
        decode(decoder, **{**settings, "max_new_tokens": 10})
    output = caught.value.output
    assert new_tokens(output.sequences, PROMPTS, output.stats.emitted) == [expected[0], [], expected[2]]


# Caches and refusals


def test_pools_stay_where_they_are_from_batch_to_batch():
    decoder = build()
    decode(decoder, **NEVER)
    cache = decoder.static._idle
    places = [pool.data_ptr() for pool in cache.rows()]
    first, _ = decode(decoder, **SAMPLED)
    assert decoder.static._idle is cache
    assert [pool.data_ptr() for pool in cache.rows()] == places
    assert list(cache._slabs) == [cache.dummy]
    assert decode(decoder, **SAMPLED)[0] == first

    decoder.static.open(3, None)  # another batch has the cache, or lost it
    assert decode(decoder, **SAMPLED)[0] == first
    assert decoder.static._idle is not cache


def test_recordings_of_unused_steps_are_dropped(monkeypatch):
    """Beside other processors, here top-k, every temperature has its own steps."""
    monkeypatch.setattr("arbordraft.decoding.static.recording._MOST", 4)
    decoder = build("wor lifted", buckets=(32,))
    first, _ = decode(decoder, **SAMPLED, temperature=0.5)
    for hundredths in range(60, 66):
        decode(decoder, **SAMPLED, temperature=hundredths / 100)
    assert [kind.processors[0][1][0][1] for _, kind in decoder.static.recorder.recordings] == [0.62, 0.63, 0.64, 0.65]
    assert decode(decoder, **SAMPLED, temperature=0.5)[0] == first


def test_the_dummy_counts_towards_the_limit():
    dummy, sample = 1 + 8, 5 + TREE.num_nodes + 10
    enough = build(buckets=(8,), max_cache_tokens=dummy + sample)
    assert decode(enough, PROMPTS[:1], **NEVER, max_new_tokens=10)
    with pytest.raises(CacheOverflow, match="may hold"):
        decode(build(buckets=(8,), max_cache_tokens=dummy + sample - 1), PROMPTS[:1], **NEVER, max_new_tokens=10)


@pytest.mark.parametrize(("buckets", "least"), [((8,), 1 + 64), ((256,), 1 + 256), (None, 0)], ids=str)
def test_an_engine_states_its_least_limit_at_once(buckets, least):
    """The least limit covers drafts of all samples at the same time, and has room for one request."""
    decoder, least = build(buckets=buckets), least + TREE.num_nodes + 2
    message = rf"max_cache_tokens must be at least {least} for max_samples=7 .*, got {least - 1}"
    with pytest.raises(ValueError, match=message):
        Engine(decoder, max_cache_tokens=least - 1, max_samples=7)
    engine = Engine(decoder, max_cache_tokens=least, max_samples=7)
    assert engine.room(1) == 1
    assert len(engine.submit(Request(prompt=[5], max_new_tokens=1)).result()[0].tokens) == 1
    if buckets:
        small = build(buckets=buckets, max_cache_tokens=8)
        with pytest.raises(CacheOverflow, match=r"may hold 8 tokens, and steps of fixed shapes set \d+ aside .* fewer"):
            decode(small, PROMPTS, **NEVER)


class OwnTops(DraftLaw):
    def __init__(self):
        super().__init__(1, 1, False)

    def narrow(self, children):
        return self

    def tops_of(self, draft):
        return 1


@pytest.mark.parametrize(
    ("coupling", "settings", "reason"),
    [
        (Coupling(IID(2), TopDown(KSeq())), {"do_sample": True}, "KSeq samples on the host"),
        (Coupling(OwnTops(), TopDown(RecursiveRejection())), {"do_sample": True}, "tops in a way of its own"),
        ("wor", {"repetition_penalty": 1.2}, "RepetitionPenalty"),
        ("wor", {"do_sample": True, "eta_cutoff": 0.1}, "EtaLogitsWarper"),
        ("wor", {"do_sample": True, "min_new_tokens": 3}, "MinNewTokensLength"),
    ],
)
def test_requests_that_need_the_host_are_refused_before_decoding(coupling, settings, reason):
    decoder = build(coupling)
    decoder.stepper.step = pytest.fail
    with pytest.raises(ValueError, match=rf"{reason}.*buckets=None"):
        decode(decoder, **settings)


def test_lossless_verifiers_of_any_kind_decode_greedily():
    compare(Coupling(TopTail(1, 1), TopDown(SpecHub())), requests=(NEVER,))
    compare(Coupling(Fixed(2), TopDown(Matching())), "lookup", requests=(NEVER,))


def test_parts_that_do_not_fit_together_are_refused(kernels):
    packed = RaggedModel(tiny(), kernels="native")
    with pytest.raises(ValueError, match=r"kernels='torch'.*buckets=None"):
        build(target=packed, drafter=EarlyExitDrafter(packed, 1))
    with pytest.raises(ValueError, match="compile_backend is for steps of fixed shapes"):
        build(buckets=None, compile_backend="eager")


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_weights_that_moved_are_noticed(part):
    """Recorded or compiled steps, and drafts in them, hold the addresses of weights."""
    models = {name: RaggedModel(tiny(seed=seed), kernels="torch") for seed, name in enumerate(("target", "drafter"))}
    decoder = build("shared", LanguageModelDrafter(models["drafter"]), target=models["target"], buckets=(64,))
    decode(decoder, **NEVER)
    old, cache = set(decoder.static.recorder.recordings.values()), decoder.static._idle
    assert {type(one.step) for one in old} == {StaticStep, DraftedStep}
    decode(decoder, **NEVER)
    assert set(decoder.static.recorder.recordings.values()) == old
    models[part].model.bfloat16()
    decode(decoder, **NEVER)
    assert not set(decoder.static.recorder.recordings.values()) & old
    assert decoder.static._idle is not cache
    dtype = torch.bfloat16 if part == "target" else torch.float32
    assert {pool.dtype for pool in decoder.static._idle.rows()} == {dtype}


def test_a_model_in_training_mode_is_refused():
    target = RaggedModel(tiny(), kernels="torch")
    decoder = build(target=target, drafter=LanguageModelDrafter(ragged(seed=3)))
    decode(decoder, [[7]], **NEVER)
    target.model.train()
    with pytest.raises(ValueError, match="training mode"):
        decode(decoder, [[7]], **NEVER)


# Recording, with a stand-in for the GPU


@pytest.fixture
def recorded(monkeypatch):
    """Checks that recording changes no rows of samples; returns the class that counts recordings."""
    record, run, caches = Recording.record, StaticStepping.__call__, []

    def running(self, tree, batch, noise, cache, *others):
        caches[:] = [cache]
        return run(self, tree, batch, noise, cache, *others)

    def checked(self, memory):
        pools = memory.rows
        before = [pool.clone() for pool in pools]
        record(self, memory)
        if not isinstance(self.step, StaticStep):
            return
        (cache,) = caches
        samples = torch.ones(len(pools[0]), dtype=torch.bool)
        samples[cache.dummy_start : cache.dummy_start + cache.capacity(cache.dummy)] = False
        for pool, old in zip(pools, before, strict=True):
            assert torch.equal(pool[samples], old[samples])
            assert not torch.equal(pool, old)

    monkeypatch.setattr(StaticStepping, "__call__", running)
    monkeypatch.setattr(Recording, "record", checked)
    return record_on_cpu(monkeypatch)


@pytest.mark.parametrize("settings", [NEVER, SAMPLED], ids=["greedy", "sampled"])
def test_steps_are_recorded_once_and_replayed(recorded, settings):
    expected, _ = decode(build("wor lifted", buckets=None), **settings)
    as_on_a_gpu(decoder := build("wor lifted"))
    for _ in range(2):
        found, stats = decode(decoder, **settings)
        assert found == expected
    recordings = decoder.static.recorder.recordings.values()
    assert recorded.made == sum("a step" in one.step.title for one in recordings)
    assert recorded.replays == 2 * max(stats.forwards)


def test_pools_that_moved_are_recorded_again(recorded):
    as_on_a_gpu(decoder := build("wor lifted", buckets=(32,)))
    expected, _ = decode(build("wor lifted", buckets=None), **NEVER)
    assert decode(decoder, **NEVER)[0] == expected
    made = recorded.made
    decoder.static._idle = None
    assert decode(decoder, **NEVER)[0] == expected
    assert recorded.made == 2 * made > 0
