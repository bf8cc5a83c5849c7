"""Compares trees that two drafters of equal weights grow over a few rounds."""

import numpy as np
import pytest
from transformers import TemperatureLogitsWarper

from arbordraft import TreeTopology
from arbordraft.deciders.decisions import Limits, Verification
from arbordraft.sampling.laws import IID, SharedNoise
from support.models import PROMPTS

TEXTS = [*PROMPTS, [40, 2, 9]]
BINARY = TreeTopology.k_ary(2, 3)
TOPOLOGIES = {
    "chain": TreeTopology.chain(4),
    "binary": BINARY,
    "sequoia": TreeTopology.sequoia((0.5, 0.2, 0.15, 0.1), 14, 5),
    "uneven": TreeTopology([-1, 0, 0, 1, 1, 1, 2, 3, 6]),
    "root": TreeTopology.chain(0),
}
ENDS = {  # per round and sample: the node down to which the tree is accepted, if it was drafted
    4: [[1, 0, 2, 3], [2, 1, 0, 4], [0, 3, 1, 1]],
    1: [[2], [0], [1]],
}


def at_most(levels, **options):
    """Returns a function that plans at most these levels per sample, within the allowed depth."""

    def plan(situation):
        found = [min(pair) for pair in zip(situation.max_depth, levels, strict=False)]
        return Limits.everything(found, **options)

    return plan


def weighed(situation):
    """Plans with different trust and expectations for every sample and depth."""
    count = len(situation.max_depth)
    trust = [(0.6 + 0.2 * sample, 1.7, 0.9) for sample in range(count)]
    following = [(0.9 - 0.1 * sample, 0.7, 0.5) for sample in range(count)]
    weights = [1 - 0.2 * sample for sample in range(count)]
    return Limits.of(situation.max_depth, trust, following, weights, level_cost=0.3, row_cost=0.02)


def priced(price):
    """Returns a function that plans all levels, where verifying a draft costs ``price`` tokens."""

    def plan(situation):
        seconds = np.arange(situation.drafts + 1.0)
        return at_most(MANY, verification=Verification(seconds, rate=price))(situation)

    return plan


MANY = [9] * 4
PLANS = {
    "everything": at_most(MANY),
    "levels": at_most([3, 0, 1, 2]),
    "dear rows": at_most(MANY, row_cost=0.15),
    "dear levels": at_most(MANY, level_cost=0.9),
    "both": at_most([4, 2, 3, 9], row_cost=0.04, level_cost=0.5),
    "budget": at_most(MANY, budget=5),
    "large budget": at_most(MANY, budget=60),  # room for all drafts
    "priced": priced(0.1),
    "weighed": weighed,
    "nothing": at_most([0] * 4),
}
LAW = SharedNoise(4)
GREEDY = {"greedy": True}
HOT, WARM = ({"processors": [TemperatureLogitsWarper(heat)]} for heat in (1.0, 0.5))
TEMPERATURES = {"0": GREEDY, "0.5": WARM, "1": HOT}

BETWEEN_LEVELS = {  # options of a step that need the host between levels
    "asked": {"decide": lambda view: [True] * len(view.paths)},
    "random draws": {"law": IID(2)},
}


def trees(rounds, topology, plan, seed=0, **options):
    tree = rounds.propose(topology, LAW, plan=plan, seed=seed, **options)
    found = [None] * len(tree)
    for sample in tree.living:
        rows = tree.rows_of([sample])
        tokens = dict(zip(tree.node[rows].tolist(), tree.token[rows].tolist(), strict=True))
        found[sample] = tokens, tree.chance[rows[1:]].tolist()
    return tree, found


def check(fast, slow, topology, plan, rounds=3, near=1e-4, **options):
    """Drafts and commits a few rounds with both drafters; returns the number of drafted nodes."""
    count = 0
    for number in range(rounds):
        tree, found = trees(fast, topology, plan, 31 * number, **options)
        _, expected = trees(slow, topology, plan, 31 * number, **options)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours:
                assert ours[0] == theirs[0]
                assert ours[1] == pytest.approx(theirs[1], rel=near, abs=1e-6)
                count += len(ours[1])
        ends = ENDS[len(found)][number]
        fast.commit(tree, ends)
        slow.commit(tree, ends)
    return count


def check_no_drafts(rounds, **options):
    """Checks that weights which are no numbers draft no tokens and cause a warning."""
    with pytest.warns(UserWarning, match="drafter produced NaN or infinite logits"):
        _, found = trees(rounds, BINARY, at_most(MANY), **options)
    assert [list(tokens) for tokens, _ in found] == [[0]] * 4
