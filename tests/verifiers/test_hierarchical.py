"""Hierarchical speculative decoding (arXiv 2601.05724) through our enumeration: its published code is not lossless.

The paper and its code walk a chain from its end, as in block verification. Let b be the product of the ratios of target
and draft, capped at 1 at every token. A prefix is kept with the share h of its residual ``(b p - q)+``. Only for the
whole chain do paper and code differ: the code accepts it by the product without caps. With caps, the rule is block
verification. So the gain over block verification comes from the loss of the law.
"""

from itertools import pairwise

import pytest
import torch

import arbordraft as ad
from arbordraft.sampling.noise import residual
from arbordraft.testing import ROW_KINDS, distance_to_target, expected_accepted, random_table, row
from arbordraft.verifiers import Lifted, RecursiveRejection, TreeVerifier

CHAIN = ad.IID(1)


class Hierarchical(TreeVerifier):
    """Rule on a chain; it accepts the whole chain by the capped product or, as published, by the plain product."""

    def __init__(self, capped):
        super().__init__()
        self.capped = capped

    def supports(self, law):
        return law.k == 1

    def decide(self, tree, target):
        rows, capped, plain = tree.rows, [1.0], 1.0
        for parent, child in pairwise(rows):
            token = tree.token(child)
            ratio = (target[parent][token] / tree.drawn_from(parent)[token]).item()
            plain *= ratio
            capped.append(min(1.0, capped[-1] * ratio))
        if (yield rows[-1], capped[-1] if self.capped else min(1.0, plain)):
            return rows[-1], target[rows[-1]]
        for end, share in reversed(list(zip(rows, capped, strict=True))[:-1]):
            left = residual(share * target[end], tree.drawn_from(end))
            mass = left.sum().item()
            if end == rows[0] or (yield end, mass / (mass + 1 - share) if mass > 0 else 0.0):
                break
        return end, left if left.sum() > 0 else target[end]


def distance(capped, table, length):
    return distance_to_target(Hierarchical(capped), ad.TreeTopology.chain(length), CHAIN, table)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_with_caps_it_is_block_verification(kind):
    for length in (1, 2, 3):
        table = random_table(kind, 3, seed=4)
        assert distance(True, table, length) < 1e-12
        topology = ad.TreeTopology.chain(length)
        block, capped = (
            expected_accepted(verifier, topology, CHAIN, table)
            for verifier in (Lifted(RecursiveRejection()), Hierarchical(True))
        )
        assert capped == pytest.approx(block, abs=1e-12)


def two_coins(prefix):
    """Returns rows of two tokens: the target prefers token 0 more than the draft at the root, but less after it."""
    return {(): (row(3, 1), row(1, 1)), (0,): (row(1, 1), row(3, 1))}.get(prefix, (row(1, 1), row(1, 1)))


def test_the_smallest_counterexample():
    """With two tokens and two drafts, the pair (0, 0) has probability 3/8, but is emitted with 1/2."""
    assert distance(False, two_coins, 1) < 1e-12  # caps change nothing if there is one ratio
    assert distance(True, two_coins, 2) < 1e-12
    assert distance(False, two_coins, 2) == pytest.approx(1 / 8)


def test_the_published_code_gains_acceptance_and_loses_the_law():
    """On random rows it accepts more than block verification. No lossless rule for one path can do so."""
    far, gain = [], []
    for seed in range(8):
        table, topology = random_table("random", 3, seed), ad.TreeTopology.chain(3)
        far.append(distance(False, table, 3))
        block, published = (
            expected_accepted(verifier, topology, CHAIN, table)
            for verifier in (Lifted(RecursiveRejection()), Hierarchical(False))
        )
        gain.append(published - block)
    assert min(gain) >= -1e-12
    assert torch.tensor(gain).mean() > 0.03
    assert torch.tensor(far).mean() > 0.02
