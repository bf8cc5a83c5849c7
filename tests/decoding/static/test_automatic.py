"""Automatic steps of fixed shapes: used where a GPU could record them, left out elsewhere."""

import gc
import logging

import pytest
import torch
from support.models import PROMPTS, decode, ragged, tiny

from arbordraft import (
    IID,
    Coupling,
    Engine,
    Lifted,
    NGramDrafter,
    RaggedModel,
    RecursiveRejection,
    Request,
    SpeculativeDecoder,
    TopDown,
    TreeTopology,
)
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.recording import Recording
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.decoding.step import Stepper
from arbordraft.decoding.timing import _recorded_seconds, measure_rows
from arbordraft.drafters import LanguageModelDrafter
from arbordraft.kernels import choice
from arbordraft.target.attention import UnsupportedModel
from arbordraft.verifiers import OptimalTransport

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seeds": [3, 4, 5]}


def build(coupling=None, drafter=None, **options):
    if drafter is None:
        drafter = LanguageModelDrafter(ragged(seed=3))
    topology = TreeTopology.chain(2) if coupling else TreeTopology.from_k_config((2, 1))
    return SpeculativeDecoder(ragged(), drafter, topology, coupling, **options)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Uses steps of fixed shapes as on a GPU, although nothing is recorded."""
    monkeypatch.setattr(StaticStepping, "active", property(lambda self: not self._failed))


def test_a_cpu_uses_no_steps_of_fixed_shapes():
    decoder = build()
    assert not decoder.stepper.fixed
    assert decode(decoder)[1].pad_rows == 0


def test_kernels_of_the_reference_cannot_be_recorded(monkeypatch):
    """Reference kernels ask the host on every device."""
    decoder = build()
    monkeypatch.setattr(type(decoder.target), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(choice, "installed", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    assert decoder.stepper.fixed
    with choice.use("reference"):
        assert not decoder.stepper.fixed


@pytest.mark.parametrize("drafter", [None, NGramDrafter(longest=2, shortest=1)], ids=["model", "lookups"])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_steps_of_fixed_shapes_are_used_where_possible(as_on_a_gpu, settings, drafter):
    expected, stats = decode(build(drafter=drafter, buckets=None), **settings)
    assert stats.pad_rows == 0
    decoder = build(drafter=drafter)
    found, stats = decode(decoder, **settings)
    assert found == expected
    assert stats.pad_rows > 0
    assert decoder.static.shapes


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"repetition_penalty": 1.3, **SAMPLED}], ids=str)
def test_requests_that_ask_the_host_get_ordinary_steps(as_on_a_gpu, settings):
    expected, _ = decode(build(buckets=None), **settings)
    decoder = build()
    found, stats = decode(decoder, **settings)
    assert found == expected
    assert stats.pad_rows == 0
    with pytest.raises(ValueError, match="asks the host: build the decoder with buckets=None"):
        decode(build(buckets=(8,)), **settings)


def test_a_rule_that_samples_on_the_host_gets_ordinary_steps_when_sampling(as_on_a_gpu):
    def make(**options):
        return build(Coupling(IID(1), TopDown(OptimalTransport())), **options)

    for settings, padded in (({}, True), (SAMPLED, False)):
        expected, _ = decode(make(buckets=None), **settings)
        found, stats = decode(make(), **settings)
        assert found == expected
        assert (stats.pad_rows > 0) == padded


def parts_of_steps(monkeypatch):
    """Records in a list how many runs of fixed shapes each step takes."""
    step, run, parts = Stepper.step, StaticStepping.__call__, []

    def stepping(self, state):
        parts.append(0)
        return step(self, state)

    def running(self, *given):
        parts[-1] += 1
        return run(self, *given)

    monkeypatch.setattr(Stepper, "step", stepping)
    monkeypatch.setattr(StaticStepping, "__call__", running)
    return parts


def answers(decoder, requests):
    engine = Engine(decoder, max_cache_tokens=4096)
    streams = [engine.submit(Request(prompt=[5, 9, 7], max_new_tokens=6, **options)) for options in requests]
    engine.run()
    return [stream.result()[0] for stream in streams]


@pytest.mark.parametrize(
    "requests",
    [
        [{"temperature": 0.0, "logprobs": 2}],
        [{"temperature": 0.7, "top_k": top_k, "seed": 1} for top_k in (5, 9, 20)],
    ],
    ids=["log-probabilities", "many settings"],
)
def test_requests_that_would_be_slower_or_lose_logprobs_get_ordinary_steps(as_on_a_gpu, monkeypatch, requests):
    parts = parts_of_steps(monkeypatch)
    decoder = build()
    found = answers(decoder, requests)
    assert max(parts) < len(requests)
    assert [one.tokens for one in found] == [one.tokens for one in answers(build(buckets=None), requests)]
    assert all(bool(one.logprobs) == ("logprobs" in request) for one, request in zip(found, requests, strict=True))


@pytest.mark.parametrize("coupling", [None, Coupling(IID(1), Lifted(RecursiveRejection()))], ids=["shared", "drawn"])
@pytest.mark.parametrize(
    ("settings", "temperatures", "groups"),
    [({}, (0.0, 0.3, 5.0), 1), ({"top_k": 9}, (0.3, 5.0), 2)],
    ids=["temperatures are numbers of a table", "other settings are constants of a step"],
)
def test_samples_of_different_temperatures_share_a_step(
    as_on_a_gpu, monkeypatch, settings, temperatures, groups, coupling
):
    parts = parts_of_steps(monkeypatch)
    requests = [{"temperature": temperature, "seed": 1, **settings} for temperature in temperatures]
    decoder = build(coupling)
    found = answers(decoder, requests)
    assert [one.tokens for one in found] == [one.tokens for one in answers(build(coupling, buckets=None), requests)]
    assert len({tuple(one.tokens) for one in found}) == len(temperatures)
    assert max(parts) == groups


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_failed_recording_is_logged_once_and_changes_no_text(as_on_a_gpu, monkeypatch, caplog, at, settings):
    coupling = Coupling(IID(1), Lifted(RecursiveRejection()))
    expected, _ = decode(build(coupling, buckets=None), **settings)
    run, calls = Recording.__call__, []

    def failing(self, *arguments):
        calls.append(self)
        if len(calls) > at:
            raise UnsupportedModel("a step of it cannot be recorded")
        return run(self, *arguments)

    monkeypatch.setattr(Recording, "__call__", failing)
    decoder = build(coupling)
    with caplog.at_level(logging.WARNING, "arbordraft"):
        for _ in range(2):
            assert decode(decoder, **settings)[0] == expected
    assert len(calls) == at + 1
    assert [record.message for record in caplog.records] == [
        "steps run without CUDA graphs, which is slower: a step of it cannot be recorded"
    ]
    calls.clear()
    with pytest.raises(UnsupportedModel):
        decode(build(coupling, buckets=(8,)), **settings)


def test_a_second_batch_beside_the_first_gets_ordinary_steps(as_on_a_gpu):
    """With fixed shapes, both would record their graphs anew in every step."""
    stepper = build().stepper
    first, second = stepper.open(1, None), stepper.open(1, None)
    assert isinstance(first.cache, StaticCache)
    assert not isinstance(second.cache, StaticCache)
    for state in (first, second):
        stepper.close(state)
    third = stepper.open(1, None)
    assert third.cache is first.cache
    stepper.close(third)


def test_a_failed_batch_does_not_block_the_next(as_on_a_gpu):
    decoder = build()

    def fails(*_):
        raise RuntimeError("a failing hook")

    decoder.on_step = fails
    with pytest.raises(RuntimeError, match="a failing hook"):
        decode(decoder)
    decoder.on_step = None
    gc.collect()
    assert decode(decoder)[1].pad_rows > 0


def test_padding_does_not_fill_a_small_cache(as_on_a_gpu):
    decoder = build(max_cache_tokens=30)
    expected, _ = decode(build(buckets=None), [PROMPTS[0]])
    found, stats = decode(decoder, [PROMPTS[0]])
    assert found == expected
    assert stats.pad_rows == 0


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_hooks_of_modules_are_called_in_every_step(as_on_a_gpu, part):
    target, draft, heard = RaggedModel(tiny(), kernels="torch"), RaggedModel(tiny(seed=3), kernels="torch"), []
    decoder = SpeculativeDecoder(target, LanguageModelDrafter(draft))
    expected, stats = decode(decoder)
    assert stats.pad_rows > 0
    layer = (target if part == "target" else draft).model.model.layers[0]
    handle = layer.register_forward_hook(lambda *_: heard.append(1))
    found, stats = decode(decoder)
    assert found == expected
    assert stats.pad_rows == 0
    assert len(heard) >= max(stats.forwards)
    handle.remove()
    assert decode(decoder)[1].pad_rows > 0


def test_adapters_that_are_switched_are_recorded_anew(as_on_a_gpu):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    decoder = SpeculativeDecoder(RaggedModel(adapted, kernels="torch"), NGramDrafter())
    decode(decoder)
    recorded = list(decoder.static.recorder.recordings.values())
    decode(decoder)
    assert list(decoder.static.recorder.recordings.values()) == recorded
    with adapted.disable_adapter():
        _, stats = decode(decoder)
        assert stats.pad_rows > 0
        assert not set(decoder.static.recorder.recordings.values()) & set(recorded)


def test_buckets_accept_no_word_but_auto():
    with pytest.raises(ValueError, match="buckets must be auto, None or numbers of rows"):
        build(buckets="all")
    with pytest.raises(ValueError, match="give their row counts, buckets="):
        build(compile_backend="inductor")


def test_costs_are_measured_on_the_steps_that_will_run(as_on_a_gpu, monkeypatch):
    asked = iter([False, True])
    assert list(_recorded_seconds(ragged(), (1, 4, 8), 5, 2, lambda: next(asked))) == [1, 4]
    monkeypatch.setattr("arbordraft.decoding.timing._recorded_seconds", lambda *_: {1: 0.5, 8: 0.25})
    assert measure_rows(ragged(), (1, 8)).seconds == (0.25, 0.25)

    def unsupported(*_):
        raise UnsupportedModel("no")

    monkeypatch.setattr("arbordraft.decoding.timing._recorded_seconds", unsupported)
    assert measure_rows(ragged(), (1, 8), repeats=1).rows == (1, 8)
