"""Triton models whose rows have the same bits in every batch: ``RaggedModel(row_invariant=True)``."""

import numpy as np
import pytest
import torch
from support.models import PROMPTS, decode, fusable, left_padded, tiny, varied
from support.prepacked_models import ROUNDING, logits, plain
from torch import nn
from torch.testing import assert_close

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.drafters import NoDrafter
from arbordraft.kernels import choice, native
from arbordraft.kernels.ragged_tree_attention import triton as attention
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.equality import Equality
from arbordraft.trees.topology import ancestor_words

KINDS = ["llama", "qwen2", "mistral", "qwen3", "gemma2", "gemma3_text"]
OTHERS = {
    "mixtral": r"mlp\.gate \(MixtralTopKRouter\)",
    "phi3": r"qkv_proj \(Linear\)",
    "olmo2": r"q_proj \(Linear\)",
    "glm4": r"gate_up_proj \(Linear\)",
    "cohere": r"input_layernorm \(CohereLayerNorm\)",
    "gpt2": r"c_attn \(Conv1D\)",
}
OPERATORS = {"linear", "gated_linear", "project_rotate_append", "ragged_tree_attention", "rms_norm", "add_rms_norm"}


def invariant(model, **options):
    return RaggedModel(model, **{"kernels": "triton", "row_invariant": True, "self_test": False} | options)


@pytest.fixture
def ordered(monkeypatch):
    """Sums products input by input, as a GPU does; numpy's order depends on the shapes of both sides."""
    if not choice.interpreted():
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = (part.data.astype(np.float32) for part in (a, b))
        total = np.add.reduce(left.T[:, :, None] * right[:, None, :], axis=0)
        return interpreter.TensorHandle(d.data + total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", KINDS)
def test_references_change_no_bit(architecture, dtype):
    model = varied(architecture).to(dtype)
    target = invariant(model, self_test=True)
    assert target.row_invariant
    assert "all linears" in target.chosen
    with choice.use("reference"):
        assert torch.equal(logits(target), logits(plain(model)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", KINDS)
def test_kernels_only_round_otherwise(architecture):
    model = varied(architecture)
    with choice.use("reference"):
        expected = logits(plain(model))
    target = invariant(model)
    choice.ran.clear()
    with choice.use("triton"):
        assert_close(logits(target), expected, **ROUNDING)
    assert {name.partition("/")[0] for name in choice.ran} >= OPERATORS
    assert {name.partition("/")[2] for name in choice.ran} == {"triton"}
    assert choice.ran["linear/triton"] == (2 * 2 + 1) * choice.ran["project_rotate_append/triton"] / 2


def different_rows(target):
    """Returns the nodes of a path whose bits in a batched tree differ from those of decoding one by one.

    The prompt is then read in other portions.
    """
    tree, path = TreeTopology.from_k_config((2, 1)), [0, 2, 4]
    prompts = [[(7 * place) % 37 + 3 for place in range(count)] for count in (5, 62)]
    tokens = torch.tensor([[9, 12, 30, 31, 11], [4, 35, 23, 8, 17]])
    with choice.use("triton"):
        cache = RaggedKVCache()
        samples = [cache.open(len(prompt)) for prompt in prompts]
        target.prefill(dict(zip(samples, prompts, strict=True)), cache)
        words = ancestor_words(tree.visible).repeat(2, 1)
        together = target(tokens.flatten(), cache.lay_out(samples, [tree.depth_list] * 2, words), cache)[5:]
        alone = RaggedKVCache()
        sample = alone.open(len(prompts[1]))
        target.prefill({sample: prompts[1]}, alone, chunk=16)
        different = []
        for node in path:
            row = target(tokens[1, node : node + 1], alone.lay_out([sample], [[0]]), alone)[0]
            alone.commit({sample: [0]})
            different += [node] * (not torch.equal(row, together[node]))
    return different


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3_text", marks=pytest.mark.soak)])
def test_rows_have_the_same_bits_in_every_batch(ordered, architecture):
    target = invariant(varied(architecture).to(torch.float16))
    assert different_rows(target) == []


def test_other_attention_would_be_seen(ordered, monkeypatch):
    """Negative control: tiles of keys begin where a tree begins."""

    def elsewhere(query, keys, values, layout, region, positions, words, scale, window, softcap, sinks, *_):
        most, longest = int((layout[0, 1:] - layout[0, :-1]).max()), int(layout[2].max())
        batch = query, keys, values, layout, region, positions, words
        return attention.launch(*batch, scale, window, softcap, sinks, most, longest, False, None)

    monkeypatch.setattr(attention, "launch_rows", elsewhere)
    assert different_rows(invariant(varied("llama").to(torch.float16)))


def test_a_decoder_reports_pathwise_equality():
    decoder = SpeculativeDecoder(invariant(varied("llama")), NGramDrafter(), TreeTopology.chain(2))
    with choice.use("reference"):  # fast, with the bits of torch; the report must notice rows that differ
        report = decoder.equality_report()
    assert report.equality is (Equality.pathwise if report.equal == report.rows else Equality.tokens)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("buckets", [None, (8,)], ids=["ordinary", "recorded"])
@pytest.mark.parametrize("sampled", [False, True])
def test_texts_are_those_of_plain_decoding(ordered, sampled, buckets):
    target = invariant(varied("llama").to(torch.float16))
    request = {"do_sample": sampled, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    request |= {"temperature": 1.0, "top_k": 0, "seeds": [5, 6]} if sampled else {}
    with choice.use("triton"):
        tokens = [
            SpeculativeDecoder(target, drafter, tree, buckets=how)
            .generate(**left_padded(PROMPTS[:2]), **request)
            .tolist()
            for drafter, tree, how in (
                (NoDrafter(), TreeTopology.chain(0), None),
                (NGramDrafter(longest=2, shortest=1), TreeTopology.chain(2), buckets),
            )
        ]
    assert tokens[0] == tokens[1]


def test_new_weights_are_read():
    model = varied("llama")
    target = invariant(model)
    before = logits(target)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    model.lm_head.weight = nn.Parameter(2 * model.lm_head.weight.detach())
    assert torch.equal(logits(target), logits(plain(model)))
    assert not torch.equal(logits(target), before)


# Models that cannot be row-invariant are refused


@pytest.mark.parametrize("architecture", OTHERS)
def test_modules_without_kernels_are_named(architecture):
    with pytest.raises(UnsupportedModel, match=rf"row_invariant=True .*{OTHERS[architecture]}"):
        invariant(varied(architecture))


def test_a_forward_hook_on_a_row_invariant_model_is_refused():
    model = varied("llama")
    target = invariant(model)
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp"):
        logits(target)


def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(varied("llama"), peft.LoraConfig(target_modules=["q_proj"])).eval()
    with pytest.raises(UnsupportedModel, match="q_proj"):
        invariant(model)


def test_row_invariance_needs_native_or_triton_kernels():
    with pytest.raises(ValueError, match=r"row_invariant=True needs kernels='native' .* asked for"):
        invariant(fusable(), kernels="torch")
    if native.problem() is None:
        assert invariant(fusable(), kernels="native").row_invariant
        with pytest.raises(UnsupportedModel, match="row_invariant=True needs native kernels for all of Llama"):
            invariant(tiny(), kernels="native")  # its heads are too small


def test_other_gpus_are_refused(monkeypatch):
    """On AMD GPUs, the instruction that multiplies depends on the tile."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="row-invariant on NVIDIA's GPUs only"):
        invariant(varied("llama"))


def test_recorded_steps_attend_row_by_row():
    target = invariant(varied("llama"))
    decoder = SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(2), buckets=(8,))
    seen = []
    launch = attention.launch_rows
    with pytest.MonkeyPatch.context() as patch, choice.use("triton"):
        patch.setattr(attention, "launch_rows", lambda *given: seen.append(len(given[0])) or launch(*given))
        decode(decoder, PROMPTS[:1], max_new_tokens=3)
    assert 8 in seen
