"""Records tokens and counts of two thousand decoders, one hash each, to compare them after a refactoring.

    python tests/support/behaviour.py                  rewrites tests/golden/behaviour.txt
    python tests/support/behaviour.py --only eagle     prints tokens and counts of the matching configurations
    python tests/support/behaviour.py --nudge 1        lists configurations that weights off by a millionth change
    python tests/support/behaviour.py --device cuda    lists configurations that a GPU decodes differently

A hash covers the new tokens of every sample and all counts of ``DecodeStats``; times are left out. Models are tiny,
their weights come from numpy, noise is seeded and costs are given. So hashes depend on no cache, network or clock. A
configuration whose tokens depend on the last bits of a sum does not belong here. ``--nudge`` finds it, and ``FRAGILE``
leaves it out.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import cache
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(tests), str(tests.parent / "examples" / "benchmarks")]

import numpy as np
import torch
import transformers
from padded import PaddedDecoder
from torch import nn
from transformers import NoBadWordsLogitsProcessor, PreTrainedTokenizerFast

from arbordraft import (
    IID,
    BlockDrafter,
    ConfidenceThreshold,
    CostAware,
    CostTable,
    Coupling,
    DecodeStats,
    EagleDrafter,
    EarlyExitDrafter,
    Engine,
    Fixed,
    HybridDrafter,
    LanguageModelDrafter,
    Lifted,
    Matching,
    MedusaDrafter,
    NGramDrafter,
    NoDrafter,
    RaggedModel,
    RecursiveRejection,
    Request,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
    builders,
)
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Bandit,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    NodeBudget,
    PathSurvival,
)
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder
from arbordraft.drafters import Drafter, GrammarDrafter
from arbordraft.grammars import Grammar
from arbordraft.heads.exit_adapter import ExitAdapter
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.verifiers import KSeq, LongestBranch, OptimalTransport, TopTailRule, TypicalAcceptance
from support.models import generated, tiny
from support.native_drafters import new_head
from support.recurrent_models import FALCON_FACTORS
from support.shrunken import RECURRENT, shrunken

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "behaviour.txt"
CHUNKS = 16
LENGTH = 12
LETTERS = "abcdefghij0123456789,"
VOCAB = 3 + len(LETTERS)
FRAGILE = {  # the first changed without AVX, as its linear program has several solutions; the others when nudged
    "block iid2+transport free other uneven t1,bad-words engine-reuse ragged torch qwen3 free",
    "model shared2 dear main k221 t.7,top-k batch3 buckets torch mixtral free",
    "grammar>eagle iid2+transport depth2 main chain4 t1,top-p batch3 padded native qwen3 free",
    "grammar>eagle wor2+lifted-rrs depth2 other uneven t.7 batch8 buckets torch mixtral free",
    "grammar>eagle fixed2+shared free main chain4 mixed engine-reuse ragged native mistral regex",
}


# Models


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one letter per token, after the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>"]
    spelling = Tokenizer(models.BPE({text: number for number, text in enumerate([*special, *LETTERS])}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=spelling, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )


_nudge: int | None = None
_device = "cpu"


def filled(network: nn.Module, seed: int, scale: float = 1.0) -> Any:
    """Gives a network weights that are the same on every machine.

    Args:
        network: network to change in place.
        seed: seed of the weights.
        scale: approximate size of products with the matrices.
    """
    numbers, noise = np.random.default_rng(seed), np.random.default_rng([seed, _nudge or 0])
    with torch.no_grad():
        for _, weight in sorted(network.named_parameters()):
            shape = tuple(weight.shape)
            if weight.ndim > 1:
                values = numbers.standard_normal(shape) * scale * shape[-1] ** -0.5
            else:
                values = numbers.uniform(0.5, 1.5, shape)
            if _nudge is not None:
                values *= 1 + 1e-6 * noise.standard_normal(shape)
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
    return network.eval().requires_grad_(False)


def sharpened(model: Any, factor: float) -> Any:
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    return model


def network(architecture: str, seed: int = 0, **settings: Any) -> Any:
    if architecture in RECURRENT:
        whole = {"head_dim": 16, **FALCON_FACTORS} if architecture == "falcon_h1" else {}  # runs in one native call
        model = shrunken(architecture, vocab_size=VOCAB, **{**RECURRENT[architecture], **whole, **settings})
    else:
        model = tiny(architecture, **{"vocab_size": VOCAB, "head_dim": 16, "max_position_embeddings": 160, **settings})
    return sharpened(filled(model, seed), 1.5)


@cache
def target(architecture: str, kernels: str) -> RaggedModel:
    return wrapped(network(architecture), kernels, tokenizer())


def wrapped(model: Any, kernels: str, tokens: PreTrainedTokenizerFast | None = None) -> RaggedModel:
    """Wraps a model on its device; C++ kernels run on a CPU only, and Triton's replace them elsewhere."""
    if _device != "cpu" and kernels == "native":
        kernels = "triton"
    return RaggedModel(model.to(_device), tokens, kernels=kernels)


def similar(architecture: str) -> Any:
    """Returns a draft model that often agrees with the target: its weights are mixed with others."""
    model, other = network(architecture), network(architecture, seed=5)
    with torch.no_grad():
        for weight, change in zip(model.parameters(), other.parameters(), strict=True):
            weight.mul_(0.9).add_(change, alpha=0.3)
    return model


def _head(kind: str, trimmed: bool) -> Any:
    head = new_head("masked block" if kind == "p-eagle" else kind, VOCAB, 16 if trimmed else None)
    filled(head, seed=11, scale=1.2)
    if trimmed:
        head.tokens.copy_(torch.arange(VOCAB)[VOCAB % 16 :])
    return head.to(_device)


@cache
def drafter(kind: str, variant: str, architecture: str, kernels: str) -> Drafter:
    """Returns a drafter that configurations share: all it knows of a text is in the state of a batch."""
    of, other = target(architecture, kernels), variant == "other"
    first, _, second = kind.partition(">")
    if second:
        return HybridDrafter(*(drafter(part, variant, architecture, kernels) for part in (first, second)))
    match kind:
        case "none":
            return NoDrafter()
        case "grammar":
            return GrammarDrafter()
        case "ngram":
            return NGramDrafter(longest=3, shortest=1) if other else NGramDrafter(longest=4, shortest=2)
        case "model" if other:
            small = network("llama", seed=3, num_hidden_layers=1, vocab_size=VOCAB + 8)
            return LanguageModelDrafter(wrapped(small, kernels), same_tokenizer=True)
        case "model" if variant == "recurrent":
            return LanguageModelDrafter(wrapped(network("mamba2", seed=3), kernels), same_tokenizer=True)
        case "model":
            return LanguageModelDrafter(wrapped(similar(architecture), kernels), same_tokenizer=True)
        case "exit":
            adapter = filled(ExitAdapter.for_target(of.model, 1), seed=13, scale=0.3).to(_device) if other else None
            return EarlyExitDrafter(of, 1, adapter)
        case "eagle":
            return EagleDrafter(_head(kind, other), of)
        case "medusa":
            return MedusaDrafter(_head(kind, other), of)
        case _:
            return BlockDrafter(_head(kind, other), of)


# The dimensions of a configuration

DRAFTERS = [
    *("none", "ngram", "grammar", "grammar>ngram", "model", "exit", "eagle", "medusa", "block", "p-eagle"),
    *("ngram>model", "grammar>eagle"),
]
CERTAIN = {"none", "ngram", "grammar", "grammar>ngram"}
COUPLINGS: dict[str, Callable[[], Coupling]] = {
    "shared2": lambda: Coupling.shared(2),
    "shared3": lambda: Coupling.shared(3),
    "fixed2+shared": lambda: Coupling(Fixed(2), Coupling.shared(2).verifier),
    "fixed3+match": lambda: Coupling.matching(3),
    "fixed2+lifted-rrs": lambda: Coupling(Fixed(2), Lifted(RecursiveRejection())),
    "iid2+rrs": lambda: Coupling(IID(2), TopDown(RecursiveRejection())),
    "iid3+lifted-rrs": lambda: Coupling(IID(3), Lifted(RecursiveRejection())),
    "iid2+k-seq": lambda: Coupling(IID(2), TopDown(KSeq())),
    "iid2+lifted-k-seq": lambda: Coupling(IID(2), Lifted(KSeq())),
    "iid2+transport": lambda: Coupling(IID(2), TopDown(OptimalTransport())),
    "wor3+rrs": lambda: Coupling(WithoutReplacement(3), TopDown(RecursiveRejection())),
    "wor2+lifted-rrs": lambda: Coupling(WithoutReplacement(2), Lifted(RecursiveRejection())),
    "wor2+lifted-match": lambda: Coupling(WithoutReplacement(2), Lifted(Matching())),
    "wor2+typical": lambda: Coupling(WithoutReplacement(2), TypicalAcceptance()),
    "wor3+longest": lambda: Coupling(WithoutReplacement(3), LongestBranch()),
    "top1tail1+spechub": lambda: Coupling(TopTail(1, 1), TopDown(SpecHub(order="paper"))),
    "top1tail1+lifted-spechub": lambda: Coupling(TopTail(1, 1), Lifted(SpecHub())),
    "top2tail1+lifted-top-tail": lambda: Coupling(TopTail(2, 1), Lifted(TopTailRule())),
    "adaptive3+rrs": lambda: Coupling(AdaptiveTopTail(3, 0.2), TopDown(RecursiveRejection())),
}
FREE = StepCosts(CostTable((1, 64), (1.0, 1.1)), CostTable((1, 64), (0.01, 0.01)))
DEAR = StepCosts(CostTable((1, 4, 64), (1.0, 1.1, 5.0)), CostTable((1, 64), (0.07, 0.1)))


def _learned() -> Decider:
    return filled(LearnedDecider(top_k=4, widths=(8,), threshold=0.23), seed=17)


DECIDERS: dict[str, Callable[[], Decider]] = {
    "whole": FixedDepth,
    "depth2": lambda: FixedDepth(2),
    "budget5": lambda: NodeBudget(5),
    "confidence": lambda: ConfidenceThreshold(0.23),
    "entropy": lambda: EntropyBound(0.3, 0.2),
    "survival": lambda: PathSurvival(0.13),
    "heuristic": lambda: Heuristic(2, 4),
    "average": lambda: AcceptedAverage(1.3),
    "adaedl": lambda: AdaEDL(0.33, step=0.17),
    "bandit": lambda: Bandit([FixedDepth(1), FixedDepth(3)], longest=4),
    "learned": _learned,
    "free": lambda: CostAware(FREE),
    "dear": lambda: CostAware(DEAR, nodes=6),
}
ANTICIPATING = {"budget5"}
TREES = {
    "chain4": TreeTopology.chain(4),
    "k221": TreeTopology.from_k_config((2, 2, 1)),
    "k311": TreeTopology.from_k_config((3, 1, 1)),
    "uneven": TreeTopology([-1, 0, 0, 1, 1, 2, 3, 6]),
    "sequoia8": TreeTopology.sequoia((0.5, 0.25, 0.15), 8, 4),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy,penalty": {"repetition_penalty": 1.3},
    "t1": {"temperature": 1.0},
    "t.7": {"temperature": 0.7},
    "t.7,top-k": {"temperature": 0.7, "top_k": 6},
    "t1,top-p": {"temperature": 1.0, "top_p": 0.83},
    "t.7,min-p": {"temperature": 0.7, "min_p": 0.07},
    "t1,penalty": {"temperature": 1.0, "repetition_penalty": 1.4},
    "t1,bad-words": {"temperature": 1.0, "bad_words": [[13], [15], [16, 17]]},
    "t.7,min-new": {"temperature": 0.7, "min_new_tokens": 9},
    "t1,bias": {"temperature": 1.0, "logit_bias": {4: 2.0, 9: -5.0}, "frequency_penalty": 0.4},
}
MIXED = [SETTINGS[name] for name in ("t1", "greedy", "t.7,top-k", "t1,penalty", "t1,top-p", "t.7,min-p", "greedy")]
BY_SCORES = {"greedy", "t1", "t.7", "t.7,top-k", "t1,top-p", "t.7,min-p"}
MODES = ["batch1", "batch3", "batch8", "engine3", "engine8", "engine-reuse"]
GRAMMARS = {
    "free": [None],
    "regex": [Grammar.regex("[a-c]{2}(,[a-c]{2}){2}"), None, Grammar.choice(["abacab", "abaddcafe", "dig,fig"])],
}


class Configuration(NamedTuple):
    """One decoder and its requests; the fields are names of the tables above."""

    drafter: str
    coupling: str
    decider: str
    variant: str
    tree: str
    settings: str
    mode: str
    step: str
    kernels: str
    target: str
    grammar: str

    @property
    def name(self) -> str:
        return " ".join(self)


AXES: dict[str, Sequence[str]] = {
    "drafter": DRAFTERS,
    "coupling": list(COUPLINGS),
    "decider": list(DECIDERS),
    "variant": ["main", "other"],
    "tree": list(TREES),
    "settings": [*SETTINGS, "mixed"],
    "mode": MODES,
    "step": ["ragged", "buckets", "padded"],
    "kernels": ["torch", "native"],
    "target": ["llama", "qwen3", "mistral", "mixtral"],
    "grammar": list(GRAMMARS),
}


# Combinations that the toolkit accepts, listed by name: a moved or renamed attribute changes nothing here.
SHARED = {"shared2", "shared3", "fixed2+shared"}
DRAWN = {name for name in COUPLINGS if not name.startswith(("shared", "fixed"))}  # not for CERTAIN
FOR_ONE_LAW = {
    name for name in COUPLINGS if name.endswith(("k-seq", "spechub", "top-tail"))
}  # not for a hybrid of two drafters
IN_BUCKETS = {name for name in COUPLINGS if name.endswith(("rrs", "top-tail", "lifted-spechub"))} - {
    "adaptive3+rrs"
} | SHARED
NARROW = {name for name in COUPLINGS if "2+" in name or name.startswith(("shared2", "top1tail1"))}  # two children
CANDIDATES = "wor3+longest"


def valid(drafter: str, coupling: str, decider: str) -> bool:
    """Returns whether the three fit together."""
    if drafter in CERTAIN and coupling in DRAWN:
        return False
    if ">" in drafter and coupling in FOR_ONE_LAW:
        return False
    if coupling == CANDIDATES and drafter not in {"model", "exit", "eagle", "block"}:
        return False
    return coupling in SHARED or decider not in ANTICIPATING


def fits(chosen: dict[str, str]) -> bool:
    """Returns whether the toolkit accepts a configuration, which may be incomplete."""

    def of(axis: str) -> str:
        return chosen.get(axis, "")

    coupling = of("coupling")
    candidates = coupling == CANDIDATES
    if (tree := of("tree")) in {"k311", "sequoia8"} and coupling in NARROW:
        return False
    if tree == "chain4" and candidates:
        return False
    if of("settings") in {"mixed", "t1,bias"} and of("mode").startswith("batch"):
        return False
    if of("settings") == "t.7,min-new" and of("grammar") == "regex":
        return False
    if of("step") == "buckets":
        if candidates or of("kernels") == "native" or of("grammar") == "regex" or of("mode") == "engine-reuse":
            return False
        if of("settings") and of("settings") not in BY_SCORES:
            return False
        if of("settings") != "greedy" and coupling not in IN_BUCKETS:
            return False
        if of("settings") != "greedy" and ">" in of("drafter") and coupling.startswith("iid"):
            return False
    if of("step") == "padded":
        return not candidates and tree in {"", "chain4"} and not of("mode").startswith("engine")
    return True


@cache
def configurations() -> dict[str, Configuration]:
    """Returns configurations by name: all valid triples of drafter, coupling and decider, and pairs of other values.

    The other values of a triple cover as many new pairs as possible; nothing is drawn at random.
    """
    seen: Counter[frozenset[tuple[str, str]]] = Counter()
    used: Counter[tuple[str, str]] = Counter()
    found: list[Configuration] = []

    def complete(chosen: dict[str, str]) -> dict[str, str] | None:
        for axis in sorted(AXES.keys() - chosen, key=lambda axis: (-len(AXES[axis]), axis)):
            options = [value for value in AXES[axis] if fits({**chosen, axis: value})]
            if not options:
                return None
            rarity: dict[str, float] = dict.fromkeys(options, 0.0)
            for value, other in product(options, chosen.items()):  # sum() rounds differently since Python 3.12
                rarity[value] += 1 / (1 + seen[frozenset({(axis, value), other})]) ** 2
            chosen = {**chosen, axis: max(options, key=lambda value: (rarity[value], -used[axis, value]))}
        return chosen

    def add(chosen: dict[str, str]) -> None:
        seen.update(map(frozenset, combinations(chosen.items(), 2)))
        used.update(chosen.items())
        found.append(Configuration(**chosen))

    triples = [
        {"drafter": drafter, "coupling": pair, "decider": decider}
        for drafter, pair, decider in product(DRAFTERS, COUPLINGS, DECIDERS)
        if valid(drafter, pair, decider)
    ]
    for triple in triples:
        chosen = complete(triple)
        assert chosen is not None, f"no values of the other dimensions fit {triple}"
        add(chosen)
    for one, other in combinations([axis for axis in AXES if axis not in triples[0]], 2):
        for pair in product(product([one], AXES[one]), product([other], AXES[other])):
            if seen[frozenset(pair)]:
                continue
            tries = (complete({**triple, **dict(pair)}) for triple in triples if fits({**triple, **dict(pair)}))
            if (chosen := next(filter(None, tries), None)) is not None:
                add(chosen)
    return {one.name: one for one in found if one.name not in FRAGILE}


# Models with recurrent layers

STATEFUL = {
    "target": ("lfm2", "qwen3_next", "mamba2", "granitemoehybrid", "jamba", "llama", "falcon_h1"),
    "drafter": ("ngram", "model", "ngram>model", "eagle", "grammar>ngram"),
    "coupling": ("shared2", "fixed3+match", "wor2+lifted-rrs", "iid2+k-seq"),
}
_OTHERS: dict[str, Sequence[str]] = {  # taken in turn
    "kernels": 4 * ("torch",) + 4 * ("native",),
    "variant": 8 * ("main",) + 8 * ("other",),
    "mode": ("engine-reuse", "batch3", "engine8"),
    "settings": ("greedy", "t1", "t.7,top-k", "greedy,penalty", "t1,top-p"),
    "decider": ("whole", "confidence", "dear", "depth2", "survival", "free", "average"),
}


@cache
def stateful() -> dict[str, Configuration]:
    """Returns configurations of targets with recurrent layers by name, and of llama with such a draft model."""
    found = []
    for number, (of, kind, coupling) in enumerate(product(*STATEFUL.values())):
        if not valid(kind, coupling, "whole") or (of == "llama" and "model" not in kind):
            continue
        turn = {axis: values[number % len(values)] for axis, values in _OTHERS.items()}
        turn |= {"tree": "uneven" if coupling in NARROW else "k311", "step": "ragged"}
        turn["grammar"] = "regex" if kind.startswith("grammar") else "free"
        if of == "llama":
            turn["variant"] = "recurrent"
        found.append(Configuration(target=of, drafter=kind, coupling=coupling, **turn))
    return {one.name: one for one in found if one.name not in FRAGILE}


@cache
def stateful_in_buckets() -> dict[str, Configuration]:
    """Returns configurations of targets with recurrent layers in steps of fixed shapes, by name."""
    found = []
    settings, modes = ("greedy", "t1", "t.7,top-k"), ("batch3", "engine8")
    kinds = product(STATEFUL["target"][:4], ("ngram", "model", "eagle"), ("shared2", "wor2+lifted-rrs"))
    for number, (of, kind, coupling) in enumerate(kinds):
        turn = {"drafter": kind, "coupling": coupling, "target": of, "step": "buckets", "kernels": "torch"}
        turn |= {"settings": settings[number % 3], "mode": modes[number // 3 % 2], "tree": "uneven", "grammar": "free"}
        turn |= {"variant": "main", "decider": ("whole", "depth2", "free")[number % 3]}
        if valid(kind, coupling, turn["decider"]) and fits(turn):
            found.append(Configuration(**turn))
    return {one.name: one for one in found}


# Decoders of the builders


def _by_builders(of: RaggedModel, draft: Drafter, head: Drafter) -> dict[str, Callable[[], SpeculativeDecoder]]:
    acceptance = (0.6, 0.2, 0.1)
    return {
        "plain": lambda: builders.plain(of),
        "lookup": lambda: builders.lookup(of, FREE),
        "ems-sd": lambda: builders.ems_sd(of, length=5),
        "ems-sd,model": lambda: builders.ems_sd(of, draft, length=5),
        "specinfer": lambda: builders.specinfer(of, draft, (1, 1, 3, 1)),
        "mcsd": lambda: builders.mcsd(of, draft),
        "dynasd": lambda: builders.dynasd(of, draft, decider=ConfidenceThreshold(0.23)),
        "dynasd,wide": lambda: builders.dynasd(of, draft, 3, 3, decider=ConfidenceThreshold(0.23)),
        "spechub": lambda: builders.spechub(of, draft, 3),
        "sequoia": lambda: builders.sequoia(of, draft, acceptance, 10),
        "eagle": lambda: builders.eagle(of, head, nodes=10, costs=FREE),
        "fitted": lambda: builders.cost_aware(of, draft, 10, costs=DEAR),
        "fitted,lookup": lambda: builders.cost_aware(of, draft, 10, lookup=True, costs=FREE),
        "expanding": lambda: builders.eagle2(of, head, 10),
        "expanding,lookup": lambda: builders.eagle2(of, draft, 10, lookup=True),
        "default,ngram": lambda: SpeculativeDecoder(of, NGramDrafter()),
        "default,model": lambda: SpeculativeDecoder(of, draft),
        "default,eagle": lambda: SpeculativeDecoder(of, head),
    }


class Built(NamedTuple):
    """One decoder of the builders and its requests."""

    builder: str
    settings: str
    mode: str
    kernels: str

    @property
    def name(self) -> str:
        return "builders " + " ".join(self)


@cache
def built() -> dict[str, Built]:
    """Returns all configurations of the builders by name."""
    names = _by_builders(*[None] * 3)  # type: ignore[arg-type]
    asked = [("greedy", "batch3"), ("t1", "batch3"), ("t.7,top-k", "engine8"), ("mixed", "engine3")]
    found = [Built(one, *how, kernels) for one, how, kernels in product(names, asked, AXES["kernels"])]
    return {one.name: one for one in found if one.name not in FRAGILE}


def everything() -> dict[str, Configuration | Built]:
    """Returns all recorded configurations by name, in the order of the file."""
    return {**configurations(), **built(), **stateful(), **stateful_in_buckets()}


def chunk(number: int) -> list[str]:
    """Returns the names of one of the ``CHUNKS`` parts, which take about equally long."""
    return list(everything())[number::CHUNKS]


def tenth() -> list[str]:
    """Returns every tenth name; these cover all values of all dimensions."""
    return list(everything())[::10]


# Requests and outcomes


def _prompts(mode: str) -> list[list[int]]:
    count = int(mode[-1]) if mode[-1].isdigit() else 4
    if mode == "engine-reuse":
        common = [3 + (7 * place + place // 5) % len(LETTERS) for place in range(40)]
        return [[*common, *range(3, 3 + more)] for more in (4, 1, 6, 2)]
    known = [[5, 9, 7, 5, 9], [11], [8, 3, 8, 3, 8, 3, 8, 20, 21, 22, 8, 3, 19]]
    return [[*known[sample % 3], *range(12, 12 + sample // 3)] for sample in range(count)]


def _decoder(one: Configuration | Built) -> SpeculativeDecoder:
    if isinstance(one, Built):
        parts = [drafter(kind, "main", "llama", one.kernels) for kind in ("model", "eagle")]
        return _by_builders(target("llama", one.kernels), *parts)[one.builder]()
    of, tree = target(one.target, one.kernels), TREES[one.tree]
    pair, decider = COUPLINGS[one.coupling](), DECIDERS[one.decider]()
    proposer = drafter(one.drafter, one.variant, one.target, one.kernels)
    if one.coupling == CANDIDATES:
        return TargetInitialisedDecoder(of, proposer, tree, decider)
    if one.step == "padded":
        return PaddedDecoder(of, proposer, tree, pair, decider)
    return SpeculativeDecoder(of, proposer, tree, pair, decider, buckets=(8, 32) if one.step == "buckets" else None)


def _settings(name: str, sample: int) -> dict[str, Any]:
    return dict(MIXED[sample % len(MIXED)] if name == "mixed" else SETTINGS[name])


def _generated(
    decoder: SpeculativeDecoder, prompts: list[list[int]], settings: dict[str, Any], grammars: list[Grammar | None]
) -> tuple[list[list[int]], DecodeStats]:
    if bad := settings.pop("bad_words", None):
        settings["bad_words_ids"] = bad
    sampled = {"do_sample": True, "top_k": 0} if "temperature" in settings else {"do_sample": False}
    settings = {**sampled, **settings, "grammar": grammars if any(grammars) else None}
    seeds = [100 + sample for sample in range(len(prompts))]
    tokens, output = generated(decoder, prompts, max_new_tokens=LENGTH, seeds=seeds, **settings)
    return tokens, output.stats


def _served(
    decoder: SpeculativeDecoder, prompts: list[list[int]], mode: str, requests: list[dict[str, Any]]
) -> tuple[list[list[int]], DecodeStats]:
    """Decodes requests that come between steps: prompts are read in portions, some wait for a place in the batch."""
    stats: list[DecodeStats] = []
    decoder.on_step = lambda state, tree, verdict: stats.append(state.stats)
    places = 4 if mode == "engine8" else 3 if mode == "engine-reuse" else 8
    engine = Engine(decoder, max_cache_tokens=2048, max_samples=places, max_rows=16, reuse=mode == "engine-reuse")
    streams, at_a_time = [], 3 if mode == "engine8" else 1
    for number, (prompt, options) in enumerate(zip(prompts, requests, strict=True)):
        if bad := options.pop("bad_words", None):
            options["processors"] = [NoBadWordsLogitsProcessor(bad, eos_token_id=2)]
        if mode == "engine-reuse":
            options["n"] = 1 + number % 2
        options.setdefault("temperature", 0.0)
        request = Request(prompt=prompt, max_new_tokens=LENGTH, seed=100 + 10 * number, **options)
        streams.append(engine.submit(request))
        if number % at_a_time == at_a_time - 1:
            engine.step()
            engine.step()
    engine.run()
    answers = [list(answer.tokens) for stream in streams for answer in stream.result()]
    engine.close()
    return answers, stats[-1]


class Outcome(NamedTuple):
    """The tokens and counts that a hash covers."""

    tokens: list[list[int]]
    counts: dict[str, Any]

    @property
    def hash(self) -> str:
        text = json.dumps([self.tokens, self.counts], sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def counts(stats: DecodeStats) -> dict[str, Any]:
    """Returns all counts, sorted within each counter, without times."""
    found = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name not in ("seconds", "busy")}
    return {
        name: {str(key): value[key] for key in sorted(value) if value[key]} if isinstance(value, Counter) else value
        for name, value in found.items()
    }


def outcome(one: Configuration | Built) -> Outcome:
    """Decodes the requests of a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lossy decoders warn
        decoder = _decoder(one)
    prompts = _prompts(one.mode)
    grammars = GRAMMARS[one.grammar if isinstance(one, Configuration) else "free"]
    wanted = [grammars[sample % len(grammars)] for sample in range(len(prompts))]
    if one.mode.startswith("batch"):
        tokens, stats = _generated(decoder, prompts, _settings(one.settings, 0), wanted)
    else:
        requests = [{**_settings(one.settings, sample), "grammar": grammar} for sample, grammar in enumerate(wanted)]
        tokens, stats = _served(decoder, prompts, one.mode, requests)
    return Outcome(tokens, counts(stats))


# The file


def recorded(path: Path = GOLDEN) -> dict[str, str]:
    """Returns the hashes of a file by name."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: found for found, name in (line.split(" ", 1) for line in lines)}


def as_named() -> Any:
    """Returns a patch that runs the steps of a name, not the default steps of a GPU, whose padding counts."""
    return mock.patch.object(StaticStepping, "active", property(lambda stepping: not stepping.automatic))


def _start(nudge: int | None, device: str) -> None:
    global _nudge, _device
    _nudge, _device = nudge, device
    if device != "cpu":
        as_named().start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def hash_of(name: str) -> str:
    """Returns the hash of a configuration, or its error."""
    try:
        return outcome(everything()[name]).hash
    except Exception as error:  # other configurations are still compared
        return f"{type(error).__name__}: {error}"


def recording(names: Sequence[str], processes: int, nudge: int | None = None, device: str = "cpu") -> dict[str, str]:
    """Decodes configurations in parallel processes; returns their hashes by name."""
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, (nudge, device)) as pool:
        return dict(zip(names, pool.map(hash_of, names, chunksize=8), strict=True))


def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def head() -> str:
    """Returns comment lines about the machine and versions; they are not compared."""
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    versions = ", ".join(f"{name} {version}" for name, version in made.items())
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        "# Written by tests/support/behaviour.py: a hash of tokens and counts, then the configuration.\n"
        f"# Made on {_processor()} ({capability}), Python {platform.python_version()}, {versions}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="print configurations whose names match a regular expression")
    parser.add_argument(
        "--nudge", type=int, metavar="SEED", help="compare with the file after a tiny change of weights"
    )
    parser.add_argument(
        "--device", default="cpu", help="device of the decoders; others than cpu are compared with the file"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of parallel processes; 1 by default")
    parser.add_argument("--to", type=Path, default=GOLDEN, help="another file to write")
    given = parser.parse_args()
    if given.only is not None and given.nudge is None and given.device == "cpu":
        _start(None, "cpu")
        for name, one in everything().items():
            if re.search(given.only, name):
                found = outcome(one)
                print(found.hash, name, json.dumps(found._asdict()), sep="\n  ")
        return
    names = [name for name in everything() if re.search(given.only or "", name)]
    hashes = recording(names, given.processes, given.nudge, given.device)
    if given.nudge is not None or given.device != "cpu":
        known = recorded()
        others = [f"{name}: {hashes[name]}" for name in names if known.get(name) != hashes[name]]
        print(*others, f"{len(others)} of {len(names)} differ", sep="\n")
        return
    if failed := [f"{name}: {found}" for name, found in hashes.items() if " " in found]:
        raise SystemExit("\n".join(["nothing is written, as these fail:", *failed]))
    given.to.parent.mkdir(exist_ok=True)
    given.to.write_text(head() + "".join(f"{found} {name}\n" for name, found in hashes.items()))
    print(f"{len(hashes)} configurations, {given.to.stat().st_size:,} bytes: {given.to}")


if __name__ == "__main__":
    main()
