"""Warm-up before the first request compiles and records its steps, and leaves no other trace."""

import pytest
from support.models import PAYS, decode, ragged
from support.recording import as_on_a_gpu, record_on_cpu

from arbordraft import CostAware, Engine, LanguageModelDrafter, NGramDrafter, Request, SpeculativeDecoder, TreeTopology
from arbordraft.kernels import choice

TREE = TreeTopology.k_ary(2, 3)


def build(drafter=None, **options):
    drafter = LanguageModelDrafter(ragged(seed=3)) if drafter is None else drafter
    return SpeculativeDecoder(ragged(), drafter, TREE, **{"buckets": (1, 8, 16), **options})


@pytest.fixture
def as_with_triton(monkeypatch):
    """Lets warm-up run as if steps ran in Triton."""
    monkeypatch.setattr(choice, "triton_chosen", lambda _: True)


def test_warm_up_does_nothing_without_triton(monkeypatch):
    decoder = build()
    monkeypatch.setattr(decoder.target, "run", pytest.fail)
    decoder.warm_up()
    assert decoder.static.shapes == []


@pytest.mark.parametrize("recorded", ["a step", "a draft"])
def test_warm_up_records_all_steps_of_requests(monkeypatch, as_with_triton, recorded):
    record = record_on_cpu(monkeypatch, recorded)
    decoder = as_on_a_gpu(build())
    decoder.warm_up(samples=2, max_cache_tokens=4096)
    made = record.made
    assert made == {"a step": 2 * (1 + 3), "a draft": 2 * 3}[recorded]  # without drafts and with three depths
    engine = Engine(decoder, max_cache_tokens=4096, max_samples=2)
    for temperature in (0.0, 0.8):
        stream = engine.submit(Request(prompt=[5, 9, 7], max_new_tokens=12, temperature=temperature, seed=1))
        engine.run()
        assert len(stream.result()[0].tokens) == 12
    assert record.made == made
    assert record.replays > made


@pytest.mark.parametrize("buckets", [None, (8, 16)])
@pytest.mark.parametrize("drafter", [None, NGramDrafter()])
def test_warm_up_changes_nothing_else(as_with_triton, buckets, drafter):
    class Learning(CostAware):
        def learn(self, *_):
            pytest.fail("a decider learned from a warm-up step")

    expected, _ = decode(build(drafter, buckets=buckets))
    seen = []
    decoder = build(drafter, buckets=buckets)
    decoder.on_step = lambda *_: seen.append(1)
    decoder.warm_up()
    assert seen == []
    assert decode(decoder)[0] == expected
    build(drafter, buckets=buckets, decider=Learning(PAYS)).warm_up()


@pytest.mark.parametrize("bound", [40, 60, 300])
def test_warm_up_works_with_small_caches(as_with_triton, bound):
    build(max_cache_tokens=bound, buckets=(8, 16)).warm_up()


def test_warm_up_works_with_models_of_few_positions(as_with_triton):
    target = ragged("gpt2")
    SpeculativeDecoder(target, NGramDrafter(), TREE, buckets=(16,)).warm_up(2)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"max_cache_tokens": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        build().warm_up(**wrong)
