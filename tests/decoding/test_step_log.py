"""Steps as a table: every packed node once; accepted nodes join to the answer."""

import sys

import pytest
from support.models import PROMPTS, decode, ragged, tiny_tokenizer

from arbordraft import NGramDrafter, SpeculativeDecoder, StepLog


@pytest.fixture(params=[None, tiny_tokenizer()], ids=["ids", "texts"])
def logged(request):
    decoder = SpeculativeDecoder(ragged(), NGramDrafter())
    decoder.on_step = log = StepLog(request.param)
    said, stats = decode(decoder, max_new_tokens=20)
    return log, said, stats


def test_accepted_rows_join_to_the_answers(logged):
    log, said, _ = logged
    for sample, tokens in enumerate(said):
        kept = [row for row in log.rows if row["sample"] == sample and row["accepted"] and row["kind"] != "root"]
        assert [row["token"] for row in kept][: len(tokens)] == tokens


def test_a_row_per_packed_node_and_one_for_the_target_of_each_sample(logged):
    log, _, stats = logged
    nodes = [row for row in log.rows if row["node"] >= 0]
    assert len(nodes) == stats.rows
    assert len(log.rows) - len(nodes) == sum(row["kind"] == "root" for row in nodes)
    assert {row["kind"] for row in log.rows} == {"root", "draft", "recovered", "bonus"}


def test_a_row_is_one_level_below_its_parent(logged):
    log, *_ = logged
    for step in {row["step"] for row in log.rows}:
        for sample in range(len(PROMPTS)):
            rows = [row for row in log.rows if (row["step"], row["sample"]) == (step, sample)]
            depths = {row["node"]: row["depth"] for row in rows if row["node"] >= 0}
            assert all(row["depth"] == depths[row["parent"]] + 1 for row in rows if row["kind"] != "root")


def test_the_log_converts_to_pandas(logged, monkeypatch):
    log, *_ = logged
    frame = log.to_frame()
    assert len(frame) == len(log.rows)
    assert ("text" in frame) == (log._tokenizer is not None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        log.to_frame()
