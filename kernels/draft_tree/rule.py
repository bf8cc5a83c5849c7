"""The growth rule on a host, level by level: in C++ where it can be used, else by the reference.

Shapes: B samples, N nodes of the topology, R nodes of a depth, K children at most.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from arbordraft.kernels.draft_tree import reference
from arbordraft.kernels.draft_tree.limits import Ints, Limits, Reals, Trees
from arbordraft.kernels.native import functions

_NAMES = (
    *("token", "chance", "reach", "slots", "samples", "offsets", "children", "nodes", "levels", "calibration"),
    *("expected", "known", "group", "groups", "level_cost", "row_cost", "budget", "whole"),
)


def _address(array: "npt.NDArray[Any]") -> int:
    address: int = array.__array_interface__["data"][0]  # a third of the time of array.ctypes.data
    return address


@cache
def _declare(library: ctypes.PyDLL) -> None:
    """Declares the functions of cpu.h."""
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.arbordraft_going.argtypes = address, number, address, number
    library.arbordraft_going.restype = number
    library.arbordraft_add.argtypes = address, number, number, address, address, address, address, number
    library.arbordraft_add.restype = None


class _HostTrees(ctypes.Structure):
    """``HostTrees`` of cpu.h: addresses and sizes."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _NAMES)


class HostRule:
    """Decides which nodes of trees get children, and adds these, in place.

    Args:
        trees: the trees.
        limits: how far they go on.
        levels: the topology's depths, see :class:`~arbordraft.kernels.draft_tree.reference.Level`.
        offsets: ``[N + 1]`` int64 positions in ``children`` at which the children of each node begin.
        children: ``[N - 1]`` int64 children of node 0, of node 1, and so on.
    """

    def __init__(
        self, trees: Trees, limits: Limits, levels: Sequence[reference.Level], offsets: Ints, children: Ints
    ) -> None:
        self.trees, self.limits, self.levels = trees, limits, levels
        self._library = functions()
        if limits.calibration.shape != limits.expected.shape or len(limits.calibration) != len(limits.levels):
            raise ValueError("calibration and expected must have one shape: Limits.of fills up the shorter one")
        if len(limits.levels) != len(trees.token):
            raise ValueError(f"there are limits of {len(limits.levels)} samples for {len(trees.token)} trees")
        if self._library is not None:
            _declare(self._library)
            self._prepare(offsets, children)

    def going(self, depth: int) -> Ints:
        """Returns ``[3, R]`` samples, nodes and tokens of those nodes of a depth that get children, ascending."""
        if self._library is None:
            samples, places = reference.going(self.trees, self.limits, self.levels[depth], depth).nonzero()
            nodes = self.levels[depth].inner[places]
            return np.stack([samples, nodes, self.trees.token[samples, nodes]])
        found, address = self._found
        count = self._library.arbordraft_going(self._pointer, depth, address, found.shape[1])
        return found[:, :count]

    def add(self, depth: int, samples: Ints, nodes: Ints, tokens: Ints, chances: Reals) -> None:
        """Adds children.

        Args:
            depth: depth of the parents.
            samples: ``[R]`` samples of the parents.
            nodes: ``[R]`` parents.
            tokens: ``[R, K]`` tokens of the children, -1 for none.
            chances: ``[R, K]`` their draft probabilities.
        """
        if self._library is None:
            level = self.levels[depth]
            shape = len(self.trees.token), len(level.inner)
            parents = np.zeros(shape, dtype=np.bool_)
            every, likely = np.full((*shape, tokens.shape[1]), -1), np.zeros((*shape, tokens.shape[1]))
            places = np.searchsorted(level.inner, nodes)
            parents[samples, places], every[samples, places], likely[samples, places] = True, tokens, chances
            reference.add(self.trees, self.limits, level, depth, parents, every, likely)
            return
        integers = [np.ascontiguousarray(part, dtype=np.int64) for part in (samples, nodes, tokens)]
        arrays = *integers, np.ascontiguousarray(chances, dtype=np.float64)
        self._library.arbordraft_add(self._pointer, depth, len(nodes), *map(_address, arrays), tokens.shape[1])

    def _prepare(self, offsets: Ints, children: Ints) -> None:
        assert self._library is not None
        trees, limits = self.trees, self.limits
        samples, nodes = trees.token.shape
        if (group := limits.group) is None:
            groups = 1
            costs = np.array([[limits.level_cost], [limits.row_cost]], dtype=np.float64)
            bounds = np.array([[limits.budget], [limits.whole]], dtype=np.int64)
        else:  # costs of a group are known by sample
            groups = len(limits.budget)
            first = np.zeros(groups, dtype=np.int64)
            (living,) = (limits.weight >= 0).nonzero()
            first[group[living]] = living
            costs = np.stack([limits.level_cost[first, 0], limits.row_cost[first, 0]])
            bounds = np.stack([np.array(limits.budget), limits.whole[first, 0]])
        levels = np.ascontiguousarray(limits.levels, dtype=np.int64)
        calibration = np.ascontiguousarray(limits.calibration, dtype=np.float64)
        expected = np.ascontiguousarray(limits.expected, dtype=np.float64)
        slots, found = np.arange(samples), np.empty((3, samples * nodes), dtype=np.int64)
        self._kept = costs, bounds, slots, levels, calibration, expected  # their addresses are used
        self._pointer = ctypes.byref(
            _HostTrees(
                *(_address(trees.token), _address(trees.chance), _address(trees.reach), _address(slots), samples),
                *(_address(offsets), _address(children), nodes),
                *(_address(levels), _address(calibration), _address(expected)),
                *(calibration.shape[1], 0 if group is None else _address(group), groups),
                *(_address(costs), _address(costs) + 8 * groups, _address(bounds), _address(bounds) + 8 * groups),
            )
        )
        self._found = found, _address(found)


__all__ = ["HostRule"]
