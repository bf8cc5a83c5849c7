"""A seeded request gets the same tokens in any batch, in any order, and after any earlier requests.

Models are in float64. Rounding then differs by 1e-16 between products of other sizes, which flips no decision.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from support.models import PROMPTS, generated, tiny

import arbordraft as ad
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Bandit,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    PathSurvival,
)
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Limits, Verification
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.language_model import shrink
from arbordraft.sampling.noise import Noise

SEEDS = (11, 2**40 + 12, 13)
SLOPE = ad.CostTable((1, 64), (1.0, 3.0))
STEPS = StepCosts(SLOPE, ad.CostTable((1, 64), (0.05, 0.1)))


@cache
def model():
    return ad.RaggedModel(tiny(sharpness=2.5, hidden_size=16).double(), kernels="torch")


def lookup():
    return ad.NGramDrafter(longest=3, shortest=1)


def shallow():
    return ad.LanguageModelDrafter(ad.RaggedModel(shrink(model().model, [0]), kernels="torch"))


DRAFTERS = {
    "lookup": lookup,
    "lookup or exit": lambda: ad.HybridDrafter(lookup(), ad.EarlyExitDrafter(model(), 1)),
    "lookup or model": lambda: ad.HybridDrafter(lookup(), shallow()),
    "model": shallow,
    "early exit": lambda: ad.EarlyExitDrafter(model(), 1),
    "nothing": ad.NoDrafter,
}


def learned():
    torch.manual_seed(5)
    return LearnedDecider(widths=(8,), threshold=0.45).double()


DECIDERS = {
    "always": FixedDepth,
    "confidence": lambda: ad.ConfidenceThreshold(0.42),
    "entropy": lambda: EntropyBound(0.4, 0.1),
    "survival": lambda: PathSurvival(0.25),
    "heuristic": lambda: Heuristic(2, 4),
    "average": lambda: AcceptedAverage(1.0, 0.5),
    "AdaEDL": lambda: AdaEDL(0.3, 0.1),
    "bandit": lambda: Bandit([FixedDepth(1), ad.ConfidenceThreshold(0.42), FixedDepth(3)]),
    "cost-aware": lambda: ad.CostAware(STEPS),
    "learned": learned,
    "cost-aware, learned": lambda: ad.CostAware(STEPS, survival=learned()),
    "costs of rows": lambda: ad.CostAware(SLOPE),
    "few nodes": lambda: ad.CostAware(SLOPE, nodes=3),
}


def build(drafter, decider="always", drawn=False, **options):
    """Builds a decoder with trees of up to three levels; ``drawn`` asks for random draws if the drafter allows them."""
    if drawn:
        coupling, topology = (
            ad.Coupling(ad.IID(2), ad.Lifted(ad.RecursiveRejection())),
            ad.TreeTopology.from_k_config((2, 1, 1)),
        )
    else:
        coupling, topology = ad.Coupling.matching(2), ad.TreeTopology.from_k_config((2, 2, 1))
    decider = DECIDERS[decider]() if isinstance(decider, str) else decider
    return ad.SpeculativeDecoder(model(), DRAFTERS[drafter](), topology, coupling, decider, **options)


def decode(decoder, samples, seeds=SEEDS, **settings):
    """Decodes some of the prompts together; returns the tokens by sample, and the statistics."""
    prompts = [PROMPTS[sample] for sample in samples]
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.6, "eos_token_id": None, **settings}
    found, output = generated(decoder, prompts, seeds=[seeds[sample] for sample in samples], **settings)
    return dict(zip(samples, found, strict=True)), output.stats


def texts(decoder, samples, seeds=SEEDS, **settings):
    return decode(decoder, samples, seeds, **settings)[0]


COMPANIES = ([1], [0, 1, 2], [2, 0])


def leaks(decoder, companies=COMPANIES, rounds=1, **settings):
    """Yields samples whose tokens differ between batches that one decoder runs in turn, with batch and texts."""
    for number in range(rounds):
        seeds = [seed + 100 * number for seed in SEEDS]
        known = {}
        for company in companies:
            for sample, text in texts(decoder, company, seeds, **settings).items():
                if known.setdefault(sample, text) != text:
                    yield sample, company, known[sample], text


CASES = [
    *itertools.product(DRAFTERS, DECIDERS, [False]),
    *itertools.product(["lookup or exit", "model", "early exit"], DECIDERS, [True]),
]


@pytest.mark.one_in(2)  # the number of deciders is odd, so all parts run
@pytest.mark.parametrize(
    ("drafter", "decider", "drawn"), CASES, ids=lambda value: value if isinstance(value, str) else repr(value)
)
def test_a_text_depends_on_its_own_request_alone(drafter, decider, drawn):
    assert list(leaks(build(drafter, decider, drawn))) == []


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_used_decoder_gives_the_texts_of_a_new_one(drafter):
    """Requests run alone and in every order, also after a greedy batch, whose samples may share a budget."""
    for decider in ("bandit", "cost-aware"):
        used = build(drafter, decider)
        list(leaks(used, [[0, 1, 2]], rounds=2))
        texts(used, [2, 1, 0], do_sample=False)
        new = {sample: texts(build(drafter, decider), [sample])[sample] for sample in range(3)}
        for company in itertools.permutations(range(3)):
            assert texts(used, list(company)) == new


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_other_seeds_give_other_texts_and_drafts_are_accepted(drafter):
    """Otherwise nothing could leak, and the tests above would prove nothing."""
    decoder = build(drafter)
    found, stats = decode(decoder, [0, 1, 2])
    assert (stats.accepted.total() > 0) == (drafter != "nothing")
    others = texts(decoder, [0, 1, 2], [seed + 1 for seed in SEEDS])
    assert any(found[sample] != others[sample] for sample in range(3))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_finished_sample_changes_no_other(drafter):
    decoder = build(drafter, "cost-aware")
    whole = texts(decoder, [0, 1, 2])
    ends = whole[1][2]  # the second sample ends early, the others where they emit that token
    found = texts(decoder, [0, 1, 2], eos_token_id=ends)
    assert len(found[1]) <= 3
    for sample, text in whole.items():
        assert found[sample] == text[: text.index(ends) + 1] if ends in text else text


@pytest.mark.parametrize("drafter", ["lookup", "lookup or model", "early exit"])
def test_threads_share_a_decoder(drafter):
    decoder = build(drafter, "cost-aware")
    expected = texts(decoder, [0, 1, 2])
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda company: texts(decoder, company), [[0], [2, 1], [1, 0], [0, 2], [1]]))
    for some in found:
        assert some == {sample: expected[sample] for sample in some}


@pytest.mark.parametrize("decider", ["bandit", "cost-aware", "few nodes"])
def test_steps_of_fixed_shapes_leak_nothing(decider):
    coupling, topology = (
        ad.Coupling(ad.Fixed(2), ad.TopDown(ad.RecursiveRejection())),
        ad.TreeTopology.from_k_config((2, 2, 1)),
    )
    parts = model(), lookup(), topology, coupling, DECIDERS[decider]()
    assert list(leaks(ad.SpeculativeDecoder(*parts, buckets=(4, 16)))) == []


@pytest.mark.parametrize("drafter", ["lookup or exit", "model"])
def test_row_invariant_kernels_leak_nothing_in_float32(drafter, kernels, monkeypatch):
    native = ad.RaggedModel(tiny(sharpness=2.5, hidden_size=16), kernels="native")
    monkeypatch.setitem(globals(), "model", lambda: native)
    assert list(leaks(build(drafter, "cost-aware"))) == []


@pytest.mark.parametrize(("expected_batch", "drafts"), [(1, True), (64, False)])
def test_sampled_requests_plan_for_the_expected_batch(expected_batch, drafts):
    """Up to 8 rows are free, each further row costs a forward: drafts pay alone, not in a batch of 64."""
    costs = ad.CostTable((1, 8, 9), (1.0, 1.0, 2.0))
    decoder = build("lookup", ad.CostAware(costs), expected_batch=expected_batch)
    assert (decode(decoder, [0, 1, 2])[1].drafted > 0) == drafts
    assert list(leaks(decoder)) == []


# Negative controls: deliberate leaks are caught.


class Counting(Decider):
    """Decides by the number of its calls, of all samples together."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def forward(self, view):
        self.asked += 1
        return [self.asked % 3 > 0] * len(view.paths)


class Moody(Decider):
    """Plans by the number of its plans, of all samples together."""

    can_plan = True

    def __init__(self):
        super().__init__()
        self.asked = 0

    def plan(self, situation):
        self.asked += 1
        return Limits.everything(situation.max_depth, verification=Verification(np.zeros(1 + self.asked % 3), 0.0))


class Gossip(ad.NGramDrafter):
    """Lets all samples of a batch learn together, as earlier versions did."""

    def add(self, state, sample, tokens, handle):
        super().add(state, sample, tokens, handle)
        state.texts[sample].odds = next(iter(state.texts.values())).odds


def decide_together(monkeypatch):
    """Lets whole batches decide and spend together even when they sample, as earlier versions did."""
    monkeypatch.setattr(DraftContext, "pathwise", lambda context, sample: True)


def test_a_decider_that_leaks_would_be_seen():
    assert next(leaks(build("model", Counting()), rounds=3), None)


def test_plans_that_leak_would_be_seen():
    assert next(leaks(build("lookup", Moody()), rounds=3), None)


def test_lookups_that_leak_would_be_seen(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "lookup", lambda: Gossip(longest=3, shortest=1))
    assert next(leaks(build("lookup", "survival"), rounds=20, max_new_tokens=32), None)


@pytest.mark.parametrize("decider", ["cost-aware", "cost-aware, learned", "few nodes"])
def test_batches_that_decide_together_would_be_seen(monkeypatch, decider):
    decide_together(monkeypatch)
    assert next(leaks(build("early exit", decider), rounds=4), None)


def test_noise_of_one_source_would_be_seen(monkeypatch):
    drawn = Noise.of.__func__
    monkeypatch.setattr(Noise, "of", classmethod(lambda cls, own, nodes: drawn(cls, own[:1] * len(own), nodes)))
    assert next(leaks(build("lookup"), [[0, 1, 2], [2, 0]]), None)
