"""Each row may be asked about once: its uniform answers one question, and the enumeration assumes independence."""

import math

import pytest
import torch

import arbordraft as ad
from arbordraft.sampling.laws import IID
from arbordraft.sampling.noise import Noise, residual
from arbordraft.testing import distance_to_target, one_tree, random_table, target_rows
from arbordraft.verifiers import TreeVerifier

CHAIN = ad.TreeTopology.chain(1)


class Halves(TreeVerifier):
    """Accepts a single draft by two questions, each with the square root of the right probability."""

    def supports(self, law):
        return (law.tops, law.tails) == (0, 1)

    def decide(self, tree, target):
        (child,) = tree.children(tree.root)
        token, row, draft = tree.token(child), target[tree.root], tree.drawn_from(tree.root)
        half = math.sqrt(min(1.0, (row[token] / draft[token]).item()))
        if (yield child, half) and (yield child, half):
            return child, target[child]
        return tree.root, residual(row, draft)


def unchecked(monkeypatch):
    monkeypatch.setattr(TreeVerifier, "_questions", lambda self, tree, target: self.decide(tree, target))


def drafted():
    """Returns a tree whose draft may be rejected, and its target rows."""
    table = random_table("random", 3, seed=1)
    target, draft = table(())
    tree = one_tree(CHAIN, IID(1), {0: 0, 1: int((draft - target).argmax())}, {0: draft})
    rows = target_rows(tree, table)
    return tree, [rows[row] for row in tree.rows]


def test_a_second_question_about_a_row_is_refused():
    with pytest.raises(RuntimeError, match=r"Halves\(\) asks twice about row 1, whose uniform answers only once"):
        distance_to_target(Halves(), CHAIN, IID(1), random_table("random", 3, seed=1))
    tree, rows = drafted()
    with pytest.raises(RuntimeError, match="asks twice"):
        Halves()(tree.batch, rows, Noise.draw([Noise.source(0)], CHAIN.num_nodes))


def test_an_enumeration_would_pass_such_a_verifier(monkeypatch):
    """Control: the law is the target's if answers were independent, but the sampler accepts far too often."""
    unchecked(monkeypatch)
    assert distance_to_target(Halves(), CHAIN, IID(1), random_table("random", 3, seed=1)) < 1e-12
    tree, rows = drafted()
    chance = sum(share for share, path, _ in Halves().law(tree, rows) if len(path) == 2)
    taken = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    accepted = 0
    for uniform in taken:
        noise = Noise(*torch.full((3, 1, CHAIN.num_nodes), float(uniform), dtype=torch.float64))
        accepted += len(Halves()(tree.batch, rows, noise).paths[0]) == 2
    assert 0.01 < chance < 0.9
    assert accepted / len(taken) == pytest.approx(math.sqrt(chance), abs=2e-3)
