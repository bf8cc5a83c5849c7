"""Architectures that the native kernels fuse, and how tests run their models."""

import torch
from torch import nn
from torch.testing import assert_close

import arbordraft as ad
from arbordraft import builders
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.masks import stack_words
from arbordraft.trees.topology import ancestor_words
from support.models import PROMPTS, VOCAB, decode

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
FUSED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gemma3", "phi3", *MIXTURES]
FUSED += ["gpt2", "olmo2", "glm4", "cohere", "cohere2", "starcoder2", "phi"]
OTHERS = ["opt", "gpt_neox", "gpt_oss", "deepseek_v3"]
TREES = [ad.TreeTopology([-1, 0, 0, 1, 1, 2, 3]), ad.TreeTopology([-1]), ad.TreeTopology([-1, 0, 0, 0, 1, 4, 5, 6, 7])]
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


def logits(target, layers=None, tokens=None):
    """Returns logits of the trees of three samples, after ragged prompts."""
    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        tokens = torch.randint(3, VOCAB, (sum(tree.num_nodes for tree in TREES),), generator=generator)
    cache = RaggedKVCache()
    samples = [cache.open(len(prompt)) for prompt in PROMPTS]
    for _, packed, batch in cache.portions(dict(zip(samples, PROMPTS, strict=True)), 2048):
        target.run(packed, batch, cache, layers=layers)
    words = stack_words([ancestor_words(tree.visible) for tree in TREES])
    return target(tokens, cache.lay_out(samples, [tree.depth_list for tree in TREES], words), cache, layers=layers)


def plain(model):
    return ad.RaggedModel(model, self_test=False, kernels="torch")


def faithful(model, *, fused=None, row_invariant=None, **options):
    """Wraps a model for the native kernels and checks that it computes as its own modules do.

    Args:
        fused: expected number of layers that the kernels take over; by default any.
        row_invariant: expected ``row_invariant``; by default any.
        options: options of RaggedModel.
    """
    target = ad.RaggedModel(model, **{"kernels": "native", **options})
    assert fused is None or target.prepacking.fused == fused
    assert row_invariant is None or target.row_invariant == row_invariant
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
    return target


def prepacked_modules(target):
    return [prepacked_module for _, _, prepacked_module in target.prepacking.places]


def decoders(target):
    lookup = ad.Coupling.matching(2)
    drawn = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    return {
        "plain": builders.plain(target),
        "chain": builders.ems_sd(target, length=4),
        "lookup tree": ad.SpeculativeDecoder(target, ad.NGramDrafter(), ad.TreeTopology.k_ary(2, 3), lookup),
        "early exit": ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 1), ad.TreeTopology.k_ary(2, 3), drawn),
    }


def disagreements(target):
    """Yields decoders and batches whose greedy output differs from plain decoding of single prompts."""
    expected = [decode(builders.plain(target), [prompt], max_new_tokens=50)[0][0] for prompt in PROMPTS]
    for name, decoder in decoders(target).items():
        for batch in ([0, 1, 2], [0], [2], [2, 0]):
            found, _ = decode(decoder, [PROMPTS[index] for index in batch], max_new_tokens=50)
            if found != [expected[index] for index in batch]:
                yield name, batch


class Lora(nn.Module):
    """A low-rank addition to a linear, as adapters wrap it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
