"""The growth rule of draft trees: C++, recorded drafts and the host's grower decide like the arrays, row for row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import context, grown

from arbordraft import Fixed, TreeTopology
from arbordraft.decoding.static.cache import Memory
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.drafters import Drafter
from arbordraft.drafters.network import Outputs
from arbordraft.kernels.draft_tree import Limits, TreesToGrow, draft_from_rows, reference
from arbordraft.kernels.draft_tree.reference import fits, gains, growing, reach_below
from arbordraft.kernels.prepacked_linear import prepack
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.trees.forest import Forest

VOCAB, RANK, TURNS = 24, 16, 500


def any_topology(random):
    """Draws a topology; nodes of a level need not be in the order of their parents."""
    levels = [[0]]
    parents = [-1]
    for _ in range(random.integers(1, 5)):
        above = random.choice(levels[-1], size=random.integers(1, 7)).tolist()
        levels.append(list(range(len(parents), len(parents) + len(above))))
        parents += above
    return TreeTopology(parents)


def any_roots(random):
    """Draws the roots of one to three samples, beside one that takes no part or none."""
    roots = random.integers(0, VOCAB, random.integers(1, 4)).tolist()
    if random.random() < 0.5:
        roots.insert(random.integers(0, len(roots) + 1), None)
    return roots


def any_scores(random, *shape):
    scores = random.normal(size=shape) * 4
    if random.random() < 0.4:
        scores = scores.round()  # many ties
    return torch.from_numpy(scores).float()


def planted(topology, roots, limits):
    forest = Forest.of_roots(topology, roots, [None] * len(roots))
    forest.reach[:, 0] = limits.weight
    return forest


def to_grow(forest, limits):
    topology, slots = forest.topology, np.flatnonzero(forest.token[:, 0] >= 0).tolist()
    return TreesToGrow(forest, slots, topology.child_offsets, topology.child_order, limits)


def everything(topology, roots):
    weight = np.array([-1.0 if root is None else 1.0 for root in roots])
    return replace(Limits.everything([topology.max_depth] * len(roots)), weight=weight)


def any_limits(random, topology, roots, chances):
    """Draws limits; a price may equal the reach of a node exactly, and many nodes may have equal reach."""
    samples, known = len(roots), int(random.integers(1, topology.max_depth + 2))
    plain = random.random() < 0.4
    calibration, expected = np.ones((2, samples, known)) if plain else random.uniform(0, 2.5, (2, samples, known))
    weight = np.ones(samples) if plain else random.uniform(0.2, 1, samples)
    inner = topology.inner[1] if topology.max_depth > 1 else []
    some = max(chances[:, random.choice(inner or [1])])  # chances of a sample that takes no part are 0
    return Limits(
        random.integers(0, topology.max_depth + 1, samples),
        calibration,
        expected,
        np.where([root is None for root in roots], -1.0, weight),
        level_cost=float(random.choice([0, 0, random.uniform(0, 1), 1 - some])),
        row_cost=float(random.choice([0, random.uniform(0, 0.6), some])),
        budget=int(random.choice([-1, -1, 1, 3, 5, 40])),
    )


def by_the_rule(topology, roots, limits, draw, change=None):
    """Grows trees by the rule, of which ``change`` replaces a function.

    ``draw`` takes the n nodes of a depth that may have children, and their ``[S, n]`` tokens. It returns the
    ``[S, n, k]`` tokens of their children, the best one first, and their draft probabilities.
    """
    forest = planted(topology, roots, limits)
    with pytest.MonkeyPatch.context() as patched:
        for name, other in (change or {}).items():
            patched.setattr(reference, name, other)
        for depth, level in enumerate(topology.tree_levels):
            going = reference.going(forest, limits, level, depth)
            drawn = draw(level.inner.tolist(), forest.token[:, level.inner])
            reference.add(forest, limits, level, depth, going, *drawn)
    return forest


def from_table(table, width):
    """Returns a function that draws the best tokens by the parents' tokens alone."""

    def draw(nodes, above):
        found, likely = tree_expand(table[torch.from_numpy(above.clip(0))].flatten(0, 1), width(nodes))
        return (part.unflatten(0, above.shape).numpy() for part in (found, likely.exp().double()))

    return draw


def columns(forest):
    return forest.token, forest.chance, forest.reach


def native_case(seed, change=None):
    """Grows trees in the C++ kernel and, from the same children, by the rule."""
    random = np.random.default_rng(seed)
    topology, roots = any_topology(random), any_roots(random)
    samples, depth, options = sum(root is not None for root in roots), topology.max_depth, {}
    if random.random() < 0.5:  # rows depend on the parents' tokens
        options = {
            "table": any_scores(random, VOCAB, RANK) * 0.3,
            "correction": prepack(any_scores(random, VOCAB, RANK) * 0.3),
            "gates": torch.ones(samples, depth, RANK),
        }
    scores = any_scores(random, samples, depth, VOCAB)

    def native(limits):
        forest = planted(topology, roots, limits)
        assert not draft_from_rows(scores, to_grow(forest, limits), **options)
        return forest

    full = native(everything(topology, roots))

    def draw(nodes, above):
        assert np.array_equal(above[above >= 0], full.token[:, nodes][above >= 0])
        width = max(len(topology.child_list[node]) for node in nodes)
        drawn, likely = np.full((len(roots), len(nodes), width), -1), np.zeros((len(roots), len(nodes), width))
        for place, node in enumerate(nodes):
            for rank, child in enumerate(topology.child_list[node]):
                drawn[:, place, rank], likely[:, place, rank] = full.token[:, child], full.chance[:, child]
        return drawn, likely

    limits = any_limits(random, topology, roots, full.chance)
    return columns(native(limits)), columns(by_the_rule(topology, roots, limits, draw, change))


class Lookup:
    """Network whose scores depend on the token alone."""

    device, dtype, states, vocab_size, vocabulary = torch.device("cpu"), torch.float32, 0, VOCAB, None

    def __init__(self, table):
        self.table = table

    def run(self, tokens, hidden, positions, ragged, rows=None):
        return Outputs(self.table[tokens if rows is None else tokens[rows]])


def recorded_case(seed, change=None):
    """Grows trees in a draft of fixed shapes and, from the same scores, by the rule."""
    random = np.random.default_rng(seed)
    topology, roots = any_topology(random), any_roots(random)
    network = Lookup(any_scores(random, VOCAB, VOCAB))
    draw = from_table(network.table, lambda nodes: max(len(topology.child_list[node]) for node in nodes))
    full = by_the_rule(topology, roots, everything(topology, roots), draw)
    limits = any_limits(random, topology, roots, full.chance)
    forest = planted(topology, roots, limits)
    trees = to_grow(forest, limits)
    slots = trees.slots
    bucket = DraftBucket(4, 2, max(1, *limits.levels[slots].tolist()))
    table = torch.zeros(bucket.size, dtype=torch.int64)
    lacking = [([roots[slot]] * int(random.integers(1, 3)), None) for slot in slots]
    bucket.fill(table, lacking, [(9 * sample, 3) for sample in range(len(slots))], trees, [99] * (4 - len(slots)))
    step = DraftStep(network, topology, bucket, shared=False, longest=64)
    tokens, chances = step(table, torch.zeros(0, 0), Memory([]))[:, : len(slots)].numpy()
    forest.token[slots, : tokens.shape[1]], forest.chance[slots, : tokens.shape[1]] = tokens, chances
    reference.reached(forest, limits, topology.tree_levels, slots)
    return columns(forest), columns(by_the_rule(topology, roots, limits, draw, change))


class Table(Drafter):
    """Drafts level by level from a table that has a row of scores for each token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def scores(self, state, frontier):
        return self.table[frontier.tokens]


def host_case(seed, change=None, trim=False):
    """Grows trees level by level in the grower of all drafters and, from the same scores, by the rule.

    The grower keeps the drafts beyond the budget unless it may ``trim``.
    """
    random = np.random.default_rng(seed)
    topology, roots = any_topology(random), any_roots(random)
    table = any_scores(random, VOCAB, VOCAB)
    draw = from_table(table, lambda nodes: topology.width)
    full = by_the_rule(topology, roots, everything(topology, roots), draw)
    limits = any_limits(random, topology, roots, full.chance)
    living = [sample for sample, root in enumerate(roots) if root is not None]
    arrays = {name: getattr(limits, name)[living] for name in ("levels", "calibration", "expected", "weight")}
    depths = [None if root is None else topology.max_depth for root in roots]
    step = context([[root or 0] for root in roots], topology, Fixed(topology.width), greedy=True, max_depth=depths)
    with pytest.MonkeyPatch.context() as patched:
        if not trim:
            patched.setattr(reference, "number_kept", lambda reach, *price: len(reach))
        tree = grown(Table(table), None, step, plan=lambda situation: replace(limits, **arrays))
    tokens, chances = np.full((len(roots), topology.num_nodes), -1), np.zeros((len(roots), topology.num_nodes))
    tokens[tree.owner, tree.node], chances[tree.owner, tree.node] = tree.token, tree.chance
    expected = by_the_rule(topology, roots, limits, draw, change)
    if trim and limits.budget >= 0:
        drafts = [(-expected.reach[s, n], n, s) for s, n in np.argwhere(expected.token >= 0).tolist() if n]
        for _, node, sample in sorted(drafts)[limits.budget :]:
            expected.token[sample, node], expected.chance[sample, node] = -1, 0
    return (tokens, chances), (expected.token, expected.chance)


CASES = {"native": native_case, "recorded": recorded_case, "host": host_case}


def differ(found, expected):
    return any(not np.array_equal(own, other) for own, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", CASES)
def test_trees_are_those_of_the_rule(kernels, kind):
    count = 0
    for seed in range(TURNS):
        found, expected = CASES[kind](seed)
        assert not differ(found, expected), seed
        count += (expected[0][:, 1:] >= 0).sum()
    assert count > 500


def test_the_likeliest_drafts_within_the_budget_are_kept():
    """Smaller nodes come first among equally likely ones, then smaller samples."""
    assert not any(differ(*host_case(seed, trim=True)) for seed in range(TURNS))
    assert any(differ(host_case(seed, trim=True)[0], host_case(seed)[0]) for seed in range(TURNS))


def no_clip(reach, calibration, chance):
    return reach * calibration * chance


def strict(gain, able, level_cost, group=None, whole=False):
    going = able & (gain > 0)
    return going & ((gain * going).sum(keepdims=True) >= level_cost)


def one_by_one(gain, able, level_cost, group=None, whole=False):
    return growing(gain, able, level_cost, np.arange(len(gain)), whole)


CONTROLS = {
    "calibration beyond all bounds": {"reach_below": no_clip},
    "nodes without gain stop": {"growing": strict},
    "each sample decides alone": {"growing": one_by_one},
    "free rows": {"gains": lambda reach, expected, row_cost: gains(reach, expected, row_cost * 0)},
    "one draft more": {"fits": lambda reach, drafts, budget: fits(reach, drafts, budget + 1)},
    "ties do not fit": {"fits": lambda reach, drafts, budget: (drafts >= reach[..., None]).sum(-1) <= budget - 1},
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("kind", CASES)
def test_another_rule_would_be_seen(kernels, kind, control):
    """Negative control: only the expectation is changed."""
    assert any(differ(*(column[:2] for column in CASES[kind](seed, CONTROLS[control]))) for seed in range(TURNS))


def test_arrays_and_tensors_are_treated_alike():
    random = np.random.default_rng(0)
    for _ in range(50):
        reach, calibration, chance = random.uniform(0, 1.5, (3, 2, 4)).round(1)
        able, drafts, whole = random.random((2, 4)) < 0.7, reach.flatten(), random.random((2, 1)) < 0.5
        row, level, budget = random.uniform(0, 0.4), random.uniform(0, 2), int(random.integers(1, 6))

        def decide(kind, arrays=(reach, calibration, chance, able, drafts, whole), row=row, level=level,
                   budget=budget):  # fmt: skip
            reach, calibration, chance, able, drafts, whole = map(kind, arrays)
            gain = gains(reach, calibration, row)
            return (
                gain,
                reach_below(reach, calibration, chance),
                fits(reach, drafts, budget),
                growing(gain, able, level),
                growing(gain, able, level, whole=True),
                growing(gain, able, level, whole=whole),
            )

        for array, tensor in zip(decide(np.array), decide(torch.from_numpy), strict=True):
            assert np.array_equal(array, tensor.numpy())


def test_trees_drawn_at_random_go_on_whole():
    gain = np.array([[0.5, -0.2], [0.1, -0.2], [0.3, 0.3]])
    able = np.array([[True, True], [True, True], [True, False]])

    def alone(level_cost, whole=True):
        return growing(gain, able, level_cost, np.arange(3), whole).tolist()

    assert alone(0.0) == [[True, True], [False, False], [True, False]]
    assert alone(0.3) == [[True, True], [False, False], [True, False]]
    assert alone(0.31) == [[False, False]] * 3
    assert alone(0.0, np.array([[True], [False], [True]])) == [[True, True], [True, False], [True, False]]


def test_samples_of_a_group_decide_together():
    """The first two samples gain 0.6 together, the third one 0.3."""
    gain = np.array([[0.5, -0.2], [0.1, -0.2], [0.3, 0.3]])
    able = np.array([[True, True], [True, True], [True, False]])
    for level_cost, going in ((0.3, [True, True, True]), (0.31, [True, True, False]), (0.61, [False] * 3)):
        found = growing(gain, able, level_cost, np.array([0, 0, 1]))
        assert found.tolist() == [[goes_on, False] for goes_on in going]
