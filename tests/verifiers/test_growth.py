"""Every verifier with every decider that a decoder takes beside it emits the target's law; refused pairs need not."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.models import ragged

import arbordraft as ad
from arbordraft import deciders, verifiers
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.deciders.decisions import Draw, Origin, StepView
from arbordraft.decoding.assemble import assemble
from arbordraft.testing import distance_to_target, draft_trees, random_table
from arbordraft.trees.verdict import Causality
from arbordraft.verifiers import (
    GlobalResolution,
    GreedyMultiPath,
    KSeq,
    OptimalTransport,
    Remembered,
    TopTailRule,
    TreeVerifier,
)

FORK = ad.TreeTopology.fork(2, 3)  # rows depend on drafted tokens from the second level on
SMALL_FORK = ad.TreeTopology.fork(2, 2)
UNEVEN = ad.TreeTopology([-1, 0, 0, 1])
COSTS = StepCosts(CostTable((1, 8), (1.0, 1.4)), CostTable((1, 8), (0.05, 0.1)))


class Surviving(deciders.RowSurvival):
    """Predicts that rows survive as often as they are peaked."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(threshold, hidden_size=0, top_k=2)

    def chances(self, places, statistics, hidden):
        return statistics[:, 1]


def learned() -> deciders.LearnedDecider:
    """Returns a network that trusts peaked rows."""
    decider = deciders.LearnedDecider(top_k=2, threshold=0.5, widths=())
    with torch.no_grad():
        decider.network[0].weight.copy_(torch.tensor([[0.0, 0, 0, 0, 6.0, 0]]))  # of the highest probability
        decider.network[0].bias.fill_(-3.0)
    return decider


DECIDERS: dict[str, Callable[[], deciders.Decider]] = {
    "FixedDepth": lambda: deciders.FixedDepth(1),
    "Heuristic": lambda: deciders.Heuristic(1, 2),
    "AcceptedAverage": lambda: deciders.AcceptedAverage(0.5, 1.0),
    "NodeBudget": lambda: deciders.NodeBudget(3),
    "ConfidenceThreshold": lambda: deciders.ConfidenceThreshold(0.45),
    "EntropyBound": lambda: deciders.EntropyBound(0.65),
    "AdaEDL": lambda: deciders.AdaEDL(0.65),
    "PathSurvival": lambda: deciders.PathSurvival(0.45),
    "RowSurvival": Surviving,
    "LearnedDecider": learned,
    "CostAware": lambda: deciders.CostAware(COSTS),
    "Bandit": lambda: deciders.Bandit([deciders.ConfidenceThreshold(0.45), deciders.FixedDepth(2)]),
    "Bandit of lengths": lambda: deciders.Bandit([deciders.FixedDepth(1), deciders.FixedDepth(2)]),
}
RULES = {
    "RecursiveRejection": (ad.WithoutReplacement(2), ad.RecursiveRejection),
    "Matching": (ad.IID(2), ad.Matching),
    "KSeq": (ad.IID(2), KSeq),
    "SpecHub": (ad.TopTail(1, 1), ad.SpecHub),
    "TopTailRule": (ad.TopTail(1, 1), TopTailRule),
    "GlobalResolution": (ad.IID(2), GlobalResolution),
    "OptimalTransport": (ad.IID(2), OptimalTransport),
}
VERIFIERS = {
    f"{lift.__name__}({name})": (law, partial(lambda lift, rule: lift(Remembered(rule())), lift, rule))
    for lift in (ad.TopDown, ad.Lifted)
    for name, (law, rule) in RULES.items()
} | {"GreedyMultiPath": (ad.IID(2), GreedyMultiPath)}


def view_of(depth, tree, memory):
    """Returns the view of a decider before the level below ``depth`` is drawn."""
    origins = {}

    def draws(row):
        path = []
        while row != tree.root:
            parent = int(tree.batch.parent[row])
            probs = tree.drawn_from(parent)
            origin = origins.setdefault(parent, Origin(lambda probs=probs: probs))
            path.append(Draw(probs[tree.token(row)].item(), origin))
            row = parent
        return path[::-1]

    rows = [row for row in tree.rows if tree.batch.depth[row] == depth]
    return StepView(depth, [[draws(row) for row in rows]], [memory], planned=len(tree.rows))


def distance(verifier, law, decider, topology, steps, kind, seed=0):
    def goes_on(depth, tree):
        return decider(view_of(depth - 1, tree, decider.start()))[0]

    draft = partial(draft_trees, goes_on=goes_on)
    return distance_to_target(verifier, topology, law, random_table(kind, 2, seed), steps, draft)


def refusal(name, decider):
    """Returns why a decoder refuses the pair; ``None`` if it takes it."""
    law, make = VERIFIERS[name]
    target = ragged()
    try:
        assemble(target, ad.LanguageModelDrafter(target), FORK, ad.Coupling(law, make()), DECIDERS[decider]())
    except ValueError as error:
        return str(error)
    return None


PAIRS = [(verifier, decider) for verifier in VERIFIERS for decider in DECIDERS]


def test_the_tables_hold_every_verifier_and_decider():
    exact = {
        name
        for name, kind in vars(verifiers).items()
        if inspect.isclass(kind) and issubclass(kind, TreeVerifier | verifiers.Rule) and kind.exactness.lossless
    }
    exact -= {"TreeVerifier", "RuleVerifier", "Rule", "Remembered", "SharedMatching", "TopDown", "Lifted"}
    assert exact == {*RULES, "GreedyMultiPath"}
    assert {*deciders.__all__} - {"Decider"} <= {*DECIDERS}


@pytest.mark.parametrize(("verifier", "decider"), PAIRS)
def test_pairs_that_decoders_take_emit_the_target(verifier, decider):
    if reason := refusal(verifier, decider):
        assert "looks at" in reason
        assert DECIDERS[decider]().growth > VERIFIERS[verifier][1]().growth
        return
    law, make = VERIFIERS[verifier]
    for kind, seed in (("random", 7), ("peaked", 1), ("holes", 2)):
        assert distance(make(), law, DECIDERS[decider](), FORK, 1, kind, seed) < 1e-12
    smaller = SMALL_FORK if verifier == "GreedyMultiPath" else UNEVEN
    assert distance(make(), law, DECIDERS[decider](), smaller, 2, "random") < 1e-12


@pytest.mark.parametrize("decider", [name for name, make in DECIDERS.items() if make().growth is Causality.CAUSAL])
def test_refused_pairs_change_the_law(decider):
    """Negative control: the length of all paths tells how many of them are alike."""
    decide, law = DECIDERS[decider](), ad.IID(2)
    assert max(distance(GreedyMultiPath(), law, decide, FORK, 1, "random", seed) for seed in range(7, 15)) > 1e-3


def test_decisions_that_are_overridden_count_as_causal():
    class Peeking(deciders.FixedDepth):
        can_plan = False

        def forward(self, view):
            return [max(nodes) > 0.5 for nodes in view.confidence]

    class Stated(Peeking):
        growth = Causality.FIXED

        def forward(self, view):
            return [view.depth < 1 for _ in view.paths]

    target = ragged()
    coupling = ad.Coupling(ad.IID(2), GreedyMultiPath())
    with pytest.raises(ValueError, match=r"Peeking.* looks at drafted tokens, but GreedyMultiPath"):
        assemble(target, ad.LanguageModelDrafter(target), FORK, coupling, Peeking())
    assemble(target, ad.LanguageModelDrafter(target), FORK, coupling, Stated())


def test_a_first_drafter_that_draws_at_random_is_refused():
    """Whether its tree is replaced would depend on the tokens that it drew."""
    target = ragged()
    first, otherwise = ad.LanguageModelDrafter(ragged(seed=3)), ad.LanguageModelDrafter(target)
    hybrid = ad.HybridDrafter(first, otherwise)
    with pytest.raises(ValueError, match="the choice between two drafters would depend on them"):
        assemble(target, hybrid, FORK, ad.Coupling.of(ad.IID(2)))
    assemble(target, hybrid, FORK, ad.Coupling.shared(2))
    assemble(target, ad.HybridDrafter(ad.NGramDrafter(), otherwise), FORK, ad.Coupling.of(ad.IID(2)))
