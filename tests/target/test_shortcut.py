"""The shortcut around a model's layers gives the bits of transformers' forward, or is not taken."""

from dataclasses import replace

import pytest
import torch
from support.models import ARCHITECTURES, fusable
from support.prepacked_models import faithful, logits, plain
from transformers import LlamaForCausalLM

from arbordraft import RaggedModel
from arbordraft.target.cache import RaggedKVCache

pytestmark = pytest.mark.usefixtures("kernels")


def long_way(target):
    target._prepared = replace(target._prepared, shortcut=None)
    return target


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "mixtral", "qwen2_moe", "olmo2", "glm4", "phi"])
def test_the_shortcut_gives_the_same_bits(architecture, weights, dtype):
    target = RaggedModel(fusable(architecture).to(dtype), kernels="native", weights=weights)
    assert target._prepared.shortcut is not None
    assert torch.equal(logits(target), logits(long_way(target)))


def test_rows_and_hidden_states_are_those_without_the_shortcut():
    target = RaggedModel(fusable(), kernels="native")

    def asked():
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(5)], [range(5)])
        return target.run(torch.arange(5), batch, cache, torch.tensor([4, 0, 2]), hidden=[0, 2, 1])

    short = asked()
    long_way(target)
    for ours, theirs in zip(short, asked(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("gemma2", {}),
        ("gpt2", {}),
        ("cohere", {}),
        ("granite", {"logits_scaling": 3.0}),
        ("granite", {"embedding_multiplier": 2.0}),
    ],
    ids=str,
)
def test_models_with_further_parts_do_not_take_the_shortcut(monkeypatch, architecture, change):
    """Negative control: the shortcut would omit their operations outside the layers."""
    monkeypatch.setitem(ARCHITECTURES, "granite", ARCHITECTURES["llama"])
    model = fusable(architecture, **change)
    target = faithful(model)
    assert target._prepared.shortcut is None


def test_a_cap_that_small_logits_never_reach_is_seen():
    class Capped(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.clamp(-20, 20)
            return output

    model = fusable()
    assert logits(plain(model)).abs().max() < 20
    model.__class__ = Capped
    assert RaggedModel(model, kernels="native")._prepared.shortcut is None


def test_forward_hooks_are_called():
    target, heard = RaggedModel(fusable(), kernels="native"), []
    target.model.model.register_forward_hook(lambda *_: heard.append("model"))
    with pytest.warns(match="changed after they were prepacked"):
        logits(target)
    assert target._latest().shortcut is None
    assert heard


def test_replaced_forwards_are_called():
    target = RaggedModel(fusable(), kernels="native")
    expected, own = logits(target), target.model.forward

    def doubled(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    target.model.forward = doubled
    target.refresh()
    assert target._prepared.shortcut is None
    assert torch.equal(logits(target), 2 * expected)


def test_early_exits_do_not_take_the_shortcut():
    target = RaggedModel(fusable(), kernels="native")
    early = logits(target, layers=1)
    assert not torch.equal(early, logits(target))
    assert torch.equal(early, logits(long_way(target), layers=1))
