"""A block head becomes three graphs, or two without its Markov term."""

import onnx
import pytest
import torch
from support.companions import target
from support.models import VOCAB, generated
from support.onnx_graphs import origin

from arbordraft import BlockDrafter, Coupling, SpeculativeDecoder, TreeTopology
from arbordraft.drafter_names import load_drafter
from arbordraft.exports.onnx import plans
from arbordraft.exports.onnx.sources import of
from arbordraft.exports.onnx.writing import write
from arbordraft.heads.block import BlockHead
from arbordraft.onnx.graph import Graph


def inputs(path):
    return [value.name for value in onnx.load(path).graph.input]


def test_a_block_head_is_three_graphs(graphs):
    written = graphs("block")
    assert {file.name for file in written.files} == {"fuse.onnx", "markov.onnx", "model.onnx", "parity.json"}
    assert inputs(written.folder / "model.onnx")[:4] == ["input_ids", "hidden_states", "depths", "attention_mask"]
    assert inputs(written.folder / "markov.onnx") == ["input_ids", "gates"]
    about = Graph(written.folder / "model.onnx").about
    assert (about["kind"], about["block_size"], about["markov_rank"]) == ("block", 4, 8)
    weights = onnx.load(written.folder / "markov.onnx").graph.initializer
    assert {tuple(sorted(tensor.dims)) for tensor in weights} >= {(8, 40), (8, VOCAB)}
    assert not any(32 in tensor.dims for tensor in weights), "the target's embeddings were not folded"
    for name in ("model", "markov"):
        assert written.parity[f"{name}.onnx: greatest difference"] <= 1e-4
        assert written.parity[f"{name}.onnx: same most probable tokens"] is True


def test_a_head_without_a_markov_term_has_no_graph_for_it(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = BlockHead.for_target(target().model, range(40), hidden_layers=[1, 2, 3], markov_rank=0)
    torch.nn.init.normal_(head.masks.weight[1:])
    folder = write(lambda: plans.block(head, origin()), tmp_path / "graphs").folder
    assert not (folder / "markov.onnx").exists()
    coupling, outputs = Coupling.matching(2), []
    for drafter in (load_drafter(folder, target()), BlockDrafter(head, target())):
        decoder = SpeculativeDecoder(target(), drafter, TreeTopology.from_k_config((2, 2, 1)), coupling)
        tokens, output = generated(decoder, max_new_tokens=12, do_sample=False, pad_token_id=0)
        outputs.append((tokens, output.stats.drafted))
    assert outputs[0] == outputs[1]


def test_a_missing_markov_graph_is_an_error(graphs, tmp_path):
    for file in graphs("block").files:
        if file.name != "markov.onnx":
            (tmp_path / file.name).write_bytes((graphs("block").folder / file.name).read_bytes())
    with pytest.raises(ValueError, match=r"markov\.onnx is missing: write the folder again"):
        load_drafter(tmp_path, target())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_matrices_get_fewer_bits(graphs, quantization):
    found = graphs("block", quantization=quantization)
    assert 0.8 < found.parity["model.onnx: acceptance by float32, quantised"] < 1
    assert Graph(found.folder / "markov.onnx").about["quantization"] == "none"


def test_a_checkpoint_becomes_graphs(tmp_path):
    head = BlockHead.for_target(target().model, range(40), hidden_layers=[1, 2, 3], block_size=2, markov_rank=3)
    head.save_pretrained(tmp_path / "head")
    assert [spec.file for spec in of(str(tmp_path / "head"), origin())] == ["fuse.onnx", "model.onnx", "markov.onnx"]
