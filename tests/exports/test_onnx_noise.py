"""The draw as a graph: it has the bits of the definition in any runtime, or it is not written."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.numpy_noise import gumbel as numpy_gumbel
from support.onnx_graphs import PLANS
from typer.testing import CliRunner

from arbordraft.cli import main as cli
from arbordraft.exports.onnx import ParityError, arrays, noise
from arbordraft.exports.onnx.writing import write
from arbordraft.kernels.gumbel import gumbel_argmax, gumbel_reference, reference
from arbordraft.onnx.graph import Graph

INF = float("inf")
SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -1, 0x1234_5678_9ABC_DEF0]
POSITIONS = [0, 1, 2, 100, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


def feed(logits, seed, position, temperature=1.0):
    return {
        "logits": torch.as_tensor(logits, dtype=torch.float32),
        "seed": torch.as_tensor(seed),
        "position": torch.as_tensor(position),
        "temperature": torch.tensor(temperature),
    }


@pytest.fixture(scope="module")
def graph(graphs):
    return Graph(graphs("draw").folder / noise.DRAW)


@pytest.mark.parametrize("level", ["DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL"])
@pytest.mark.parametrize("opset", [20, 23])
def test_noise_has_the_bits_of_the_definition(graphs, opset, level):
    """No fusion in a runtime may reorder or contract operations. With logits of 0, the scores are the noise."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    path = str(graphs("draw", opset=opset).folder / noise.DRAW)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    seeds, positions = (torch.tensor(numbers) for numbers in (SEEDS, POSITIONS))
    for vocabulary in (1, 65, 1000):
        given = feed(torch.zeros(len(seeds), vocabulary), seeds, positions)
        token, scores = session.run(["token", "scores"], {name: values.numpy() for name, values in given.items()})
        expected = gumbel_reference(seeds, positions, vocabulary).numpy()
        assert (scores == expected).all()
        assert (scores == numpy_gumbel([seed % 2**64 for seed in SEEDS], POSITIONS, vocabulary)).all()
        assert token.tolist() == expected.argmax(-1).tolist()


def test_many_rows_at_once(graph):
    """Every pair of a seed and a position has its own noise, at any place of the batch."""
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator)
    positions = torch.randint(2**32, (300,), generator=generator)
    scores = graph.run(feed(torch.zeros(300, 130), seeds, positions))["scores"]
    assert torch.equal(scores, gumbel_reference(seeds, positions, 130))
    assert scores.unique().numel() == scores.numel()
    assert torch.equal(graph.run(feed(torch.zeros(1, 130), seeds[7:8], positions[7:8]))["scores"], scores[7:8])


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 1.7, 100.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 64, 65, 1000])
def test_tokens_are_those_of_the_kernel(graph, vocabulary, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(40, vocabulary, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -INF
    seeds, positions = torch.arange(40) * 2**58, torch.arange(40) ** 6
    found = graph.run(feed(logits, seeds, positions, temperature))["token"]
    assert torch.equal(found, gumbel_argmax(logits, seeds, positions, temperature))


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([-INF, 0.0, -INF], 1),
        ([-INF, -INF, -INF], -1),
        ([-INF], -1),
        ([3e38, 3e38, 3e38], 0),
        ([0.0, 1e30, 1e30, 1e30], 1),
        ([-1e30, -1e30, -INF], 0),
        ([0.0] * 64 + [1e20, 1e20], 64),
        ([0.0, INF], 1),
    ],
    ids=["only one", "none", "none of one", "ties", "later ties", "low ties", "ties in the next group", "infinite"],
)
def test_noise_changes_neither_masked_nor_tied_scores(graph, row, token):
    """Scores of -inf stay -inf. Among equal scores so large that the noise is lost, the first one wins."""
    found = graph.run(feed([row] * 5, torch.arange(5), torch.arange(5)))
    assert found["token"].tolist() == [token] * 5
    assert torch.equal(found["scores"] == -INF, torch.tensor([row] * 5) == -INF)


def test_rows_of_one_seed_and_position_share_noise(graph):
    logits, once, often = torch.randn(7, 70), torch.tensor([5]), torch.full((7,), 5)
    shared, own = (graph.run(feed(logits, places, places)) for places in (once, often))
    assert torch.equal(shared["scores"], own["scores"])
    assert torch.equal(shared["token"], own["token"])


def test_temperature_divides_logits_and_not_the_noise(graph):
    logits, rows = torch.randn(3, 70), torch.arange(3)
    scores = graph.run(feed(logits, rows, rows, 0.7))["scores"]
    assert torch.equal(scores, (logits / torch.tensor(0.7)).double() + gumbel_reference(rows, rows, 70))


def test_the_file_describes_itself(graphs):
    path = graphs("draw").folder / noise.DRAW
    found = Graph(path)
    assert (found.kind, found.about["opset"], found.outputs) == ("draw", 20, ["token", "scores"])
    assert found.inputs == {
        "logits": ["rows", "vocab_size"],
        "seed": ["rows or 1"],
        "position": ["rows or 1"],
        "temperature": [],
    }
    assert graphs("draw").parity == {"draw.onnx: greatest difference": 0.0}
    onnx.checker.check_model(onnx.load(path), full_check=True)


def test_the_command_writes_the_graph(tmp_path):
    result = CliRunner().invoke(cli.app, ["export", "onnx", "draw", str(tmp_path / "out"), "--quantize", "int8"])
    assert result.exit_code == 0, result.output
    assert "draw.onnx: greatest difference: 0" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["draw.onnx", "parity.json"]
    assert Graph(tmp_path / "out" / noise.DRAW).about["quantization"] == "none"  # the draw has no matrices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "Unexpected input data type"),
        ({"seed": torch.zeros(2)}, "Unexpected input data type"),
        ({"position": torch.zeros(2, 1, dtype=torch.int64)}, "Invalid rank for input: position"),
        ({"temperature": torch.ones(2)}, "cannot be reshaped"),
        ({"temperature": torch.ones(5)}, "cannot be reshaped"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, "Attempting to broadcast|Shape mismatch|cannot be reshaped"),
    ],
    ids=[
        "float64",
        "float seeds",
        "rank of positions",
        "one temperature per row",
        "one temperature per column",
        "another number of seeds",
    ],
)
def test_a_runtime_refuses_inputs_that_do_not_fit(graph, change, message):
    with pytest.raises(Exception, match=message):
        graph.run(feed(torch.zeros(2, 5), torch.arange(2), torch.arange(2)) | change)


# Other definitions are not written

WORDS_OF = reference.words_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MULTIPLIERS", (0xD2511F55, 0xCD9E8D57)),
        ("MULTIPLIERS", (0xCD9E8D57, 0xD2511F53)),
        ("KEY_STEPS", (0xBB67AE85, 0x9E3779B9)),
        ("ROUNDS", 9),
        ("TERMS", 10),
        ("LN2", float(np.float32(reference.LN2))),
        ("counters_for", lambda vocabulary: -(-vocabulary // 64) * 16),
        ("words_of", lambda *given: WORDS_OF(*given)[::-1]),
        ("words_of", lambda *given: WORDS_OF(*given)[:1] * 2),
    ],
    ids=[
        *("multiplier", "order of multipliers", "order of key steps", "rounds", "terms", "float32", "rounded up"),
        *("halves swapped", "one half twice"),
    ],
)
def test_another_definition_is_refused(monkeypatch, tmp_path, name, value):
    def other(opset):
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, value)
            return noise.draw_graph(opset)

    with pytest.raises(ParityError, match=r"draw\.onnx"):
        write(lambda: [replace(noise.draw(), build=other)], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_of_one_bit_is_refused(tmp_path):
    """Tokens would hardly ever show such a difference."""
    (spec,) = PLANS["draw"]()

    class Other(noise.Draw):
        def forward(self, *given):
            token, scores = super().forward(*given)
            return [token, torch.nextafter(scores, torch.tensor(INF, dtype=torch.float64))]

    with pytest.raises(ParityError, match=r"scores differ"):
        write(lambda: [replace(spec, network=Other())], tmp_path / "out", tolerance=1.0)


# Arrays that build the graph


@pytest.mark.parametrize(
    "values",
    [
        2.0 ** np.arange(-127, 128),
        np.nextafter(2.0 ** np.arange(-126, 128), 0),
        np.nextafter(2.0 ** np.arange(-127, 127), np.inf),
        np.random.default_rng(0).random(1000),
    ],
    ids=["powers", "below", "above", "random"],
)
def test_frexp_is_exact(values):
    """A logarithm would likely be off by one at powers of two."""
    builder = arrays.GraphBuilder()
    mantissa, exponent = arrays.frexp(builder.input("x", np.float64, ["n"]))
    model = builder.model({"m": (mantissa, ["n"]), "e": (exponent, ["n"])}, 20)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found, expected = session.run(None, {"x": values}), np.frexp(values)
    assert all((ours == theirs).all() for ours, theirs in zip(found, expected, strict=True))
