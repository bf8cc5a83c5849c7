"""Decoders around a trained EAGLE head: the builder, node budgets, loading, and the benchmark of drafters."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.companions import target, texts, trained
from support.models import PAYS, PROMPTS, decode, tiny, tiny_tokenizer
from typer.testing import CliRunner

import arbordraft as ad
from arbordraft import builders
from arbordraft.bench.decoding import in_turns
from arbordraft.bench.suites import drafter_gain
from arbordraft.bench.workload import Workload
from arbordraft.cli.main import app
from arbordraft.deciders import NodeBudget
from arbordraft.deciders.decisions import Verification
from arbordraft.drafter_names import load_drafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("eagle")
    trained("eagle").save(path)
    return path


@pytest.mark.parametrize("lookup", [False, True])
def test_the_builder_decodes_like_the_target(folder, lookup):
    decoder = builders.eagle(target(), folder, costs=PAYS, nodes=6, lookup=lookup, max_depth=3)
    found, stats = decode(decoder, max_new_tokens=20)
    assert found == [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts(), strict=True)]
    assert stats.tau > 1.2
    assert stats.exactness == "pathwise"


def test_the_builder_fits_trees_to_the_head(folder):
    drafter = ad.EagleDrafter.from_pretrained(folder, target())
    drafter.acceptance = (0.9, 0.0, 0.0)
    assert builders.eagle(target(), drafter, costs=PAYS, nodes=1).topology.parent_list == (-1, 0, 1, 2)
    drafter.acceptance = (0.3, 0.3, 0.3)
    assert builders.eagle(target(), drafter, costs=PAYS, nodes=1).topology.parent_list == (-1, 0, 0, 0)
    copied = builders.eagle(target(), drafter, costs=PAYS, nodes=8, max_depth=3, lookup=True).topology
    assert (copied.levels[3].stop, copied.num_nodes, copied.max_depth) == (32, 36, 7), "lookups may fill the budget"
    given = ad.TreeTopology.from_k_config((2, 1))
    assert builders.eagle(target(), drafter, costs=PAYS, topology=given).topology is given


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_budget_keeps_the_likeliest_nodes(folder, nodes):
    """Trees have no more rows than allowed and keep the best, so no fixed tree of that size is better."""
    drafter = ad.EagleDrafter.from_pretrained(folder, target())
    tree = ad.TreeTopology.from_k_config((3, 2, 2))
    decoder = ad.SpeculativeDecoder(target(), drafter, tree, ad.Coupling.shared(3), NodeBudget(nodes))
    rows = []
    decoder.on_step = lambda state, tree, verdict: rows.append(
        (sum(tree.lengths), len([length for length in tree.lengths if length]))
    )
    found, _ = decode(decoder, max_new_tokens=20)
    assert found == [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts(), strict=True)]
    assert all(total <= nodes * samples for total, samples in rows)
    assert nodes == 1 or any(total == nodes * samples for total, samples in rows)


def test_pruning_early_changes_nothing(folder):
    """Nodes that cannot be among the best are not expanded; trees equal those of full expansion."""

    class Patient(NodeBudget):
        def plan(self, situation):
            limits = super().plan(situation)
            every = Verification(-np.arange(limits.budget + 1.0), rate=1.0)  # as many as there may be
            return replace(limits, budget=-1, verification=every)

    found = []
    for decider in (NodeBudget(4), Patient(4)):
        decoder = ad.SpeculativeDecoder(
            target(),
            ad.EagleDrafter.from_pretrained(folder, target()),
            ad.TreeTopology.from_k_config((3, 2, 2)),
            ad.Coupling.shared(3),
            decider,
        )
        _, stats = decode(decoder, max_new_tokens=20)
        found.append((stats.tau, stats.drafted, dict(stats.accepted)))
    assert found[0] == found[1]


def test_a_folder_without_a_drafter_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no trained drafter"):
        load_drafter(tmp_path, target())
    tiny().save_pretrained(tmp_path)
    assert isinstance(load_drafter(tmp_path, target()), ad.LanguageModelDrafter)


def test_every_compared_decoder_is_lossless(folder):
    drafters = {"eagle": load_drafter(folder, target()), "medusa": trained("medusa").drafter(target())}
    names = []
    for temperature in (0.0, 1.0):
        for name, decoder in drafter_gain(target(), drafters, Workload(temperature=temperature)).items():
            found, stats = decode(decoder, max_new_tokens=20)
            assert found == [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts(), strict=True)], name
            assert stats.exactness == ("exact" if "chain of" in name else "pathwise")
            names.append((temperature, name))
    assert len(names) == len(set(names)) == 16


def test_the_gain_is_counted(folder):
    model = ad.RaggedModel(target().model, tiny_tokenizer(eos_token="c"), kernels="torch")
    drafters = {"eagle": ad.EagleDrafter.from_pretrained(folder, model)}
    found = []
    for temperature in (0.0, 1.0):
        workload = Workload(("a b c", "c"), batch=2, new_tokens=8, temperature=temperature, repeats=1)
        found += in_turns(model, drafter_gain(model, drafters, workload), workload)
    assert [row.temperature for row in found] == [0] * 5 + [1] * 5
    assert [row.decoder for row in found[:5]] == [row.decoder for row in found[5:]]
    for row in found:
        assert 1 <= row.tau <= 7
        assert row.speed_up == pytest.approx(row.tokens_per_second / found[5 * (row.temperature > 0)].tokens_per_second)


def test_the_command_line_takes_a_trained_drafter(folder, tmp_path):
    model = tmp_path / "model"
    target().model.save_pretrained(model)
    tiny_tokenizer(eos_token="c").save_pretrained(model)
    runner = CliRunner()
    common = ["--model", str(model), "--dtype", "float32", "--drafter", str(folder)]
    result = runner.invoke(app, ["generate", "a b", *common, "--max-new-tokens", "4", "--kernels", "torch"])
    assert result.exit_code == 0, result.output
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "a b"}]}) + "\n")
    options = ["--prompts", str(prompts), "--new-tokens", "4", "--batch", "1", "--json", str(report)]
    result = runner.invoke(app, ["bench", "decode", *common, *options])
    assert result.exit_code == 0, result.output
    assert len(json.loads(report.read_text())["measurements"]) == 10
