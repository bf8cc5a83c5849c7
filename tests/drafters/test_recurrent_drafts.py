"""Draft models with recurrent layers: one call leaves the states that drafting level by level leaves, bit for bit."""

import pytest
import torch
from support.companions import Rounds
from support.grown_trees import BINARY, ENDS, GREEDY, PLANS, TEXTS, trees
from support.native_drafters import RECURRENT, built

from arbordraft import TreeTopology
from arbordraft.target.states import MOST_STATES, RecurrentStates, StateRows

pytestmark = pytest.mark.usefixtures("kernels")

CHAIN, UNEVEN = TreeTopology.chain(4), TreeTopology([-1, 0, 0, 1, 1, 2, 1, 3, 5, 5, 6, 8])
TOPOLOGIES = {"chain": CHAIN, "binary": BINARY, "uneven": UNEVEN}
each_model = pytest.mark.parametrize("kind", RECURRENT)
each_topology = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


def memory(rounds):
    """Returns the bytes of all committed rows and states of the drafter, by sample."""
    cache = rounds.state.cache
    found = []
    for handle in rounds.state.handles.values():
        slab, slots = cache._slabs[handle], cache._states._samples[handle]
        rows = [pool[slab.start : slab.start + slab.length] for pool in cache._pools()]
        kept = [slots.slot, *(slots.kept[number] for number in sorted(slots.kept))]
        for pools in (cache._states._windows, cache._states._states):
            rows += [pools.by_key[key][kept] for key in sorted(pools.by_key)]
        found.append([sorted(slots.kept), *(part.contiguous().view(torch.uint8).tolist() for part in rows)])
    return found


def without_rotation(model):
    """Sets all angles to zero, since torch rounds other cosines in another way."""
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq"):
            frequencies.zero_()


def watched(kind, topology, *, one_call=True):
    """Returns the trees of a few rounds, and the drafter's memory before and after each."""
    target, drafter = built(kind, change=without_rotation)
    assert drafter._network.native is not None
    if not one_call:
        drafter._network._native = drafter.model.prepacking, None
    rounds, found = Rounds(drafter, target, TEXTS), []
    for number in range(3):
        tree, proposed = trees(rounds, topology, PLANS["everything"], **GREEDY)
        drafted = memory(rounds)
        rounds.commit(tree, ENDS[4][number])
        found.append(([one and one[0] for one in proposed], drafted, memory(rounds)))
    return found


@each_topology
@each_model
def test_one_call_leaves_the_same_states(kind, topology):
    assert watched(kind, topology) == watched(kind, topology, one_call=False)


def test_steps_of_chains_need_no_more_states():
    """A sample has as many as when it drafts level by level: a node takes over the state of its parent."""
    target, drafter = built("model, mamba2")
    rounds, slots = Rounds(drafter, target, TEXTS), []
    for number in range(6):
        tree, _ = trees(rounds, CHAIN, PLANS["everything"], **GREEDY)
        rounds.commit(tree, ENDS[4][number % 3])
        slots.append(rounds.state.cache._states._slots)
    assert len(set(slots[1:])) == 1
    assert slots[-1] <= 4 * MOST_STATES * 1.5  # pools grow ahead


# Negative controls


def shared_states(patch):
    """Lets all nodes of a sample's level share a state."""
    spare = RecurrentStates.spare
    patch.setattr(RecurrentStates, "spare", lambda self, number: spare(self, 1) * number)


def committed_states(patch):
    """Lets nodes write the states that they start from."""

    def spare(self, number):
        return [sample.ahead for sample in self._samples.values()] * (number // len(self._samples))

    patch.setattr(RecurrentStates, "spare", spare)


def other_inputs(patch):
    """Lets a commit run the inputs of other nodes."""
    drafted = StateRows.drafted

    def wrong(self, parents):
        drafted(self, parents)
        for sample in self._samples:
            sample.rows.reverse()

    patch.setattr(StateRows, "drafted", wrong)


@pytest.mark.parametrize("spoil", [shared_states, committed_states, other_inputs])
def test_other_states_would_be_seen(monkeypatch, spoil):
    expected = watched("model, mamba2", BINARY, one_call=False)
    assert watched("model, mamba2", BINARY) == expected
    spoil(monkeypatch)
    assert watched("model, mamba2", BINARY) != expected
