"""Accepted paths in Triton's interpreter: those of the reference, and its moves."""

from itertools import pairwise

import pytest
import torch
from torch import library

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.accepted_paths import (
    accepted_paths,
    accepted_paths_reference,
    matching_ends,
    matching_ends_reference,
)
from arbordraft.kernels.accepted_paths import triton as kernels

TREES = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(4), TreeTopology.chain(0), TreeTopology.k_ary(2, 3)]
DEPTH = 4


def packed(seed, padding=3):
    """Packs trees, then the rows of a dummy; the sample before the dummy takes no part. Its root is the dummy's."""
    generator = torch.Generator().manual_seed(seed)
    parent, level, sample, roots = [], [], [], []
    for number, tree in enumerate(TREES):
        roots.append(len(parent))
        parent += [above if above < 0 else above + roots[-1] for above in tree.parent_list]
        level += tree.depth_list
        sample += [number] * tree.num_nodes
    roots += [len(parent)] * 2
    parent, level, sample = parent + [-1] * padding, level + [0] * padding, sample + [len(TREES) + 1] * padding
    tokens, best = torch.randint(0, 3, (2, len(parent)), generator=generator)
    slots, home = torch.randperm(500, generator=generator)[: len(parent)], torch.arange(len(roots)) * 1000
    tokens[1] = -1  # a row without a node
    return (tokens, best), *(torch.tensor(part) for part in (parent, level, sample, roots)), slots, home


@pytest.mark.parametrize("seed", range(6))
def test_paths_and_moves(guarded, seed):
    (tokens, best), parent, level, sample, roots, slots, home = packed(seed)
    with choice.use("triton"):
        end, token = matching_ends(tokens, best, parent, roots, DEPTH)
        found = accepted_paths(end, parent, level, slots, home, sample, roots, DEPTH)
    for one, other in zip((end, token), matching_ends_reference(tokens, best, parent, roots, DEPTH), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(token, best[end])
    expected = accepted_paths_reference(end, parent, level, slots, home, sample, roots, DEPTH)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for owner, path in enumerate(found[0].tolist()):
        rows = [row for row in path if row >= 0]
        assert rows[0] == roots[owner]
        assert rows[-1] == end[owner]
        assert all(parent[below] == above for above, below in pairwise(rows))


def test_rows_of_several_blocks(guarded, monkeypatch):
    (tokens, best), parent, _, _, roots, *_ = packed(1)
    monkeypatch.setattr(kernels, "_ROWS", 8)
    with choice.use("triton"):
        assert torch.equal(
            matching_ends(tokens, best, parent, roots, DEPTH)[0],
            matching_ends_reference(tokens, best, parent, roots, DEPTH)[0],
        )


def test_a_wrong_input_would_be_seen():
    """Negative control: other tokens end paths elsewhere, and other depths move other rows."""
    (tokens, best), parent, level, sample, roots, slots, home = packed(0)
    with choice.use("triton"):
        end, _ = matching_ends(tokens, best, parent, roots, DEPTH)
        assert not torch.equal(end, matching_ends(tokens, best.roll(1), parent, roots, DEPTH)[0])
        moves = accepted_paths(end, parent, level, slots, home, sample, roots, DEPTH)
        assert not torch.equal(moves[2], accepted_paths(end, parent, level, slots, home, sample + 1, roots, DEPTH)[2])
        assert (
            moves[1].tolist() != accepted_paths(end, parent, level, slots + 1, home, sample, roots, DEPTH)[1].tolist()
        )


def test_no_depth_and_no_samples():
    (tokens, best), parent, level, sample, roots, slots, home = packed(2)
    none = roots[:0]
    with choice.use("triton"):
        assert torch.equal(matching_ends(tokens, best, parent, roots, 0)[0], roots)
        path, source, destination = accepted_paths(roots, parent, level, slots, home, sample, roots, 0)
        assert path.tolist() == roots[:, None].tolist()
        assert len(source) == len(destination) == 0
        assert matching_ends(tokens, best, parent, none, DEPTH)[0].shape == (0,)
        assert accepted_paths(none, parent, level, slots, none, sample, none, DEPTH)[0].shape == (0, DEPTH + 1)


def test_the_operators_are_registered_properly():
    (tokens, best), parent, level, sample, roots, slots, home = packed(3)
    ops = torch.ops.arbordraft
    library.opcheck(ops.matching_ends.portable, (tokens, best, parent, roots, DEPTH))
    library.opcheck(ops.accepted_paths.portable, (roots, parent, level, slots, home, sample, roots, DEPTH))
