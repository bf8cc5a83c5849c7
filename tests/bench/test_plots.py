"""Pictures of measurements: their panels, the order of these, and files that are refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from arbordraft import TreeTopology
from arbordraft.bench.decoding import DecodeRow
from arbordraft.trees.drawing import columns
from arborlab.plots import MOST_LINES, picture, plot, read_rows, speed_picture
from arborlab.verifiers import NodeRow, TreeRow

RESULTS = Path(__file__).parents[2] / "examples" / "results"


def decode(decoder, batch=1, temperature=0.0, speed_up=1.0, tau=1.5, **more):
    return DecodeRow("bfloat16", batch, temperature, decoder, "exact", 10.0, speed_up, tau=tau, **more)


def node(law, k, acceptance):
    return NodeRow("head", 1.0, k, law, "RRS", 10, [acceptance], acceptance, 0.01, 1.0)


def tree(law, nodes):
    return TreeRow("head", 1.0, "binary", nodes, law, "TopDown(RRS)", 10, 1.5, 0.1)


def test_acceptance_is_drawn_as_a_gain_if_prompts_are_known():
    rows = [
        NodeRow("head", 1.0, k, law, "RRS", 10, [level], level, 0.3, 1.0, by_prompt=[level - 0.1, level + 0.1])
        for k in (1, 2)
        for law, level in ((f"IID({k})", 0.5), (f"WithoutReplacement({k})", 0.6))
    ]
    axes = picture(rows).axes[0]
    assert "gain over" in axes.get_ylabel()
    ends = sorted(line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata()) == 2)
    assert ends == pytest.approx([0.0, 0.1])


PLAIN = [decode("plain", batch, tau=1.0) for batch in (1, 8)]
CASES = {
    "speed first, then its cause": (
        [*PLAIN, *(decode("chain", batch, speed_up=1.2) for batch in (1, 8))],
        ["speed against plain (bfloat16, greedy)", "tokens per target forward (greedy)"],
    ),
    "padding is the cause": (
        [*PLAIN, *(decode("padded", batch, pad_rows=0.5) for batch in (1, 8))],
        ["speed against plain (bfloat16, greedy)", "share of rows that are padding (greedy)"],
    ),
    "clients, long prompts and kinds of requests apart": (
        [
            *PLAIN,
            *(decode("plain", batch, tau=1.0, request="chat", served=True) for batch in (1, 8)),
            *(decode("plain", batch, tau=1.0, context=1024) for batch in (1, 8)),
        ],
        [
            "speed against plain (bfloat16, chat, clients of a server)",
            "speed against plain (bfloat16, greedy)",
            "speed against plain (bfloat16, temperature 0, 1024 tokens)",
        ],
    ),
    "one batch size": (
        [decode("plain", tau=1.0), decode("chain", acceptance=[0.5, 0.4])],
        ["speed against plain (bfloat16, greedy)", "share accepted when tried (greedy)"],
    ),
    "no panel without a cause": ([decode("plain", tau=1.0), decode("a")], ["speed against plain (bfloat16, greedy)"]),
    "too many for lines": (
        [*PLAIN, *(decode(f"d{number}", batch) for batch in (1, 8) for number in range(MOST_LINES + 1))],
        ["speed against plain (bfloat16, greedy)"],
    ),
    "without plain": ([decode("generate"), decode("chain")], ["speed against generate (bfloat16, greedy)"]),
    "nodes": ([node("IID(2)", 2, 0.4), node("IID(3)", 3, 0.5)], ["head, temperature 1"]),
    "trees": ([tree("IID(2)", 3), tree("IID(2)", 7)], ["head, temperature 1, binary trees"]),
}


@pytest.mark.parametrize(("rows", "titles"), CASES.values(), ids=CASES)
def test_panels(rows, titles):
    panels = picture(rows).axes
    assert [panel.get_title() for panel in panels] == titles
    assert all(panel.get_legend() is None for panel in panels)
    assert all(panel.has_data() for panel in panels)


def test_a_panel_has_six_lines_and_counts_the_others():
    (panel,) = picture([node(f"Law{number}({k})", k, number / 10) for number in range(9) for k in (2, 3)]).axes
    names = [text.get_text() for text in panel.texts]
    assert "3 lower ones are not shown" in names
    assert [name for name in names if name.startswith("Law")] == [f"Law{number}, RRS" for number in range(3, 9)]


def test_a_decoder_has_one_colour_in_all_panels():
    rows = [
        decode(name, batch, temperature) for name in ("plain", "a", "b") for batch in (1, 2) for temperature in (0, 1)
    ]
    colours = [{text.get_text(): text.get_color() for text in panel.texts} for panel in picture(rows).axes]
    assert len({found["a"] for found in colours}) == len({found["b"] for found in colours}) == 1
    assert colours[0]["a"] != colours[0]["b"]


@pytest.mark.parametrize(("spread", "bars"), [(0.0, 0), (0.1, 1)])
def test_rounds_that_differ_have_error_bars(spread, bars):
    rows = [*PLAIN, *(decode("a", batch, spread=spread) for batch in (1, 8))]
    drawn = [container for container in picture(rows).axes[0].containers if container.has_yerr]
    assert len(drawn) == bars


@pytest.mark.parametrize(
    "name", ["product", "batching", "deciders", "verifiers-eagle", "verifiers-trees", "trained-batch8"]
)
def test_stored_measurements_can_be_drawn(name):
    rows = read_rows(RESULTS / f"{name}.json")
    assert len(rows) == len(json.loads((RESULTS / f"{name}.json").read_text())["measurements"])
    assert picture(rows).axes


def test_saved_rows_are_read_back(tmp_path):
    rows = [decode("a", spread=0.1), node("IID(2)", 2, 0.5), tree("IID(2)", 3)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"measurements": [asdict(row) for row in rows]}))
    assert read_rows(path) == rows


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measurements": 3}', '{"measurements": [3]}', "\x00"], ids=repr)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json holds no measurements: let a benchmark write some"):
        read_rows(path)


def test_measurements_of_a_gpu_can_be_drawn():
    panels = {panel.get_title(): panel for panel in picture(read_rows(RESULTS / "gpu.json")).axes}
    kernels, *others = panels
    assert kernels.startswith("kernels: least time")
    parts = "parts of a recorded step of"
    assert others == ["steps of llama-3.1-8b", f"{parts} llama-3.1-8b", f"{parts} smollm2-135m"]
    names = [label.get_text() for label in panels[kernels].get_yticklabels()]
    assert "rms_norm, 512 rows of 4096" in names
    notes = [text.get_text() for text in panels["steps of llama-3.1-8b"].texts]
    assert "1 rows, 7.48 ms" in notes
    assert "step" not in [label.get_text() for label in panels[others[1]].get_yticklabels()]


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="these measurements have no picture"):
        plot([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="needs decoding at two batch sizes"):
        speed_picture([decode("a")])


def test_nodes_stand_above_their_children():
    assert columns(TreeTopology.from_parents([-1, 0, 0, 1, 1])) == [1.25, 0.5, 2.0, 0.0, 1.0]
