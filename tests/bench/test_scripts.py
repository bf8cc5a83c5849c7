"""Each script in ``examples/benchmarks`` runs to its end on a tiny model and writes its figures."""

import importlib
import inspect
import json
import re
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import blocks
import bounds
import edits
import mixtures
import pytest
import ranking
import recurrent
import torch
import typer
import verdicts
import weights
from support.models import ragged, tiny_checkpoint
from typer.testing import CliRunner

from arbordraft import CostTable, NoDrafter, RaggedModel
from arbordraft.bench.report import Report
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.cli.main import app
from arbordraft.cli.options import BOTH
from arbordraft.deciders.costs import StepCosts
from arbordraft.kernels import native
from arbordraft.loading import load_target
from arbordraft.utils.choices import Dtype
from arborlab.tuning import grid
from arborlab.verifiers import NodeRow

SCRIPTS = Path(weights.__file__).parent
FLOAT, HALF = [Dtype.float32], [Dtype.bfloat16]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny model."""
    torch.manual_seed(0)
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def measured(tmp_path, tiny, monkeypatch):
    """Runs a script in this process; gives the rows and settings that it has written."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "abcd"))
    seen = []

    def on_progress(report, what, done, of):
        assert 0 <= done < of
        seen.append(what)

    monkeypatch.setattr(Report, "on_progress", on_progress)

    def run(name, **options):
        report = tmp_path / "report.json"
        script = importlib.import_module(name)
        if "prompts" in script.main.__annotations__:
            options = {"prompts": prompts, "limit": 2, "new_tokens": 4} | options
        if "repeats" in script.main.__annotations__:
            options = {"repeats": 1} | options
        script.main(model=str(tiny), json=report, **options)
        assert seen
        assert not list(tmp_path.glob("*.part*"))
        return json.loads(report.read_text())

    return run


@pytest.mark.parametrize(
    ("name", "options", "groups"),
    [
        ("forward", {"dtype": FLOAT}, {"forward"}),
        ("verify", {"dtype": FLOAT}, {"verify"}),
        ("lookup", {"dtype": FLOAT}, {"decode"}),
        ("cpu", {"dtype": HALF, "others": False}, {"cpu forward", "cpu decode"}),
    ],
)
def test_times_and_their_provenance(measured, name, options, groups):
    found = measured(name, **options)
    assert {row["group"] for row in found["measurements"]} == groups
    assert all(row["ours"] > 0 for row in found["measurements"])
    assert found["provenance"]["versions"]["torch"] == version("torch")
    assert found["settings"]["model"]


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_a_report_names_the_type_that_was_chosen(measured, monkeypatch, fast):
    monkeypatch.setattr(native, "fast_bfloat16", lambda: fast)
    found = measured("batching", batches="1", length=2)
    expected = "bfloat16" if fast else "float32"
    assert found["settings"]["dtype"] == expected
    assert {row["dtype"] for row in found["measurements"]} == {expected}


def test_no_default_ignores_the_processor():
    """Commands and scripts choose a type by the processor, take float32, or compare both types."""
    defaults = {}

    def look(command, path):
        for name, inner in getattr(command, "commands", {}).items():
            look(inner, f"{path} {name}")
        for option in command.params:
            if option.name == "dtype":
                defaults[path] = option.default

    look(typer.main.get_command(app), "arbordraft")
    for script in SCRIPTS.glob("*.py"):
        main = getattr(importlib.import_module(script.stem), "main", None)
        if main is not None and "dtype" in (parameters := inspect.signature(main).parameters):
            defaults[script.name] = parameters["dtype"].default
    assert len(defaults) > 15
    fixed = {name: value for name, value in defaults.items() if value not in (None, Dtype.float32, BOTH)}
    assert not fixed


@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        ("batching", {"batches": "1,2"}, 2 * 5),
        ("product", {"drafter": "early-exit:1", "batches": "2", "nodes": 6}, 2 * 5),
        ("deciders", {"drafter": "early-exit:1", "batches": "2", "depth": 2}, 1 + 2 + 7),
    ],
)
def test_decoders_take_turns_and_are_drawn(measured, tmp_path, name, options, rows):
    picture = tmp_path / "picture.png"
    with warnings.catch_warnings(action="ignore"):  # the lossy fork says that it is
        found = measured(name, png=picture, **options)
    assert len(found["measurements"]) == rows
    assert picture.stat().st_size > 1000


def test_bounds_follow_from_bytes_and_products(measured):
    found = measured("bounds", dtype=FLOAT, weights="own,int8", rows="1,4")["measurements"]
    assert [(row["weights"], row["rows"]) for row in found] == [("own", 1), ("own", 4), ("int8", 1), ("int8", 4)]
    for row in found:
        assert row["ratio"] == pytest.approx(row["milliseconds"] / max(row["reading"], row["multiplying"]))
    with pytest.raises(ValueError, match="bounds are those of native kernels"):
        next(bounds.against_bounds(ragged(), [1], 1))


@pytest.mark.usefixtures("kernels")
def test_products_with_blocks(tmp_path):
    report = tmp_path / "blocks.json"
    blocks.main(kinds="Q4_K,INT4,F16", rows="1,3", outputs=64, inputs=256, megabytes=1, repeats=1, json=report)
    found = json.loads(report.read_text())["measurements"]
    kinds = ["Q4_K", "Q4_K", "INT4", "INT4", "F16", "F16"]
    assert [(row["kind"], row["rows"]) for row in found] == list(zip(kinds, [1, 3] * 3, strict=True))
    assert [4.5 < row["bits"] < 5.5 for row in found] == [True] * 4 + [False] * 2
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 and row["packing"] > 0 for row in found)


def test_time_of_a_verdict_by_law_and_verifier(tmp_path):
    report = tmp_path / "verdicts.json"
    verdicts.main(vocabularies="40,50", children="1,2", repeats=1, json=report)
    rows = json.loads(report.read_text())["measurements"]
    assert {row["vocabulary"] for row in rows} == {40, 50}
    assert {row["topology"] for row in rows} == {"chain", "complete", "paths"}
    assert {row["nodes"] for row in rows} == {verdicts.NODES}
    assert all(row["milliseconds"] > 0 for row in rows)
    judged = {(row["law"], row["verifier"]) for row in rows if row["topology"] == "paths"}
    assert judged >= {
        ("IID(2)", "multi-path"),
        ("TopTail(1,1)", "Lifted(SpecHub)"),
        ("SharedNoise(2)", "SharedMatching"),
    }
    assert all(row["topology"] != "complete" for row in rows if row["verifier"] == "multi-path")


def test_more_information_spends_a_budget_no_worse(measured):
    rows = measured("budgets", drafter="early-exit:1", dtype=Dtype.float32, temperatures="1", depth=3, rows="1,3")
    found = {(row["noise"], row["looks_at"], row["rows"]): row for row in rows["measurements"]}
    for noise in ("shared", "independent"):
        bound = found[noise, "the verdict (bound)", 1]["accepted"]
        assert all(row["accepted"] <= bound + 1e-9 for key, row in found.items() if key[0] == noise and key[2] == 1)
        whole = {row["accepted"] for key, row in found.items() if key[0] == noise and key[2] == 3}
        assert max(whole) == pytest.approx(min(whole))  # a budget for all rows leaves nothing to choose
    unsound = {key[:2] for key, row in found.items() if not row["lossless"]}
    assert unsound == {("independent", "drafted tokens")}


def test_ranks_have_the_errors_of_differences(tmp_path):
    def node(law, by_prompt):
        mean = sum(by_prompt) / len(by_prompt)
        return NodeRow("head", 1.0, 2, law, "RRS", 3, [mean, 0.0], mean, 0.1, 1.0, by_prompt=by_prompt)

    file, found = tmp_path / "verifiers.json", tmp_path / "ranks.json"
    with Report(file) as report:
        report.take([node("IID(2)", [0.1, 0.5, 0.9]), node("better", [0.2, 0.6, 1.0]), node("equal", [0.0, 0.8, 0.9])])
    ranking.main(files=[file], json=found)
    rows = json.loads(found.read_text())["measurements"]
    assert [(row["law"], row["as_good"]) for row in rows] == [("better", True), ("equal", True), ("IID(2)", False)]
    assert [row["behind"] for row in rows] == pytest.approx([0, 1 / 30, 0.1])
    with pytest.raises(ValueError, match="lacks the figures of each prompt"):
        next(ranking.ranks([node("IID(2)", [0.5]), replace(node("IID(2)", [0.5]), by_prompt=[])]))


def test_weights(measured, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d " * 100)
    found = measured("weights", text=text, batches="1,2")["measurements"]
    kinds = ["own", "int4", "int8", "int8-weight-only"]
    assert [(row["batch"], row["weights"]) for row in found] == [(batch, kind) for batch in (1, 2) for kind in kinds]
    for row in found:
        own = row["weights"] == "own"
        assert (row["divergence"] == 0) == own
        assert (row["memory"] == 1) == own
        assert row["tokens_per_second"] > 0
        assert row["perplexity"] > 1
    text.write_text("a b")
    with pytest.raises(ValueError, match="is too short: at least 256 are read"):
        measured("weights", text=text, batches="1")


def test_tuned_is_beside_the_whole_grid(measured, tmp_path):
    file = tmp_path / "tuned.json"
    cheap = CostTable((1,), (1e-3,))
    chosen = Choice(2, Setting("tree", 8), 5.0, 4.0)
    Tuned("early-exit:1", 0.0, StepCosts(cheap, cheap), [chosen]).save(file)
    found = measured("tuned", file=file, batches="2")["measurements"]
    assert found[0]["decoder"] == "chosen: tree of 8"
    assert {row["decoder"].removeprefix("chosen: ") for row in found} == set(map(str, grid(NoDrafter())))
    assert found[0]["speed_up"] == 1


@pytest.mark.soak
def test_draft_steps_of_graphs(measured, tmp_path, tiny):
    pytest.importorskip("onnx")
    graphs = tmp_path / "graphs"
    written = CliRunner().invoke(app, ["export", "onnx", "early-exit:1", str(graphs), "--target", str(tiny)])
    assert written.exit_code == 0, written.output
    rows = measured("onnx_steps", graphs=[graphs], drafter="early-exit:1", batches="1,2", depth=2)["measurements"]
    assert [(row["drafter"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("torch, own modules", "torch, native kernels", "graphs")
    ]


def test_edits_of_the_same_functions(tiny, tmp_path, capsys):
    body = "".join(f"    total += {number}\n" for number in range(6))
    (tmp_path / "some.py").write_text(f"def some(total):\n{body}    return total\n\ndef short():\n    return 1\n")
    assert len(edits.functions(tmp_path, 20)) == 1
    asked = edits.requests(["a", "b"], 12)
    assert len(set(asked)) == 10
    assert [source for _, source in asked[:3]] == ["a", "b", "a"]
    edits.main(model=str(tiny), dtype=Dtype.float32, limit=6, new_tokens=4, batches="1,2", folder=tmp_path)
    shown = capsys.readouterr().out
    assert len(re.findall(r"│ [12] +│ prediction", shown)) >= 2
    assert len(re.findall(r"│ [12] +│ lookups", shown)) >= 4
    assert "1.00 x" in shown


@pytest.mark.parametrize(("shape", "experts"), [("tiny", 4), pytest.param("moe-64", 64, marks=pytest.mark.soak)])
def test_mixtures_are_saved_as_targets(tiny, tmp_path, shape, experts):
    mixtures.main(shape, tmp_path / "model", tokenizer=str(tiny))
    target, tokenizer = load_target(str(tmp_path / "model"), Dtype.float32)
    assert target.model.config.num_experts == experts
    assert target.vocab_size == len(tokenizer)
    with pytest.raises(FileExistsError, match="--force"):
        mixtures.main(shape, tmp_path / "model", tokenizer=str(tiny))


@pytest.mark.usefixtures("kernels")
def test_recurrent_models_are_measured_against_bounds_and_others(tmp_path):
    report = tmp_path / "recurrent.json"
    recurrent.main(shapes="tiny-lfm2", dtype=FLOAT, new_tokens=8, repeats=1, json=report)
    rows = json.loads(report.read_text())["measurements"]
    assert [row["group"] for row in rows] == ["forward"] * 3 + ["step", "plain", "self", "drafts"]
    assert all(row["ours"] > 0 and row["reference"] > 0 for row in rows)
    with pytest.raises(ValueError, match="there is no shape 'other'; choose of lfm2-350m"):
        recurrent.main(shapes="other", dtype=FLOAT)
    target = RaggedModel(recurrent.random_model(*recurrent.HYBRIDS["tiny-lfm2"], torch.float32), kernels="native")
    assert target.prepacking.fused == target.num_layers == 3
    other = recurrent.attention_model(target, torch.float32)
    assert not other.recurrent
    assert other.prepacking.nbytes == pytest.approx(target.prepacking.nbytes, rel=0.2)


def test_every_script_is_tested():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    scripts = [path.stem for path in SCRIPTS.glob("*.py") if "run_script(main)" in path.read_text()]
    assert len(scripts) > 10
    assert [name for name in scripts if f'"{name}"' not in source and f"import {name}" not in source] == []
