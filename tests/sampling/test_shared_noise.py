"""Sampling with noise that target and drafter share: the law is right, and texts do not depend on drafts."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chi2
from support.models import PROMPTS, generated, left_padded, ragged
from support.request_law import BUSH, FEW, PAIR, few_tokens, fit, small_decoder
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import arbordraft as ad
from arbordraft import builders
from arbordraft.deciders import CostAware, Decider, NodeBudget
from arbordraft.kernels.gumbel.reference import gumbel_of
from arbordraft.sampling.drawn_rows import DrawnRows
from arbordraft.sampling.laws import AdaptiveTopTail, SharedNoise
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, Proposal
from arbordraft.trees.verdict import Causality
from arbordraft.verifiers import KSeq, SharedMatching, TypicalAcceptance

# Valid couplings


@pytest.mark.parametrize(
    "verifier",
    [
        ad.TopDown(ad.Matching()),
        ad.TopDown(ad.RecursiveRejection()),
        ad.Lifted(ad.RecursiveRejection()),
        ad.TopDown(KSeq()),
        TypicalAcceptance(),
    ],
    ids=str,
)
def test_no_other_verifier_takes_shared_noise(verifier):
    with pytest.raises(ValueError, match=r"depend on the target's noise: .* Only SharedMatching\(\) is valid"):
        ad.Coupling(SharedNoise(2), verifier)


@pytest.mark.parametrize("law", [ad.IID(2), ad.WithoutReplacement(2), ad.TopTail(1, 1), AdaptiveTopTail(2)], ids=str)
def test_no_law_with_noise_of_its_own_is_matched(law):
    with pytest.raises(ValueError, match=r"seldom are: take SharedNoise\(k\) or Fixed\(k\)"):
        ad.Coupling(law, SharedMatching())


def test_noise_of_the_other_kind_is_refused():
    tree = DraftTree.of(ad.TreeTopology.chain(1), SharedNoise(1), [{0: 1, 1: 2}])
    rows, uniforms = torch.full((2, 4), 0.25), torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match="noise must be of type GumbelNoise"):
        ad.Coupling.shared()(tree, rows, Noise(uniforms, uniforms, uniforms))
    with pytest.raises(TypeError, match="noise must be of type Noise"):
        ad.Coupling.matching()(tree, rows, GumbelNoise([SharedSource(1)], [1]))
    with pytest.raises(TypeError, match="has no law given the drafts"):
        SharedMatching().law(tree[0], rows)


@pytest.mark.parametrize(
    "processor",
    [None, TopKLogitsWarper(4), TopKLogitsWarper(9), TopPLogitsWarper(0.5, filter_value=-9.0)],
    ids=["none", "top 4", "top 9", "top p"],
)
def test_a_row_without_tokens_is_refused(processor):
    noise, scores = GumbelNoise([SharedSource(1)], [3]), torch.full((1, 5), -torch.inf)
    assert noise.draw(scores, None, [(0, 0)]) == [-1]
    tree = DraftTree.roots(ad.TreeTopology.chain(0), [1], Proposal(SharedNoise(1)))
    rows = SoftmaxRows(scores)
    if processor is not None:
        pipeline = LogitsPipeline([processor])
        rows = SoftmaxRows(
            scores,
            lambda taken, rows: pipeline(taken, lambda row: []),
            lambda taken, rows: pipeline.trimmed(taken, lambda row: []),
        )
    with pytest.raises(ValueError, match="no token has any probability; check the processors"):
        ad.Coupling.shared()(tree, rows, noise)


@pytest.mark.parametrize(
    "processors",
    [
        [TopPLogitsWarper(0.8)],
        [TopKLogitsWarper(4)],
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
        [TopPLogitsWarper(0.5, filter_value=-9.0)],
    ],
    ids=["top-p", "top-k", "all", "not dropped"],
)
def test_draws_need_not_sort_to_truncate(processors, monkeypatch):
    """Rows have few distinct scores, so that top-k and top-p cut at ties."""
    generator, pipeline = torch.Generator().manual_seed(0), LogitsPipeline(processors)
    logits = torch.randn(400, 50, generator=generator).mul(2).bfloat16().mul(4).round().div(4)
    places = [(row, 0) for row in range(400)]
    noise = GumbelNoise([SharedSource(seed) for seed in range(400)], [0] * 400)
    written = SoftmaxRows(logits, lambda taken, rows: pipeline(taken, lambda row: []))
    expected = written.draw(range(400), noise, places)
    sorted_rows = []
    for module in ("processors", "rows"):
        monkeypatch.setattr(f"arbordraft.sampling.{module}.truncate", lambda one, scores: cut(one, sorted_rows, scores))
    lazy = SoftmaxRows(logits, written.scores_of, lambda taken, rows: pipeline.trimmed(taken, lambda row: []))
    assert lazy.draw(range(400), noise, places) == expected
    plain = SoftmaxRows(logits).draw(range(400), noise, places)
    assert plain != expected or processors[-1].filter_value != -torch.inf
    assert 0 < sum(sorted_rows) < 1200


def cut(processor, sorted_rows, scores):
    sorted_rows.append(len(scores))
    return processor(scores.new_zeros(len(scores), 1, dtype=torch.long), scores)


# The law: argmax(log p + g) has law p


def chance_of_winning(target, gumbel):
    """Returns each token's probability to have the highest perturbed score.

    It is the integral over the token's own noise; the other tokens stay below its value by the law of a Gumbel.
    """
    scores = np.log(target)

    def integrand(y, token):
        value = scores[token] + gumbel(y)
        return np.exp(-np.exp(np.delete(scores, token) - value).sum())

    return [quad(integrand, 0, 1, (token,), epsabs=1e-13, epsrel=1e-13, limit=400)[0] for token in range(len(target))]


def defined_gumbel(y):
    """Returns the noise of the words that represent the uniform ``y``."""
    upper = np.floor(y * 2.0**32)
    return gumbel_of(np.array([upper]), np.array([(y * 2.0**32 - upper) * 2.0**32 - 0.5]), np)[0]


@pytest.mark.parametrize(
    "target", [[0.5, 0.5], [0.9, 0.1], [0.2, 0.3, 0.5], [0.7, 0.1, 0.15, 0.05], [1e-4, 0.9999]], ids=str
)
def test_the_highest_perturbed_token_has_the_law_of_the_target(target):
    assert np.abs(np.array(chance_of_winning(target, defined_gumbel)) - target).max() < 1e-12


def test_noise_of_another_scale_would_be_seen():
    """Negative control: the noise is scaled by 1.001."""
    found = chance_of_winning([0.7, 0.3], lambda y: 1.001 * defined_gumbel(y))
    assert abs(found[0] - 0.7) > 1e-5


# Whole decoders: two and three tokens jointly, with top-p, in a batch


LAWFUL = {
    "draft model": lambda: small_decoder(SharedNoise(2), SharedMatching(), BUSH),
    "n-gram": lambda: small_decoder(ad.Fixed(2), SharedMatching(), BUSH, ad.NGramDrafter(3, 1)),
    "early exit": lambda: small_decoder(SharedNoise(2), SharedMatching(), PAIR, ad.EarlyExitDrafter(few_tokens(0), 1)),
    "lookup else model": lambda: small_decoder(
        SharedNoise(2),
        SharedMatching(),
        BUSH,
        ad.HybridDrafter(ad.NGramDrafter(3, 3), ad.LanguageModelDrafter(few_tokens(3))),
    ),
    "budget": lambda: builders.eagle2(few_tokens(0), few_tokens(3), 3),
    "cost-aware": lambda: builders.cost_aware(
        few_tokens(0), few_tokens(3), 3, costs=ad.CostTable((1, 10_000), (1.0, 3.0))
    ),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_sampling_has_the_law_of_the_target(name):
    assert fit(LAWFUL[name]()) > 1e-3


@contextmanager
def other_keys(monkeypatch, keys):
    """Replaces the seeds and positions of draws; ``keys`` also gets their depths and the number of the call."""
    kept, calls = GumbelNoise.keys, []

    def changing(draw):
        def changed(*arguments):
            calls.append(None)

            def changed_keys(self, places, *_):
                seeds, positions = kept(self, places)
                return keys(seeds, positions, torch.tensor([depth for _, depth in places]), len(calls))

            with monkeypatch.context() as inner:
                inner.setattr(GumbelNoise, "keys", changed_keys)
                return draw(*arguments)

        return changed

    with monkeypatch.context() as patch:
        for owner in (GumbelNoise, DrawnRows):  # draws of the target; drafters read noise elsewhere
            patch.setattr(owner, "draw", changing(owner.draw))
        yield


BROKEN_LAW = {
    "keyed by the node": lambda seeds, positions, depths, call: (seeds, depths),
    "the same at every position": lambda seeds, positions, depths, call: (seeds, positions * 0),
    "used again after a rejection": lambda seeds, positions, depths, call: (
        seeds,
        torch.where(depths == 0, positions - 1, positions).clamp(min=8),
    ),
}


@pytest.mark.parametrize("name", BROKEN_LAW)
def test_a_wrong_key_would_be_seen_in_the_law(monkeypatch, name):
    with other_keys(monkeypatch, BROKEN_LAW[name]):
        assert fit(LAWFUL["draft model"]()) < 1e-6


def test_one_number_for_all_tokens_would_be_seen(monkeypatch):
    """Negative control: equal noise for all tokens cannot decide between siblings."""
    monkeypatch.setattr("arbordraft.sampling.noise.gumbel_argmax", lambda scores, *_: scores.argmax(-1))
    monkeypatch.setattr(DrawnRows, "draw", lambda self, rows, *_: self.logits[list(rows)].argmax(-1).tolist())
    assert fit(LAWFUL["draft model"]()) < 1e-6


def first_tokens(seeds):
    output = builders.plain(few_tokens(0)).generate(
        torch.tensor([[1, 2, 3]] * len(seeds)),
        do_sample=True,
        top_k=0,
        max_new_tokens=1,
        eos_token_id=None,
        seeds=seeds,
    )
    return output[:, 3]


def test_seeds_are_independent():
    """Tests neighbouring seeds, as in requests: pairs of tokens occur as often as their marginals predict."""
    tokens = first_tokens(list(range(4000)))
    pairs = torch.zeros(FEW, FEW)
    pairs.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1), accumulate=True)
    expected = pairs.sum(1, keepdim=True) * pairs.sum(0) / pairs.sum()
    kept = expected > 0
    statistic = ((pairs - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert chi2.sf(statistic, (FEW - 1) ** 2) > 1e-3
    assert len(first_tokens([7] * 50).unique()) == 1  # negative control: samples that share their noise


# The path: the text is that of plain decoding for all drafts


@cache
def plain_texts(temperature, top_p, penalty, seed, count=12):
    return texts(
        ad.SpeculativeDecoder(ragged(), ad.NoDrafter()), range(len(PROMPTS)), temperature, top_p, penalty, seed, count
    )


def texts(decoder, order, temperature, top_p, penalty, seed, count=12):
    prompts = [PROMPTS[sample] for sample in order]
    found, _ = generated(
        decoder,
        prompts,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=top_p,
        repetition_penalty=penalty,
        max_new_tokens=12,
        seeds=[2**64 - 1 - seed - sample for sample in order],
    )
    return dict(zip(order, found, strict=True))


class Peeking(Decider):
    """Stops by drafted tokens that are not verified yet: by the parity of the likely ones."""

    growth = Causality.ANTICIPATING

    def forward(self, view):
        return [sum(path[-1].probability > 0.3 for path in nodes if path) % 2 == 0 for nodes in view.paths]


@cache
def drafter(name):
    model = {
        "model": lambda: ad.LanguageModelDrafter(ragged(seed=3)),
        "same model": lambda: ad.LanguageModelDrafter(ragged()),
        "exit": lambda: ad.EarlyExitDrafter(ragged(), layers=1),
        "n-gram": lambda: ad.NGramDrafter(longest=3, shortest=1),
        "hybrid": lambda: ad.HybridDrafter(ad.NGramDrafter(2, 2), ad.LanguageModelDrafter(ragged(seed=3))),
    }
    return model[name]()


@st.composite
def decoders(draw):
    parents = [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 9)))]
    topology = ad.TreeTopology([-1, *sorted(parents)])
    law = draw(st.sampled_from([SharedNoise, ad.Fixed]))(max(topology.width, 1))
    table = ad.CostTable([1, 4, 64], [1.0, 1.5, 30.0])
    decider = draw(st.sampled_from([None, Peeking(), NodeBudget(3), CostAware(table), CostAware(table, nodes=2)]))
    name = draw(st.sampled_from(["model", "same model", "exit", "n-gram", "hybrid"]))
    return ad.SpeculativeDecoder(ragged(), drafter(name), topology, ad.Coupling(law, SharedMatching()), decider)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    decoders(),
    st.permutations(range(len(PROMPTS))),
    st.integers(1, len(PROMPTS)),
    st.sampled_from([(0.3, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.8, 1.0), (2.0, 0.95, 1.3)]),
    st.integers(0, 3),
)
def test_the_text_is_that_of_plain_decoding(decoder, order, batch, request_, seed):
    """The text does not depend on tree, drafter, decider and batch."""
    expected = plain_texts(*request_, seed)
    for sample, tokens in texts(decoder, order[:batch], *request_, seed).items():
        assert tokens == expected[sample]


BROKEN_PATH = {
    "keyed by the step": lambda seeds, positions, depths, call: (seeds, positions * 0 + call),
    "keyed by the node": lambda seeds, positions, depths, call: (seeds, depths),
    "keyed by the step and the node": lambda seeds, positions, depths, call: (seeds, depths + 100 * call),
    "keyed by the size of the batch": lambda seeds, positions, depths, call: (seeds, positions + len(seeds)),
}


@pytest.mark.parametrize("name", BROKEN_PATH)
def test_a_wrong_key_would_be_seen_in_the_text(monkeypatch, name):
    """Negative control: the text depends on the drafts."""
    decoder = ad.SpeculativeDecoder(ragged(), drafter("same model"), BUSH, ad.Coupling.shared(2))
    with other_keys(monkeypatch, BROKEN_PATH[name]):
        plain = texts(ad.SpeculativeDecoder(ragged(), ad.NoDrafter()), [0], 1.0, 1.0, 1.0, 0)
        drafted = texts(decoder, [0, 1, 2], 1.0, 1.0, 1.0, 0)
    assert plain[0] != drafted[0]


def test_shared_drafts_are_the_tokens_that_the_target_will_draw():
    """A drafter that has the target's rows is always right, at any temperature."""
    decoder = ad.SpeculativeDecoder(ragged(), drafter("same model"), ad.TreeTopology.chain(3), ad.Coupling.shared())
    _, output = generated(decoder, do_sample=True, max_new_tokens=12)
    assert output.stats.accepted.total() == output.stats.drafted


def test_shared_noise_is_the_default_for_trees_and_lookups_but_not_for_chains():
    target, draft = ragged(), ragged(seed=3)
    shared = {
        "tree": ad.SpeculativeDecoder(target, draft),
        "cost_aware": builders.cost_aware(target, draft),
        "eagle2": builders.eagle2(target, draft),
        "lookup else tree": builders.cost_aware(target, draft, lookup=True),
        "lookups": ad.SpeculativeDecoder(target, ad.NGramDrafter()),
        "plain": builders.plain(target),
    }
    for decoder in shared.values():
        assert decoder.coupling.exactness == "pathwise"
        assert decoder.equality_report().equality in ("pathwise", "fp32 tokens")
    assert ad.SpeculativeDecoder(target, draft, ad.TreeTopology.chain(4)).coupling.exactness == "exact"


def test_without_seeds_the_generator_of_torch_decides():
    decoder, request_ = builders.cost_aware(ragged(), ragged(seed=3)), {"do_sample": True, "max_new_tokens": 8}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(decoder.generate(**left_padded(PROMPTS), **request_))
    assert torch.equal(found[0], found[1])
    assert found[0].shape != found[2].shape or not torch.equal(found[0], found[2])
