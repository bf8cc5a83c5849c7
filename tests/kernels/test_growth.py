"""The growth rule of draft trees: C++ and recorded drafts decide like the reference, row for row."""

import numpy as np
import pytest
import torch
from support.models import context, grown

from arbordraft import Fixed, TreeTopology
from arbordraft.deciders.decisions import Plan
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.drafters import Drafter
from arbordraft.kernels.draft_tree import Growth, draft_from_rows, reference
from arbordraft.kernels.draft_tree.reference import fits, gains, grow, growing, growing_whole, reach_below
from arbordraft.kernels.prepacked_linear import prepack
from arbordraft.kernels.tree_expand import tree_expand

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


def everything(topology, samples):
    depth = topology.max_depth
    ones = [1.0] * samples
    return Growth(topology.child_offsets, topology.child_order, [depth] * samples, ones, ones, ones, 0.0, 0.0, -1)


def any_growth(random, topology, samples, chances):
    """Draws a growth; a price may equal the reach of a node exactly, and many nodes may have equal reach."""
    known = int(random.integers(1, topology.max_depth + 2))
    plain = random.random() < 0.4
    trust, following = np.ones((2, samples, known)) if plain else random.uniform(0, 2.5, (2, samples, known))
    inner = topology.inner[1] if topology.max_depth > 1 else []
    some = chances[0, random.choice(inner or [1])]
    return everything(topology, samples)._replace(
        levels=random.integers(0, topology.max_depth + 1, samples).tolist(),
        trust=trust.flatten().tolist(),
        next=following.flatten().tolist(),
        weights=np.ones(samples).tolist() if plain else random.uniform(0.2, 1, samples).tolist(),
        level=float(random.choice([0, 0, random.uniform(0, 1), 1 - some])),
        row=float(random.choice([0, random.uniform(0, 0.6), some])),
        budget=int(random.choice([-1, 0, 1, 3, 5, 40])),
    )


def any_scores(random, *shape):
    scores = random.normal(size=shape) * 4
    if random.random() < 0.4:
        scores = scores.round()  # many ties
    return torch.from_numpy(scores).float()


def columns(drafted, samples, nodes):
    tokens, chances = np.full((samples, nodes), -1), np.zeros((samples, nodes))
    places = drafted.samples, drafted.nodes
    tokens[places], chances[places] = drafted.tokens, drafted.chances
    return tokens, chances


def native_case(seed):
    """Grows a tree in the C++ kernel and, from the same children, in the reference."""
    random = np.random.default_rng(seed)
    topology, samples = any_topology(random), int(random.integers(1, 4))
    shape = samples, topology.num_nodes
    depth = topology.max_depth
    options = {"roots": torch.from_numpy(random.integers(0, VOCAB, samples))}
    if random.random() < 0.5:  # rows depend on the parents' tokens
        options |= {
            "table": any_scores(random, VOCAB, RANK) * 0.3,
            "correction": prepack(any_scores(random, VOCAB, RANK) * 0.3),
            "gates": torch.ones(samples, depth, RANK),
        }
    scores = any_scores(random, samples, depth, VOCAB)
    tokens, chances = columns(draft_from_rows(scores, everything(topology, samples), **options), *shape)

    def draw(depth, nodes, above):
        assert np.array_equal(above[above >= 0], tokens[:, nodes][above >= 0])
        width = max(len(topology.child_list[node]) for node in nodes)
        drawn, likely = np.full((samples, len(nodes), width), -1), np.zeros((samples, len(nodes), width))
        for place, node in enumerate(nodes):
            for rank, child in enumerate(topology.child_list[node]):
                drawn[:, place, rank], likely[:, place, rank] = tokens[:, child], chances[:, child]
        return drawn, likely

    growth = any_growth(random, topology, samples, chances)
    return columns(draft_from_rows(scores, growth, **options), *shape), grow(growth, draw)


class Lookup:
    """Network whose scores depend on the token alone."""

    device, dtype, states, vocab_size, vocabulary = torch.device("cpu"), torch.float32, 0, VOCAB, None

    def __init__(self, table):
        self.table = table

    def run(self, tokens, hidden, positions, ragged, rows=None):
        return self.table[tokens if rows is None else tokens[rows]], None


def recorded_case(seed):
    """Grows a tree in a draft of fixed shapes and, from the same scores, in the reference."""
    random = np.random.default_rng(seed)
    topology, samples = any_topology(random), int(random.integers(1, 4))
    network = Lookup(any_scores(random, VOCAB, VOCAB))
    roots = random.integers(0, VOCAB, (samples, 1))

    def draw(depth, nodes, above):
        tokens = roots if depth == 0 else above.clip(0)
        width = max(len(topology.child_list[node]) for node in nodes)
        found, likely = tree_expand(network.table[torch.from_numpy(tokens)].flatten(0, 1), width)
        return (part.unflatten(0, tokens.shape).numpy() for part in (found, likely.exp().double()))

    _, chances = grow(everything(topology, samples), draw)
    growth = any_growth(random, topology, samples, chances)
    bucket = DraftBucket(4, 2, max(1, *growth.levels))
    table = torch.zeros(bucket.size, dtype=torch.int64)
    lacking = [([int(root)] * int(random.integers(1, 3)), None) for root in roots[:, 0]]
    bucket.fill(table, lacking, [(9 * sample, 3) for sample in range(samples)], growth, None, [99] * (4 - samples))
    step = DraftStep(network, topology, bucket, shared=False, longest=64)
    found = step(table, torch.zeros(0, 0), [])[:, :samples].numpy()
    tokens, chances = np.full((samples, topology.num_nodes), -1), np.zeros((samples, topology.num_nodes))
    tokens[:, 1 : found.shape[2]], chances[:, : found.shape[2]] = found[0][:, 1:], found[1]
    return (tokens, chances), grow(growth, draw)


class Table(Drafter):
    """Drafts level by level from a table that has a row of scores for each token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def propose(self, state, level):
        return self.table[level.tokens]


def grower_case(seed):
    """Grows a tree level by level in the grower of all drafters and, from the same scores, in the reference."""
    random = np.random.default_rng(seed)
    topology, samples = any_topology(random), int(random.integers(1, 4))
    table = any_scores(random, VOCAB, VOCAB)
    roots = random.integers(0, VOCAB, (samples, 1))

    def draw(depth, nodes, above):
        tokens = roots if depth == 0 else above.clip(0)
        found, likely = tree_expand(table[torch.from_numpy(tokens)].flatten(0, 1), topology.width)
        return (part.unflatten(0, tokens.shape).numpy() for part in (found, likely.exp().double()))

    _, chances = grow(everything(topology, samples), draw)
    growth = any_growth(random, topology, samples, chances)
    plan = Plan(
        growth.levels,
        np.reshape(growth.trust, (samples, -1)).tolist(),
        np.reshape(growth.next, (samples, -1)).tolist(),
        growth.level,
        growth.row,
        growth.budget if growth.budget > 0 else None,
        weights=growth.weights,
    )
    drafter = Table(table)
    step = context(roots.tolist(), topology, Fixed(topology.width), greedy=True)
    tree = grown(drafter, None, step, plan=lambda situation: plan)
    tokens, chances = np.full((samples, topology.num_nodes), -1), np.zeros((samples, topology.num_nodes))
    tokens[tree.owner, tree.node], chances[tree.owner, tree.node] = tree.token, tree.chance
    tokens[:, 0] = -1
    return (tokens, chances), grow(growth, draw)


CASES = {"native": native_case, "recorded": recorded_case, "grower": grower_case}


def differ(found, expected):
    return any(not np.array_equal(own, other) for own, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", CASES)
def test_trees_are_those_of_the_reference(kernels, kind):
    count = 0
    for seed in range(TURNS):
        found, expected = CASES[kind](seed)
        assert not differ(found, expected), seed
        count += (expected[0] >= 0).sum()
    assert count > 500


def no_clip(reach, trust, chance):
    return reach * trust * chance


def strict(gain, able, level, axis=None):
    going = able & (gain > 0)
    return going & ((gain * going).sum(axis=axis, keepdims=True) >= level)


def one_by_one(gain, able, level, axis=None):
    return growing(gain, able, level, axis=1)


CONTROLS = {
    "trust beyond all bounds": ("reach_below", no_clip),
    "nodes without gain stop": ("growing", strict),
    "each sample decides alone": ("growing", one_by_one),
    "free rows": ("gains", lambda reach, following, row: gains(reach, following, row * 0)),
    "one draft more": ("fits", lambda reach, drafts, budget: fits(reach, drafts, budget + 1)),
    "ties do not fit": ("fits", lambda reach, drafts, budget: (drafts >= reach[..., None]).sum(-1) <= budget - 1),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("kind", CASES)
def test_another_rule_would_be_seen(kernels, monkeypatch, kind, control):
    """Negative control: only the reference is changed."""
    name, other = CONTROLS[control]
    monkeypatch.setattr(reference, name, other)
    assert any(differ(*CASES[kind](seed)) for seed in range(TURNS))


def test_arrays_and_tensors_are_treated_alike():
    random = np.random.default_rng(0)
    for _ in range(50):
        reach, trust, chance = random.uniform(0, 1.5, (3, 2, 4)).round(1)
        able, drafts = random.random((2, 4)) < 0.7, reach.flatten()
        row, level, budget = random.uniform(0, 0.4), random.uniform(0, 2), int(random.integers(1, 6))

        def decide(kind, reach=reach, trust=trust, chance=chance, able=able, drafts=drafts, row=row, level=level,
                   budget=budget):  # fmt: skip
            reach, trust, chance, able, drafts = map(kind, (reach, trust, chance, able, drafts))
            gain = gains(reach, trust, row)
            return (
                gain,
                reach_below(reach, trust, chance),
                fits(reach, drafts, budget),
                growing(gain, able, level),
                growing(gain, able, level, axis=1),
                growing_whole(gain, able, level),
            )

        for array, tensor in zip(decide(np.array), decide(torch.from_numpy), strict=True):
            assert np.array_equal(array, tensor.numpy())


def test_trees_drawn_at_random_go_on_whole():
    gain = np.array([[0.5, -0.2], [0.1, -0.2], [0.3, 0.3]])
    able = np.array([[True, True], [True, True], [True, False]])
    assert growing_whole(gain, able, 0.0).tolist() == [[True, True], [False, False], [True, False]]
    assert growing_whole(gain, able, 0.3).tolist() == [[True, True], [False, False], [True, False]]
    assert growing_whole(gain, able, 0.31).tolist() == [[False, False]] * 3
