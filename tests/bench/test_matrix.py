"""The matrix of speeds: long prompts, clients of a server, and the command that measures all of it."""

import asyncio
import json
import re
import string
from types import SimpleNamespace

import httpx
import pytest
import torch
from support.models import ragged, tiny_checkpoint, tiny_tokenizer
from support.served import tiny_decoder
from typer.testing import CliRunner

from arbordraft.bench import matrix
from arbordraft.bench.clients import Clients, fields
from arbordraft.bench.contexts import lengthened, reference_text
from arbordraft.bench.decoding import DecodeRow, in_turns, ours
from arbordraft.bench.pages import page
from arbordraft.bench.report import Report
from arbordraft.bench.suites import whole_batches
from arbordraft.bench.workload import REQUESTS, Workload
from arbordraft.cli import policy, serve
from arbordraft.cli.main import app
from arbordraft.decoding.engine import Engine
from arbordraft.serving.app import build_app
from arbordraft.serving.server import running
from arbordraft.serving.service import Service

PROVENANCE = {"date": "2026-11-28T12:00:00+0000", "cpu": "EPYC", "threads": 2, "commit": "abc"}
QUESTIONS = ("Why?", "How does it work?", "x" * 90)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer with a token for every printable character."""
    return tiny_tokenizer(string.printable)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


# Long prompts


def test_prompts_get_passages_of_their_own(letters):
    found = lengthened(letters, QUESTIONS, 80, seed=3)
    assert found == lengthened(letters, QUESTIONS, 80, seed=3)
    assert found != lengthened(letters, QUESTIONS, 80, seed=4)
    passages, questions = zip(*(prompt.rsplit("\n\n", 1) for prompt in found), strict=True)
    assert questions == ("Why?", "How does it work?", "Why?")  # the third is too long
    assert [len(letters(prompt)["input_ids"]) for prompt in found] == [80] * 3
    assert len(set(passages)) == 3
    text = reference_text()
    assert all(passage in text for passage in passages)  # no passage is put together of repeated parts
    assert passages[0] * 2 not in text


def test_no_prompt_exceeds_its_context(letters):
    """A tokenizer that splits text at its edges otherwise gives more tokens than the passage had."""

    class Edgy:
        chat_template = None

        def __call__(self, text, **options):
            ids = letters(text, **options)["input_ids"]
            return {"input_ids": ids if len(ids) > 10_000 else ids[:3] + ids}

        def decode(self, ids):
            return letters.decode(ids)

    (found,) = lengthened(Edgy(), ["Why?"], 60, seed=0)
    assert len(Edgy()(found)["input_ids"]) == 60


def test_impossible_contexts_are_refused(letters):
    with pytest.raises(ValueError, match="no prompt has fewer than 5 tokens"):
        lengthened(letters, QUESTIONS, 5, seed=0)
    with pytest.raises(ValueError, match="give a context below that, got 10000000"):
        lengthened(letters, QUESTIONS, 10_000_000, seed=0)


def test_a_workload_lengthens_its_prompts(letters):
    target = SimpleNamespace(tokenizer=letters, device=torch.device("cpu"), max_positions=100)
    workload = Workload(QUESTIONS, batch=2, context=80, new_tokens=20)
    assert [batch["attention_mask"].sum(1).tolist() for batch in workload.batches(target)] == [[80, 80], [80]]
    assert workload.fits(target)
    assert not Workload(QUESTIONS, context=80, new_tokens=21).fits(target)


# Sizes


def test_few_prompts_come_from_all_over_the_list():
    prompts = tuple("abcdefgh")
    few = [whole_batches(Workload(prompts, batch=batch), 2).prompts for batch in (1, 2, 3, 16)]
    assert few == [("b", "f"), ("b", "f"), ("b", "d", "g"), prompts * 2]
    assert whole_batches(Workload(prompts, batch=3)).prompts == prompts[:6]


# Clients


def test_only_settings_of_the_protocol_are_asked_for():
    own = {"n-grams": "no_repeat_ngram_size", "bad-words": "bad_words_ids"}
    asked = {kind: fields(Workload(["a"], kind=kind, new_tokens=9)) for kind in REQUESTS if kind not in own}
    assert asked["greedy"] == {"max_tokens": 9, "temperature": 0.0}
    assert asked["repetition"] == {"max_tokens": 9, "temperature": 0.0, "repetition_penalty": 1.1}
    assert asked["min-tokens"]["min_tokens"] == 9, "a server refuses more than the longest answer"
    assert fields(Workload(["a"], kind="min-tokens", new_tokens=128))["min_tokens"] == 64
    assert asked["min-p"] == {"max_tokens": 9, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.05}
    for kind, setting in own.items():
        with pytest.raises(ValueError, match=f"no field for {setting}"):
            fields(Workload(["a"], kind=kind))


class Counted:
    """A server that counts the requests it answers at a time."""

    def __init__(self):
        self.now = self.most = 0
        self.seen = []

    async def __call__(self, request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "exactness": "pathwise"}]})
        body = json.loads(request.content)
        self.seen.append(body)
        if body["prompt"] == [60]:
            return httpx.Response(400, text="too long")
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        details = {"target_forwards": 2, "drafted_tokens": 3}
        return httpx.Response(
            200, json={"usage": {"completion_tokens": body["prompt"][0], "completion_tokens_details": details}}
        )


def prompts_of(*first):
    ids = torch.tensor([[0, token] for token in first])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0, 1]] * len(first))}


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_every_client_waits_for_its_answer(clients):
    server, workload = Counted(), Workload(["a"], batch=clients, served=True, new_tokens=4, seed=2)
    with Clients() as loops:
        loops._http = httpx.AsyncClient(transport=httpx.MockTransport(server))
        decode = loops.decode("http://some")
        stats = decode(prompts_of(7, 5, 9, 8), workload)
        with pytest.raises(ValueError, match="refused a request of the measurement: too long"):
            decode(prompts_of(60), workload)
    assert server.most == clients
    assert stats.emitted == [7, 5, 9, 8]
    assert (stats.exactness, stats.forwards, stats.drafted) == ("pathwise", [2] * 4, 12)
    assert [body["prompt"] for body in server.seen[:4]] == [[7], [5], [9], [8]]
    assert [body["seed"] for body in server.seen[:4]] == workload.seeds(4)
    assert [body["max_tokens"] for body in server.seen[:4]] == workload.lengths(4)


def test_answers_of_clients_differ_in_length():
    lengths = Workload(["a"], new_tokens=9).lengths(100)
    assert set(lengths) == {5, 6, 7, 8, 9}
    assert lengths == Workload(["a"], new_tokens=9).lengths(100) != Workload(["a"], new_tokens=9, seed=1).lengths(100)


def test_clients_get_the_answers_of_the_library(decoder):
    workload = Workload(("hello there", "a", "the sea", "why"), batch=2, served=True, new_tokens=12, kind="chat")
    service = Service(Engine(decoder, max_cache_tokens=4000), "tiny")
    with running(build_app(service)) as (server, url), Clients() as loops:
        decoders = {"plain": ours(decoder), "served": loops.decode(url)}
        rows = list(in_turns(decoder.target, decoders, workload))
        (inputs,) = workload.batches(decoder.target)
        answers = [decode(inputs, workload) for decode in decoders.values()]
    lengths = workload.lengths(len(workload.prompts))
    assert answers[1].emitted == [min(pair) for pair in zip(answers[0].emitted, lengths, strict=True)]
    assert min(answers[1].forwards) > 0
    assert [row.steps_speed_up is None for row in rows] == [False, True]
    assert {row.served for row in rows} == {True}
    assert server.should_exit
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


# Cases that are left out


def test_impossible_cases_are_left_out_with_their_reasons():
    report, target = Report(), ragged()  # 128 positions
    possible = Workload(["a"], new_tokens=28, context=100)
    cases = [
        possible,
        Workload(["a"], new_tokens=28, context=101, kind="greedy"),
        Workload(["a"], kind="n-grams", served=True, batch=1),
        Workload(["a"], kind="n-grams", served=True, batch=8),
    ]
    assert matrix.measurable(cases, target, report) == [possible]
    assert report.left_out == [
        "greedy, 101 tokens: the model has 128 positions",
        "n-grams with clients: OpenAI's protocol has no field for no_repeat_ngram_size",
    ]
    assert report.settings["left_out"] == report.left_out
    with pytest.raises(ValueError, match="nothing is left to measure; greedy, 101 tokens: the model has 128"):
        matrix.measurable(cases[1:2], target, Report())


def test_drafters_that_a_model_cannot_have_are_left_out():
    report = Report()
    found = matrix.loaded(ragged(), ["ngram", "head", "self"], report)
    assert list(found) == ["plain", "ngram"]
    assert [reason.partition(":")[0] for reason in report.left_out] == ["head", "self"]
    assert "no drafter was trained for this model" in report.left_out[0]


# The page


def row(decoder, batch, speed_up, **settings):
    return DecodeRow("bfloat16", batch, 0.0, decoder, "pathwise", 1.0, speed_up, request="greedy", **settings)


def test_a_page_has_clients_and_contexts():
    rows = [
        *(row(name, 4, speed) for name, speed in (("plain", 1.0), ("auto", 1.4))),
        *(row(name, 1, speed, served=True) for name, speed in (("plain", 1.0), ("auto", 1.2))),
        *(row(name, 64, speed, served=True) for name, speed in (("plain", 1.0), ("auto", 0.9))),
        *(row(name, 4, 1.0, context=1024, steps_speed_up=steps) for name, steps in (("plain", 1.0), ("auto", 0.8))),
    ]
    text = page(rows, {"model": "m", "dtype": "bfloat16"}, PROVENANCE, ["self: too small"])
    assert "| request | batch 4 | 1 client | 64 clients |" in text
    assert "| greedy | 1.40 ± 0.00 (1.0) | 1.20 ± 0.00 (1.0) | 0.90 ± 0.00 (1.0) |" in text
    assert "| greedy, 1024 tokens | 1.00 ± 0.00 (1.0), steps 0.80 |  |  |" in text
    limits = text.partition("## Known limits")[2].partition("## Left out")[0]
    assert re.findall("- (.*)", limits) == [
        "auto, greedy, 64 clients: 0.90 x plain, spread 0.00",
        "auto, greedy, 1024 tokens, batch 4: steps 0.80 x plain, spread 0.00",
    ]
    assert text.endswith("## Left out\n\n- self: too small\n")
    assert "Clients ask a server" in text
    assert "Clients ask a server" not in page(rows[:2], {}, PROVENANCE)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    return str(tiny_checkpoint(folder / "model", max_position_embeddings=1024))


def measured(tmp_path, model, *options):
    files = ["--json", str(tmp_path / "m.json"), "--page", str(tmp_path / "m.md")]
    sizes = ["--model", model, "--dtype", "float32", "--new-tokens", "4"]
    done = CliRunner().invoke(app, ["bench", "policy", *sizes, *files, *options])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "m.json").read_text())
    return report, (tmp_path / "m.md").read_text()


def cases_of(report):
    return {(row["request"], row["batch"], row["served"], row["context"]) for row in report["measurements"]}


def test_a_narrowed_matrix(tmp_path, model):
    options = ["--requests", "greedy,chat", "--batches", "1,2", "--clients", "1,3", "--contexts", "300,1100"]
    report, text = measured(tmp_path, model, "--matrix", *options, "--drafter", "ngram", "--drafter", "head")
    kinds = ("greedy", "chat")
    assert cases_of(report) == {
        *((kind, batch, False, 0) for kind in kinds for batch in (1, 2)),
        *((kind, batch, False, 300) for kind in kinds for batch in (1, 2)),
        *((kind, clients, True, 0) for kind in kinds for clients in (1, 3)),
    }
    assert {row["decoder"] for row in report["measurements"]} == {"plain", "ngram"}
    assert len(report["measurements"]) == 2 * 12
    assert all(row["tokens_per_second"] > 0 for row in report["measurements"])
    assert report["settings"]["drafter"] == ["ngram", "head"]
    assert [entry.partition(":")[0] for entry in report["settings"]["left_out"]] == [
        "greedy, 1100 tokens",
        "chat, 1100 tokens",
        "head",
    ]
    assert "| chat, 300 tokens |" in text
    assert "| request | batch 1 | batch 2 | 1 client | 3 clients |" in text
    stated = report["settings"]["workloads"]
    counts = {(entry["batch"], entry["context"] > 0): entry["prompts"]["count"] for entry in stated}
    assert counts == {(1, False): policy.FEW, (2, False): policy.FEW, (3, False): 9, (1, True): 1, (2, True): 2}


def test_options_that_are_left_out_are_those_of_the_whole_matrix(monkeypatch, tmp_path, model):
    """Sizes of the preset reach the workloads; here nothing is decoded."""
    seen = []
    monkeypatch.setattr(Report, "decode", lambda report, target, decoders, workload: seen.append((decoders, workload)))
    monkeypatch.setattr(Report, "_write_page", lambda report: None)
    sizes = ["--model", model, "--dtype", "float32", "--matrix", "--clients", "none"]
    done = CliRunner().invoke(app, ["bench", "policy", *sizes])
    assert done.exit_code == 0, done.output
    cases = [workload for _, workload in seen]
    plain = {(case.kind, case.batch) for case in cases if not case.context}
    assert plain == {(kind, batch) for kind in REQUESTS for batch in (1, 2, 4, 8, 16)}
    long = {(case.kind, case.batch, case.context) for case in cases if case.context}
    assert long == {(kind, batch, 256) for kind in ("greedy", "chat") for batch in (1, 4)}  # 1024 positions
    assert {(case.new_tokens, case.repeats) for case in cases} == {(48, 2)}
    assert {len(case.prompts) for case in cases if case.batch == 1} == {1, policy.FEW}
    assert {"plain", "auto", "ngram"} <= seen[0][0].keys()
    seen.clear()
    assert CliRunner().invoke(app, ["bench", "policy", *sizes[:4], "--drafter", "ngram"]).exit_code == 0
    assert {(case.kind, case.context, case.served, case.repeats) for _, case in seen} == {("", 0, False, 5)}


def test_a_missing_library_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(serve, "_LIBRARIES", ("fastapi", "no_such_library"))
    monkeypatch.setattr(Report, "load", lambda *arguments, **options: pytest.fail("the model was loaded"))
    refused = CliRunner().invoke(app, ["bench", "policy", "--matrix"])
    assert isinstance(refused.exception, ImportError)
    assert "serving needs no_such_library; run: pip install 'arbordraft[serve]'" in str(refused.exception)


@pytest.mark.parametrize("options", [["--clients", "0"], ["--contexts", "some"], ["--batches", "none,1"]], ids=str)
def test_wrong_sizes_are_refused(options):
    refused = CliRunner().invoke(app, ["bench", "policy", "--matrix", *options])
    assert refused.exit_code == 2
