"""``examples/benchmarks/grammars.py``: its schemas are valid, and all contestants decode all tokens."""

import json

import grammars
import jsonschema
import pytest
from support.spellers import speller

from arbordraft.bench.decoding import in_turns
from arbordraft.bench.workload import Workload


@pytest.mark.parametrize("schema", [schema for _, schema in grammars.TASKS], ids=range(len(grammars.TASKS)))
def test_schemas_are_valid(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema


def test_all_contestants_decode_all_tokens(monkeypatch, tmp_path):
    target = speller()
    monkeypatch.setattr(
        target.tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr("arbordraft.builders.known_costs", lambda *_: None)
    monkeypatch.setattr("arbordraft.builders.CostAware", lambda costs, **_: None)
    suite = grammars.GrammarSuite(target, 2)
    workload = Workload(suite.prompts, batch=2, new_tokens=24, repeats=1)
    decoders = suite.decoders(workload)
    (inputs,) = workload.batches(target)
    counts = {name: sum(decode(inputs, workload).emitted) for name, decode in decoders.items()}
    assert set(counts.values()) == {48}
    rows = list(in_turns(target, decoders, workload))
    assert rows[1].tau > rows[0].tau == 1
    masks = suite.masks(workload, rows[0])
    assert masks.tokens == 48
    assert masks.share > 0
    monkeypatch.setattr("arbordraft.bench.report.load_target", lambda *_, **__: (target, target.tokenizer))
    grammars.main(limit=2, new_tokens=4, batches="2", repeats=1, json=tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())["measurements"]
    assert [row.get("decoder") for row in written] == [*decoders, None]
