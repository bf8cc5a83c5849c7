"""Workloads of benchmarks: the ranges of their settings, and their record in a file of results."""

import json

import pytest
from support.models import ragged

from arbordraft.bench.measure import save
from arbordraft.bench.suites import filled
from arbordraft.bench.workload import Workload

WRONG = {
    "no batch": ({"batch": 0}, ValueError, "batch must be a whole number of at least 1, got 0"),
    "half a token": ({"new_tokens": 0.5}, TypeError, "new_tokens must be a whole number"),
    "no round": ({"repeats": 0}, ValueError, "repeats must be a whole number of at least 1"),
    "a negative temperature": ({"temperature": -1.0}, ValueError, "temperature"),
    "a nucleus above 1": ({"top_p": 2}, ValueError, "top_p"),
    "a penalty of 0": ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be above 0"),
    "a negative seed": ({"seed": -1}, ValueError, "seed"),
}


@pytest.mark.parametrize(("options", "kind", "match"), WRONG.values(), ids=WRONG)
def test_settings_out_of_range_are_refused(options, kind, match):
    with pytest.raises(kind, match=match):
        Workload(**options)


def test_settings_reach_the_request():
    workload = Workload(temperature=0.1, top_p=0.1, repetition_penalty=1.05)
    request = workload.request()
    assert {name: request[name] for name in ("temperature", "top_p", "repetition_penalty", "do_sample")} == {
        "temperature": 0.1, "top_p": 0.1, "repetition_penalty": 1.05, "do_sample": True
    }  # fmt: skip
    assert "repetition_penalty" not in Workload().request()


def test_prompts_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"RaggedModel\(model, tokenizer\)"):
        Workload().batches(ragged())


def test_results_state_their_workload(tmp_path):
    one, other = (Workload(prompts, temperature=1.0).stated() for prompts in (("a", "b"), ("a", "c")))
    save(tmp_path / "x.json", [], workloads=[one])
    (written,) = json.loads((tmp_path / "x.json").read_text())["settings"]["workloads"]
    assert written["prompts"]["count"] == 2
    assert {name: written[name] for name in ("batch", "new_tokens", "temperature", "repeats", "seed")} == {
        "batch": 8, "new_tokens": 128, "temperature": 1.0, "repeats": 3, "seed": 0
    }  # fmt: skip
    assert one["prompts"] != other["prompts"]  # the record tells prompts apart


def test_batches_hold_no_more_prompts_than_there_are():
    found = filled([Workload(("a", "b"), batch=batch, temperature=t) for t in (0.0, 1.0) for batch in (1, 4, 8)])
    assert [(one.temperature, one.batch) for one in found] == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
