"""Whole drafts in fixed shapes with all Triton kernels, against drafts of the references level by level."""

import pytest
from support.companions import Rounds
from support.grown_trees import GREEDY, HOT, LAW, MANY, at_most, check
from support.native_drafters import built

from arbordraft import TreeTopology
from arbordraft.decoding.static.drafting import StaticDrafts
from arbordraft.kernels import choice

TOPOLOGY = TreeTopology([-1, 0, 0, 1, 1, 2, 3])
TEXTS = [[5, 9, 7, 5, 9], [11, 4], [8, 3, 8], [6, 6]]


class Switched(Rounds):
    """Drafts in Triton or in plain torch; the target runs as usual."""

    def propose(self, *given, **options):
        with choice.use("triton" if self.static else "reference"):
            return super().propose(*given, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [GREEDY, HOT], ids=["greedy", "shared noise"])
@pytest.mark.parametrize("kind", ["eagle", "eagle, trimmed", "model"])
def test_static_drafts_in_triton_give_the_trees_of_plain_torch(kind, options):
    assert LAW.k >= TOPOLOGY.width
    target, drafter = built(kind, "torch")
    fast, slow = (Switched(drafter, target, TEXTS, static) for static in (StaticDrafts(TOPOLOGY), None))
    choice.ran.clear()
    assert check(fast, slow, TOPOLOGY, at_most(MANY), rounds=2, **options) > 20
    assert choice.ran["static_draft/triton"] == 2
    assert choice.ran["tree_expand/reference"], "the second drafter must run in plain torch"
