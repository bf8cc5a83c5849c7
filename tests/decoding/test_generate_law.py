"""The law of whole requests: many samples of one prompt, compared with the target's own probabilities."""

import pytest
from support.request_law import BUSH, PAIR, TEXT, few_tokens, fit, small_decoder

import arbordraft as ad
from arbordraft.drafters import planning
from arbordraft.sampling.noise import Noise
from arbordraft.verifiers import KSeq, NodeLaw

LAWFUL = {
    "without replacement, lifted": lambda: small_decoder(
        ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()), BUSH
    ),
    "spechub as in the paper": lambda: small_decoder(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub(order="paper")), PAIR),
    "iid, k-seq": lambda: small_decoder(ad.IID(2), ad.TopDown(KSeq()), BUSH),
    "n-gram": lambda: small_decoder(ad.Fixed(2), ad.TopDown(ad.Matching()), BUSH, ad.NGramDrafter(3, 1)),
    "a draft model with few positions": lambda: small_decoder(
        ad.WithoutReplacement(2),
        ad.Lifted(ad.RecursiveRejection()),
        BUSH,
        ad.LanguageModelDrafter(few_tokens(3, len(TEXT) + 1)),
    ),
    "early exit": lambda: small_decoder(
        ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()), PAIR, ad.EarlyExitDrafter(few_tokens(0), 1)
    ),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_sampling_has_the_law_of_the_target(name):
    assert fit(LAWFUL[name]()) > 1e-3


@pytest.mark.parametrize("name", ["without replacement, lifted", "iid, k-seq"])
def test_a_bound_on_drafts_keeps_the_law(name):
    assert fit(LAWFUL[name](), max_drafts=2) > 1e-3


def test_a_prediction_keeps_the_law():
    assert fit(LAWFUL["n-gram"](), predictions=[[4, 1, 2]] * 1500) > 1e-3


def test_random_trees_that_are_pruned_would_be_seen(monkeypatch):
    """Negative control: the likelier one of two drafts that were drawn at random."""
    monkeypatch.setattr(planning, "_within_bounds", lambda context, drafter, depths: depths)
    assert fit(small_decoder(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()), PAIR), max_drafts=1) < 1e-6


class NoResidual(ad.Matching):
    """Negative control: after a rejection it draws from the target again instead of from the residual."""

    def node_law(self, target, weight, draft, tokens, law):
        found = ad.RecursiveRejection().node_law(target, weight, draft, tokens, law)
        return NodeLaw(found.accept, target * (1 - sum(found.accept)), 0.0)


def test_a_biased_rule_would_be_seen():
    assert fit(small_decoder(ad.WithoutReplacement(2), ad.TopDown(NoResidual()), PAIR)) < 1e-6


def test_noise_used_twice_would_be_seen(monkeypatch):
    """Negative control: a step that repeats the uniforms of the one before it."""
    drawn, first = Noise.of, []

    def again(own, nodes):
        first.append(first[0] if first else drawn(own, nodes))
        return first[0]

    monkeypatch.setattr(Noise, "of", again)
    assert fit(LAWFUL["spechub as in the paper"]()) < 1e-6
