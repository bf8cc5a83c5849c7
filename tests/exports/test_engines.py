"""Exported drafters compute the same in engines, checked on the files alone and by the engines' own rules."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import companions
from support.models import PROMPTS, VOCAB, tiny
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoConfig
from typer.testing import CliRunner

from arbordraft.cli import main as cli
from arbordraft.exports.engines import export_sglang, export_vllm
from arbordraft.exports.engines.draft_model import in_both_dialects
from arbordraft.exports.engines.eagle3 import eagle3, speculators
from arbordraft.exports.engines.layout import LayoutError
from arbordraft.exports.engines.medusa import medusa, widened
from arbordraft.exports.engines.target import describe_target
from arbordraft.heads.block import BlockHead
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.medusa import MedusaHead

KEYS = {  # of an EAGLE-3 checkpoint, from the formats' own descriptions
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Returns folders as training publishes them: a target, and one drafter of each kind."""
    root = tmp_path_factory.mktemp("published")
    companions.target().model.save_pretrained(root / "target")
    for name in companions.STUDENTS:
        part = companions.drafter(name)
        network = next(
            found
            for found in (getattr(part, "head", None), getattr(part, "adapter", None), getattr(part, "model", None))
            if found is not None
        )
        getattr(network, "model", network).save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def target(folders):
    return describe_target(str(folders["target"]))


def engine_row(folder: Path, engine: str, prefix: list[int], drafted: list[int]) -> Tensor:
    """Returns ``[V]`` logits after a draft, from an EAGLE folder as the engine reads and runs it."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    llama = config.get("transformer_layer_config", config)
    assert not config["norm_before_residual"]
    model = companions.target().model
    outputs = []  # of every layer, in order
    with torch.no_grad():
        hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2])) for layer in model.model.layers]
        model(torch.tensor([prefix[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
    plain = [found[0] if isinstance(found, tuple) else found for found in outputs]
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if engine == "sglang":  # numbers a state by the layer that outputs it
        states = [plain[layer][0] for layer in ids]
    else:  # numbers a state by the count of layers before it; the embeddings would be 0
        states = [plain[layers - 1][0] for layers in config.get("eagle_aux_hidden_state_layer_ids") or ids]
    layer = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    inside = {name.removeprefix(layer): tensor for name, tensor in weights.items()}
    size, epsilon, embed = llama["head_dim"], llama["rms_norm_eps"], model.get_input_embeddings().weight

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], inside[f"{name}.weight"], epsilon)

    def turned(x: Tensor, position: int) -> Tensor:
        angles = position * llama["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        first, second = x.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    fused = list(linear(torch.cat(states, dim=-1), inside["fc.weight"]))
    mask = config.get("mask_token_id", config.get("pard_token"))
    if mask is not None:  # parallel drafting does not read drafted tokens
        drafted = [mask] * len(drafted)
        fused += [linear(inside["mask_hidden"].flatten(), inside["fc.weight"])] * len(drafted)
    text, keys, values, hidden = [*prefix, *drafted], [], [], None
    for slot, token in enumerate(text[1:]):
        hidden = fused[slot] if slot < len(fused) else hidden
        x = torch.cat([norm(embed[token], "input_layernorm"), norm(hidden, "hidden_norm")])
        q, k, v = (linear(x, inside[f"self_attn.{name}_proj.weight"]).view(-1, size) for name in "qkv")
        groups = len(q) // len(k)
        keys.append(turned(k, slot).repeat_interleave(groups, 0))
        values.append(v.repeat_interleave(groups, 0))
        scores = torch.einsum("hc,shc->hs", turned(q, slot), torch.stack(keys)) / size**0.5
        attended = torch.einsum("hs,shc->hc", scores.softmax(-1), torch.stack(values)).flatten()
        hidden = hidden + linear(attended, inside["self_attn.o_proj.weight"])
        x = norm(hidden, "post_attention_layernorm")
        gated = silu(linear(x, inside["mlp.gate_proj.weight"])) * linear(x, inside["mlp.up_proj.weight"])
        hidden = hidden + linear(gated, inside["mlp.down_proj.weight"])
    logits = linear(norm(hidden, "norm"), inside["lm_head.weight"])
    wide = torch.full((llama["vocab_size"],), -torch.inf)
    wide[inside["d2t"] + torch.arange(len(logits))] = logits
    return wide


EAGLES = [("vllm", "eagle3"), ("vllm", "speculators"), ("sglang", "eagle3")]


@pytest.mark.parametrize(("engine", "layout"), EAGLES)
def test_engines_compute_the_logits_of_the_head(folders, tmp_path, engine, layout):
    export = {"vllm": export_vllm, "sglang": export_sglang}[engine]
    done = export(folders["eagle"], tmp_path / "out", layout=layout, target=str(folders["target"]))
    assert [file.name for file in done.files] == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "midlayer." if layout == "eagle3" else "layers.0."
    assert {name.removeprefix(prefix) for name in tensors} == KEYS
    head, model = companions.drafter("eagle").head, companions.target().model
    for drafted in ([], [7, 9, 4]):
        expected = companions.eagle_row(head, model, PROMPTS[2], drafted)
        row = engine_row(tmp_path / "out", engine, PROMPTS[2], drafted)
        torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)
    # The trap: with the other engine's layer numbers, the same files are another network.
    if layout == "eagle3":
        other = engine_row(tmp_path / "out", {"vllm": "sglang", "sglang": "vllm"}[engine], PROMPTS[2], [])
        assert not torch.allclose(other, companions.eagle_row(head, model, PROMPTS[2], []), atol=1e-2)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_vllm_computes_the_logits_of_the_block_head(folders, tmp_path, layout, order):
    """Covers a head that reads the target's states in another order than engines collect them."""
    head = BlockHead.from_pretrained(folders["peagle"])
    size, places = head.config.target_hidden_size, [[1, 2, 3].index(number) for number in order]
    with torch.no_grad():
        for weight in (head.fc.weight, head.mask_hidden):
            parts = weight.clone().split(size, dim=-1)
            weight.copy_(torch.cat([parts[place] for place in places], dim=-1))
    head.config.hidden_layers = order
    head.save_pretrained(tmp_path / "head")
    export_vllm(tmp_path / "head", tmp_path / "out", layout=layout, target=str(folders["target"]))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "midlayer." if layout == "eagle3" else "layers.0."
    assert {name.removeprefix(prefix) for name in tensors} == {*KEYS, "mask_hidden"}
    for drafted in ([], [7], [7, 9, 4]):
        expected = companions.block_row(head, companions.target().model, PROMPTS[2], drafted)
        row = engine_row(tmp_path / "out", "vllm", PROMPTS[2], drafted)
        torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert layout == "speculators" or '"parallel_drafting": true' in card


def test_settings_of_the_eagle3_layout(folders, tmp_path):
    export_vllm(folders["eagle"], tmp_path / "out", target=str(folders["target"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, 40)
    read = AutoConfig.from_pretrained(tmp_path / "out")  # as both engines read it
    assert (read.model_type, read.head_dim, read.draft_vocab_size) == ("llama", 8, 40)
    assert read.rope_parameters["rope_theta"] == companions.drafter("eagle").head.config.rope_theta


def test_settings_of_the_speculators_layout(folders, tmp_path):
    place = str(folders["target"])
    export_vllm(folders["eagle"], tmp_path / "out", layout="speculators", target=place, speculative_tokens=3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"] == {"name_or_path": place, "architectures": ["LlamaForCausalLM"]}
    assert config["norm_before_residual"] is False  # vLLM's default is true
    assert config["transformer_layer_config"]["model_type"] == "llama"


def test_states_in_another_order_are_sorted_and_read_once(folders, tmp_path):
    """Engines collect each state once, in the order of the layers."""
    torch.manual_seed(0)
    head = EagleHead.for_target(companions.target().model, range(40), hidden_layers=(3, 1, 3))
    torch.nn.init.normal_(head.fc.weight)
    head.save_pretrained(tmp_path / "head")
    export_vllm(tmp_path / "head", tmp_path / "out", target=str(folders["target"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["num_aux_hidden_states"] == 2
    expected = companions.eagle_row(head.eval(), companions.target().model, PROMPTS[0], [4])
    row = engine_row(tmp_path / "out", "vllm", PROMPTS[0], [4])
    torch.testing.assert_close(row, expected, rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match="SGLang fuses 3 hidden states"):
        export_sglang(tmp_path / "head", tmp_path / "other", target=str(folders["target"]))


def test_a_whole_vocabulary_needs_no_map(folders, tmp_path):
    head = EagleHead.for_target(companions.target().model, range(VOCAB), hidden_layers=(1, 2, 3))
    head.save_pretrained(tmp_path / "head")
    export_vllm(tmp_path / "head", tmp_path / "out", target=str(folders["target"]), dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_medusa_heads_have_the_same_most_probable_token(folders, tmp_path):
    export_vllm(folders["medusa"], tmp_path / "out", target=str(folders["target"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["num_heads"], config["medusa_fc_bias"]) == ("medusa", 3, True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["lm_heads.2.weight"].shape == (VOCAB, 32)  # vLLM requires all rows
    head = companions.drafter("medusa").head
    hidden = torch.randn(200, 32)
    for index in range(3):
        block = f"blocks.{index}.layers.0"
        x = hidden + silu(linear(hidden, tensors[f"{block}.weight"], tensors[f"{block}.bias"]))
        found = linear(x, tensors[f"lm_heads.{index}.weight"]).argmax(-1)
        assert torch.equal(found, head.widen(head.logits(hidden, index)).argmax(-1))


def test_a_path_that_misleads_vllm_is_refused(folders, tmp_path):
    for name in ("medusa", "model"):
        with pytest.raises(ValueError, match="because of 'eagle3' in its path"):
            export_vllm(folders[name], tmp_path / "My-EAGLE3" / "out", target=str(folders["target"]))
    assert list(tmp_path.iterdir()) == []
    assert export_sglang(folders["model"], tmp_path / "eagle3", target=str(folders["target"])).files


def test_rows_of_zeros_would_change_the_most_probable_token():
    """Negative control: a token outside the draft vocabulary wins where all others have negative logits."""
    rows, tokens, hidden = -torch.ones(2, 3), torch.tensor([0, 2]), torch.ones(3)
    assert linear(hidden, torch.zeros(4, 3).index_copy(0, tokens, rows)).argmax() == 1
    rows[0] *= 0.5
    assert linear(hidden, widened(rows, tokens, 4)).argmax() == 0


def test_a_draft_model_keeps_its_weights_and_has_settings_in_both_dialects(folders, tmp_path):
    for export in (export_vllm, export_sglang):
        export(folders["model"], tmp_path / "out", target=str(folders["target"]), force=True)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert config["torch_dtype"] == config["dtype"] == "float32"
        before, after = (load_file(path / "model.safetensors") for path in (folders["model"], tmp_path / "out"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_draft_model_may_share_its_embeddings(folders, tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    export_vllm(tmp_path / "tied", tmp_path / "out", target=str(folders["target"]))


def test_rope_dialects():
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    assert in_both_dialects(newer)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    older = {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert in_both_dialects(older)["rope_parameters"] == newer["rope_parameters"]


# Files that an engine would load wrongly are never written


def drop(tensors, name):
    del tensors[name]


def swap(tensors, name, tensor):
    tensors[name] = tensor


BROKEN = {
    "missing": (lambda t: drop(t, "midlayer.hidden_norm.weight"), "missing midlayer.hidden_norm.weight"),
    "missing map": (lambda t: drop(t, "t2d"), "missing t2d"),
    "extra": (lambda t: swap(t, "midlayer.self_attn.q_proj.bias", torch.zeros(32)), "unexpected .*q_proj.bias"),
    "shape": (lambda t: swap(t, "fc.weight", torch.zeros(32, 64)), r"fc.weight is \[32, 64\] instead of \[32, 96\]"),
    "dtype": (lambda t: swap(t, "norm.weight", torch.ones(32).half()), "norm.weight is torch.float16"),
    "map's dtype": (lambda t: swap(t, "d2t", t["d2t"].int()), "d2t is torch.int32 instead of torch.int64"),
    "ids instead of offsets": (lambda t: swap(t, "d2t", t["d2t"] + torch.arange(40)), "d2t leads"),
    "one id twice": (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "to the same id"),
    "t2d disagrees": (lambda t: swap(t, "t2d", ~t["t2d"]), "not the 40 that d2t leads to"),
}


@pytest.mark.parametrize(("breakage", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_tensors_are_noticed(folders, target, tmp_path, breakage, message):
    files = eagle3(EagleHead.from_pretrained(folders["eagle"]), target, "vllm", "")
    tensors = {name: tensor.clone() for name, tensor in files.tensors.items()}
    replace(files, tensors=tensors).write(tmp_path)  # unchanged tensors are accepted
    breakage(tensors)
    with pytest.raises(LayoutError, match=message):
        replace(files, tensors=tensors).write(tmp_path)


def test_speculators_and_medusa_layouts_are_checked(folders, target, tmp_path):
    for files in (
        speculators(EagleHead.from_pretrained(folders["eagle"]), target, 3, ""),
        medusa(MedusaHead.from_pretrained(folders["medusa"]), target, ""),
    ):
        tensors = dict(files.tensors)
        del tensors[next(iter(tensors))]
        with pytest.raises(LayoutError, match="missing"):
            replace(files, tensors=tensors).write(tmp_path)


def test_files_changed_after_writing_are_noticed(folders, target, tmp_path):
    files = eagle3(EagleHead.from_pretrained(folders["eagle"]), target, "vllm", "")
    files.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(LayoutError, match="norm_before_residual is True instead of False"):
        files.check(tmp_path)


# Failed exports name the cause and leave no files


def truncated(source: Path, folder: Path) -> Path:
    """Copies a checkpoint and truncates it; `tests/checkpoints/test_damaged.py` has every kind of damage."""
    weights = Path(shutil.copytree(source, folder)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize("name", ["eagle", "peagle", "medusa", "model"])
def test_damaged_checkpoints_are_refused(folders, tmp_path, name):
    with pytest.raises(ValueError, match=r"truncated or damaged .* copy the checkpoint again"):
        export_vllm(truncated(folders[name], tmp_path / name), tmp_path / "out", target=str(folders["target"]))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'harm')!r}, 'w')",)

    file = tmp_path / "drafter.pt"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="pickled, and loading it could run anything"):
        export_vllm(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter.pt"]


@pytest.mark.parametrize(
    ("engine", "drafter", "options", "message"),
    [
        (export_vllm, "block", {}, "mask_token_id"),
        (export_vllm, "peagle", {"speculative_tokens": 5}, "4 tokens ahead"),
        (export_sglang, "peagle", {}, "SGLang serves no block heads"),
        (export_vllm, "exit", {}, "early exits cannot be served"),
        (export_sglang, "exit", {}, "early exits cannot be served"),
        (export_sglang, "medusa", {}, "SGLang serves no Medusa heads"),
        (export_sglang, "eagle", {"layout": "speculators"}, "'eagle3' only"),
        (export_vllm, "medusa", {"layout": "speculators"}, "is for EAGLE, block, DFlash and DSpark heads"),
        (export_vllm, "eagle", {"layout": "eagle2"}, "no layout 'eagle2'"),
        (export_vllm, "eagle", {"dtype": "int8"}, "float32, bfloat16, float16"),
        (export_vllm, "eagle", {"speculative_tokens": 0}, "at least one token"),
        (export_vllm, "model", {"dtype": "float16"}, "keeps its dtype"),
        (export_vllm, "eagle", {"target": "nowhere"}, "'nowhere' cannot be read"),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_unsupported_requests_are_refused(folders, tmp_path, engine, drafter, options, message):
    with pytest.raises(ValueError, match=message):
        engine(folders[drafter], tmp_path / "out", **{"target": str(folders["target"]), **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["vit", "mystery"])
def test_models_without_language_modelling_are_refused(folders, tmp_path, kind):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match="engines serve EAGLE heads, Medusa heads and causal language models"):
        export_vllm(tmp_path / "odd", tmp_path / "out", target=str(folders["target"]))
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_a_target_that_does_not_fit_is_refused(folders, tmp_path):
    tiny(num_hidden_layers=2, hidden_size=64, head_dim=16).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"hidden states of size 32, the target .* has 64"):
        export_vllm(folders["eagle"], tmp_path / "out", target=str(tmp_path / "wide"))
    tiny(vocab_size=50).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="share one tokenizer"):
        export_vllm(folders["model"], tmp_path / "out", target=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="name its target with --target"):
        export_vllm(folders["eagle"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "wide"]


def test_hidden_states_that_engines_do_not_give_are_refused(folders, tmp_path):
    head = EagleHead.for_target(companions.target().model, range(40), hidden_layers=(1, 2, companions.LAYERS))
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="passed the final norm, which engines leave out"):
        export_vllm(tmp_path / "head", tmp_path / "out", target=str(folders["target"]))
    head = EagleHead.for_target(companions.target().model, range(40), hidden_layers=(0, 1, 2))
    head.save_pretrained(tmp_path / "low")
    with pytest.raises(ValueError, match="sglang gives 1 to 3"):
        export_sglang(tmp_path / "low", tmp_path / "out", target=str(folders["target"]))


def test_a_failed_export_keeps_an_existing_folder(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="--force"):
        export_vllm(folders["eagle"], tmp_path / "out", target=str(folders["target"]))
    drafter = truncated(folders["eagle"], tmp_path / "drafter")
    with pytest.raises(ValueError, match="truncated"):
        export_vllm(drafter, tmp_path / "out", target=str(folders["target"]), force=True)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_heads_keep_the_dtype_that_they_were_written_in(folders, tmp_path):
    EagleHead.from_pretrained(folders["eagle"], dtype=torch.float16).save_pretrained(tmp_path / "head")
    export_vllm(tmp_path / "head", tmp_path / "out", target=str(folders["target"]))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "out"))
    assert after["fc.weight"].dtype == torch.float16
    assert torch.equal(before["fc.weight"], after["fc.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    EagleHead.from_pretrained(folders["eagle"], dtype=torch.float64).save_pretrained(tmp_path / "double")
    with pytest.raises(ValueError, match=r"weights in float64 are not served.*--dtype"):
        export_vllm(tmp_path / "double", tmp_path / "other", target=str(folders["target"]))


# The command line


def test_the_command_exports_and_tells_how_to_serve(folders, tmp_path):
    run = CliRunner()
    for engine in ("vllm", "sglang"):
        arguments = ["export", engine, str(folders["eagle"]), str(tmp_path / engine), "--target"]
        result = run.invoke(cli.app, [*arguments, str(folders["target"])], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        for shown in ("model.safetensors", "sha256", "MiB", str(tmp_path / engine)):
            assert shown in result.output
    again = run.invoke(cli.app, [*arguments, str(folders["target"])])
    assert isinstance(again.exception, FileExistsError)
    assert run.invoke(cli.app, [*arguments, str(folders["target"]), "--force"]).exit_code == 0
