"""Packed rows of any architecture have the logits that the model itself gives for each path alone."""

import pytest
import torch
from support.models import ARCHITECTURES, PROMPTS, VOCAB, check_greedy, next_logits, tiny
from torch import nn
from torch.testing import assert_close

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology, UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.masks import SlicedCausalMask, stack_words

REFUSED = ("falcon", "bloom")
SUPPORTED = [name for name in ARCHITECTURES if name not in REFUSED]
TREES = [
    TreeTopology([-1, 0, 0, 1, 1, 2, 3]),
    TreeTopology([-1]),
    TreeTopology([-1, 0, 0, 0, 1, 4, 5, 6, 7]),  # deeper than any sliding window here
]
KEPT = [[0, 1, 4], [0], [0, 1]]  # accepted nodes: a path that ends early, a root alone, a path that moves no row
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


def run_trees(target, cache, samples, tokens, topologies=TREES, shift=0, masks=None):
    """Runs one packed forward with a tree per sample."""
    masks = masks or [SlicedCausalMask(topology) for topology in topologies]
    words = stack_words([mask.words for mask in masks])
    depths = [[depth + shift for depth in topology.depth_list] for topology in topologies]
    packed = torch.tensor([token for sample in tokens for token in sample])
    return target(packed, cache.lay_out(samples, depths, words), cache)


def single_paths(model, prefixes, tokens, topologies=TREES):
    """Returns the logits of every node of every tree, from a separate text for each node."""
    return torch.stack(
        [
            next_logits(model, [*prefix, *(drafted[node] for node in topology.path(end))])
            for prefix, drafted, topology in zip(prefixes, tokens, topologies, strict=True)
            for end in range(topology.num_nodes)
        ]
    )


def random_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (tree.num_nodes,), generator=generator).tolist() for tree in TREES]


def prefilled(target, prompts=PROMPTS, chunk=2048):
    cache = RaggedKVCache()
    samples = [cache.open(len(prompt)) for prompt in prompts]
    target.prefill(dict(zip(samples, prompts, strict=True)), cache, chunk=chunk)
    return cache, samples


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [2048, 4], ids=["whole", "chunked"])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_packed_trees_equal_single_paths(architecture, chunk):
    """After prefill, each step has a different tree per sample and commits part of a path."""
    model = tiny(architecture)
    target = RaggedModel(model, kernels="torch")
    cache, samples = prefilled(target, chunk=chunk)
    prefixes = [list(prompt) for prompt in PROMPTS]
    for seed in range(2):
        tokens = random_tokens(seed)
        packed = run_trees(target, cache, samples, tokens)
        assert_close(packed, single_paths(model, prefixes, tokens), **ROUNDING)
        cache.commit(dict(zip(samples, KEPT, strict=True)))
        prefixes = [
            prefix + [drafted[node] for node in kept]
            for prefix, drafted, kept in zip(prefixes, tokens, KEPT, strict=True)
        ]
    plain = run_trees(target, cache, samples, [[7], [8], [9]], [TreeTopology([-1])] * 3)
    assert_close(plain, single_paths(model, prefixes, [[7], [8], [9]], [TreeTopology([-1])] * 3), **ROUNDING)


@pytest.mark.parametrize("architecture", [name for name in SUPPORTED if name != "mamba"])  # it has no positions
def test_a_wrong_position_or_ancestor_would_be_seen(architecture):
    model = tiny(architecture)
    target = RaggedModel(model, kernels="torch")
    tokens = random_tokens(0)
    expected = single_paths(model, PROMPTS, tokens)
    siblings_see_each_other = [
        SlicedCausalMask(TreeTopology.chain(topology.num_nodes - 1)) if topology.num_nodes > 1 else None
        for topology in TREES
    ]
    siblings_see_each_other[1] = SlicedCausalMask(TREES[1])
    for fault in ({"masks": siblings_see_each_other}, {"shift": 1}, {}):
        cache, samples = prefilled(target)
        error = (run_trees(target, cache, samples, tokens, **fault) - expected).abs().max()
        assert error < 1e-4 if not fault else error > 1e-2


def test_only_the_wanted_rows_get_logits():
    model = tiny()
    target = RaggedModel(model, kernels="torch")
    cache = RaggedKVCache()
    batch = cache.lay_out([cache.open(), cache.open()], [range(3), range(2)])
    logits = target(torch.tensor([5, 6, 7, 8, 9]), batch, cache, rows=torch.tensor([2, 4]))
    assert_close(logits, torch.stack([next_logits(model, [5, 6, 7]), next_logits(model, [8, 9])]), **ROUNDING)


def test_empty_prompts_need_no_prefill():
    target = RaggedModel(tiny(), kernels="torch")
    cache, samples = prefilled(target, [[], [4, 5], []])
    assert [cache.length(sample) for sample in samples] == [0, 2, 0]


@pytest.mark.parametrize("architecture", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_that_cannot_be_packed_is_refused(architecture):
    with pytest.raises(UnsupportedModel, match=r"every layer to be softmax attention.*AttentionInterface"):
        RaggedModel(tiny(architecture), kernels="torch")


def test_attention_with_extras_is_refused():
    """Layers with further arguments are refused: gemma3n shares keys between layers, t5 adds a bias to scores."""
    model = tiny()
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        RaggedModel(model, kernels="torch")


def test_the_self_test_notices_another_model():
    """A layer that mixes neighbouring rows is wrong for trees, and the attention hook cannot detect it."""
    model = tiny()
    mixer = model.model.layers[0].mlp
    forward = mixer.forward
    mixer.forward = lambda rows: forward(rows + 0.5 * nn.functional.pad(rows, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(UnsupportedModel, match="packed logits differ from single ones"):
        RaggedModel(model, kernels="torch")
    RaggedModel(model, self_test=False, kernels="torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma2"])
def test_half_precision_passes_the_self_test(architecture, dtype):
    RaggedModel(tiny(architecture).to(dtype), kernels="torch")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_stays_as_it_was(implementation):
    model = tiny()
    model.set_attn_implementation(implementation)
    prompt = torch.tensor([PROMPTS[0]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    before = model.generate(prompt, **options)
    target = RaggedModel(model, kernels="torch")
    cache = RaggedKVCache()
    sample = cache.open()

    def unchanged():
        assert model.config._attn_implementation == implementation
        assert model.config.num_hidden_layers == 2
        assert torch.equal(model.generate(prompt, **options), before)

    for _, packed, batch in cache.portions({sample: PROMPTS[0]}, 2048):
        target.run(packed, batch, cache, layers=1)
    unchanged()
    with pytest.raises(IndexError):
        target(torch.tensor([VOCAB]), cache.lay_out([sample], [[0]]), cache, layers=1)
    unchanged()


_LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("architecture", "kind", "extra", "limit"),
    [
        ("llama", "default", {}, 128),
        ("llama", "linear", {"factor": 2.0}, 128),
        ("llama", "dynamic", {"factor": 2.0}, 128),
        ("phi3", "longrope", _LONG, 32),
    ],
)
def test_positions_end_before_the_rotation_depends_on_the_batch(architecture, kind, extra, limit):
    rope = {"rope_type": kind, "rope_theta": 1e4, **extra}
    original = {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    assert RaggedModel(tiny(architecture, rope_parameters=rope, **original), kernels="torch").max_positions == limit


def pruned(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


SIZES = {
    "vocabulary 61 -> 70": lambda model: model.resize_token_embeddings(70),
    "layers 2 -> 1": pruned,
    "positions 128 -> 16": lambda model: setattr(model.config, "max_position_embeddings", 16),
}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("change", SIZES)
def test_changed_sizes_after_wrapping_are_named(change, kernels):
    model = tiny()
    decoder = SpeculativeDecoder(RaggedModel(model, kernels=kernels), NGramDrafter())
    check_greedy(decoder, count=4)
    SIZES[change](model)
    with pytest.raises(ValueError, match=rf"sizes changed after it was wrapped \({change}\): build RaggedModel anew"):
        check_greedy(decoder, count=4)
    check_greedy(SpeculativeDecoder(RaggedModel(model, kernels=kernels), NGramDrafter()), count=4)
