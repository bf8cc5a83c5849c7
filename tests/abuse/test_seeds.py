"""A seeded request says the same whatever shares its batch, in whatever order, and whatever was decoded before.

Models are in float64: what products of other sizes round otherwise is then 1e-16, which flips no decision.
"""

import itertools
from functools import cache

import pytest
import torch
from models import PROMPTS, left_padded, new_tokens, tiny

from arbordraft import (
    IID,
    AcceptedAverage,
    AdaEDL,
    Backoff,
    Bandit,
    ConfidenceThreshold,
    CostAware,
    CostTable,
    Coupling,
    EarlyExitDrafter,
    EntropyBound,
    Fixed,
    FixedDepth,
    Heuristic,
    HybridDrafter,
    LanguageModelDrafter,
    LearnedDecider,
    Lifted,
    Matching,
    NGramDrafter,
    NodeBudget,
    NoDrafter,
    PathSurvival,
    RaggedModel,
    RecursiveRejection,
    SpeculativeDecoder,
    StepCosts,
    TopDown,
    TreeTopology,
)

SEEDS = (11, 2**40 + 12, 13)
SLOPE = CostTable((1, 64), (1.0, 3.0))
STEPS = StepCosts(SLOPE, CostTable((1, 64), (0.05, 0.1)))


@cache
def model(seed=0, layers=2):
    return RaggedModel(tiny(seed=seed, sharpness=2.5, num_hidden_layers=layers, hidden_size=16).double())


def lookup():
    return NGramDrafter(longest=3, shortest=1)


DRAFTERS = {
    "lookup": lookup,
    "lookup or exit": lambda: HybridDrafter(lookup(), EarlyExitDrafter(model(), 1)),
    "lookup or model": lambda: HybridDrafter(lookup(), LanguageModelDrafter(model(3, 1))),
    "model": lambda: LanguageModelDrafter(model(3, 1)),
    "early exit": lambda: EarlyExitDrafter(model(), 1),
    "nothing": NoDrafter,
}


def learned():
    torch.manual_seed(5)
    return LearnedDecider(widths=(8,), threshold=0.45).double()


DECIDERS = {
    "always": FixedDepth,
    "confidence": lambda: ConfidenceThreshold(0.42),
    "entropy": lambda: EntropyBound(0.4, 0.1),
    "survival": lambda: PathSurvival(0.25),
    "backoff": lambda: Backoff(1, 4),
    "heuristic": lambda: Heuristic(2, 4),
    "average": lambda: AcceptedAverage(1.0, 0.5),
    "AdaEDL": lambda: AdaEDL(0.3, 0.1),
    "bandit": lambda: Bandit([FixedDepth(1), ConfidenceThreshold(0.42), FixedDepth(3)]),
    "cost-aware": lambda: CostAware(STEPS),
    "learned": learned,
    "cost-aware, learned": lambda: CostAware(STEPS, learned()),
}
COSTS = {"no costs": None, "table": SLOPE, "budget": NodeBudget(3)}


def build(drafter, decider="always", costs=None, drawn=False, **options):
    """A decoder with trees of up to three levels; ``drawn``: by random draws where the drafter allows for them."""
    if drawn:
        coupling, topology = Coupling(IID(2), Lifted(RecursiveRejection())), TreeTopology.from_k_config((2, 1, 1))
    else:
        coupling, topology = Coupling(Fixed(2), TopDown(Matching())), TreeTopology.from_k_config((2, 2, 1))
    decider = DECIDERS[decider]() if isinstance(decider, str) else decider
    return SpeculativeDecoder(model(), DRAFTERS[drafter](), topology, coupling, decider, costs=costs, **options)


def texts(decoder, samples, seeds=SEEDS, **settings):
    """What the decoder answers to some of the prompts together, by sample."""
    prompts = [PROMPTS[sample] for sample in samples]
    output = decoder.generate(
        **left_padded(prompts),
        **{"max_new_tokens": 24, "do_sample": True, "temperature": 0.6, "eos_token_id": None, **settings},
        seeds=[seeds[sample] for sample in samples],
        return_dict_in_generate=True,
    )
    return dict(zip(samples, new_tokens(output.sequences, prompts, output.stats.emitted), strict=True))


def leaks(make, rounds=1):
    """Samples whose text depends on more than their prompt, their seed and the decoder, and in which company."""
    for number in range(rounds):
        seeds = [seed + 100 * number for seed in SEEDS]
        used = make()
        alone = {sample: texts(used, [sample], seeds)[sample] for sample in range(3)}  # after others, one by one
        for company in ([0, 1, 2], [2, 0]):
            found = texts(make() if number % 2 else used, company, seeds)
            yield from ((sample, company) for sample in company if found[sample] != alone[sample])


CASES = [
    *itertools.product(DRAFTERS, DECIDERS, ["no costs"], [False]),
    *itertools.product(["lookup or exit", "model", "early exit"], DECIDERS, ["no costs"], [True]),
    *itertools.product(DRAFTERS, ["always", "bandit", "cost-aware"], ["table", "budget"], [False]),
]


@pytest.mark.parametrize(
    ("drafter", "decider", "costs", "drawn"),
    [pytest.param(*case, id=", ".join([*case[:3], "drawn" if case[3] else "certain"])) for case in CASES],
)
def test_nothing_leaks(drafter, decider, costs, drawn):
    assert list(leaks(lambda: build(drafter, decider, COSTS[costs], drawn))) == []
