"""Outcomes of a step's drafts, as deciders receive them."""

import pytest
from support.models import decode, ragged

import arbordraft as ad
from arbordraft.deciders import FixedDepth
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Outcome, Verdict

SHAPE = ad.TreeTopology.from_k_config((2, 1, 1))  # 1 and 2 below the root, 3 and 4 below these, then 5 and 6
CHANCES = {1: 0.5, 2: 0.25, 3: 0.75, 5: 0.125}


@pytest.mark.parametrize(
    ("alive", "path", "outcome"),
    [
        ((), (), Outcome(0, 0, ())),
        ((1,), (), Outcome(1, 0, (0.5,))),
        ((1,), (1,), Outcome(1, 1, (0.5,))),
        ((1, 2), (), Outcome(1, 0, (0.75,))),
        ((1, 2, 3), (), Outcome(2, 0, (0.75,))),
        ((1, 2, 3), (1,), Outcome(2, 1, (0.75, 0.75))),
        ((1, 2, 3), (1, 3), Outcome(2, 2, (0.75, 0.75))),
        ((1, 2, 3), (2,), Outcome(2, 1, (0.75,))),
        ((1, 2, 3, 5), (2,), Outcome(3, 1, (0.75,))),
        ((1, 2, 3, 5), (1, 3, 5), Outcome(3, 3, (0.75, 0.75, 0.125))),
        ((1, 2, 3, 4), (2,), Outcome(2, 1, (0.75, 0.0))),
    ],
    ids=str,
)
def test_outcomes(alive, path, outcome):
    """An outcome states, for the root and every accepted node with children, the chance that a child is accepted."""
    tokens = {0: 7} | {node: 10 + node for node in alive}
    tree = DraftTree.of(SHAPE, ad.Fixed(2), [None, tokens], chances=[None, CHANCES], source="Model")
    verdict = Verdict.of(tree, {1: (list(tokens).index((0, *path)[-1]), 9)})
    assert verdict.outcome(tree, 1) == outcome._replace(source="Model")


class Listening(FixedDepth):
    """Drafts everything and keeps the outcomes of each sample."""

    def __init__(self):
        super().__init__()
        self.told = []

    def start(self):
        self.told.append([])
        return self.told[-1]

    def learn(self, memory, outcome):
        memory.append(outcome)


DRAFTERS = {
    "nothing": (ad.NoDrafter, {""}),
    "lookup": (lambda: ad.NGramDrafter(3, 1), {"NGramDrafter"}),
    "early exit": (lambda: ad.EarlyExitDrafter(ragged(), 1), {"EarlyExitDrafter"}),
    "model": (lambda: ad.LanguageModelDrafter(ragged(seed=3)), {"LanguageModelDrafter"}),
    "hybrid": (
        lambda: ad.HybridDrafter(ad.NGramDrafter(3, 1), ad.LanguageModelDrafter(ragged(seed=3))),
        {"NGramDrafter", "LanguageModelDrafter"},
    ),
}


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.5}], ids=["0", "0.5"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_decoder_reports_every_outcome(name, settings):
    make, sources = DRAFTERS[name]
    decider = Listening()
    topology = ad.TreeTopology.chain(0) if name == "nothing" else SHAPE
    decoder = ad.SpeculativeDecoder(ragged(), make(), topology, ad.Coupling.shared(max(1, topology.width)), decider)
    _, stats = decode(decoder, max_new_tokens=24, **settings)
    assert [len(told) for told in decider.told] == stats.forwards
    outcomes = [outcome for told in decider.told for outcome in told]
    assert {outcome.source for outcome in outcomes if outcome.drafted} <= sources
    assert sources == {""} or {outcome.source for outcome in outcomes if outcome.drafted} == sources
    assert sum(outcome.accepted for outcome in outcomes) == stats.accepted.total()
    for outcome in outcomes:
        assert 0 <= outcome.accepted <= outcome.drafted <= 3
        assert outcome.accepted <= len(outcome.stated) <= outcome.accepted + 1
        assert all(0 <= stated <= 1 + 1e-6 for stated in outcome.stated)
    assert name == "nothing" or any(0 < stated < 1 for outcome in outcomes for stated in outcome.stated)
