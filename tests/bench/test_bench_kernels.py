"""The benchmark of the Triton kernels: its bounds, its bookkeeping, and that it runs from end to end."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import gpu_kernels
import kernel_timing
import problems
import pytest
import score_problems
import torch
import typer
from kernel_timing import Goal, Problem, measured
from packed import Packed, flash, flex, sdpa
from roofline import STEPPED, Shape, fitting_shapes, predictions, product
from torch.testing import assert_close

pytest.importorskip("triton", reason="Triton is made for Linux only")
from arbordraft import TreeTopology
from arbordraft.kernels.choice import INTERPRETER
from arbordraft.kernels.work import Work

CPU, NOWHERE = torch.device("cpu"), torch.device("meta")
SMALL = Shape(context=300, batch=2, tree=5, group=2, size=16, heads=4)


def test_the_script_runs_whole_in_the_interpreter(tmp_path):
    report = tmp_path / "kernels.json"
    asked = ["--contexts", "2048,64", "--batches", "1", "--trees", "8", "--json", str(report)]
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    found = subprocess.run(
        [sys.executable, gpu_kernels.__file__, *asked],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "There is no GPU" in found.stdout
    assert "results agree with float64" in found.stdout
    written = json.loads(report.read_text())
    assert written["settings"]["device"] == "cpu"
    assert written["provenance"]["versions"]["torch"] == version("torch")
    bounds = [row for row in written["measurements"] if "h100_us" in row]
    rows = [row for row in written["measurements"] if "error" in row]
    # Two contexts with one group and size, and as many with each of two more groups and one more size.
    assert sum(row["kernel"] == "ragged_tree_attention" for row in bounds) == 2 * (1 + 2 + 1)
    names = {"ragged_tree_attention", "kv_append", "kv_compact", "row_stats", "left_mass", "left_pick", "verify_tree"}
    names |= {"lowest_kept", "tree_expand", "gumbel_draw"}
    assert {row["kernel"] for row in bounds} == {row["kernel"] for row in rows} == names
    assert all(row["correct"] for row in rows)
    assert all(row["us"] is None for row in rows)  # the interpreter's time is nobody's


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
    assert bound.splits == "16/8/16"
    assert bound.partial == pytest.approx(2 * 32 * 32 * 16 * 129 * 4 / (keys + rows + tables))


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


def test_comparisons_are_not_for_matrix_units():
    """Fourteen operations per score to sum above four pivots, and six to collect it: more than an A100 reads along."""
    (bound,) = (row for row in predictions([], STEPPED) if row.kernel == "lowest_kept")
    assert bound.bound == "compute on A100"
    assert bound.a100_us == pytest.approx(20 * 512 * 128256 / 9.75e12 * 1e6)


def test_every_size_is_there_once():
    shapes = product([512, 2048], [1, 8], [1, 8, 32, 64], [4, 1, 8], [128, 64])
    assert len(shapes) == len(set(shapes)) == 2 * 2 * (4 + 2 + 1)
    assert {(shape.group, shape.size) for shape in shapes if shape.tree == 32} == {
        (4, 128),
        (1, 128),
        (8, 128),
        (4, 64),
    }


def test_no_split_is_empty():
    cuts = {context: Shape(context, 1, 1, 4, 128).splits(132) for context in (256, 512, 700, 4096)}
    assert cuts == {256: 1, 512: 8, 700: 8, 4096: 16}  # of tiles of 64 keys


def test_what_does_not_fit_is_left_out_and_said():
    small, large = Shape(512, 1, 1, 4, 128), Shape(32768, 32, 1, 1, 128)
    told = []
    assert fitting_shapes([small, large], 24 * 10**9, told.append) == [small]
    assert told == [f"left out, as it does not fit into 24 GB: {large}"]
    assert fitting_shapes([small, large], 80 * 10**9, told.append) == [small, large]


class Clock:
    """A device that moves a byte and computes 100 flops in a microsecond, and takes what a call returns."""

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
        ({"goal": Goal("of copy", 0.71), "work": Work(700, 100_000, matrix=True)}, ""),  # arithmetic is what bounds it
        ({"goal": Goal("us", 100), "run": lambda: 99e-6}, "reached"),
        ({"goal": Goal("us", 100), "run": lambda: 101e-6, "work": Work(1, 100_000)}, "missed"),
        ({}, ""),
    ],
)
def test_goals(changes, reached):
    (row,) = measured([problem(**changes)], Clock())
    assert row.reached == reached
    assert row.correct


def test_times_of_peers_and_a_peer_that_fails():
    def fails():
        raise RuntimeError("no such kernel\nand much more")

    told = []
    peers = {"sdpa": lambda: lambda: 2e-3, "flex": fails}
    (row,) = measured([problem(peers=peers, work=Work(500, 80_000, matrix=True))], Clock(), told.append)
    assert (row.us, row.sdpa_us, row.flex_us) == (1000, 2000, None)
    assert (row.of_copy, row.of_roofline) == (0.5, 0.8)
    assert told == ["flex has no time for case: no such kernel"]


@pytest.mark.parametrize("error", [0.11, float("nan"), float("inf")])
def test_a_wrong_kernel_is_seen(monkeypatch, capsys, error):
    """Negative control, and the script fails."""
    (row,) = measured([problem(error=lambda: error)], None)
    assert not row.correct
    assert row.us is None
    monkeypatch.setattr(gpu_kernels, "device", lambda: CPU)
    monkeypatch.setattr(gpu_kernels, "chosen", lambda *_: [problem(error=lambda: error), problem()])
    with pytest.raises(typer.Exit) as failed:
        gpu_kernels.main(contexts="64", batches="1", trees="1")
    assert failed.value.exit_code == 1
    assert "1 of 2 results differ" in capsys.readouterr().out


def test_a_late_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "triton" in sys.modules
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Python starts"):
        kernel_timing.device()
    monkeypatch.setattr(kernel_timing, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[triton\]'"):
        kernel_timing.device()


def test_peers_compute_the_same():
    """The dense mask and FlexAttention's, on ragged prefixes and trees, in float32."""
    trees = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(0), TreeTopology.k_ary(2, 2)]
    packed = Packed.random([37, 0, 130], trees, heads=4, group=2, size=16, device=CPU)
    packed.query, packed.keys, packed.values = (x.float() for x in (packed.query, packed.keys, packed.values))
    dense = sdpa(packed)().unflatten(2, (2, -1)).flatten(1, 2)
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        flexible = flex(packed, compiled=False)()
    for sample, tree in enumerate(trees):
        exact = packed.exact(sample).float()
        for found in (dense, flexible):
            assert_close(found[sample, :, : tree.num_nodes].transpose(0, 1), exact)


def test_a_gpu_could_run_it(monkeypatch):
    """On tensors without values: all are on one device, shapes fit, and nothing asks for values."""
    monkeypatch.setenv(INTERPRETER, "1")  # what Triton's part then is, is not asked: operators only say their shapes
    attention = problems.attention(SMALL, NOWHERE)
    assert attention.run().device == NOWHERE
    assert {name: make()().device for name, make in attention.peers.items()} == {"sdpa": NOWHERE, "flash": NOWHERE}
    options = problems.attention_options("all", [5, 0, 9], 4, 2, 16, {"window": 3, "sinks": True}, NOWHERE)
    assert options.run().shape == (16 + 1 + 71, 4, 16)
    stepped = problems.TINY_STEPPED
    calls = [make(stepped, NOWHERE) for make in (problems.kv_append, problems.kv_compacted, score_problems.expansion)]
    for part in (score_problems.passes, score_problems.truncation, score_problems.verification):
        calls += part(stepped, NOWHERE)
    for call in calls:  # what a CUDA graph holds must not wait for the device
        call.run()
    with pytest.raises(NotImplementedError):  # negative control: how many there are, only the device knows
        torch.ones(3, device=NOWHERE).nonzero()


def test_packed_attention_of_flash_is_causal():
    packed = Packed.random([7], [TreeTopology.chain(2)], heads=2, group=1, size=16, device=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError):
            flash(packed)()
