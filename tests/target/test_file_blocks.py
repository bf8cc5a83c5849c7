"""Blocks of GGUF files are decoded without conversion, and other weights are never taken for blocks."""

import copy
import pickle

import pytest
import torch
from support.models import fusable
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import arbordraft as ad
from arbordraft.kernels.prepacked_linear import dequantize_blocks, pack, restore_blocks
from arbordraft.loading import load_model
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.gguf_blocks import READABLE, FileBlocks, blocks_of, in_memory

pytest.importorskip("gguf")
from support.blocks import ordinary_blocks
from support.gguf_files import LETTERS, dequantised, file_name, write_gguf

pytestmark = pytest.mark.usefixtures("kernels")
MIXED = [("output.", "Q8_0"), ("embd", "Q8_0"), ("attn_v", "Q5_0"), ("gate", "Q4_0"), ("down", "MXFP4"), ("", "Q4_1")]
# As files of Q4_K_M, whose rows are multiples of 256.
K_QUANTS = [
    ("output.", "Q6_K"),
    ("attn_v", "Q6_K"),
    ("gate", "IQ4_XS"),
    ("down", "Q5_K"),
    ("embd", "Q5_1"),
    ("", "Q4_K"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture
def written(tmp_path):
    def write(kinds, architecture="llama", **changes):
        file = tmp_path / "tiny.gguf"
        write_gguf(file, fusable(architecture, vocab_size=len(LETTERS), **changes), kinds)
        return file

    return write


def stored(weight):
    """Returns the float32 numbers of a parameter's blocks, in the model's order."""
    raw, kind, rows = blocks_of(weight)
    return dequantize_blocks(raw, kind)[rows]


def decoder_of(file):
    return ad.load(file, "none", weights="file", dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kinds", [*([("", kind)] for kind in READABLE), MIXED, K_QUANTS], ids=[*READABLE, "mixed", "K-quants"]
)
def test_blocks_hold_the_numbers_of_the_file(written, kinds, dtype):
    file = written(kinds, **WIDE)
    expected = dict(load_model(str(file), dtype)[0].named_parameters())
    found = dict(load_model(str(file), dtype, as_stored=True)[0].named_parameters())
    truth = dequantised(file)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(in_memory(weight), expected[name])
        assert isinstance(weight, FileBlocks) == (weight.ndim == 2)
        if weight.ndim == 2:
            dense = stored(weight)
            assert torch.equal(dense.to(dtype), expected[name])  # in the model's order of rows
            assert torch.equal(dense.sort(dim=0).values, truth[file_name(name)].sort(dim=0).values)
    rows = stored(found["model.layers.0.self_attn.q_proj.weight"])
    assert not torch.equal(rows, truth["blk.0.attn_q.weight"])  # control: the file orders these rows differently


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_models_equal_those_that_transformers_reads(written, architecture, tied):
    pytest.importorskip("accelerate", reason="transformers reads such files with it")
    # transformers does not read the head size of Qwen3 from the file.
    file = written(MIXED, architecture, tie_word_embeddings=tied, head_dim=128 if architecture == "qwen3" else 16)
    options = {"gguf_file": file.name, "dtype": torch.float32}
    expected = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
    model, tokenizer = load_model(str(file), torch.float32, as_stored=True)
    held = [name for name, parameter in model.named_parameters() if isinstance(parameter, FileBlocks)]
    assert held == [name for name, parameter in expected.named_parameters() if parameter.ndim == 2]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert model.generation_config == expected.generation_config
    assert model.name_or_path == str(file.parent)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer("hello ab")["input_ids"] == theirs("hello ab")["input_ids"]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_decoding_reads_the_blocks_of_the_file(written, tied):
    file = written([("", "Q8_0")], tie_word_embeddings=tied)
    target = decoder_of(file).target
    assert target.weights == "file"
    assert target.row_invariant
    assert "file" in target.chosen
    head = target.network().get_output_embeddings()
    truth = dequantised(file)["token_embd.weight" if tied else "output.weight"]
    assert torch.equal(restore_blocks(head.prepacked[0], len(LETTERS)), truth)


@pytest.mark.parametrize(("kinds", "sizes"), [(MIXED, {}), (K_QUANTS, WIDE)], ids=["mixed", "K-quants"])
def test_logits_are_close_to_those_of_the_dequantised_model(written, kinds, sizes):
    """Only activations in 8 bits differ from the model that transformers reads."""
    file = written(kinds, **sizes)
    model, _ = load_model(str(file), torch.float32)
    decoder = decoder_of(file)
    tokens = torch.arange(20) % len(LETTERS)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    error = (rows_of(decoder, tokens) - expected).square().mean().sqrt() / spread
    assert error < 0.05
    assert decoder.complete("hello", max_new_tokens=8) == decoder.complete("hello", max_new_tokens=8)


@pytest.mark.parametrize(("kinds", "sizes"), [(MIXED, {}), (K_QUANTS, WIDE)], ids=["mixed", "K-quants"])
def test_greedy_text_is_that_of_the_dequantised_model(written, kinds, sizes, tmp_path):
    """Where the text of transformers' own reading differs, its margin is below the noise of activations in 8 bits."""
    pytest.importorskip("accelerate", reason="transformers reads such files with it")
    file = written(kinds, **sizes)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompt, new = torch.arange(5)[None], 60
    text = model.generate(prompt, do_sample=False, min_new_tokens=new, max_new_tokens=new, eos_token_id=None)
    others = torch.randint(len(LETTERS), (new,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        along, expected = model(text).logits[0, 4:-1], model(others[None]).logits[0]
    noise = 0.05 * (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    free = decoder_of(file).generate(prompt, do_sample=False, min_new_tokens=new, max_new_tokens=new, eos_token_id=None)
    places = (free != text)[0, 5:].nonzero()
    if len(places):
        row, token = along[int(places[0])], free[0, 5 + int(places[0])]
        assert row.max() - row[token] < noise

    def margins(decoder):
        chosen = rows_of(decoder, others).argmax(dim=-1)
        return expected.max(dim=-1).values - expected.gather(1, chosen[:, None])[:, 0]

    found = margins(decoder_of(file))
    assert (found == 0).float().mean() > 0.9
    assert (found < noise).all()
    write_gguf(tmp_path / "other.gguf", fusable(vocab_size=len(LETTERS), seed=1, **sizes), kinds)
    other = margins(decoder_of(tmp_path / "other.gguf"))  # control: another model
    assert (other == 0).float().mean() < 0.5
    assert (other > noise).any()


def rows_of(decoder, tokens):
    """Returns the logits of all rows of a text."""
    cache = RaggedKVCache()
    return decoder.target(tokens, cache.lay_out([cache.open(len(tokens))], [range(len(tokens))]), cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_merged_into_copies(written, dtype):
    """Merged linears are no longer blocks, and keep the numbers of their copies."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    file, config = written(MIXED), peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    models = []
    for as_stored in (False, True):
        torch.manual_seed(0)
        models.append(peft.get_peft_model(load_model(str(file), dtype, as_stored=as_stored)[0], config).eval())
    target = ad.RaggedModel(models[1], kernels="native")
    assert "2 of 2 layers fused, adapters merged into copies of 4 linears" in target.chosen
    tokens, cache = torch.arange(20) % len(LETTERS), RaggedKVCache()
    found = target(tokens, cache.lay_out([cache.open(20)], [range(20)]), cache).float()
    with torch.no_grad():
        expected = models[0](tokens[None]).logits[0].float()
        with models[0].disable_adapter():
            without = models[0](tokens[None]).logits[0].float()
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert (without - expected).norm() > 0.2 * expected.norm()  # control: the adapter matters


def test_decoding_makes_no_matrix_dense(written, monkeypatch):
    decoder = decoder_of(written(MIXED))

    def dense(blocks):
        raise AssertionError(f"{list(blocks.shape)} made dense")

    monkeypatch.setattr(FileBlocks, "dense", dense)
    decoder.complete("hello", max_new_tokens=8)
    with pytest.raises(AssertionError, match="made dense"):  # control: the model's own modules do
        decoder.target.model(torch.zeros(1, 1, dtype=torch.int64))


def test_blocks_cannot_be_written_to(written):
    target = decoder_of(written([("", "Q8_0")])).target
    down = target.model.model.layers[0].mlp.down_proj
    before = down.weight.dense()
    refusal = "cannot be written to: load the model with kernels='torch'"
    with torch.no_grad(), pytest.raises(RuntimeError, match=refusal):
        down.weight.mul_(2)
    assert torch.equal(down.weight, before)
    before.copy_(down.weight)  # reading is allowed
    down.weight = nn.Parameter(2 * before)
    with pytest.warns(match="prepacking them again"):
        target.begin(RaggedKVCache())
    matrix = target.prepacking.stack[0].down
    assert torch.equal(restore_blocks(matrix.weight), 2 * before)


def sent(model):
    """Returns the model as another process receives it."""
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("again", [copy.deepcopy, sent])
def test_copies_have_the_same_blocks(written, again):
    model, _ = load_model(str(written(MIXED, tie_word_embeddings=True)), torch.float32, as_stored=True)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), again(model).named_parameters(), strict=True):
        assert type(theirs) is type(ours), name
        assert torch.equal(ours, theirs)
    assert ad.RaggedModel(again(model)).weights == "file"


def test_saving_blocks_is_refused(written, tmp_path):
    model, _ = load_model(str(written([("", "Q8_0")])), torch.float32, as_stored=True)
    with pytest.raises(RuntimeError, match="copy the file, or load it with kernels='torch'"):
        model.save_pretrained(tmp_path / "folder")


def test_blocks_can_be_quantised_to_fewer_bits(written):
    """Blocks are the model's own weights, so other quantisations use their numbers."""
    model, _ = load_model(str(written([("", "Q8_0")])), torch.float32, as_stored=True)
    target = ad.RaggedModel(model, weights="int4")
    assert target.weights == "int4"
    matrix = target.prepacking.stack[0].down
    assert torch.equal(matrix.weight, pack(in_memory(model.model.layers[0].mlp.down_proj.weight), "int4")[0])
    with pytest.raises(ValueError, match="file weights need the native kernels: use kernels='native'"):
        ad.RaggedModel(model, kernels="torch")


def test_originals_need_no_second_file(written):
    file = written([("", "Q8_0")])
    texts = {
        ad.load(file, "none", weights="file", device="cpu", keep_weights=keep).complete("hello", max_new_tokens=8)
        for keep in (True, False)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_that_are_not_quantised_keep_their_numbers(written, dtype):
    file = written([("ffn_down", "F16"), ("", "Q4_1")])
    target = ad.load(file, "none", weights="file", dtype=dtype, device="cpu").target
    layer, truth = target.prepacking.stack[0], dequantised(file)["blk.0.ffn_down.weight"]
    assert torch.equal(restore_blocks(layer.down.weight), truth)


@pytest.mark.parametrize("weights", [None, "file"])
def test_kinds_that_kernels_do_not_read_are_refused(written, weights):
    file = written([("ffn_down", "TQ2_0"), ("", "Q4_1")], **WIDE)
    with pytest.raises(ValueError, match=r"tiny.gguf, tensor 'blk.0.ffn_down.weight': .*, not of TQ2_0: choose"):
        ad.load(file, "none", weights=weights, device="cpu")


def test_kinds_of_one_matrix_differ(written):
    """Queries and keys in one kind, values in another, and gates in another than their inputs."""
    file = written(K_QUANTS, **WIDE)
    layer, truth = decoder_of(file).target.prepacking.stack[0], dequantised(file)
    gates = restore_blocks(layer.gate_up.weight).unflatten(0, (-1, 2, 16))
    assert torch.equal(gates[:, 0].flatten(0, 1), truth["blk.0.ffn_gate.weight"])
    assert torch.equal(gates[:, 1].flatten(0, 1), truth["blk.0.ffn_up.weight"])
    values = truth["blk.0.attn_v.weight"]
    assert torch.equal(restore_blocks(layer.qkv.weight)[-len(values) :], values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_files_without_blocks_keep_the_dtype(written, kind):
    target = decoder_of(written([("", kind)])).target
    assert target.weights is None
    assert target.prepacking.stack[0].down.weight.dtype == torch.float32


@pytest.mark.parametrize("weights", [None, "file"])
def test_blocks_are_the_default_of_a_file(written, weights):
    file = written(MIXED)
    assert ad.load(file, "none", weights=weights, dtype="float32", device="cpu").target.weights == "file"


def test_blocks_are_made_dense_if_asked_for(written):
    """Originals stay in the file; only the packed copy has the dtype of the model."""
    file = written(MIXED)
    target = ad.load(file, "none", weights="dense", dtype="float32", device="cpu").target
    assert target.weights is None
    assert isinstance(target.model.lm_head.weight, FileBlocks)
    expected, _ = load_model(str(file), torch.float32)
    assert not any(isinstance(weight, FileBlocks) for weight in expected.parameters())
    tokens, cache = torch.arange(20), RaggedKVCache()
    with torch.no_grad():
        found = target(tokens, cache.lay_out([cache.open(20)], [range(20)]), cache)
        assert_close(found, expected(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_without_kernels_blocks_are_made_dense(written):
    file = written(MIXED)
    model = ad.load(file, "none", kernels="torch", device="cpu").target.model
    assert not any(isinstance(weight, FileBlocks) for weight in model.parameters())
    with pytest.raises(ValueError, match=r"weights='file' needs the native kernels: .*; weights='dense' does without"):
        ad.load(file, "none", kernels="torch", weights="file", device="cpu")


def test_names_of_weights(written, tmp_path):
    fusable(vocab_size=len(LETTERS)).save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="means the blocks of a GGUF file"):
        ad.load(tmp_path / "folder", "none", weights="file", device="cpu")
    with pytest.raises(ValueError, match="weights must be one of int4, int8, int8-weight-only or None, got 'file'"):
        ad.RaggedModel(fusable(vocab_size=len(LETTERS)), weights="file")


def test_damaged_files_are_named(written):
    file = written([("", "Q8_0")])
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="is cut: tensor"):
        ad.load(file, "none", weights="file", device="cpu")


def test_stacked_experts_run_in_their_blocks():
    """Experts of a file keep their kinds beside a shared expert, whose numbers are the model's own."""
    model, source = fusable("qwen2_moe"), torch.Generator().manual_seed(0)
    held = model.model.layers[0].mlp.experts
    for layer in model.model.layers:
        for name, kind in (("gate_up_proj", "MXFP4"), ("down_proj", "Q5_1")):
            shape = getattr(layer.mlp.experts, name).shape
            raw = ordinary_blocks(kind, shape[0] * shape[1], shape[2], source)
            blocks = FileBlocks(raw.numpy(), kind, tuple(shape), torch.float32)
            setattr(layer.mlp.experts, name, nn.Parameter(blocks, requires_grad=False))
    target = ad.RaggedModel(model)
    assert target.weights == "file"
    layer = target.prepacking.stack[0]
    experts, inner = held.down_proj.shape[0], held.down_proj.shape[2]
    gates = restore_blocks(layer.gate_up.weight).unflatten(0, (-1, 2, 16)).transpose(1, 0).flatten(1, 2)
    truth = in_memory(held.gate_up_proj).unflatten(1, (2, inner)).transpose(0, 1).flatten(1, 2)
    assert torch.equal(gates[:, : experts * inner], truth)
    assert not torch.equal(truth[0], truth[1])  # control: gates differ from inputs
    down = in_memory(held.down_proj).flatten(0, 1)
    assert torch.equal(restore_blocks(layer.down.weight)[: len(down)], down)
    mlp = model.model.layers[0].mlp.shared_expert.down_proj.weight
    assert torch.equal(restore_blocks(layer.down.weight)[len(down) :, :inner][: len(mlp)], mlp[:, :inner])
