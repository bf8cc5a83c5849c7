"""Damaged, incomplete and foreign checkpoints: refused by name before any decoding or training."""

import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.companions import EXIT, target, trained
from support.models import ARCHITECTURES, next_logits, tiny, tiny_checkpoint, tiny_tokenizer
from support.onnx_graphs import decider
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

import arbordraft as ad
from arbordraft.deciders import LearnedDecider
from arbordraft.drafter_names import drafter_named, load_drafter
from arbordraft.exports.decoder_config import TargetReference
from arbordraft.exports.engines import export_vllm
from arbordraft.exports.onnx.sources import origin
from arbordraft.loading import load_model, load_target
from arbordraft.onnx.decider import OnnxDecider
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import run
from arbordraft.training.resuming import check_fit, check_resumable
from arbordraft.training.targets import Target
from arbordraft.utils.choices import Dtype

Harm = Callable[[Path], Any]


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Harm:
    """Returns a function that edits the stored weights."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def drop(name: str) -> Harm:
    return tensors(lambda weights: weights.pop(name))


def put(name: str, value: Tensor) -> Harm:
    return tensors(lambda weights: weights.update({name: value}))


def fill(name: str, value: float) -> Harm:
    """Returns a function that fills one element of a tensor."""
    return tensors(lambda weights: weights[name].view(-1)[:1].fill_(value))


def cast(name: str, dtype: torch.dtype) -> Harm:
    return tensors(lambda weights: weights.update({name: weights[name].to(dtype)}))


def config(**changes: Any) -> Harm:
    """Returns a function that changes settings; ``...`` removes one."""

    def harm(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return harm


def content(file: str, change: Callable[[bytes], bytes] | bytes) -> Harm:
    """Returns a function that changes the bytes of a file."""

    def harm(folder: Path) -> None:
        path = folder / file
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return harm


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": 1}))


def absent(file: str) -> Harm:
    return lambda folder: (folder / file).unlink()


WEIGHTS = "model.safetensors"
# Harms to the files of any checkpoint, with the expected messages.
FILES: dict[str, tuple[Harm, str]] = {
    "truncated": (content(WEIGHTS, lambda data: data[:-100]), r"model\.safetensors is truncated or damaged .*copy"),
    "half a header": (content(WEIGHTS, lambda data: data[:40]), r"model\.safetensors is truncated or damaged"),
    "empty": (content(WEIGHTS, b""), r"model\.safetensors is truncated or damaged"),
    "garbage": (content(WEIGHTS, b"\x07garbage" * 99), r"model\.safetensors is truncated or damaged"),
    "text": (content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n" * 4), "is truncated or damaged"),
    "pickled": (pickled, r"weights pickled \(pytorch_model\.bin\), and loading them could run anything.*save_pret"),
    "no weights": (absent(WEIGHTS), r"has no model\.safetensors: it is not complete"),
    "no config": (absent("config.json"), r"its config\.json cannot be read"),
    "half a config": (content("config.json", lambda data: data[: len(data) // 2]), r"config\.json cannot be read"),
    "empty config": (content("config.json", b""), r"config\.json cannot be read"),
    "binary config": (content("config.json", b"\xff\xfe\x00"), r"config\.json cannot be read"),
    "config as list": (content("config.json", b"[1]"), r"config\.json cannot be read"),
    "extra tensor": (put("spare.weight", torch.ones(2)), r"unexpected keys: spare\.weight"),
}


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a folder with one sound checkpoint of every kind."""
    root = tmp_path_factory.mktemp("whole")
    tiny_checkpoint(root / "model")
    target().model.save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    for name in ("block", "eagle", "medusa", "exit"):
        trained(name).save(root / name)
    decider().save_pretrained(root / "decider")
    return root


@pytest.fixture
def copied(whole, tmp_path):
    """Returns a function that copies a checkpoint, to be damaged."""

    def copy(name):
        return shutil.copytree(whole / name, tmp_path / name)

    return copy


# Models


def sharded(folder, edit=lambda folder: None):
    """Splits the weights into two files with an index, then edits the folder."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, share in parts.items():
        save_file({name: weights[name] for name in share}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, share in parts.items() for name in share}
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    edit(folder)


def another(make, folder):
    """Replaces the weights with another model's and keeps the settings."""
    own = (folder / "config.json").read_bytes()
    make().save_pretrained(folder)
    (folder / "config.json").write_bytes(own)


def classifier():
    settings = AutoConfig.for_model("llama", **ARCHITECTURES["llama"])
    return AutoModelForSequenceClassification.from_config(settings)


MODELS = {
    **FILES,
    "missing": (drop(UP), rf"model\.safetensors does not fit its own config\.json \(missing keys: {UP}\)"),
    "many missing": (
        tensors(lambda weights: [weights.pop(name) for name in list(weights)[3:]]),
        r"missing keys: [^,]*, [^,]*, [^,;]* and \d+ more",
    ),
    "no embedding": (drop("model.embed_tokens.weight"), r"missing keys: model\.embed_tokens"),
    "99 layers": (config(num_hidden_layers=99), r"missing keys: model\.layers\.10\..* and \d+ more"),
    "1 layer": (config(num_hidden_layers=1), r"unexpected keys: model\.layers\.1\."),
    "another vocabulary": (config(vocab_size=64), r"lm_head\.weight is \[61, 32\] instead of \[64, 32\]"),
    "another architecture": (partial(another, lambda: tiny("gpt2")), r"missing keys: .*; unexpected keys: "),
    "another size": (partial(another, lambda: tiny(hidden_size=64)), r"mismatched keys: .* instead of "),
    "without a head": (partial(another, lambda: tiny().model), r"missing keys: lm_head\.weight"),
    "a classifier": (partial(another, classifier), r"missing keys: lm_head\.weight; unexpected keys: score\.weight"),
    "nan": (fill(UP, torch.nan), rf"holds NaN or infinite weights \({UP}\)"),
    "infinite": (fill(NORM, torch.inf), rf"NaN or infinite weights \({NORM}\)"),
    "minus infinite": (fill("lm_head.weight", -torch.inf), r"NaN or infinite weights \(lm_head"),
    "int32": (cast(NORM, torch.int32), rf"{NORM} is stored as I32 instead of float32"),
    "int64": (cast(UP, torch.int64), rf"{UP} is stored as I64 instead of float32"),
    "uint8": (cast(UP, torch.uint8), "is stored as U8"),
    "bool": (cast(UP, torch.bool), "is stored as BOOL"),
    "float8": (cast(UP, torch.float8_e4m3fn), "is stored as F8_E4M3"),
    "transposed": (put("lm_head.weight", torch.ones(32, 61)), r"lm_head\.weight is \[32, 61\] instead of \[61, 32\]"),
    "no heads": (config(num_attention_heads=...), "mismatched keys: .*q_proj|cannot be loaded"),
    "null heads": (config(num_attention_heads=None), "cannot be loaded .*num_attention_heads"),
    "0 heads": (config(num_attention_heads=0), "cannot be loaded"),
    "heads as text": (config(num_attention_heads="4"), "cannot be loaded .*num_attention_heads"),
    "no size": (config(hidden_size=None), "cannot be loaded .*hidden_size"),
    "no kind": (config(model_type=...), r"config\.json cannot be read \(it has no '"),
    "kind as number": (config(model_type=3), "gives 3 as its kind"),
    "unknown kind": (config(model_type="nope"), "cannot be loaded .*`nope`"),
    "vision": (config(model_type="vit"), "cannot be loaded .*AutoModelForCausalLM"),
    "missing shard": (
        partial(sharded, edit=absent("b.safetensors")),
        r"lacks b\.safetensors, which its model\.safetensors\.index\.json names",
    ),
    "truncated shard": (
        partial(sharded, edit=content("b.safetensors", lambda data: data[:-9])),
        r"b\.safetensors is truncated",
    ),
    "empty shard": (partial(sharded, edit=content("a.safetensors", b"")), r"a\.safetensors is truncated"),
    "half an index": (
        partial(sharded, edit=content(f"{WEIGHTS}.index.json", b'{"weight_map"')),
        r"index\.json is damaged .*copy",
    ),
    "index of pickles": (
        partial(sharded, edit=content(f"{WEIGHTS}.index.json", b'{"weight_map": {"a": "a.bin"}}')),
        "no safetensors file beside it",
    ),
    "index elsewhere": (
        partial(sharded, edit=content(f"{WEIGHTS}.index.json", b'{"weight_map": {"a": "../a.safetensors"}}')),
        "no safetensors file beside it",
    ),
    "tokenizer": (content("tokenizer.json", b"{}"), "the tokenizer in .* cannot be read"),
    "half a tokenizer": (content("tokenizer.json", b'{"model'), "the tokenizer in .* cannot be read"),
}


@pytest.mark.parametrize("how", MODELS)
def test_a_damaged_model_is_refused(copied, capfd, how):
    harm, message = MODELS[how]
    folder = copied("model")
    harm(folder)
    with pytest.raises(ValueError, match=message) as refused:
        load_model(str(folder), torch.float32)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "LOAD REPORT" not in capfd.readouterr().err


def reference(folder):
    return TargetReference(folder, "float32", "torch", "").load()


PLACES = {
    "--model": lambda folder: load_target(folder, Dtype.float32),
    "training": lambda folder: Target(folder, dtype="float32").load(),
    "export": origin,
    "engine": lambda folder: export_vllm(folder, f"{folder}-out", target=folder),
    "logged decoder": reference,
    "--drafter": lambda folder: drafter_named(folder, target()),
    "drafter": lambda folder: ad.LanguageModelDrafter.from_pretrained(folder, target()),
}


@pytest.mark.parametrize("how", ["missing", "another size", "nan", "truncated", "pickled"])
@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_loads_models_is_strict(copied, place, how):
    folder = copied("model")
    MODELS[how][0](folder)
    with pytest.raises(ValueError, match=r"missing|instead of|NaN|truncated|pickled"):
        PLACES[place](str(folder))


@pytest.mark.parametrize(
    "change",
    {
        "unchanged": lambda folder: None,
        "float64": tensors(lambda weights: weights.update({n: t.double() for n, t in weights.items()})),
        "bfloat16 and float32": cast(UP, torch.float32),
        "shards": sharded,
        "no architectures": config(architectures=...),
        "old buffers": put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    }.items(),
    ids=lambda item: item[0],
)
def test_sound_models_load(copied, whole, change):
    folder = copied("model")
    change[1](folder)
    model, tokenizer = load_model(str(folder), torch.float32)
    assert not model.training
    assert tokenizer.padding_side == "left"
    expected = tiny(max_position_embeddings=2048)
    assert torch.equal(next_logits(model, [5, 9, 7]), next_logits(expected, [5, 9, 7]))


def test_tied_weights_may_be_stored_once(tmp_path):
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    found, tokenizer = load_model(str(tmp_path), torch.float32)
    assert tokenizer is None
    assert torch.equal(next_logits(found, [5, 9]), next_logits(model, [5, 9]))
    drop("model.embed_tokens.weight")(tmp_path)
    with pytest.raises(ValueError, match=r"missing keys: lm_head\.weight, model\.embed_tokens\.weight"):
        load_model(str(tmp_path), torch.float32)


def test_weights_too_large_for_their_dtype_are_refused(copied):
    folder = copied("model")
    fill(NORM, 1e6)(folder)
    load_model(str(folder), torch.bfloat16)
    with pytest.raises(ValueError, match=rf"infinite weights \({NORM}\).* too large for float16"):
        load_model(str(folder), torch.float16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{folder}/model.safetensors", r"is a file: name the folder that holds config\.json"),
        ("{folder}/nothing", "cannot be loaded"),
        ("", "cannot be loaded|cannot be read"),
    ],
    ids=["file", "nothing", "no name"],
)
@pytest.mark.usefixtures("no_hub")
def test_names_that_are_no_model_are_refused(copied, name, message):
    with pytest.raises(ValueError, match=message):
        load_model(name.format(folder=copied("model")), torch.float32)


def test_a_model_without_a_tokenizer_cannot_be_prompted(copied):
    folder = copied("model")
    for file in folder.glob("*token*"):
        file.unlink()
    assert load_model(str(folder), torch.float32)[1] is None
    for place in ("--model", "training"):
        with pytest.raises(ValueError, match="has no tokenizer"):
            PLACES[place](str(folder))


# Trained drafters

HEADS = {
    "block": "masks.weight",
    "eagle": "norm.weight",
    "medusa": "blocks.0.layers.0.weight",
    "exit": "mlp.down_proj.weight",
}
LOADERS = {"block": ad.BlockDrafter, "eagle": ad.EagleDrafter, "medusa": ad.MedusaDrafter, "exit": ad.EarlyExitDrafter}


def of_weight(name):
    return {
        "missing": (drop(name), rf"missing keys: {name}"),
        "nan": (fill(name, torch.nan), rf"NaN or infinite weights \({name}\)"),
        "infinite": (fill(name, torch.inf), rf"NaN or infinite weights \({name}\)"),
        "int32": (cast(name, torch.int32), rf"{name} is stored as I32 instead of float"),
        "bool": (cast(name, torch.bool), rf"{name} is stored as BOOL"),
        "shape": (put(name, torch.ones(3)), rf"{name} is \[3\] instead of"),
        "another size": (config(target_hidden_size=64), "mismatched keys: "),
        "size as text": (config(target_hidden_size="wide"), "cannot be loaded"),
    }


HEAD_CASES = {
    f"{name}-{how}": (name, *case)
    for name, weight in HEADS.items()
    for how, case in {**FILES, **of_weight(weight)}.items()
}


@pytest.mark.parametrize("case", HEAD_CASES)
def test_a_damaged_drafter_is_refused(copied, case):
    name, harm, message = HEAD_CASES[case]
    folder = copied(name)
    harm(folder)
    with pytest.raises(ValueError, match=message) as refused:
        load_drafter(folder, target())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", HEADS)
def test_a_language_model_is_refused_as_a_head(copied, name):
    with pytest.raises(ValueError, match="holds a model of type 'llama', not 'arbordraft_"):
        LOADERS[name].from_pretrained(copied("model"), target())


def acceptance(table):
    return config(acceptance=table)


DRAFT_VOCABULARY = {
    "no ids": (drop("d2t"), "missing keys: d2t"),
    "two for one": (
        tensors(lambda w: w["d2t"][3:4].sub_(1 + w["d2t"][3] - w["d2t"][2])),
        "draft vocabulary is damaged",
    ),
    "beyond the target": (tensors(lambda w: w["d2t"][-1:].fill_(999)), "draft vocabulary is damaged: d2t leads to ids"),
    "below 0": (tensors(lambda w: w["d2t"][:1].fill_(-1)), "draft vocabulary is damaged: d2t leads to ids -1"),
    "other marks": (tensors(lambda w: w["t2d"].logical_not_()), "draft vocabulary is damaged: t2d marks"),
    "ids as fractions": (cast("d2t", torch.float32), "d2t is stored as F32 instead of int64"),
    "marks as numbers": (cast("t2d", torch.int64), "t2d is stored as I64 instead of bool"),
    "more ids": (config(draft_vocab_size=41), "mismatched keys: .*d2t"),
    "nan acceptance": (acceptance([0.5, float("nan")]), "acceptance of rank 1 must be a number from 0 to 1, got nan"),
    "acceptance above 1": (acceptance([1.5]), "acceptance of rank 0 must be a number from 0 to 1"),
    "acceptance below 0": (acceptance([0.5, -0.1]), "acceptance of rank 1 must be"),
    "acceptance sums to 2": (acceptance([0.9, 0.6, 0.5]), "acceptance table sums to 2.000"),
    "no acceptance": (acceptance([]), "acceptance table must have 1 to 40 entries"),
    "endless acceptance": (acceptance([0.0] * 41), "acceptance table must have 1 to 40 entries"),
    "acceptance as text": (acceptance("high"), "cannot be loaded|acceptance"),
    "acceptance of texts": (acceptance(["0.5"]), "cannot be loaded|acceptance"),
    "hidden states beyond": (config(hidden_layers=[1, 2, 99]), r"reads hidden states \[99\], the target's are 0\.\.4"),
}


@pytest.mark.parametrize("how", DRAFT_VOCABULARY)
def test_a_head_that_contradicts_itself_is_refused(copied, how):
    harm, message = DRAFT_VOCABULARY[how]
    folder = copied("eagle")
    harm(folder)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads_load_from_any_floating_point_dtype(copied, name, dtype):
    folder = copied(name)
    cast(HEADS[name], dtype)(folder)
    assert isinstance(load_drafter(folder, target()), LOADERS[name])


def test_folders_of_other_parts_are_refused(copied):
    with pytest.raises(ValueError, match="holds no trained drafter but a LearnedDecider"):
        load_drafter(copied("decider"), target())
    with pytest.raises(ValueError, match="holds a model of type 'arbordraft_medusa', not 'arbordraft_eagle'"):
        ad.EagleDrafter.from_pretrained(copied("medusa"), target())
    with pytest.raises(ValueError, match="write early-exit:LAYERS"):
        drafter_named("early-exit:some", target())


# Deciders

DECIDER = {name: case for name, case in FILES.items() if name not in ("extra tensor",)} | {
    "missing": (drop("network.0.weight"), "Missing key"),
    "extra tensor": (put("spare", torch.ones(2)), "Unexpected key"),
    "nan": (fill("network.0.weight", torch.nan), r"NaN or infinite weights \(network\.0\.weight\)"),
    "int32": (cast("network.0.weight", torch.int32), r"network\.0\.weight must be stored as floating-point"),
    "shape": (put("network.0.weight", torch.ones(2)), "size mismatch"),
    "another class": (config(**{"class": "Heuristic"}), "that of something else"),
    "nan threshold": (config(threshold=float("nan")), "threshold"),
    "nan temperature": (config(temperatures=[float("nan")]), "temperatures"),
    "unknown setting": (config(depth=3), "depth"),
    "endless widths": (config(widths=[10**9]), "widths"),
}


@pytest.mark.parametrize("how", DECIDER)
def test_a_damaged_decider_is_refused(copied, how):
    harm, message = DECIDER[how]
    folder = copied("decider")
    harm(folder)
    with pytest.raises(ValueError, match=rf"cannot be read as a LearnedDecider: .*({message})"):
        LearnedDecider.from_pretrained(folder)


# Graphs


def graph_with(source, folder, *, weights=None, **about):
    """Copies an exported folder, then fills its matrices with a value or changes its metadata."""
    onnx = pytest.importorskip("onnx")
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx")
    if weights is not None:
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
                values = onnx.numpy_helper.to_array(tensor).copy()
                values.fill(weights)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for entry in model.metadata_props:
        if entry.key.removeprefix("arbordraft.") in about:
            entry.value = about[entry.key.removeprefix("arbordraft.")]
    onnx.save(model, folder / "model.onnx", save_as_external_data=False)
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("medusa", {"weights": float("nan")}, "predicts NaN or infinity"),
        ("model", {"weights": float("nan")}, "predicts NaN or infinity"),
        ("decider", {"weights": float("nan")}, "predicts NaN or infinity"),
        ("medusa", {"d2t": "[0, 0, 0]"}, "predicts 40 tokens, its draft vocabulary has 3"),
        ("medusa", {"d2t": "[0, -1]"}, "draft vocabulary is damaged"),
        ("medusa", {"d2t": "[999]"}, "draft vocabulary is damaged"),
        ("medusa", {"acceptance": "[2.0]"}, "acceptance of rank 0"),
        ("medusa", {"acceptance": "[0.5"}, "damaged settings"),
        ("medusa", {"vocab_size": "64"}, "vocabulary of 64 tokens, the target has 61"),
        ("medusa", {"kind": '"poem"'}, "kind 'poem', which is no"),
        ("decider", {"kind": '"poem"'}, "kind 'poem', which is no"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value if value in HEADS else "",
)
def test_a_damaged_graph_is_refused(graphs, tmp_path, name, changes, message):
    folder = graph_with(graphs(name).folder, tmp_path / "spoilt", **changes)
    with pytest.raises(ValueError, match=message):
        OnnxDecider.from_pretrained(folder) if name == "decider" else load_drafter(folder, target())


# Checkpoints of trainings

GOOD = {"state_dict": {"weight": torch.ones(3000)}, "optimizer_states": [], "loops": {}, "global_step": 3}


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def saved(**changes):
    def write(path):
        torch.save({k: v for k, v in (GOOD | changes).items() if v is not ...}, path)

    return write


def bitten(path):
    saved()(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"state_dict", b"\xff\xfe\xfd\xfc\xfb_dict", 1))


DAMAGED = "is truncated, damaged or no checkpoint of a training"
RESUMED = {
    "missing": (lambda path: None, "there is no .*; name a file such as checkpoints/last.ckpt"),
    "empty": (lambda path: path.write_bytes(b""), DAMAGED),
    "KeyError 101": (lambda path: path.write_bytes(b"e" * 100), DAMAGED),
    "garbage": (lambda path: path.write_bytes(bytes(range(256)) * 9), DAMAGED),
    "truncated": (lambda path: (saved()(path), path.write_bytes(path.read_bytes()[:-500])), DAMAGED),
    "damaged string": (bitten, DAMAGED),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(GOOD)), DAMAGED),
    "harmful": (saved(extra=Harmful()), DAMAGED),
    "a list": (lambda path: torch.save([1], path), "lacks loops, optimizer_states, state_dict"),
    "a state_dict": (lambda path: torch.save(GOOD["state_dict"], path), "is no checkpoint of a training"),
    "weights only": (saved(optimizer_states=...), "lacks optimizer_states"),
    "not tensors": (saved(state_dict={"weight": 3}), "holds something other than tensors"),
    "nan": (saved(state_dict={"weight": torch.tensor([torch.nan])}), r"NaN or infinite weights \(weight\)"),
    "safetensors": (lambda path: save_file(GOOD["state_dict"], path), DAMAGED),
}


@pytest.mark.parametrize("how", RESUMED)
def test_a_damaged_training_is_not_resumed(tmp_path, how):
    harm, message = RESUMED[how]
    path = tmp_path / "last.ckpt"
    harm(path)
    with pytest.raises(ValueError, match=rf"--ckpt_path: .*last\.ckpt.*{message}|--ckpt_path: {message}"):
        check_resumable(path, fit=True)


def test_sound_trainings_are_resumed(tmp_path):
    saved()(tmp_path / "last.ckpt")
    check_resumable(tmp_path / "last.ckpt", fit=True)
    saved(optimizer_states=..., loops=...)(tmp_path / "last.ckpt")
    check_resumable(tmp_path / "last.ckpt", fit=False)
    for known in ("last", "best", "s3://bucket/last.ckpt", tmp_path):
        check_resumable(known, fit=True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": torch.ones(2, 3)}, "bias are missing"),
        ({"weight": torch.ones(3, 3), "bias": torch.ones(2)}, "another training: weight are"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(2), "spare": torch.ones(1)}, "spare are missing, unexpected"),
        ({"network.weight": torch.ones(2, 3)}, "bias, network.weight, weight are"),
    ],
    ids=["missing", "shape", "unexpected", "another network"],
)
def test_the_checkpoint_of_another_training_is_refused(weights, message):
    module = torch.nn.Linear(3, 2)
    check_fit(module, {"state_dict": module.state_dict()})
    with pytest.raises(ValueError, match=message):
        check_fit(module, {"state_dict": weights})


def test_the_command_line_checks_the_checkpoint_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.ckpt").write_bytes(b"e" * 100)
    with pytest.raises(ValueError, match=DAMAGED):
        run(DrafterModule, ["fit", "--config", "drafter/eagle", "--ckpt_path", "last.ckpt"])
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


# Parts of another kind


def meta():
    with torch.device("meta"):
        return tiny()


PARTS = {
    "no head": (lambda: ad.EagleDrafter(None, target()), "must be of the kind EagleHead, got NoneType"),
    "a path as head": (lambda: ad.EagleDrafter("folder", target()), "kind EagleHead, got str: load .* from_pretrained"),
    "heads of another kind": (
        lambda: ad.EagleDrafter(trained("medusa").network, target()),
        "kind EagleHead, got MedusaHead",
    ),
    "a head for heads": (
        lambda: ad.MedusaDrafter(trained("eagle").network, target()),
        "kind MedusaHead, got EagleHead",
    ),
    "no adapter": (lambda: ad.EarlyExitDrafter(target(), EXIT, target()), "kind ExitAdapter, got RaggedModel"),
    "a plain target": (
        lambda: ad.EagleDrafter(trained("eagle").network, target().model),
        r"target must be a RaggedModel, got LlamaForCausalLM: wrap the model as RaggedModel\(model\)",
    ),
    "no target": (
        lambda: ad.MedusaDrafter(trained("medusa").network, None),
        "target must be a RaggedModel, got NoneType",
    ),
    "an early exit of a plain target": (lambda: ad.EarlyExitDrafter(target().model, 1), "target must be a RaggedModel"),
    "no draft model": (lambda: ad.LanguageModelDrafter(None), "model must be a causal LM of transformers"),
    "a name for a draft model": (lambda: ad.LanguageModelDrafter("smollm2"), "model must be a causal LM"),
    "a drafter for a draft model": (lambda: ad.LanguageModelDrafter(ad.NGramDrafter()), "model must be a causal LM"),
    "a base model": (lambda: ad.LanguageModelDrafter(tiny().model), "LlamaModel has no language-model head"),
    "a classifier": (lambda: ad.LanguageModelDrafter(classifier().eval()), "has no language-model head"),
}


@pytest.mark.parametrize("what", PARTS)
def test_parts_of_another_kind_are_refused(what):
    make, message = PARTS[what]
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("name", [*HEADS, "model"])
def test_loading_for_a_plain_target_is_refused(copied, name):
    with pytest.raises(TypeError, match="target must be a RaggedModel, got LlamaForCausalLM"):
        {**LOADERS, "model": ad.LanguageModelDrafter}[name].from_pretrained(copied(name), target().model)


def test_a_plain_draft_model_is_wrapped():
    drafter = ad.LanguageModelDrafter(tiny(seed=3))
    assert isinstance(drafter.model, ad.RaggedModel)
    drafter.check(target(), None)


def test_a_draft_model_on_the_meta_device_is_refused():
    with pytest.raises((TypeError, ValueError), match="meta"):
        ad.LanguageModelDrafter(meta())
