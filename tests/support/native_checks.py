"""Checks for every build of the native kernels. Run as a script, checks the build that ARBORDRAFT_ISA asks for."""

import hashlib
import itertools
import random
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import native
from arbordraft.kernels.decoder_layers import (
    Experts,
    LayerRun,
    LayerWeights,
    Matrix,
    Norm,
    Recurrence,
    apply_norm,
    decoder_layers_reference,
)
from arbordraft.kernels.decoder_layers.reference import apply_norm_reference
from arbordraft.kernels.prepacked_linear import (
    ACTIVATIONS,
    BLOCKS,
    QUANTIZED,
    interleave,
    pack,
    pack_blocks,
    prepack,
    prepacked_linear,
    quantize,
    quantize_groups,
)
from arbordraft.kernels.prepacked_linear.groups import quantize_rows
from arbordraft.kernels.prepacked_linear.reference import prepacked_linear_reference
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention, ragged_tree_attention_reference
from arbordraft.kernels.verify import row_max, row_max_reference
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.prepacked_modules import memory_of
from arbordraft.trees.masks import stack_words
from arbordraft.trees.topology import ancestor_words
from support.blocks import fitting, ordinary_blocks
from support.gumbel_checks import DRAWS, check_draws, check_noise
from support.ragged_case import Case
from support.recurrent_checks import check_recurrent

# Type of the inputs, and format of the weights: the kinds of blocks, and all of these mixed.
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8-weight-only-float32": (torch.float32, "int8-weight-only"),
    "int8-weight-only-bfloat16": (torch.bfloat16, "int8-weight-only"),
    "int8-float32": (torch.float32, "int8"),
    "int8-bfloat16": (torch.bfloat16, "int8"),
    "int4-float32": (torch.float32, "int4"),
    "int4-bfloat16": (torch.bfloat16, "int4"),
    "Q4_0-float32": (torch.float32, "Q4_0"),
    "Q4_1-bfloat16": (torch.bfloat16, "Q4_1"),
    "Q5_0-bfloat16": (torch.bfloat16, "Q5_0"),
    "Q5_1-float32": (torch.float32, "Q5_1"),
    "IQ4_NL-float32": (torch.float32, "IQ4_NL"),
    "MXFP4-bfloat16": (torch.bfloat16, "MXFP4"),
    "Q4_K-float32": (torch.float32, "Q4_K"),
    "Q4_K-bfloat16": (torch.bfloat16, "Q4_K"),
    "Q5_K-bfloat16": (torch.bfloat16, "Q5_K"),
    "Q6_K-float32": (torch.float32, "Q6_K"),
    "IQ4_XS-bfloat16": (torch.bfloat16, "IQ4_XS"),
    "F32-float32": (torch.float32, "F32"),
    "F16-float32": (torch.float32, "F16"),
    "BF16-bfloat16": (torch.bfloat16, "BF16"),
    "mixed-float32": (torch.float32, "mixed"),
    "mixed-bfloat16": (torch.bfloat16, "mixed"),
}
GROUPED = [kind for kind, (_, weights) in KINDS.items() if weights not in (None, "int8-weight-only")]
UNROUNDED = [kind for kind, (_, weights) in KINDS.items() if weights in BLOCKS and BLOCKS[weights].dtype is not None]
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # relative error of rounding once

TREES = {
    "trees": [(6, TreeTopology.chain(3)), (0, TreeTopology.k_ary(2, 2)), (1, TreeTopology.fork(3, 2))],
    "single rows": [(0, TreeTopology.chain(0)), (9, TreeTopology.chain(0)), (128, TreeTopology.chain(0))],
    "several words": [(7, TreeTopology.k_ary(3, 4)), (2, TreeTopology.chain(1))],
    "several chunks": [(300, TreeTopology.k_ary(2, 2)), (126, TreeTopology.chain(4)), (127, TreeTopology.chain(0))],
}
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "wide window": {"window": 140},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": torch.linspace(-2, 2, 4)},
    "all": {"window": 3, "softcap": 1.5, "sinks": torch.linspace(2, -2, 4)},
}


def turn_kernels_off(monkeypatch):
    """Turns the kernels off as if they had never been loaded."""
    monkeypatch.setenv("ARBORDRAFT_ISA", "off")
    monkeypatch.setattr(native._kernels, "_ready", False)
    assert not native.load()


def blocks_in(weight, weights):
    """Returns rows of blocks in place of a matrix, and the kind of each 16 of them.

    Own kinds round the matrix; a file's kinds have random blocks in its place.
    """
    outputs, inputs = weight.shape
    if weights in ("int8", "int4"):
        bits = int(weights[3:])
        return [(quantize_groups(weight, bits), QUANTIZED[bits])]
    generator = torch.Generator().manual_seed(outputs + inputs)
    kinds = [*BLOCKS] if weights == "mixed" else [weights]
    parts = []
    for number, rows in enumerate(range(0, outputs, 16)):
        kind = fitting(kinds[(5 * number + inputs) % len(kinds)], inputs)
        parts.append((ordinary_blocks(kind, min(16, outputs - rows), inputs, generator), kind))
    return parts


def packed(weight, weights):
    """Packs a matrix as the kernels read it."""
    if weights in (None, "int8-weight-only"):
        return pack(weight, weights)
    return pack_blocks(*zip(*blocks_in(weight, weights), strict=True)), None


def parts_of(raw, kind):
    """Returns the two addends of blocks' weights in float64, ``[O, I]``: multiples of scales, and minima."""
    known = BLOCKS[kind]
    row, blocks = known.split(raw)
    codes, fields = known.parse(blocks)
    dense = known.numbers(codes, fields, row).double()
    minimum = None if known.scales is None else known.scales(fields, row)[1]
    if minimum is None:
        return dense, torch.zeros_like(dense)
    wide = minimum.double().repeat_interleave(dense.shape[1] // minimum.shape[1], dim=1)
    return dense - wide, wide


def linear_case(kind, outputs, inputs, rows=5, bias=True, activation=None, seed=0):
    """Returns arguments and options of a prepacked linear, its value in float64 and a bound on the kernel's error.

    Every product and every sum is exact or rounded once; the result is rounded to its type. With weights in groups,
    products of bytes are exact, and only some products and sums per group of inputs are rounded. Floats among these
    multiply rows that are not rounded to 8 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype, weights = KINDS[kind]
    if weights in BLOCKS or weights == "mixed":  # files have whole blocks
        inputs += -inputs % (256 if weights == "mixed" else BLOCKS[weights].weights)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    wide_bias = torch.randn(outputs, generator=generator) if bias else None
    prepacked, scale = packed(weight, weights)
    if kind in GROUPED:
        codes, steps = quantize_rows(x)
        rounded = (codes * steps.double()[..., None]).flatten(1)
        products = []
        for raw, name in blocks_in(weight, weights):
            multiples, minima = parts_of(raw, name)
            kept = F.pad(x, (0, multiples.shape[1] - inputs)).double() if BLOCKS[name].dtype is not None else rounded
            products.append((kept @ (multiples + minima).T, kept.abs() @ (multiples.abs() + 3 * minima.abs()).T))
        exact, size = (torch.cat(part, dim=1) for part in zip(*products, strict=True))
    else:
        eight = quantize(weight) if weights else None
        dense = weight.double() if eight is None else eight[0].double() * eight[1].double()[:, None]
        exact, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    exact = exact + (0 if wide_bias is None else wide_bias.double())
    error = 2.0**-23 * (inputs + 4) * (size + 1)
    options = {"outputs": outputs, "activation": activation}
    if activation is not None:
        gate, up = (half.flatten(1) for half in exact.unflatten(1, (-1, 2, 16)).unbind(2))
        gate_error, up_error = (half.flatten(1) for half in error.unflatten(1, (-1, 2, 16)).unbind(2))
        exact = ACTIVATIONS[activation](gate) * up
        # No activation here is steeper than 1.2; exp is good to 2 units, gelu suffers from cancellation below -4.
        error = 1.2 * gate_error * up.abs() + gate.abs() * up_error + 2.0**-20 * (1 + gate.abs()) * up.abs()
    error = error + HALF_STEP[dtype] * (exact.abs() + error)
    return (x, prepacked, scale, wide_bias), options, exact, error


def check_linear(*args, **kwargs):
    arguments, options, exact, error = linear_case(*args, **kwargs)
    found = prepacked_linear(*arguments, **options)
    assert found.dtype == arguments[0].dtype
    assert found.shape == exact.shape
    excess = (found.double() - exact).abs() - error
    assert (excess <= 0).all(), f"{excess.max()} above the bound for {args} {kwargs}"
    # The reference rounds as often and keeps the same bound, so that other tests may compare with it.
    reference = prepacked_linear_reference(*arguments, options["outputs"], options["activation"])
    assert ((reference.double() - exact).abs() <= error).all()


def attention_error(case, exact, dtype, **options):
    """Returns the kernel's error bound: scores and sums are float32, weights and results have the values' type."""
    magnitude = ragged_tree_attention_reference(
        case.query.double(), case.keys.double(), case.values.double().abs(), case.batch, scale=0.3, **options
    )
    scores = case.query.double().abs().amax() * case.keys.double().abs().nan_to_num().amax() * case.query.shape[2]
    return 2 * HALF_STEP[dtype] * (magnitude + exact.abs()) + 2.0**-22 * (scores + 16) * magnitude


def check_attention(case, **options):
    dtype = case.query.dtype
    found = case.run(ragged_tree_attention, use_native=True, **options)
    exact = case.naive(**options)
    assert found.dtype == dtype
    excess = (found.double() - exact).abs() - attention_error(case, exact, dtype, **options)
    assert (excess <= 0).all(), f"{excess.max()} above the bound, or not a number"


def layers_of(kind):
    """Returns simple blocks side by side, a layer with all options, and one with the alternatives of these options."""
    parts = *SIDE_BY_SIDE, PARTS["all"], PARTS["other"]
    return [random_layer(*KINDS[kind], seed, **part) for seed, part in enumerate(parts)]


def mixtures_of(kind):
    """Returns layers with experts; in the first two layers, every row takes all experts."""
    return [random_layer(*KINDS[kind], seed, **PARTS[part]) for seed, part in enumerate((*ALL, *CHOICES))]


def check_mixtures(kind):
    """Checks layers with experts.

    If rounding may decide which experts a row takes, no bound holds. Then only layers that take all are checked, alone.
    """
    dtype = KINDS[kind][0]
    exact = dtype == torch.float32 and kind not in GROUPED
    layers = mixtures_of(kind)
    for some in [layers] if exact else [[layer] for layer in layers[: len(ALL)]]:
        check_layers(some, dtype)


def random_layer(dtype=torch.float32, weights=None, seed=0, **options):
    """Returns a decoder layer in which every part affects the output; options switch parts on and off."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"hidden": 64, "heads": 4, "kv_heads": 2, "dim": 16, "inner": 96}
    parts = {"norms": "pre", "head_norms": "", "bias": False, "sinks": False, "activation": "silu"}
    parts |= {"centred": False, "gated": True, "experts": {}, "mixer": None, "closing": False, "residual": 1.0}
    parts |= {"factors": False}
    rest = {"window": None, "rotary": True, "softcap": None, "epsilon": 1e-5, "scale": 0.3, "parallel": False}
    if weights in BLOCKS or weights == "mixed":
        shape |= {"hidden": 256, "dim": 64, "inner": 256}
    chosen = {**shape, **parts, **rest, "beside": 0, **options}
    assert chosen.keys() == {*shape, *parts, *rest, "beside"}
    hidden, heads, kv_heads, dim, inner = (chosen[name] for name in shape)

    def noise(*sizes):
        return torch.randn(*sizes, generator=generator)

    mixer = random_recurrence(chosen["mixer"], noise) if chosen["mixer"] else None
    mixes = mixer is not None or heads > 0

    def norm(size, wanted):
        offset = 0.3 * noise(size) if chosen["centred"] else None
        return Norm(1 + 0.3 * noise(size), offset) if wanted else None

    def head_norm(number):
        return norm(number * dim if chosen["head_norms"] == "together" else dim, chosen["head_norms"])

    def matrix(outputs, inputs, gated=False, there=True):
        if not there:
            return None
        dense = (noise(outputs, inputs) * inputs**-0.5).to(dtype)
        if gated:
            dense = interleave(*dense.chunk(2))
        weight, scale = packed(dense, weights)
        if chosen["factors"]:
            scale = (1 if scale is None else scale) * (1 + 0.3 * noise(outputs))
        return Matrix(weight, scale, 0.3 * noise(outputs) if chosen["bias"] else None)

    pre, post = "pre" in chosen["norms"], "post" in chosen["norms"]
    experts, mlps = None, 1
    if choice := dict(chosen["experts"]):
        router = torch.float32 if choice.pop("exact", False) else dtype
        scores = noise(choice["routed"] + choice.get("gated", False), hidden) * hidden**-0.5
        corrections = 0.3 * noise(choice["routed"]) if choice.get("sigmoid") else None
        experts = Experts(Matrix(prepack(scores.to(router))), **choice, corrections=corrections)
        mlps = experts.routed + experts.shared
    return LayerWeights(
        pre_attention=norm(hidden, pre and mixes and not chosen["parallel"]),
        qkv=matrix(
            mixer[1] if mixer else (heads * (1 + chosen["closing"]) + 2 * kv_heads) * dim,
            chosen["beside"] + hidden,
            there=mixes,
        ),
        query_norm=head_norm(heads),
        key_norm=head_norm(kv_heads),
        sinks=noise(heads) if chosen["sinks"] else None,
        out=matrix(hidden, mixer[0].outputs if mixer else heads * dim, there=mixes),
        post_attention=norm(hidden, post and mixes),
        pre_mlp=norm(hidden, pre and inner and (mixes or not chosen["parallel"])),
        gate_up=matrix(mlps * (1 + chosen["gated"]) * inner, hidden, chosen["gated"], there=inner > 0),
        down=matrix(mlps * hidden, inner, there=inner > 0),
        post_mlp=norm(hidden, post and inner),
        beside_norm=norm(chosen["beside"], chosen["beside"] > 0),
        experts=experts,
        closing=chosen["closing"],
        residual=chosen["residual"],
        recurrence=mixer[0] if mixer else None,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        inner=inner,
        **{name: chosen[name] for name in ("activation", *rest)},
    )


def random_recurrence(kind, noise):
    """Returns a mixer for 64 hidden channels, and the outputs of the projection before it."""
    kind, _, without = kind.partition(" without ")
    sizes = {
        "convolution": {},
        "selective": {"heads": 6, "key_heads": 2, "keys": 24, "values": 16, "group": 16 if without else 48},
        "delta": {"heads": 4, "key_heads": 2, "keys": 16, "values": 32, "group": 32},
    }[kind]
    if not sizes:
        return Recurrence(kind, 0.4 * noise(4, 64)), 3 * 64
    heads, channels = sizes["heads"], sizes["heads"] * sizes["values"] + 2 * sizes["key_heads"] * sizes["keys"]
    delta = kind == "delta"
    mixer = Recurrence(
        kind,
        0.4 * noise(4, channels),
        None if delta else 0.3 * noise(channels),
        **sizes,
        rates=-noise(heads).exp(),
        step_bias=noise(heads),
        skip=None if delta else noise(heads),
        norm=None if without else 1 + 0.3 * noise(sizes["values"] if delta else heads * sizes["values"]),
        epsilon=1e-5,
        steps=(0.0, float("inf")) if delta else (0.1, 1.5),
        strongest=2.0 if delta else 1.0,
    )
    return mixer, mixer.outputs + channels + heads * (1 + delta)


BESIDE = 48  # channels beside the hidden states, if a layer has any
PARTS = {
    "base": {},
    "head norms": {"head_norms": "each"},
    "norms over all heads": {"head_norms": "together"},
    "layer norms": {"centred": True, "head_norms": "each", "norms": "pre post"},
    "no gates": {"gated": False, "bias": True},
    "biases": {"bias": True},
    "sinks": {"sinks": True},
    "norms after": {"norms": "post"},
    "norms on both sides": {"norms": "pre post"},
    "no norms": {"norms": ""},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "no rotation": {"rotary": False},
    "one key head": {"kv_heads": 1},
    "wide heads": {"heads": 3, "kv_heads": 3, "dim": 48},
    "gates after": {"closing": True},
    "weaker residual": {"residual": 0.3},
    "factors": {"factors": True},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "relu2": {"activation": "relu2", "gated": False},
    "no MLP": {"inner": 0},
    "beside": {"beside": BESIDE},
    "experts": {"experts": {"routed": 5, "chosen": 2}, "inner": 48},
    "shared experts": {
        "experts": {"routed": 4, "chosen": 2, "shared": 2, "normalised": False, "gated": True},
        "inner": 16,
        "norms": "pre post",
        "bias": True,
    },
    "sigmoids": {"experts": {"routed": 5, "chosen": 2, "sigmoid": True, "factor": 2.5}, "inner": 32, "residual": 0.3},
    "plain sigmoids": {
        "experts": {"routed": 5, "chosen": 2, "shared": 1, "sigmoid": True, "normalised": False},
        "inner": 32,
        "norms": "pre post",
        "residual": 0.3,
    },
    "plain experts": {
        "experts": {"routed": 5, "chosen": 2, "shared": 1, "sigmoid": True, "factor": 2.5},
        "activation": "relu2",
        "gated": False,
        "inner": 32,
    },
    "experts for all": {"experts": {"routed": 3, "chosen": 3, "shared": 1}, "inner": 32},
    "plain experts for all": {
        "experts": {"routed": 3, "chosen": 3, "shared": 1, "exact": True},
        "activation": "relu2",
        "gated": False,
        "inner": 32,
    },
    "all": {
        "beside": BESIDE,
        "head_norms": "each",
        "bias": True,
        "sinks": True,
        "norms": "pre post",
        "window": 4,
        "softcap": 2.0,
        "activation": "gelu_tanh",
    },
    "other": {
        "head_norms": "together",
        "centred": True,
        "gated": False,
        "factors": True,
        "rotary": False,
        "bias": True,
        "norms": "pre post",
        "activation": "gelu",
    },
}
SIDE_BY_SIDE: tuple[dict, ...] = {"inner": 0}, {"heads": 0, "parallel": True}
ALL = ("experts for all", "plain experts for all")
CHOICES = ("experts", "shared experts", "sigmoids", "plain sigmoids", "plain experts")  # rows take only some experts
LONGEST = 400


class Stack:
    """Decoder layers on random embeddings, which return hidden states.

    Args:
        layers: weights of the layers.
        dtype: type of hidden states, keys and values.
        rotary: number of rotated channels, all by default.
        rotary_dtype: type of the cosines and sines, by default ``dtype``.
    """

    def __init__(self, layers, dtype=torch.float32, rotary=None, rotary_dtype=None):
        # With seed 1, a value of an 8-bit row lies so close to the middle of two steps that processors differ.
        generator = torch.Generator().manual_seed(2)
        self.layers, self.native = layers, LayerRun(layers)
        hidden = (layers[0].out or layers[0].down).outputs
        self.embeddings = torch.randn(50, hidden, generator=generator).to(dtype)
        self.others = torch.randn(50, BESIDE, generator=generator).to(dtype)
        size = rotary or layers[0].dim
        angles = torch.arange(LONGEST)[:, None] * 100.0 ** -(torch.arange(size // 2) / (size // 2))
        self.tables = [table.repeat(1, 2).to(rotary_dtype or dtype) for table in (angles.cos(), angles.sin())]

    def run(self, tokens, batch, cache):
        hidden = self.embeddings[tokens][None]
        rows = cache.state_rows(batch, hidden.device) if self.native.recurrent else None
        pools, lineage = memory_of(cache, rows, self.layers, hidden)
        found = self.native(hidden, pools, self.rotation(batch), batch, (), self.beside(tokens), lineage)[0][0]
        if rows is not None:
            rows.keep()
        return found

    def reference(self, tokens, batch, pools):
        """Runs the reference in float64, on float64 pools."""
        hidden, beside = self.embeddings[tokens][None].double(), self.beside(tokens)
        beside = None if beside is None else beside.double()
        return decoder_layers_reference(hidden, self.layers, pools, self.rotation(batch), batch, (), beside)[0][0]

    def beside(self, tokens):
        return None if all(layer.beside_norm is None for layer in self.layers) else self.others[tokens]

    def rotation(self, batch):
        return [table[batch.positions][None] for table in self.tables]

    def pools(self, cache):
        return memory_of(cache, None, self.layers, self.embeddings)[0]

    def text(self, texts, chunks=None):
        """Returns ``[T, H]`` of whole texts, in one batch; ``chunks`` says how many tokens of each to run at once."""
        cache = RaggedKVCache()
        samples = [cache.open(len(text)) for text in texts]
        found = [[] for _ in texts]
        done = [0] * len(texts)
        for sizes in chunks or [[len(text) for text in texts]]:
            going = [index for index, size in enumerate(sizes) if size]
            parts = [texts[index][done[index] : done[index] + sizes[index]] for index in going]
            batch = cache.lay_out([samples[index] for index in going], [range(len(part)) for part in parts])
            out = self.run(torch.tensor([token for part in parts for token in part]), batch, cache)
            for index, rows in zip(going, out.split([len(part) for part in parts]), strict=True):
                found[index].append(rows)
                done[index] += len(rows)
                cache.commit({samples[index]: range(len(rows))})
        return [torch.cat(rows) for rows in found]

    def trees(self, texts, topologies, tokens):
        """Returns ``[N, H]`` of every node of one tree per text, drafted after the text."""
        cache = RaggedKVCache()
        samples = [cache.open(len(text) + tree.num_nodes) for text, tree in zip(texts, topologies, strict=True)]
        flat = torch.tensor([token for text in texts for token in text])
        self.run(flat, cache.lay_out(samples, [range(len(text)) for text in texts]), cache)
        cache.commit({sample: range(len(text)) for sample, text in zip(samples, texts, strict=True)})
        words = stack_words([ancestor_words(tree.visible) for tree in topologies])
        batch = cache.lay_out(samples, [tree.depth_list for tree in topologies], words)
        flat = torch.tensor([token for drafted in tokens for token in drafted])
        return self.run(flat, batch, cache).split([tree.num_nodes for tree in topologies])


def check_layers(layers, dtype=torch.float32, truth=None, **rotation):
    """Checks results and pools of trees, and then of prompts that continue a text.

    Args:
        layers: layers that the kernel runs.
        dtype: type of the hidden states.
        truth: layers that the reference runs, by default ``layers``.
        rotation: see :class:`Stack`.
    """
    stack = Stack(layers, dtype, **rotation)
    stack.layers = truth or layers
    # In bfloat16 about ten numbers per layer are rounded on the way to its output, each by up to 2^-8.
    # With weights in panels, rows become 8 bits, where the last bit of a float may decide a whole step.
    grouped = layers[0].matrices[0].weight.dtype == torch.uint8
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-2 if grouped else 2e-6
    cache = RaggedKVCache()
    samples = [cache.open(20) for _ in range(3)]
    texts = [[5, 9, 7, 5, 9, 1], [11], []]
    batch = cache.lay_out(samples, [range(len(text)) for text in texts])
    stack.run(torch.tensor([token for text in texts for token in text]), batch, cache)
    cache.commit({sample: range(len(text)) for sample, text in zip(samples, texts, strict=True)})
    trees = [TreeTopology.k_ary(2, 2), TreeTopology.chain(3), TreeTopology.fork(3, 1)]
    batches = [
        cache.lay_out(
            samples, [tree.depth_list for tree in trees], stack_words([ancestor_words(t.visible) for t in trees])
        )
    ]
    cache.drop(samples)
    batches.append(cache.lay_out(samples[:2], [range(5), range(2)]))
    for batch in batches:
        used = {start + key for start, past in zip(batch.starts, batch.past, strict=True) for key in range(past)}
        free = [row for row in range(cache._rows) if row not in used]
        for pool in cache._pools():
            pool[free] = float("nan")  # rows that were never written must not be read
        wide = [(keys.double(), values.double()) for keys, values in stack.pools(cache)]
        tokens = torch.arange(3, 3 + sum(batch.rows))
        expected, found = stack.reference(tokens, batch, wide), stack.run(tokens, batch, cache)
        hidden = stack.embeddings[tokens].double()
        assert found.dtype == dtype
        assert relative(found.double() - hidden, expected - hidden) < bound
        for layer, pools, truth in zip(layers, stack.pools(cache), wide, strict=True):
            for pool, exact in zip(pools, truth, strict=True) if layer.mixes else ():
                assert torch.equal(pool.isnan(), exact.isnan())
                assert relative(pool[batch.slots].double(), exact[batch.slots]) < bound


MIXERS = ("convolution", "selective", "selective without norm", "delta")


def recurrent_layers(mixer, kind):
    """Returns layers with an MLP alone, with a recurrent mixer, with attention, and with both of these side by side."""
    parts = {"heads": 0}, {"mixer": mixer}, {}, {"mixer": mixer, "inner": 0}, {"parallel": True}
    return [random_layer(*KINDS[kind], seed, **part) for seed, part in enumerate(parts)]


def check_recurrent_layers(layers, dtype=torch.float32, truth=None):
    """Checks results, inputs that are kept, windows and states of a prompt, of trees after it, and of lone rows.

    Args:
        layers: layers that the kernel runs, some of which are recurrent.
        dtype: type of the hidden states.
        truth: layers that the reference runs, by default ``layers``.
    """
    stack, cache = Stack(layers, dtype), RaggedKVCache()
    grouped = layers[0].matrices[0].weight.dtype == torch.uint8
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-2 if grouped else 5e-6
    samples = [cache.open(20) for _ in range(3)]
    trees = [TreeTopology.k_ary(2, 2), TreeTopology.chain(3), TreeTopology.fork(3, 1)]
    words = stack_words([ancestor_words(tree.visible) for tree in trees])
    for depths, visible, kept in (
        ([range(6), range(1), range(4)], None, [range(6), [0], range(4)]),
        ([tree.depth_list for tree in trees], words, [[0, 2, 5], [], [0, 1]]),
        ([[0]] * 3, None, [[0], [0], [0]]),
    ):
        batch = cache.lay_out(samples, depths, visible)
        rows = cache.state_rows(batch, stack.embeddings.device)
        pools, lineage = memory_of(cache, rows, layers, stack.embeddings)
        wide = [tuple(pool.clone().double() for pool in pair) for pair in pools]
        wide = [
            (first, second if layer.recurrence is None else second.float())
            for layer, (first, second) in zip(layers, wide, strict=True)
        ]
        exact = [part.memory(len(lineage.history), wide[0][0]) for part in (y.recurrence for y in layers) if part]
        tokens = torch.arange(3, 3 + sum(batch.rows))
        hidden = stack.embeddings[tokens][None]
        found, _ = stack.native(hidden, pools, stack.rotation(batch), batch, lineage=lineage)
        expected, _ = decoder_layers_reference(
            hidden.double(), truth or layers, wide, stack.rotation(batch), batch, lineage=replace(lineage, kept=exact)
        )
        assert relative(found.double() - hidden, expected - hidden.double()) < bound
        for ours, theirs in zip(lineage.kept, exact, strict=True):
            assert all(relative(a.double(), b.double()) < bound for a, b in zip(ours, theirs, strict=True) if a.numel())
        for layer, ours, theirs in zip(layers, pools, wide, strict=True):
            parts = 2 if layer.recurrence is not None and layer.recurrence.scans else 1
            for a, b in list(zip(ours, theirs, strict=True))[: parts if layer.recurrence else 0]:
                assert relative(a.double(), b.double()) < bound or not b.any()
        rows.keep()
        cache.commit(dict(zip(samples, kept, strict=True)))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def differing(run, count, choices):
    """Returns how many choices of rows change the bits of some row."""
    together = run(list(range(count)))
    return sum(not torch.equal(run(choice), together[choice]) for choice in choices)


def choices_of_rows(count, number, seed=0):
    """Yields single rows, shuffled choices of every size, and choices with repetitions."""
    chance = random.Random(seed)
    yield from ([row] for row in chance.sample(range(count), min(count, 4)))
    yield from (chance.sample(range(count), size) for size in range(1, count + 1))
    for _ in range(number):
        yield chance.choices(range(count), k=chance.randint(1, count))


def linear_rows(kind, outputs, inputs, activation=None, count=40):
    """Returns a function of row indices, for :func:`differing`."""
    (x, *weights), options, _, _ = linear_case(kind, outputs, inputs, count, activation=activation)
    return lambda rows: prepacked_linear(x[rows], *weights, **options)


def check_tree_rows(case, samples=None, **options):
    """Checks that every node has the bits of plain decoding along its path, and of chunked prefill."""
    together = case.run(ragged_tree_attention, use_native=True, **options)
    for sample in samples or range(len(case.samples)):
        tree = case.samples[sample][1]
        leaves = [node for node, children in enumerate(tree.child_list) if not children]
        for leaf in leaves[:: max(1, len(leaves) // 3)]:
            for chunk in (1, 3, 1000):
                for alone, rows in case.path(sample, leaf, chunk):
                    found = alone.run(ragged_tree_attention, use_native=True, **options)
                    assert torch.equal(found, together[rows])


def check_stack_rows(stack, seed=0, lengths=(270, 1, 37)):
    """Checks that texts at once, in chunks, in batches and as paths of trees have the same bits."""
    chance = random.Random(seed)
    texts = [[chance.randrange(50) for _ in range(length)] for length in lengths]
    together = stack.text(texts)
    for index, text in enumerate(texts):
        assert torch.equal(stack.text([text])[0], together[index])
    chunks, left = [], list(lengths)
    while any(left):
        sizes = [min(size, chance.choice([0, 1, 1, 2, 5, 40])) for size in left]
        left = [size - taken for size, taken in zip(left, sizes, strict=True)]
        chunks += [sizes] if any(sizes) else []
    for whole, chunked in zip(together, stack.text(texts, chunks), strict=True):
        assert torch.equal(whole, chunked)
    single = [[1]] * min(lengths[2], 24)
    assert torch.equal(stack.text([texts[2][: len(single)]], single)[0], together[2][: len(single)])
    trees = [TreeTopology.k_ary(2, 3), TreeTopology.k_ary(3, 3), TreeTopology.chain(5)]
    tokens = [[chance.randrange(50) for _ in range(tree.num_nodes)] for tree in trees]
    drafted = stack.trees(texts, trees, tokens)
    for text, tree, drafts, found in zip(texts, trees, tokens, drafted, strict=True):
        for node in (tree.num_nodes - 1, tree.num_nodes // 2):
            path = tree.path(node)
            plain = stack.text([[*text, *(drafts[n] for n in path)]], [[len(text)], *([1] for _ in path)])[0]
            assert torch.equal(plain[len(text) :], found[list(path)])


def check_row_max(dtype):
    generator = torch.Generator().manual_seed(0)
    infinity, nan = float("inf"), float("nan")
    for size in (1, 15, 16, 17, 61, 160, 1024, 1025, 3000):
        x = torch.randn(12, size, generator=generator).to(dtype)
        x[1] = 0.5  # ties everywhere: the first one counts
        x[2, size // 2] = infinity
        x[3] = -infinity
        x[4, :-1] = -infinity
        x[5, [size // 3, -1]] = 7
        x[8, 0] = infinity
        x[6, -1], x[7, 0], x[8, size // 2] = nan, nan, nan
        values, tokens = row_max(x)
        expected, places = row_max_reference(x)
        assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        sound = ~expected.isnan()
        assert not sound[6:9].any()
        assert torch.equal(tokens[sound], places[sound])
        assert (values.dtype, tokens.dtype) == (torch.float32, torch.int64)


def check_norm(dtype):
    generator = torch.Generator().manual_seed(0)
    for size, centred in itertools.product((16, 48, 576), (False, True)):
        weight, offset = torch.randn(2, size, generator=generator)
        norm = Norm(weight, offset if centred else None)
        for factor in (1e-3, 1.0, 1e3):
            x = ((torch.randn(2, 7, size, generator=generator) + 3) * factor).to(dtype)
            exact = apply_norm_reference(x.double(), norm, 1e-5)
            found = apply_norm(x, norm, 1e-5)
            magnitude = (
                weight.abs() * 10 + offset.abs() if centred else 0
            )  # terms that cancel when the mean is subtracted
            error = HALF_STEP[dtype] * exact.abs() + 2.0**-21 * (exact.abs() + magnitude)
            assert ((found.double() - exact).abs() <= error).all()
            assert all(torch.equal(apply_norm(x[:, [row]], norm, 1e-5), found[:, [row]]) for row in range(7))


def bits_of_groups():
    """Returns a digest of products with weights in groups, which is equal on all instruction sets."""
    digest = hashlib.sha256()
    for kind in GROUPED:
        for outputs, inputs in ((33, 19), (80, 64), (160, 200)):
            for rows in (1, 2, 11, 40):
                arguments, options, _, _ = linear_case(kind, outputs, inputs, rows)
                digest.update(prepacked_linear(*arguments, **options).float().numpy().tobytes())
    return digest.hexdigest()


def check_build():
    """Runs all checks above in short, for the loaded build."""
    trees = [(260, TreeTopology.k_ary(3, 4)), (6, TreeTopology.chain(3)), (0, TreeTopology.k_ary(2, 2))]
    for dtype in (torch.float32, torch.bfloat16):
        check_row_max(dtype)
        check_norm(dtype)
        for draws in DRAWS:
            check_draws(draws, dtype, vocabularies=[70])
        for size, value_size, options in (
            (16, 48, {"window": 9, "softcap": 2.0, "sinks": torch.linspace(-1, 1, 6)}),
            (64, 64, {}),
            (128, 80, {}),
        ):
            case = Case(trees, group=3, dtype=dtype, size=size, value_size=value_size)
            check_attention(case, **options)
            check_tree_rows(case, samples=[0], **options)
    check_noise(1000)
    check_recurrent()
    for kind, (dtype, _) in KINDS.items():
        for outputs, inputs in ((33, 19), (80, 64), (160, 96)):
            check_linear(kind, outputs, inputs, rows=11)
            run = linear_rows(kind, outputs, inputs)
            assert differing(run, 40, choices_of_rows(40, 4)) == 0
        for activation in ACTIVATIONS:
            check_linear(kind, 96, 64, rows=3, activation=activation)
            run = linear_rows(kind, 96, 64, activation)
            assert differing(run, 40, choices_of_rows(40, 4)) == 0
        check_layers(layers_of(kind), dtype)
        check_stack_rows(Stack(layers_of(kind), dtype))
        check_mixtures(kind)
        check_stack_rows(Stack(mixtures_of(kind), dtype))
    for mixer, kind in itertools.product(MIXERS, ("float32", "bfloat16", "int8-float32")):
        check_recurrent_layers(recurrent_layers(mixer, kind), KINDS[kind][0])
        check_stack_rows(Stack(recurrent_layers(mixer, kind), KINDS[kind][0]))


if __name__ == "__main__":
    if not native.load():
        sys.exit(f"unavailable: {native.problem()}")
    torch.set_num_threads(2)
    check_build()
    print(native.isa(), bits_of_groups())
