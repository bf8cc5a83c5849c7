"""``arbordraft bench grammars``: tasks that can be decoded, and contestants that say the same."""

import json

import jsonschema
import pytest
from support.spellers import speller

from arbordraft.bench.decoding import in_turns
from arbordraft.bench.grammars import TASKS, GrammarSuite
from arbordraft.bench.workload import Workload


@pytest.mark.parametrize("schema", [schema for _, schema in TASKS], ids=range(len(TASKS)))
def test_schemas_are_schemas(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema


def test_all_contestants_decode_the_same(monkeypatch):
    target = speller()
    monkeypatch.setattr(
        target.tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr("arbordraft.builders.known_costs", lambda *_: None)
    monkeypatch.setattr("arbordraft.builders.CostAware", lambda costs: None)
    suite = GrammarSuite(target, 2)
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
