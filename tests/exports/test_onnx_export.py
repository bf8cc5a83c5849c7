"""Exported folders: their contents, and the parity with the original without which no graph is written."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.companions import LAYERS, target, texts, trained
from support.models import ragged, tiny
from support.onnx_graphs import PLANS, decider, origin

from arbordraft import RaggedModel, UnsupportedModel
from arbordraft.exports.onnx import ParityError, plans
from arbordraft.exports.onnx.cases import SHAPES, Shape
from arbordraft.exports.onnx.checks import cache_sizes, check_against
from arbordraft.exports.onnx.networks import CausalNetwork
from arbordraft.exports.onnx.parity import check_exact, check_quantized
from arbordraft.exports.onnx.storing import compact
from arbordraft.exports.onnx.writing import write
from arbordraft.heads.base import fingerprint
from arbordraft.onnx.graph import Graph


def axes(values) -> dict[str, list[str | int]]:
    return {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}


def operators(folder: Path) -> set[str]:
    return {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}


# Contents of the files


def test_names_and_sizes_are_those_of_optimum(graphs):
    graph = onnx.load(graphs("model").folder / "model.onnx").graph
    inputs, outputs = axes(graph.input), axes(graph.output)
    past = ["batch_size", 2, "past_sequence_length", 8]
    assert inputs == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", 1, "sequence_length", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{layer}.{part}": past for layer in range(2) for part in ("key", "value")},
    }
    assert outputs["logits"] == ["batch_size", "sequence_length", 61]
    assert outputs["hidden_states"] == ["batch_size", "sequence_length", 64]
    assert set(outputs) == {"logits", "hidden_states"} | {
        f"present.{n}.{p}" for n in range(2) for p in ("key", "value")
    }


def test_an_eagle_head_is_two_graphs(graphs):
    folder = graphs("eagle").folder
    fuse, model = (onnx.load(folder / name).graph for name in ("fuse.onnx", "model.onnx"))
    assert axes(fuse.input) == {"hidden_states": ["batch_size", "sequence_length", 96]}
    assert list(axes(model.input)) == [
        "input_ids",
        "hidden_states",
        "attention_mask",
        "position_ids",
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    assert axes(model.output)["logits"] == ["batch_size", "sequence_length", 40]
    assert axes(model.output)["hidden_states_out"] == axes(model.input)["hidden_states"]


def test_files_describe_themselves(graphs):
    head = trained("eagle").network
    about = Graph(graphs("eagle").folder / "model.onnx").about
    assert about["kind"] == "eagle"
    assert about["target_fingerprint"] == fingerprint(target().model)
    assert {"target_name", "target_revision", "tokenizer_sha256", "opset", "quantization"} <= set(about)
    assert {f"version.{name}" for name in ("arbordraft", "torch", "transformers", "onnx", "onnxruntime")} <= set(about)
    assert [index + offset for index, offset in enumerate(about["d2t"])] == head.tokens.tolist()
    marks = np.unpackbits(np.frombuffer(base64.b64decode(about["t2d"]), dtype=np.uint8), bitorder="little")
    assert marks[: about["vocab_size"]].astype(bool).tolist() == head.t2d.tolist()
    assert Graph(graphs("decider").folder / "model.onnx").about["threshold"] == decider().threshold


def test_files_hold_no_stack_traces_or_paths(graphs):
    for name in ("eagle", "model"):
        for file in graphs(name).files:
            content = (graphs(name).folder / file.name).read_bytes()
            for word in (b"stack_trace", b"site-packages", b".py", str(Path(__file__).parents[2]).encode()):
                assert word not in content


def test_a_newer_opset_has_attention_as_one_operator(graphs):
    newer = graphs("eagle", opset=23)
    assert {"Attention", "RMSNormalization"} <= operators(newer.folder)
    assert "Softmax" not in operators(newer.folder)
    assert "Attention" not in operators(graphs("eagle").folder)
    assert newer.parity["model.onnx: greatest difference"] <= 1e-4
    with pytest.raises(ValueError, match=r"opset must be one of \(20, 23\), got 17"):
        write(PLANS["medusa"], graphs.root / "older", opset=17)


def test_matrices_get_fewer_bits(graphs):
    small = {name: graphs("eagle", quantization=name) for name in ("int8", "int4")}
    assert "MatMulInteger" in operators(small["int8"].folder)
    nodes = onnx.load(small["int4"].folder / "model.onnx").graph.node
    bits = {
        name: next(a.i for a in n.attribute if a.name == "bits")
        for n in nodes
        if n.op_type == "MatMulNBits"
        for name in n.output
    }
    assert bits.pop("logits") == 8, "the head keeps more bits"
    assert set(bits.values()) == {4}
    for name, export in small.items():
        found = export.parity
        assert 0.8 < found["model.onnx: acceptance by float32, quantised"] < 1
        assert 0.8 < found["model.onnx: same most probable token, quantised"] <= 1
        assert found["model.onnx: greatest difference of logits, quantised"] > found["model.onnx: greatest difference"]
        assert Graph(export.folder / "model.onnx").about["quantization"] == name
        sizes = [sum(file.size for file in each.files) for each in (export, graphs("eagle"))]
        assert sizes[0] < sizes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_bytes_of_their_checkpoint(tmp_path, dtype):
    model = tiny(tie_word_embeddings=True, vocab_size=512)
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype).float()
    target = RaggedModel(model, kernels="torch")
    spec = plans.causal_lm(target, plans.Origin(target))
    folder = write(lambda: [spec], tmp_path / "graph").folder
    kept = {tensor.name: tensor.data_type for tensor in onnx.load(folder / "model.onnx").graph.initializer}
    stored = onnx.TensorProto.BFLOAT16 if dtype is torch.bfloat16 else onnx.TensorProto.FLOAT16
    assert set(kept.values()) >= {stored}
    values = sum(parameter.numel() for parameter in model.parameters())
    assert (folder / "model.onnx").stat().st_size < 2.2 * values + 60_000, "the head is stored beside its transpose"


def test_storing_changes_no_output(tmp_path):
    weights = torch.randn(64, 96)
    exact = {"bf16": weights.bfloat16().float(), "half": weights.half().float(), "wide": weights, "twin": weights.T}
    nodes = [onnx.helper.make_node("Gemm", ["x", name], [f"y_{name}"]) for name in exact if name != "twin"]
    nodes.append(onnx.helper.make_node("Gemm", ["x", "twin"], ["y_twin"], transB=1))
    graph = onnx.helper.make_graph(
        nodes,
        "products",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 64])],
        [onnx.helper.make_tensor_value_info(f"y_{name}", onnx.TensorProto.FLOAT, ["n", 96]) for name in exact],
        [onnx.numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in exact.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    sizes, found = [], []
    for store in (lambda path: None, compact):
        store(path)
        sizes.append(path.stat().st_size)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found.append(session.run(None, {"x": np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)}))
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before, after)
    assert sizes[1] / sizes[0] == pytest.approx(2 / 4, abs=0.02), "four matrices become two halves and a whole"


def test_all_heads_keep_more_bits(graphs):
    folder = graphs("medusa", quantization="int4").folder
    nodes = [node for node in onnx.load(folder / "model.onnx").graph.node if node.op_type == "MatMulNBits"]
    bits = [next(a.i for a in node.attribute if a.name == "bits") for node in nodes]
    assert sorted(bits) == [4] * 3 + [8] * 3


def test_the_report_is_beside_the_graphs(graphs):
    export = graphs("eagle")
    report = json.loads((export.folder / "parity.json").read_text())
    assert report["found"] == export.parity
    shapes = report["batch, rows, past"]
    assert len(shapes) >= 6
    assert any(rows == 1 for _, rows, _ in shapes)
    assert any(past == 0 for *_, past in shapes)
    assert {file.name for file in export.files} == {"fuse.onnx", "model.onnx", "parity.json"}
    assert export.parity["model.onnx: same most probable tokens"] is True


# Parity


class Sabotaged(torch.nn.Module):
    """Network that computes something else in its graph than in torch."""

    def __init__(self, network, change):
        super().__init__()
        self.network, self.change = network, change

    def forward(self, hidden_states):
        found = self.network(hidden_states)
        return [self.change(found[0])] if torch.compiler.is_exporting() else found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda logits: logits + 9e-4,
            r"logits differ .* own by \d\.\d+e-04 of their greatest for Shape.*allowed are 1e-04.*raise --tolerance",
        ),
        (lambda logits: -logits, "logits differ from the network's own for Shape"),
        (lambda logits: logits[:, :1], "logits differ from the network's own for Shape"),
        (lambda logits: logits / 0, "logits differ from the network's own"),
    ],
    ids=["slightly", "other tokens", "other shape", "nan"],
)
def test_a_graph_that_misses_parity_is_not_written(tmp_path, change, message):
    (spec,) = PLANS["medusa"]()
    spoiled = replace(spec, network=Sabotaged(spec.network, change))
    with pytest.raises(ParityError, match=message):
        write(lambda: [spoiled], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Loud(torch.nn.Module):
    """Network with the same tokens and logits that are ``factor`` times as large."""

    def __init__(self, network, factor):
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, hidden_states):
        return [self.factor * self.network(hidden_states)[0]]


@pytest.mark.parametrize(
    ("factor", "tolerance"), [(1, 1e-3), (30, 1e-4)], ids=["another bound", "logits of trained models"]
)
def test_the_bound_is_a_share_of_the_logits(tmp_path, factor, tolerance):
    """An error that is rounding for logits of 30 is a fault for logits of 1, unless the tolerance is raised."""
    (spec,) = PLANS["medusa"]()
    spoiled = replace(spec, network=Sabotaged(Loud(spec.network, factor), lambda logits: logits + 9e-4))
    written = write(lambda: [spoiled], tmp_path / "out", tolerance=tolerance)
    assert json.loads((written.folder / "parity.json").read_text())["tolerance"] == tolerance


def test_one_bad_graph_keeps_good_ones_from_being_written(tmp_path, graphs):
    (spec,) = PLANS["medusa"]()
    spoiled = replace(spec, file="second.onnx", network=Sabotaged(spec.network, lambda logits: logits + 1))
    old = tmp_path / "out"
    old.mkdir()
    (old / "kept").write_text("by whom it was here before")
    with pytest.raises(ParityError, match=r"second\.onnx"):
        write(lambda: [spec, spoiled], old, force=True)
    assert [path.name for path in old.iterdir()] == ["kept"]
    assert list(tmp_path.iterdir()) == [old]


def test_verdicts_must_be_equal(graphs):
    """Integers have no tolerance."""
    (spec,) = PLANS["verification-1-1"]()
    path = graphs("verification-1-1").folder / spec.file
    assert check_exact(spec, path)

    class Other(torch.nn.Module):
        def forward(self, *inputs):
            accepted, token = spec.network(*inputs)
            return [accepted, token + (accepted < 0)]

    with pytest.raises(ParityError, match="token differ"):
        check_exact(replace(spec, network=Other()), path)


def test_quantisation_has_a_bound_of_its_own(graphs, tmp_path):
    with pytest.raises(ParityError, match=r"accepted with 0\.\d+ by the float32 one, less than 0\.9999"):
        write(PLANS["eagle"], tmp_path / "out", quantization="int4", least_acceptance=0.9999)
    assert list(tmp_path.iterdir()) == []
    spec = PLANS["eagle"]()[1]
    with pytest.raises(ParityError, match="no texts to measure"):
        check_quantized(replace(spec, real=lambda: []), graphs("eagle").folder / "model.onnx")


def test_acceptance_is_measured_against_float32(graphs):
    """Acceptance is 1 against the graph's own network, and too low against a network with flat logits."""
    spec = PLANS["eagle"]()[1]
    path = graphs("eagle").folder / "model.onnx"
    assert check_quantized(spec, path)["model.onnx: acceptance by float32, quantised"] == pytest.approx(1, abs=1e-5)

    class Flat(torch.nn.Module):
        def forward(self, *inputs):
            found = spec.network(*inputs)
            return [found[0] * 0, *found[1:]]

    with pytest.raises(ParityError, match="accepted with"):
        check_quantized(replace(spec, network=Flat()), path)


def test_every_example_is_another_tree():
    """Samples see different parts of their pasts and rows different branches, so no plain causal mask fits."""
    spec = PLANS["model"]()[0]
    found = spec.example(Shape(2, 9, 17), torch.Generator().manual_seed(0))
    seen = found["attention_mask"] == 0
    assert seen[0].sum() != seen[1].sum()
    assert not torch.equal(seen[0, 0, :, 17:], torch.ones(9, 9).tril().bool())
    assert len(SHAPES) >= 6


# Models


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox", "olmo2", "qwen3_moe", "deepseek_v3"]
)
def test_supported_models_agree_with_their_networks(name):
    model = tiny(name)
    check_against(CausalNetwork(model), model, cache_sizes(model))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_sliding_windows_are_refused(name):
    with pytest.raises(UnsupportedModel, match=r"keeps DynamicSlidingWindowLayer.*full attention"):
        plans.causal_lm(ragged(name), origin())


def test_a_model_that_cannot_take_a_mask_is_refused():
    """Its logits differ from the model's own, so the graph would be another model."""
    model = tiny()

    class Deaf(CausalNetwork):
        def forward(self, input_ids, attention_mask, position_ids, *past):
            return super().forward(input_ids, attention_mask * 0, position_ids, *past)

    sizes = cache_sizes(model)
    check_against(CausalNetwork(model), model, sizes)
    with pytest.raises(UnsupportedModel, match="differ from its own by"):
        check_against(Deaf(model), model, sizes)


def test_a_model_without_keys_and_values_is_refused():
    with pytest.raises(UnsupportedModel, match="instead of all keys and values"):
        cache_sizes(tiny("mamba"))


def test_hidden_states_out_of_range_are_refused():
    with pytest.raises(ValueError, match=rf"numbered 0\.\.{LAYERS}, got \[7\]"):
        plans.causal_lm(target(), origin(), [7])


def test_exported_hidden_states_are_those_of_transformers(graphs):
    """They are numbered as in transformers, so an EAGLE head can read them."""
    text = texts()[0]
    (spec,) = PLANS["model"]()
    graph = Graph(graphs("model").folder / "model.onnx")
    given = next(iter(spec.real()))
    with torch.no_grad():
        states = spec.network.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    found = graph.run(given)["hidden_states"]
    torch.testing.assert_close(found, torch.cat([states[1], states[2]], dim=-1), rtol=0, atol=1e-4)


def test_a_head_of_another_target_is_refused():
    other = plans.Origin(ragged(num_hidden_layers=LAYERS, seed=2))
    for make, name in ((plans.eagle, "eagle"), (plans.medusa, "medusa")):
        with pytest.raises(ValueError, match="trained for another target"):
            make(trained(name).network, other)
    with pytest.raises(ValueError, match="made for"):
        plans.early_exit(origin(), 3, trained("exit").network)
