"""Kinds of requests of benchmarks, and the page that lists their speed."""

import pytest
import torch
from support.models import ragged, tiny_tokenizer
from typer.testing import CliRunner

import arbordraft as ad
from arbordraft.bench.decoding import DecodeRow
from arbordraft.bench.pages import page
from arbordraft.bench.workload import REQUESTS, Workload
from arbordraft.cli.main import app

IDS = torch.tensor([[5, 9, 7, 5, 9]])
PROVENANCE = {"date": "2026-11-28T12:00:00+0000", "cpu": "EPYC", "threads": 2, "commit": "abc"}


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_kind_is_a_request_that_decoders_take(kind):
    target = ragged(seed=1, kernels="torch")
    settings = {**Workload(["a"], new_tokens=3, kind=kind).request(), "bad_words_ids": None, "min_new_tokens": None}
    settings |= {"bad_words_ids": [[7], [8, 9]]} if kind == "bad-words" else {}
    settings |= {"min_new_tokens": 3} if kind == "min-tokens" else {}
    text = ad.SpeculativeDecoder(target, ad.NoDrafter()).generate(input_ids=IDS, **settings)
    assert text.shape[1] > IDS.shape[1]


def test_a_kind_says_whether_tokens_are_sampled():
    assert [Workload(["a"], kind=kind).sampled for kind in ("greedy", "min-p", "repetition", "chat")] == [
        False,
        True,
        False,
        True,
    ]
    assert Workload(["a"], kind="chat").request()["repetition_penalty"] == 1.1


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no kind of request 'magic': choose among greedy, temperature"):
        Workload(["a"], kind="magic")
    for command in ("policy", "equality"):
        refused = CliRunner().invoke(app, ["bench", command, "--drafter", "none", "--requests", "greedy,magic"])
        assert refused.exit_code == 2
        assert "magic" in refused.output


def row(decoder, request, batch, speed_up):
    return DecodeRow("float32", batch, 0.0, decoder, "pathwise", 1.0, speed_up, tau=2.0, spread=0.05, request=request)


def test_a_page_names_the_cases_that_are_slower():
    rows = [
        row(name, kind, batch, speed)
        for kind, batch, speeds in (("greedy", 1, (1.0, 1.8)), ("greedy", 8, (1.0, 0.9)), ("chat", 1, (1.0, 1.3)))
        for name, speed in zip(("plain", "self"), speeds, strict=True)
    ]
    text = page(rows, {"model": "smollm2", "dtype": "bfloat16"}, PROVENANCE)
    assert "2026-11-28, EPYC, 2 threads, commit abc, smollm2 in bfloat16." in text
    assert "| greedy | 1.80 ± 0.05 (2.0) | 0.90 ± 0.05 (2.0) |" in text
    assert "| chat | 1.30 ± 0.05 (2.0) |  |" in text
    assert "- self, greedy, batch 8: 0.90 x plain, spread 0.05" in text
    assert "plain, greedy" not in text
    assert "No case is slower" in page(rows[:2], {}, PROVENANCE)


def test_the_command_writes_a_page(tmp_path):
    model = tiny_tokenizer()
    target = ragged(seed=1, kernels="torch").model
    target.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abcab"]}\n')
    done = CliRunner().invoke(
        app,
        [
            *("bench", "policy", "--drafter", "ngram", "--model", str(tmp_path / "model"), "--dtype", "float32"),
            *("--prompts", str(tmp_path / "prompts.jsonl"), "--batches", "1", "--requests", "greedy,repetition"),
            *("--new-tokens", "6", "--repeats", "1", "--page", str(tmp_path / "page.md")),
        ],
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.md").read_text()
    assert "| greedy |" in text
    assert "| repetition |" in text
