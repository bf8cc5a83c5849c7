"""Every valid pair of law and rule, top-down and lifted, emits exactly the target's law; broken rules do not."""

import pytest
import torch
from scipy.stats import chisquare

import arbordraft as ad
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.sampling.noise import Noise, draw
from arbordraft.testing import (
    ROW_KINDS,
    distance_to_target,
    draft_trees,
    one_tree,
    random_table,
    row,
    target_rows,
    tree_arguments,
)
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Exactness
from arbordraft.verifiers import KSeq, NodeLaw, OptimalTransport, Remembered, Rule, TopTailRule, TypicalAcceptance

EXACT = 1e-12
TOPOLOGIES = {
    "chain": ad.TreeTopology.chain(3),
    "binary": ad.TreeTopology.k_ary(2, 2),
    "fork": ad.TreeTopology.fork(2, 2),
    "uneven": ad.TreeTopology([-1, 0, 0, 1, 2, 2]),
    "sequoia": ad.TreeTopology.sequoia([0.6, 0.3], 6),
    "wide": ad.TreeTopology([-1, 0, 0, 0]),
}
PAIRS = [
    *((ad.IID, (k,), rule) for k in (2, 3) for rule in (ad.RecursiveRejection, KSeq, ad.Matching)),
    *(
        (ad.WithoutReplacement, (k,), rule)
        for k in (2, 3)
        for rule in (ad.RecursiveRejection, TopTailRule, ad.Matching)
    ),
    *((ad.TopTail, (1, 1), rule) for rule in (ad.SpecHub, ad.RecursiveRejection, TopTailRule, ad.Matching)),
    *((ad.TopTail, split, rule) for split in ((1, 2), (2, 1)) for rule in (ad.RecursiveRejection, TopTailRule)),
    *((AdaptiveTopTail, (k, 0.35), rule) for k in (2, 3) for rule in (ad.RecursiveRejection, TopTailRule)),
    *((ad.Fixed, (k,), rule) for k in (2, 3) for rule in (ad.RecursiveRejection, ad.Matching)),
]
PAPER_ORDER = (ad.TopTail, (1, 1), lambda: ad.SpecHub("paper"))
TRANSPORT = [
    (law, arguments, lambda formulation=formulation: OptimalTransport(formulation))
    for law, arguments in ((ad.IID, (2,)), (ad.WithoutReplacement, (2,)), (ad.TopTail, (1, 1)), (ad.Fixed, (2,)))
    for formulation in ("compact", "full")
]


def name_of(value):
    if isinstance(value, tuple) and len(value) == 3:
        law, arguments, rule = value
        return f"{law.__name__}{arguments}-{rule()}".replace(",)", ")").replace(" ", "")
    return None


def widest(topology):
    return max(len(children) for children in topology.child_list)


def fits(topology, pair):
    """Returns whether the law draws as many children as the tree is wide; chains are tried with k = 2 only."""
    k, widest = pair[0](*pair[1]).k, max(len(children) for children in TOPOLOGIES[topology].child_list)
    return widest == k or (k == 2 and widest == 1)


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize(
    ("topology", "pair"),
    [(topology, pair) for topology in TOPOLOGIES for pair in [*PAIRS, PAPER_ORDER] if fits(topology, pair)],
    ids=name_of,
)
def test_exact_rules_emit_the_target(topology, pair, lift):
    law, rule = pair[0](*pair[1]), pair[2]()
    many_trees = topology in ("binary", "sequoia")
    for kind in ("random", "holes") if many_trees else ROW_KINDS:
        verifier = lift(Remembered(rule))
        assert distance_to_target(verifier, TOPOLOGIES[topology], law, random_table(kind, 3)) < EXACT, kind


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize("pair", TRANSPORT, ids=name_of)
def test_optimal_transport_emits_the_target(pair, lift):
    law, verifier = pair[0](*pair[1]), lift(Remembered(pair[2]()))
    for kind in ROW_KINDS:
        assert distance_to_target(verifier, ad.TreeTopology([-1, 0, 0, 1]), law, random_table(kind, 3)) < EXACT, kind


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize("pair", [*PAIRS, PAPER_ORDER], ids=name_of)
def test_consecutive_steps_emit_the_target(pair, lift):
    law, rule = pair[0](*pair[1]), pair[2]()
    for topology in (ad.TreeTopology.chain(2), ad.TreeTopology([-1, 0, 0])):
        for kind in ("random", "holes"):
            verifier = lift(Remembered(rule))
            assert distance_to_target(verifier, topology, law, random_table(kind, 3), steps=2) < EXACT


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize(
    "law", [ad.IID(3), ad.WithoutReplacement(3), ad.TopTail(1, 2), ad.TopTail(2, 1), ad.Fixed(3)], ids=str
)
def test_four_tokens_and_three_children(law, lift):
    for kind in ROW_KINDS:
        verifier = lift(Remembered(ad.RecursiveRejection()))
        assert distance_to_target(verifier, TOPOLOGIES["wide"], law, random_table(kind, 4, seed=1)) < EXACT, kind


# Dynamic trees: a level may be left out for any reason known before its tokens are drawn.


def sure_enough(depth, before):
    """Goes on at depth 1, after a peaked draft row, or if token 0 was drawn."""
    drawn = [before.token(row) for row in before.rows[1:]]
    return depth == 1 or 0 in drawn or any(row.max() > 0.8 for row in tree_arguments(before)[1].values())


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize("pair", PAIRS[:-2], ids=name_of)
def test_trees_that_stop_early_emit_the_target(pair, lift):
    def draft(*arguments):
        return draft_trees(*arguments, goes_on=sure_enough)

    law, topology = pair[0](*pair[1]), ad.TreeTopology([-1, 0, 0, 1, 2, 2])
    for kind in ("random", "peaked"):
        verifier = lift(Remembered(pair[2]()))
        assert distance_to_target(verifier, topology, law, random_table(kind, 3), draft=draft) < EXACT


def test_early_stops_are_exercised():
    trees = draft_trees(TOPOLOGIES["binary"], ad.IID(2), random_table("random", 3), goes_on=sure_enough)
    assert {len(tree.rows) for _, tree in trees} == {3, 7}


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize(
    ("law", "rule"),
    [
        (ad.IID(3), ad.RecursiveRejection),
        (ad.IID(3), KSeq),
        (ad.WithoutReplacement(3), ad.RecursiveRejection),
        (ad.WithoutReplacement(3), OptimalTransport),
        (ad.TopTail(1, 2), TopTailRule),
        (ad.TopTail(1, 1), ad.SpecHub),
        (ad.TopTail(1, 1), OptimalTransport),
    ],
    ids=str,
)
def test_siblings_drawn_last_may_be_given_up(law, rule, lift):

    def draft(*arguments):
        for chance, tree in draft_trees(*arguments):
            tokens, rows = tree_arguments(tree)
            kept = {node: token for node, token in tokens.items() if node < len(tokens) - 1}
            yield chance, one_tree(topology, law, kept, rows)

    topology = ad.TreeTopology([-1] + [0] * law.k)
    for kind in ROW_KINDS:
        verifier = lift(Remembered(rule()))
        assert distance_to_target(verifier, topology, law, random_table(kind, 4), draft=draft) < EXACT, kind


def test_a_decider_that_peeks_is_caught():
    """Dropping an unlikely draft turns (.7, .3) into (.85, .15)."""
    target, draft_row = row(0.7, 0.3), row(0.5, 0.5)

    def draft(*arguments):
        return draft_trees(*arguments, drops=lambda depth, after: after.token(1) == 1)

    verifier = ad.TopDown(ad.RecursiveRejection())
    found = distance_to_target(
        verifier, ad.TreeTopology.chain(1), ad.IID(1), lambda _: (target, draft_row), draft=draft
    )
    assert found == pytest.approx(0.15)
    honest = distance_to_target(verifier, ad.TreeTopology.chain(1), ad.IID(1), lambda _: (target, draft_row))
    assert honest < EXACT


# Negative controls: each breaks one thing that the oracle must see.


class Broken(Rule):
    """A rule given as a plain function of target, weight, draft, tokens and law."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def node_law(self, *arguments):
        return self.function(*arguments)


def residual_frozen(target, weight, draft, tokens, law):
    accept, left = [], 1.0
    for token in tokens:
        ratio = min(1.0, float(target[token] / draft[token]))
        accept.append(left * ratio)
        left *= 1 - ratio
    rest = (target - draft).clamp_min(0)
    return NodeLaw(accept, left * rest / rest.sum(), 0.0)


def wrong_law(target, weight, draft, tokens, law):
    return ad.RecursiveRejection()(target, weight, draft, tokens, ad.IID(law.k))


def certain_taken_for_drawn(target, weight, draft, tokens, law):
    return ad.RecursiveRejection()(target, weight, draft, tokens, ad.WithoutReplacement(law.k))


def stops_with_target(target, weight, draft, tokens, law):
    found = ad.RecursiveRejection()(target, weight, draft, tokens, law)
    return NodeLaw(found.accept, target * found.stop.sum(), found.reject)


def skips_duplicates(target, weight, draft, tokens, law):
    distinct = list(dict.fromkeys(tokens))
    found = ad.RecursiveRejection()(target, weight, draft, distinct, law)
    accept = [found.accept[distinct.index(token)] * (token not in tokens[:i]) for i, token in enumerate(tokens)]
    return NodeLaw(accept, found.stop, found.reject)


def ignores_weight(target, weight, draft, tokens, law):
    return ad.RecursiveRejection()(target, 1.0, draft, tokens, law)


def test_children_without_a_draft_row_are_taken_for_certain():
    """This is lossless for any law: the target's token does not depend on drafts. Fewer drafts are accepted."""

    def draft(*arguments):
        for chance, tree in draft_trees(*arguments):
            yield chance, one_tree(tree.batch.topology, tree.proposal.law, tree_arguments(tree)[0])

    verifier, topology, table = ad.Lifted(ad.RecursiveRejection()), TOPOLOGIES["fork"], random_table("random", 3)
    assert distance_to_target(verifier, topology, ad.WithoutReplacement(2), table, draft=draft) < EXACT


@pytest.mark.parametrize(
    ("law", "function", "lift"),
    [
        (ad.WithoutReplacement(2), residual_frozen, ad.TopDown),
        (ad.WithoutReplacement(2), wrong_law, ad.TopDown),
        (ad.TopTail(1, 1), certain_taken_for_drawn, ad.TopDown),
        (ad.Fixed(2), certain_taken_for_drawn, ad.Lifted),
        (ad.IID(2), stops_with_target, ad.TopDown),
        (ad.IID(2), skips_duplicates, ad.TopDown),
        (ad.WithoutReplacement(2), ignores_weight, ad.Lifted),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_broken_rules_are_caught(law, function, lift):
    found = [
        distance_to_target(lift(Broken(function)), TOPOLOGIES["fork"], law, random_table("random", 3, seed))
        for seed in range(2)
    ]
    assert max(found) > 1e-3


def test_without_replacement_rule_refuses_duplicates():
    with pytest.raises(ValueError, match="drafted with probability 0"):
        ad.RecursiveRejection()(row(1, 1, 2), 1.0, row(2, 1, 1), [0, 0], ad.WithoutReplacement(2))


def test_a_fault_of_the_second_step_is_caught():
    """Draft rows left over from the first step show in two steps, not in one."""
    table = random_table("random", 3)

    def draft(topology, law, table, prefix):
        for chance, tree in draft_trees(topology, law, table, prefix):
            yield chance, one_tree(topology, law, tree_arguments(tree)[0], {0: table(())[1]})

    arguments = ad.TopDown(ad.RecursiveRejection()), ad.TreeTopology.chain(1), ad.IID(1), table
    assert distance_to_target(*arguments, draft=draft) < EXACT
    assert distance_to_target(*arguments, steps=2, draft=draft) > 1e-3


def test_typical_acceptance_is_lossy_and_says_so():
    verifier = TypicalAcceptance()
    assert verifier.exactness == Exactness.LOSSY
    table = random_table("random", 3)
    assert distance_to_target(verifier, TOPOLOGIES["binary"], ad.WithoutReplacement(2), table) > 1e-2


# The float32 path with real noise.


def sampled_joint(reuse_noise, draws=8_000):
    """Returns the p-value of the first two emitted tokens against the target."""
    table = random_table("random", 3, seed=5)
    topology, law, verifier = ad.TreeTopology.k_ary(2, 1), ad.TopTail(1, 1), ad.Lifted(ad.SpecHub())
    counts, generator = torch.zeros(3, 3), Noise.source(1)
    target, draft = (rows.float() for rows in table(()))
    noise = Noise.draw([generator] * draws, topology.num_nodes)
    if reuse_noise:
        noise = Noise(noise.draft, noise.draft, noise.final)
    samples = []
    for uniforms in noise.draft.tolist():
        tokens = law.draw(draft, uniforms[1:])
        samples.append({0: 0, 1: tokens[0], 2: tokens[1]})
    following = [table((token,))[0].float() for token in range(3)]
    rows = torch.stack([r for s in samples for r in (target, following[s[1]], following[s[2]])])
    more = generator.random(draws).tolist()
    tree = DraftTree.of(topology, law, samples, [{0: draft}] * draws)
    verdict = verifier(tree, rows, noise)
    for sample, uniform in enumerate(more):
        emitted = verdict.emitted(tree, sample)
        if len(emitted) == 1:
            emitted.append(draw(following[emitted[0]], uniform))
        counts[emitted[0], emitted[1]] += 1
    expected = draws * target.double()[:, None] * torch.stack(following).double()
    return chisquare(counts.flatten(), expected.flatten() * (draws / expected.sum())).pvalue


def test_sampled_tokens_have_the_law_of_the_target():
    assert sampled_joint(reuse_noise=False) > 1e-3


def test_noise_used_twice_is_caught():
    assert sampled_joint(reuse_noise=True) < 1e-9


def test_sampled_frequencies_equal_enumerated_probabilities():
    """On a grid of uniforms, the frequency of each path equals its probability in the law."""
    table, topology, law = random_table("random", 3, seed=2), ad.TreeTopology.chain(1), ad.IID(1)
    verifier, grid = ad.TopDown(ad.RecursiveRejection()), (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for _, tree in draft_trees(topology, law, table):
        ends = verifier.law(tree, target_rows(tree, table))
        rows = torch.stack(list(target_rows(tree, table).values())).repeat(len(grid), 1)
        accept = grid[:, None].expand(-1, topology.num_nodes)
        tokens, draft_rows = tree_arguments(tree)
        batch = DraftTree.of(topology, law, [tokens] * len(grid), [draft_rows] * len(grid))
        verdict = verifier(batch, rows, Noise(accept, accept, accept))
        found = [batch.node[path].tolist() for path in verdict.paths]
        for share, path, _ in ends:
            nodes = tree.batch.node[path].tolist()
            assert sum(own == nodes for own in found) / len(grid) == pytest.approx(share, abs=1 / len(grid))
