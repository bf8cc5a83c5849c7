"""The sliced mask is always a view of one buffer, and always equals a mask built from scratch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shapes import ancestors, parent_lists

from arbordraft import TreeTopology
from arbordraft.trees.masks import SlicedCausalMask

UNEVEN = TreeTopology([-1, 0, 0, 1, 2, 2])


def from_scratch(parents, rows, columns):
    """Builds a ``[rows, columns]`` mask: among the columns, each row sees its ancestors and itself."""
    mask = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for i, node in enumerate(rows):
        for j, other in enumerate(columns):
            mask[i, j] = other in ancestors(parents, node)
    return mask


def unpacked(words, columns):
    index = torch.arange(columns)
    return (words[:, index // 64] >> (index % 64) & 1).bool()


def test_literal_masks():
    mask = SlicedCausalMask(UNEVEN)
    assert mask.select(range(4), range(4)).tolist() == [[0b1], [0b11], [0b101], [0b1011]]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(parent_lists(20))
def test_every_slice_equals_a_mask_built_from_scratch(parents):
    mask = SlicedCausalMask(TreeTopology(parents))
    for nodes in range(len(parents) + 1):
        found = mask.select(range(nodes), range(nodes))
        assert torch.equal(unpacked(found, nodes), from_scratch(parents, range(nodes), range(nodes)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(parent_lists(130), st.data())
def test_selected_words_see_living_ancestors(parents, data):
    """Columns are a subset closed under ancestors; rows are any of its nodes in any order."""
    mask = SlicedCausalMask(TreeTopology(parents))
    alive = []
    for node, parent in enumerate(parents):
        if node == 0 or (parent in alive and data.draw(st.integers(0, 3)) > 0):
            alive.append(node)
    for rows in (data.draw(st.lists(st.sampled_from(alive), max_size=6)), alive):
        found = mask.select(rows, alive)
        assert found.shape == (len(rows), -(-len(alive) // 64))
        assert torch.equal(unpacked(found, len(alive)), from_scratch(parents, rows, alive))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([2, 3], [0, 2, 1, 3]),
        ([3, 1], [0, 1, 2, 3]),
        ([], [0, 1]),
        ([1], []),
        ([3], [0, 1]),
        ([0, 2, 1], [0, 1, 2]),
        ([0, 2, 1], [0, 2, 1]),
        ([1, 3], [1, 3]),
        ([0, 3], [0, 3]),
    ],
)
def test_selection_does_not_mistake_an_order_for_a_range(rows, columns):
    found = SlicedCausalMask(UNEVEN).select(rows, columns)
    assert torch.equal(unpacked(found, len(columns)), from_scratch(UNEVEN.parent_list, rows, columns))


def test_a_prefix_is_selected_as_a_view():
    mask = SlicedCausalMask(UNEVEN)
    assert mask.select([2, 3], range(5)).data_ptr() == mask.words[2:].data_ptr()


def test_slicing_never_allocates():
    """A thousand steps of varying length read one buffer of words."""
    topology = TreeTopology.k_ary(2, 5)
    mask = SlicedCausalMask(topology)
    words = mask.words.untyped_storage().data_ptr()
    with torch.profiler.profile(profile_memory=True) as profile:
        for step in range(1000):
            nodes = 1 + step % topology.num_nodes
            assert mask.select(range(nodes), range(nodes)).untyped_storage().data_ptr() == words
    assert not [event for event in profile.events() if event.name == "[memory]"]


def test_the_allocation_check_detects_a_copy():
    with torch.profiler.profile(profile_memory=True) as profile:
        SlicedCausalMask(UNEVEN).select(range(3), range(3)).clone()
    assert [event for event in profile.events() if event.name == "[memory]"]


def test_a_mask_moves_like_any_module():
    mask = SlicedCausalMask(UNEVEN).to("meta")
    assert mask.words.device.type == mask.topology.parents.device.type == "meta"
