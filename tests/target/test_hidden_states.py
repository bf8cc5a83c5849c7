"""Hidden states of packed rows equal those of transformers in every backend, and do not change the logits."""

import pytest
import torch
from support.models import PROMPTS, decode, fusable, tiny
from support.prepacked_models import FUSED, OTHERS, logits, plain
from torch.testing import assert_close

import arbordraft as ad
from arbordraft.target.cache import RaggedKVCache

ALL = (0, 1, 2)


def expected(model, tokens, layers=ALL):
    with torch.no_grad():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt", "gpt_oss"])
def test_hidden_states_are_those_of_transformers(architecture):
    model = tiny(architecture)
    cache = RaggedKVCache()
    samples = [cache.open() for _ in PROMPTS]
    found = plain(model).prefill(dict(zip(samples, PROMPTS, strict=True)), cache, chunk=4, hidden=ALL)
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        assert_close(found[sample], expected(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", [*FUSED, *OTHERS])
def test_native_kernels_return_hidden_states(architecture):
    model = fusable(architecture)
    target, cache = ad.RaggedModel(model, kernels="native"), RaggedKVCache()
    prompt = PROMPTS[2]
    found = target.prefill({cache.open(): prompt}, cache, hidden=ALL)
    (states,) = found.values()
    assert_close(states, expected(model, prompt), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_change_no_bit_of_the_logits(dtype):
    target = ad.RaggedModel(fusable().to(dtype), kernels="native")
    tokens = torch.arange(8) + 20
    found = []
    for hidden in ((), (1,), ALL):
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open()], [range(8)])
        found.append(target.run(tokens, batch, cache, hidden=hidden)[0])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("kernels")
def test_hidden_states_of_transformers_do_not_disable_the_kernels(recwarn):
    """transformers leaves hooks in the model, which have no effect."""
    model = fusable()
    target = ad.RaggedModel(model, kernels="native")
    before = logits(target)
    expected(model, PROMPTS[0])
    assert any(module._forward_hooks for module in model.modules())
    assert torch.equal(logits(target), before)
    assert target.row_invariant
    assert not [warning for warning in recwarn if "changed" in str(warning.message)]
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="changed"):
        logits(target)


def test_unknown_layers_are_refused():
    target, cache = plain(tiny()), RaggedKVCache()
    batch = cache.lay_out([cache.open()], [range(1)])
    with pytest.raises(ValueError, match=r"numbered 0\.\.2"):
        target.run(torch.tensor([1]), batch, cache, hidden=(3,))


def test_a_model_without_accessible_hidden_states_is_refused():
    model = tiny()
    model.model.layers.append(torch.nn.Identity())  # more layers than in the configuration
    target = plain(model)
    cache = RaggedKVCache()
    with pytest.raises(ad.UnsupportedModel, match="hidden states"):
        target.run(torch.tensor([1]), cache.lay_out([cache.open()], [range(1)]), cache, hidden=(1,))


class Watcher(ad.NGramDrafter):
    """Drafts lookups and records the hidden states that it is given."""

    hidden_layers = ALL

    def add(self, state, sample, tokens, handle):
        vars(self).setdefault("seen", {})[sample] = []
        super().add(state, sample, tokens, handle)

    def take_hidden(self, state, hidden):
        for sample, states in hidden.items():
            self.seen[sample].append(states)


class Idle(Watcher):
    """Drafts no tokens."""

    max_levels = 0


@pytest.mark.parametrize("kind", [Watcher, Idle])
@pytest.mark.parametrize("eos", [None, 44])
def test_drafters_get_hidden_states_of_all_committed_tokens_but_the_last(kind, eos):
    """Prompts and paces differ within the batch, and samples may end in the middle of an accepted path."""
    model = tiny()
    drafter = kind(longest=2, shortest=1)
    decoder = ad.SpeculativeDecoder(
        plain(model), drafter, ad.TreeTopology.from_k_config((2, 1, 1)), ad.Coupling.matching(2)
    )
    answers, stats = decode(decoder, max_new_tokens=24, eos_token_id=eos)
    assert eos is None or min(stats.emitted) < 24
    for sample, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        text = prompt + answer
        found = torch.cat(drafter.seen[sample])
        assert len(found) == len(text) - 1
        assert_close(found, expected(model, text)[:-1], rtol=1e-4, atol=1e-4)
