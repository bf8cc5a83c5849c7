"""Target rows and hidden states that drafters learn from, computed afresh or read from files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models
from support.models import ARCHITECTURES, VOCAB, ragged, tiny

from arbordraft import RaggedModel
from arbordraft.training.features import CachedFeatures, FreshFeatures, TeacherHead
from arbordraft.training.shards import ANSWER, Conversation, Shard, ShardError, ShardFolder, pack, write_shard

TEXTS = [[5, 9, 7, 5, 9], [11, 3], [8, 3, 8, 3, 8, 20, 21, 22, 8, 3, 30]]
LAYERS = (0, 1)
SCALED = {**ARCHITECTURES["llama"], "attention_multiplier": 0.35}
DOING_MORE = {"cohere": {**ARCHITECTURES["llama"], "logit_scale": 0.0625}, "granite": {**SCALED, "logits_scaling": 8.0}}


def rows(target: RaggedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's own logits and the output of its final norm."""
    with torch.no_grad():
        output = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return output.logits[0], output.hidden_states[-1][0]


# -- the head


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt2", "opt", "phi3", "qwen3"])
def test_the_head_alone_makes_the_targets_rows(architecture):
    target = ragged(architecture, sharpness=30.0)  # sharp logits, which a cap changes a lot
    head = TeacherHead(target)
    logits, final = rows(target, TEXTS[2])
    torch.testing.assert_close(head(final), logits, rtol=1e-4, atol=1e-3)
    some = torch.tensor([4, 60, 0])
    torch.testing.assert_close(head.part(some)(final), logits[:, some], rtol=1e-4, atol=1e-3)
    assert head.part(None)(final).shape == logits.shape
    torch.testing.assert_close(head.normalisers(final), logits.logsumexp(dim=-1), rtol=1e-4, atol=1e-3)
    assert not [*head.parameters()]
    assert not head.state_dict()


def test_the_bias_of_the_head_is_used():
    model = tiny("phi3")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)))
    target = RaggedModel(model, self_test=False, kernels="torch")
    logits, final = rows(target, TEXTS[0])
    head, some = TeacherHead(target), torch.tensor([4, 60, 0])
    torch.testing.assert_close(head(final), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.part(some)(final), logits[:, some], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.normalisers(final), logits.logsumexp(dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_part_of_a_row_has_the_probabilities_of_the_whole(autocast):
    """Autocast must not change the dtype of the head's products; otherwise a part would not fit its normaliser."""
    target = ragged(sharpness=3.0)
    _, final = rows(target, TEXTS[2])
    head = TeacherHead(target)
    parts = [head.part(torch.arange(half, VOCAB, 2)) for half in (0, 1)]
    normalisers = head.normalisers(final)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mass = [(part(final) - normalisers[:, None]).exp().sum(dim=-1) for part in parts]
    assert normalisers.dtype == torch.float32
    torch.testing.assert_close(mass[0] + mass[1], torch.ones(len(final)), rtol=0, atol=1e-5)
    assert 0.5 < mass[0].min() < 0.9, "half of the tokens must hold much of the mass, but not all"


def test_normalisers_take_at_most_64_rows_of_logits_at_once(monkeypatch):
    target, seen = ragged(), []
    head = TeacherHead(target)
    final, forward = torch.randn(200, head.weight.shape[1]), TeacherHead.forward
    monkeypatch.setattr(TeacherHead, "forward", lambda self, part: seen.append(len(part)) or forward(self, part))
    torch.testing.assert_close(head.normalisers(final), forward(head, final).logsumexp(dim=-1))
    assert max(seen) <= 64


def test_logits_differ_without_the_cap():
    target = ragged("gemma2", sharpness=30.0)
    head = TeacherHead(target)
    logits, final = rows(target, TEXTS[2])
    assert head.softcap == 30.0
    head.softcap = None
    assert (head(final) - logits).abs().max() > 10


@pytest.mark.parametrize("architecture", DOING_MORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_scales_its_logits_is_refused(monkeypatch, architecture, dtype):
    monkeypatch.setitem(models.ARCHITECTURES, architecture, DOING_MORE[architecture])
    target = RaggedModel(tiny(architecture).to(dtype), self_test=dtype == torch.float32, kernels="torch")
    with pytest.raises(ValueError, match="does something unknown to its logits"):
        TeacherHead(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unknown_cap_is_refused(dtype):
    target = RaggedModel(tiny(sharpness=6.0).to(dtype), self_test=False, kernels="torch")  # a cap changes logits by 5 %
    TeacherHead(target)
    target.model.lm_head.register_forward_hook(lambda _, __, logits: torch.tanh(logits / 30) * 30)
    with pytest.raises(ValueError, match="does something unknown to its logits"):
        TeacherHead(target)


# -- hidden states


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "opt"])
def test_fresh_features_are_the_models_own_hidden_states(architecture):
    target = ragged(architecture)
    for tokens, found in zip(TEXTS, FreshFeatures(target, (1, 0))(TEXTS), strict=True):
        with torch.no_grad():
            output = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        states = [states[0, :-1] for states in output.hidden_states]
        torch.testing.assert_close(found.inputs, torch.cat([states[1], states[0]], dim=-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.final, states[-1], rtol=1e-4, atol=1e-5)


def test_a_missing_layer_is_an_error():
    with pytest.raises(ValueError, match=r"numbered 0..2, got \(3, 2\)"):
        FreshFeatures(ragged(), (3,))(TEXTS)


@pytest.fixture
def fresh() -> FreshFeatures:
    return FreshFeatures(ragged(), LAYERS)


@pytest.fixture
def cached(tmp_path) -> CachedFeatures:
    folder = ShardFolder(tmp_path)
    folder.claim({})
    return CachedFeatures(folder, LAYERS)


@pytest.fixture
def shard(cached) -> Shard:
    shard = pack([Conversation(text, [ANSWER] * len(text), 0.0) for text in TEXTS], cached.folder.path(0))
    write_shard(shard)
    return shard


def test_cached_features_are_read_as_they_were_written(cached, shard, fresh):
    assert not cached.complete(shard)
    features = fresh(TEXTS)
    cached.write(shard, features)
    assert cached.complete(shard)
    for sequences in ([0, 1, 2], [2, 0], [1]):
        for sequence, found in zip(sequences, cached.read(shard, sequences), strict=True):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, features[sequence], strict=True))
    cached.check(shard, [2, 0, 1], fresh)
    (path,) = cached.folder.folder.glob("hidden-*")
    size = sum(tensor.nbytes for tensor in load_file(path).values())
    assert size == cached.bytes_per_token(fresh.target) * len(shard.tokens)


def spoil(cached, shard, change, **metadata: str) -> None:
    path = cached.folder.hidden_path(shard)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"digest": shard.digest, "layers": "0,1", **metadata})


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda tensors: tensors["final"][1].mul_(1.01), "final of sequence 0"),
        (lambda tensors: tensors["inputs"][5].zero_(), "inputs of sequence 1"),
        (lambda tensors: tensors["inputs"].copy_(tensors["inputs"].roll(1, dims=0)), "inputs of sequence 0"),
        (lambda tensors: tensors["final"][-2, 3].fill_(float("nan")), "final of sequence 2"),
        (lambda tensors: tensors["normalisers"][0].add_(0.1), "normalisers of sequence 0"),
    ],
)
def test_features_that_were_changed_are_found(cached, shard, fresh, change, place):
    cached.write(shard, fresh(TEXTS))
    spoil(cached, shard, lambda tensors: None)
    cached.check(shard, [0, 1, 2], fresh)
    spoil(cached, shard, change)
    with pytest.raises(ShardError, match=f"{place} differ from a fresh forward .*delete the file to compute it again"):
        cached.check(shard, [0, 1, 2], fresh)


@pytest.mark.parametrize("cached_in", [torch.bfloat16, torch.float32], ids=str)
def test_a_cache_in_another_type_serves_the_same_target(cached, shard, fresh, cached_in):
    """The default type differs between machines, and data may move from one to another."""
    half = FreshFeatures(RaggedModel(tiny().to(torch.bfloat16), self_test=False, kernels="torch"), LAYERS)
    writer, reader = (half, fresh) if cached_in == torch.bfloat16 else (fresh, half)
    cached.write(shard, writer(TEXTS))
    assert cached.read(shard, [0])[0].final.dtype == cached_in
    cached.check(shard, [0, 1, 2], reader)
    spoil(cached, shard, lambda tensors: tensors["final"][1].mul_(1.3))
    with pytest.raises(ShardError, match="final of sequence 0 differ"):
        cached.check(shard, [0], reader)


def test_features_of_other_sequences_are_not_written(cached, shard, fresh):
    for texts in (TEXTS[:2], [TEXTS[1], TEXTS[0], TEXTS[2]], []):
        with pytest.raises(ShardError, match="do not fit the sequences of"):
            cached.write(shard, fresh(texts))
    assert not cached.complete(shard)


@pytest.mark.parametrize(
    ("change", "metadata", "problem"),
    [
        (lambda tensors: None, {"digest": "of other text"}, "hidden states of other text;"),
        (lambda tensors: None, {"layers": "0,2"}, r"hidden states \(0, 2\), the drafter reads \(0, 1\);"),
        (lambda tensors: tensors.update(inputs=tensors["inputs"][:-1].clone()), {}, "hidden states of other text;"),
    ],
)
def test_files_of_other_text_or_layers_are_errors(cached, shard, fresh, change, metadata, problem):
    cached.write(shard, fresh(TEXTS))
    spoil(cached, shard, change, **metadata)
    with pytest.raises(ShardError, match=f"{problem} delete it to compute it again"):
        cached.complete(shard)


@pytest.mark.parametrize("layers", [(), (1,), (1, 0)])
def test_drafters_of_other_layers_read_the_same_files(cached, shard, fresh, layers):
    cached.write(shard, fresh(TEXTS))
    other = CachedFeatures(cached.folder, layers)
    assert other.complete(shard)
    other.check(shard, [0, 2], FreshFeatures(fresh.target, layers))


@pytest.mark.parametrize("size", [0, 50, -1])
def test_files_that_were_cut_off_are_errors(cached, shard, fresh, size):
    cached.write(shard, fresh(TEXTS))
    path = cached.folder.hidden_path(shard)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardError, match=r"hidden-00000.safetensors cannot be read .*delete it to compute it again"):
        cached.complete(shard)
