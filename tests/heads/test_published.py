"""Heads published by other projects give the same logits as their own libraries, position by position.

The checkpoints and their drafts were made by ``speculators`` and SpecForge: see make_published.py, make_specforge.py.
"""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import decode, tiny
from typer.testing import CliRunner

import arbordraft as ad
from arbordraft.cli.main import app
from arbordraft.drafter_names import drafter_named, load_drafter
from arbordraft.exports.engines import export_vllm
from arbordraft.exports.onnx import plans
from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.medusa import MedusaHead
from arbordraft.heads.published import is_published, published_head
from arbordraft.target.cache import RaggedKVCache

FOLDER = Path(__file__).parents[1] / "golden" / "published"
KINDS = sorted(folder.name for folder in FOLDER.iterdir())
EAGLES = [kind for kind in KINDS if kind.startswith("eagle")]
BLOCKS = [kind for kind in KINDS if kind.removeprefix("specforge-").startswith("d")]
HIDDEN, VOCAB = 16, 64
BACKENDS = ["torch", "native"]

pytestmark = pytest.mark.usefixtures("kernels")


def target(kernels="torch", **options):
    sizes = {"hidden_size": HIDDEN, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny(vocab_size=VOCAB, num_hidden_layers=4, **sizes, **options)
    return ad.RaggedModel(model, kernels=kernels, self_test=False)


def drafts(drafter, states, ids, steps):
    """Returns ``[steps, slots, D]`` logits of a chain after every slot, fed with the tokens of the text."""
    network, slots = drafter._network, len(ids)
    found = []
    for last in range(slots - steps):
        cache = RaggedKVCache()
        sample = cache.open(slots + steps)
        batch = cache.lay_out([sample], [range(last + 1)])
        hidden = network.fuse(network.normed(states[: last + 1]))
        logits, _, following = network.run_batch(ids[: last + 1], hidden, batch, cache, torch.tensor([last]))
        cache.commit({sample: range(last + 1)})
        rows = [logits[0]]
        for step in range(1, steps):
            batch = cache.lay_out([sample], [[0]])
            logits, _, following = network.run_batch(ids[last + step, None], following, batch, cache)
            cache.commit({sample: [0]})
            rows.append(logits[0])
        found.append(torch.stack(rows))
    return torch.stack(found, dim=1)


def beside(kind, kernels="torch"):
    """Builds a target with the library's embeddings and output matrix, if the head lacks them; loads the drafts."""
    of, known = target("torch"), load_file(FOLDER / kind / "drafts.safetensors")
    with torch.no_grad():
        if "embeddings" in known:
            of.model.get_input_embeddings().weight.copy_(known["embeddings"])
        if "head" in known:
            of.model.get_output_embeddings().weight.copy_(known["head"])
    return ad.RaggedModel(of.model, kernels=kernels, self_test=False), known


@torch.no_grad()
def block_drafts(drafter, states, ids, place):
    """Returns ``[depths, D]`` logits of a block after a place of the text, each depth after the text's own token."""
    network, head, cache = drafter._network, drafter.head, RaggedKVCache()
    config, sample = head.config, cache.open(64)
    for part, _, batch in cache.portions({sample: range(place)}, 2):
        network.store(network.context(states[list(part[sample])]), batch, cache)
    size = config.block_size
    batch = cache.lay_out([sample], [range(size)], torch.full((size, 1), (1 << size) - 1))
    rows = torch.tensor([ids[place], *[config.mask_token_id] * (size - 1)])
    logits, final = (part[size - config.depths :] for part in network.block(rows, batch, cache))
    found, memory = [], None
    for depth in range(config.depths):
        row, memory = network.condition(logits[depth, None], final[depth, None], ids[None, place + depth], memory)
        found.append(row[0])
    return torch.stack(found)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_the_library(kind, kernels):
    """Compares after every place that has states before it."""
    of, expected = beside(kind, kernels)
    drafter = load_drafter(FOLDER / kind, of)
    assert (drafter._network.layers.fused is not None) == (kernels == "native")
    skipped = expected["logits"].shape[1] - drafter.head.config.depths
    compared = 0
    for place, logits in zip(expected["places"].tolist(), expected["logits"], strict=True):
        if place:
            found = block_drafts(drafter, expected["states"], expected["ids"], place)
            torch.testing.assert_close(found, logits[skipped:], rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("dflash", {"mask_token_id": 7}),
        ("dspark", {"rms_norm_eps": 1.0}),
        ("dspark-gated", {"block_size": 3}),
        ("dspark-rnn", {"block_size": 2}),
    ],
)  # fmt: skip
def test_every_setting_of_blocks_counts(kind, change):
    """Negative control: a block of another length, or with other masks, gives other logits."""
    of, expected = beside(kind)
    drafter = load_drafter(FOLDER / kind, of)
    for name, value in change.items():
        setattr(drafter.head.config, name, value)
        if name == "rms_norm_eps":
            drafter.head.hidden_norm.eps = value
    skipped = drafter.head.config.block_size - drafter.head.config.depths
    found = block_drafts(drafter, expected["states"], expected["ids"], 2)
    assert not torch.allclose(found, expected["logits"][2, skipped:][: len(found)], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_masks_are_those_of_the_library(kernels):
    """Compares all depths after every slot of P-EAGLE, which the library computes in one pass."""
    of, expected = beside("peagle", kernels)
    drafter = load_drafter(FOLDER / "peagle", of)
    network, head, depths = drafter._network, drafter.head, 3
    assert (network.layers.fused is not None) == (kernels == "native")
    for last in range(1, len(expected["ids"]) - depths):
        cache = RaggedKVCache()
        sample = cache.open(32)
        slots = network.fuse(expected["states"][: last + 1])
        # Slot j of the library holds states and token of place j; ours takes the given token beside the states.
        (rows,) = drafter._ask(cache, {sample: expected["ids"][: last + 1].tolist()}, {sample: slots}, depths)
        for depth in range(depths):
            at = (expected["places"] == last) & (expected["depths"] == depth)
            torch.testing.assert_close(rows[0][depth], expected["logits"][at][0], rtol=1e-4, atol=1e-4)
    assert head.config.own_embeddings


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", EAGLES)
def test_drafts_are_those_of_the_library(kind, kernels):
    expected = load_file(FOLDER / kind / "drafts.safetensors")
    drafter = load_drafter(FOLDER / kind, target(kernels))
    assert (drafter._network.native is not None) == (kernels == "native")
    steps = len(expected["logits"])
    found = drafts(drafter, expected["states"], expected["ids"], steps)
    torch.testing.assert_close(found, expected["logits"][:, : found.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("eagle31-qwen3", "norm_output", False),
        ("eagle31-qwen3", "fc_norm", False),
        ("eagle3-bias", "norm_before_residual", False),
        ("eagle3-bias", "norm_before_fc", False),
        ("eagle3-two-layers", "rope_parameters", None),
    ],
)
def test_every_setting_counts(kind, setting, value):
    """Negative control: with another value the drafts differ."""
    expected = load_file(FOLDER / kind / "drafts.safetensors")
    drafter = load_drafter(FOLDER / kind, target())
    if setting == "fc_norm":
        drafter.head.fc_norm = torch.nn.ModuleList()
    elif setting == "norm_before_fc":
        drafter.head.input_norm = None
    else:
        setattr(drafter.head.config, setting, value)
    found = drafts(drafter, expected["states"], expected["ids"], len(expected["logits"]))
    assert not torch.allclose(found, expected["logits"][:, : found.shape[1]], rtol=1e-2, atol=1e-2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_target(kind, kernels):
    of, _ = beside(kind, kernels)
    plain, _ = decode(ad.builders.plain(of))
    for topology in (ad.TreeTopology.chain(3), ad.TreeTopology.from_k_config((2, 2))):
        for request in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}):
            expected = plain if not request else decode(ad.builders.plain(of), **request)[0]
            found, stats = decode(
                ad.SpeculativeDecoder(of, load_drafter(FOLDER / kind, of), topology, ad.Coupling.shared(2)), **request
            )
            assert found == expected
            assert sum(stats.tried.values()) > 0


def test_one_call_grows_the_same_trees_as_level_by_level():
    """The kernels handle norms of inputs and of kept outputs, own embeddings and several layers."""
    of = target("native")
    for kind in EAGLES:
        seen = []
        for whole in (True, False):
            drafter = load_drafter(FOLDER / kind, of)
            if not whole:
                drafter._network._native = None
            made, trees = ad.SpeculativeDecoder(of, drafter, ad.TreeTopology.from_k_config((2, 2, 1))), []
            made.on_step = lambda state, tree, verdict, trees=trees: trees.append(tree.token.tolist())
            decode(made)
            seen.append(trees)
        assert seen[0] == seen[1]


def copied(tmp_path, kind="eagle3", tensors=None, **config):
    folder = tmp_path / "head"
    folder.parent.mkdir(exist_ok=True)
    shutil.copytree(FOLDER / kind, folder)
    (folder / "drafts.safetensors").unlink()
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def specforge(tmp_path, **config):
    """Saves the EAGLE-3 head in the layout of SpecForge, which numbers states by the layers they come out of."""
    layer = json.loads((FOLDER / "eagle3" / "config.json").read_text())["transformer_layer_config"]
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    folder = copied(
        tmp_path, tensors=lambda held: {name.replace("layers.0.", "midlayer."): tensor for name, tensor in held.items()}
    )
    (folder / "config.json").write_text(json.dumps(layer | own | config))
    return folder


def test_the_layout_of_specforge(tmp_path):
    model = target().model
    theirs, ours = published_head(specforge(tmp_path), model), published_head(FOLDER / "eagle3", model)
    assert theirs.config.hidden_layers == ours.config.hidden_layers == [1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


def dense(tmp_path, kind, **changes):
    """Saves a DFlash or DSpark head with the flat settings of SpecForge (``dflash_config``) or DeepSpec."""
    layer = json.loads((FOLDER / kind / "config.json").read_text())
    own = {
        name: layer[name]
        for name in ("block_size", "mask_token_id", "markov_rank", "markov_head_type")
        if name in layer
    }
    settings = layer["transformer_layer_config"] | {"target_layer_ids": [0, 1, 2]}
    folder = copied(tmp_path, kind)
    (folder / "config.json").write_text(json.dumps(settings | own | changes))
    return folder


def test_the_layouts_of_specforge_and_deepspec(tmp_path):
    """Both number states by the layer they come out of; in SpecForge's layout, masks alone predict."""
    of, _ = beside("dflash")
    own = {"target_layer_ids": [0, 1, 2], "mask_token_id": 63}
    folder = dense(
        tmp_path / "dflash", "dflash", architectures=["DFlashDraftModel"], dflash_config=own, mask_token_id=None
    )
    theirs, ours = published_head(folder, of.model), published_head(FOLDER / "dflash", of.model)
    assert theirs.config.to_diff_dict() == ours.config.to_diff_dict()
    of, _ = beside("dspark")
    full = copied(tmp_path / "full", "dspark")
    trimmed = dense(tmp_path / "dspark", "dspark", architectures=["Qwen3DSparkModel"], draft_vocab_size=40)
    theirs, ours = published_head(trimmed, of.model), published_head(full, of.model)
    assert theirs.config.to_diff_dict() == ours.config.to_diff_dict()
    assert ours.config.from_anchor
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["DominoDraftModel"]}, "one of Domino; supported are EAGLE-1"),
        ({"architectures": ["EagleSpeculator"]}, "one of EAGLE-1 in speculators"),
        ({"dflash_config": {"shift_label": True}}, "shift_label=True"),
        ({"block_size": 99}, "block_size must be"),
        ({"markov_head_type": "lstm"}, "markov must be vanilla, gated or rnn"),
        ({"draft_vocab_size": 39}, "instead of"),
        ({"tensors": lambda held: held | {"embed_tokens.weight": torch.ones(64, 16)}}, "others than the target's"),
        ({"tensors": lambda held: {n: t for n, t in held.items() if n != "lm_head.weight"}}, "has no output matrix"),
    ],
)  # fmt: skip
def test_unsupported_blocks_are_refused(tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        load_drafter(copied(tmp_path, "dspark", **change), beside("dspark")[0])


@pytest.mark.parametrize("trimmed", [False, True])
def test_medusa_heads_of_vllm(tmp_path, trimmed):
    """Exported heads are read back; in vLLM's layout, trimmed vocabularies have rows for all tokens."""
    of = target()
    of.model.save_pretrained(tmp_path / "target")
    head = MedusaHead.for_target(of.model, range(40) if trimmed else range(VOCAB), num_heads=3)
    torch.nn.init.normal_(head.blocks[0].layers[0].weight)
    head.save_pretrained(tmp_path / "head")
    export_vllm(tmp_path / "head", tmp_path / "out", target=str(tmp_path / "target"))
    read = load_drafter(tmp_path / "out", of)
    assert isinstance(read, ad.MedusaDrafter)
    state = torch.randn(5, HIDDEN)
    for depth in range(3):
        found, known = (part.widen(part.logits(state, depth)) for part in (read.head, head.eval()))
        torch.testing.assert_close(found[:, :40], known[:, :40])


def test_windows_are_refused(tmp_path):
    layer = json.loads((FOLDER / "dspark" / "config.json").read_text())["transformer_layer_config"]
    windows = layer | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    with pytest.raises(ValueError, match="layer_types with sliding_attention"):
        load_drafter(copied(tmp_path, "dspark", transformer_layer_config=windows), beside("dspark")[0])


def test_embeddings_of_the_target_are_not_kept_twice(tmp_path):
    model = target().model

    def shared(held):
        return held | {"embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}

    assert published_head(FOLDER / "eagle3", model).embed_tokens is not None
    assert published_head(copied(tmp_path, tensors=shared), model).embed_tokens is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tensors": lambda held: held | {"more": torch.zeros(1)}}, "left over: more"),
        ({"tensors": lambda held: {n: t for n, t in held.items() if n != "fc.weight"}}, "missing: fc.weight"),
        ({"tensors": lambda held: held | {"norm.weight": torch.ones(9)}}, r"norm.weight is \[9\] instead of \[16\]"),
        ({"tensors": lambda held: {n: t for n, t in held.items() if n != "d2t"}}, "no head .* it lacks d2t"),
        ({"tensors": lambda held: held | {"d2t": held["d2t"] + 90}}, "draft vocabulary is damaged"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"reads hidden states \[9\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "the output of layer 4 before the final norm"),
        ({"transformer_layer_config": {"model_type": "mamba"}}, "layer is of type 'mamba'"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "has no 'hidden_size'"),
        ({"transformer_layer_config": {"model_type": "llama", "hidden_act": "gelu"}}, "hidden_act='gelu'"),
    ],
)  # fmt: skip
def test_unsupported_heads_are_refused(tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        load_drafter(copied(tmp_path, **change), target())


def test_a_setting_with_two_meanings_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one thing to SpecForge and another to vLLM"):
        published_head(specforge(tmp_path, norm_output=True), target().model)


def test_other_targets_are_refused():
    with pytest.raises(ValueError, match="another target: it needs hidden states of size 16, this target has 32"):
        load_drafter(FOLDER / "eagle3", ad.RaggedModel(tiny(vocab_size=VOCAB, num_hidden_layers=4), kernels="torch"))


def test_pickled_weights_are_refused(tmp_path):
    folder = copied(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled"):
        load_drafter(folder, target())


def test_a_name_on_the_hub_loads_a_head(monkeypatch):
    asked = []

    def download(name, allow_patterns, local_files_only=False):
        asked.append((name, len(allow_patterns), local_files_only))
        if name != "somebody/eagle3":
            raise OSError("no such repository")
        return str(FOLDER / "eagle3")

    def no_model(name, target):
        raise ValueError(f"{name} is no model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(ad.LanguageModelDrafter, "from_pretrained", no_model)
    assert isinstance(drafter_named("somebody/eagle3", target()), ad.EagleDrafter)
    assert asked == [("somebody/eagle3", 1, True), ("somebody/eagle3", 3, False)]
    with pytest.raises(ValueError, match="is none of auto"):
        drafter_named("somebody/else", target())


def test_import_saves_a_head_in_our_format(tmp_path):
    of = target()
    of.model.save_pretrained(tmp_path / "model")
    from support.models import LETTERS, tiny_tokenizer

    tiny_tokenizer(LETTERS).save_pretrained(tmp_path / "model")
    out = tmp_path / "model" / "head"
    given = ["import", str(FOLDER / "eagle31-qwen3"), str(out), "--model", str(tmp_path / "model")]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    kept, read = load_drafter(out, of), load_drafter(FOLDER / "eagle31-qwen3", of)
    assert all(torch.equal(a, b) for a, b in zip(kept.head.parameters(), read.head.parameters(), strict=True))
    assert kept.head.config.norm_output
    assert ad.load(tmp_path / "model", kernels="torch", costs=None).drafter.head.config.fc_norm
    assert not is_published(out)


def test_parts_that_support_only_plain_heads_refuse_others():
    head = published_head(FOLDER / "eagle31-qwen3", target().model)
    with pytest.raises(ValueError, match=r"ONNX knows EAGLE-3 heads of one plain layer, .*norm_output=True"):
        plans.eagle(head, None)
    with pytest.raises(ValueError, match="a block head without mask_token_id knows"):
        BlockHead(BlockConfig(norm_output=True))


def test_a_head_for_another_target_names_the_target():
    with pytest.raises(ValueError, match=r"another target: it needs a vocabulary of \d+ tokens, this target has 77"):
        published_head(FOLDER / "eagle3", tiny(vocab_size=77))
    with pytest.raises(ValueError, match=r"another target: it needs hidden states of size \d+, this target has 48"):
        published_head(FOLDER / "eagle3", tiny(vocab_size=target().vocab_size, hidden_size=48))
