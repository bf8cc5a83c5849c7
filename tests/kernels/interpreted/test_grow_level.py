"""Growth of a level in Triton's interpreter: the trees of the rule, and the tokens that run next."""

import numpy as np
import pytest
import torch
from torch import library
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.grow_level import grow_level, grow_level_reference
from arbordraft.kernels.grow_level import triton as kernels

TOPOLOGIES = {
    "chain": TreeTopology.chain(3),
    "tree": TreeTopology.from_k_config((3, 2, 2)),
    "unordered": TreeTopology([-1, 0, 0, 0, 3, 1, 3, 6, 4, 4]),
}
NAMES = "token", "chance", "reach", "broken"


def level_of(topology, depth):
    level, inner = topology.tree_levels[depth], topology.inner
    fed = inner[depth + 1] if depth + 1 < len(inner) else []
    numbers = [
        torch.tensor(np.asarray(part), dtype=torch.int64) for part in (level.inner, level.parent, level.rank, fed)
    ]
    return numbers, level.below.start


def limits(generator, samples, budget, row_cost=0.0, level_cost=0.0):
    levels = torch.randint(0, 5, (samples,), generator=generator)
    calibration, expected = torch.rand(2, samples, 2, generator=generator, dtype=torch.float64) + 0.5
    costs = torch.tensor([level_cost, row_cost], dtype=torch.float64)
    return levels, calibration, expected, costs, torch.tensor([budget])


def grown(topology, samples, plan, generator, width, trimmed=False, grow=grow_level):
    """Grows trees level by level from random scores; returns them and the tokens that ran."""
    nodes = topology.num_nodes
    trees = [torch.full((samples, nodes), -1), *torch.zeros(2, samples, nodes, dtype=torch.float64)]
    trees[0][:, 0], trees[2][:] = torch.arange(samples) + 50, -1.0
    trees[2][:, 0] = torch.rand(samples, generator=generator, dtype=torch.float64) + 0.2
    trees.append(torch.zeros(samples, dtype=torch.float64))
    ran, vocabulary = [], torch.randperm(100, generator=generator) if trimmed else None
    for depth in range(topology.max_depth):
        (inner, parent, rank, fed), below = level_of(topology, depth)
        scores = torch.randn(samples * len(inner), 9, generator=generator) * 3
        scores[0, :2] = scores[0, 0]
        log_probs, tokens = scores.log_softmax(dim=-1).topk(width, dim=-1)
        if depth == 1:
            log_probs[-1] = torch.nan  # a row that is no number
            log_probs[0, -1] = -torch.inf
        given = inner, parent, rank, fed, tokens, log_probs, vocabulary, depth, below
        ran.append(grow(*trees, *plan, *given))
    return trees, ran


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("budget", [2, 5, 2**62])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_trees_are_those_of_the_rule(guarded, name, budget, samples):
    for turn, (row_cost, level_cost) in enumerate([(0.0, 0.0), (0.1, 0.3), (0.0, 2.0)]):
        found = []
        for grow in (grow_level, grow_level_reference):
            generator = torch.Generator().manual_seed(turn)
            plan = limits(generator, samples, budget, row_cost, level_cost)
            with choice.use("triton"):
                found.append(grown(TOPOLOGIES[name], samples, plan, generator, 2, turn == 1, grow))
        (trees, ran), (expected, others) = found
        for kind, one, other in zip(NAMES, trees, expected, strict=True):
            assert_close(one, other, rtol=1e-6, atol=0 if kind == "token" else 1e-9)
        for one, other in zip(ran, others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("input_", ["levels", "calibration", "expected", "costs", "budget"])
def test_a_changed_limit_would_be_seen(input_):
    """Negative control: each of the limits decides about some tree."""
    names, different = ("levels", "calibration", "expected", "costs", "budget"), 0
    for seed in range(6):
        found = []
        for changed in (False, True):
            generator = torch.Generator().manual_seed(seed)
            plan = list(limits(generator, 3, 6, 0.05))
            if changed:
                place = names.index(input_)
                plan[place] = plan[place] + 0.5 if plan[place].is_floating_point() else plan[place] - 1
            with choice.use("triton"):
                found.append(grown(TOPOLOGIES["tree"], 3, plan, generator, 2)[0])
        different += not all(map(torch.equal, *found))
    assert different


def test_the_operator_is_registered_properly():
    generator = torch.Generator().manual_seed(0)
    (inner, parent, rank, fed), below = level_of(TOPOLOGIES["tree"], 0)
    trees = [torch.full((2, 10), 5), *torch.ones(2, 2, 10, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    tokens, log_probs = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[-0.1, -2.0], [-0.5, -1.0]])
    given = inner, parent, rank, fed, tokens, log_probs, None, 0, below
    library.opcheck(torch.ops.arbordraft.grow_level.portable, (*trees, *limits(generator, 2, 9), *given))


def test_one_launch(monkeypatch):
    """The level of a whole batch is one program."""
    launched, run = [], kernels.grow_trees

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return run[grid]

    monkeypatch.setattr(kernels, "grow_trees", Counted())
    generator = torch.Generator().manual_seed(0)
    with choice.use("triton"):
        grown(TOPOLOGIES["chain"], 3, limits(generator, 3, 9), generator, 1)
    assert launched == [(1,)] * 3
