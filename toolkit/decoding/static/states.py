"""The rows of a step in recurrent layers, described by tensors alone.

Paths are known on the host, so the table holds the states and inputs that each row reads. Accepted paths are known on
the device alone. A step leaves the states after them in other slots than it read, so it can run again. The host takes
these slots over when it commits the paths.

Shapes: T rows, S samples besides the dummy, W width of convolutions, P most nodes of a path, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from arbordraft.kernels.recurrent_tree import Scan, Schedule, advance_states, advance_windows, tree_convolution
from arbordraft.target.states import Key


class StatePlaces(NamedTuple):
    """Slots of states, by sample of a step.

    Args:
        committed: states that the samples' roots read.
        ahead: where the states after the accepted paths go.
        dummy: the dummy's state, which padding rows read.
    """

    committed: Sequence[int]
    ahead: Sequence[int]
    dummy: int


@dataclass(frozen=True)
class StateLayout:
    """The recurrent layers of a model.

    Args:
        windows: for each shape of windows, the keys of its convolutions.
        states: for each shape of states, the keys of its scans.
        width: W.
    """

    windows: tuple[tuple[Key, ...], ...]
    states: tuple[tuple[Key, ...], ...]
    width: int


class StepStates:
    """Runs the recurrent layers of one step.

    Args:
        layout: the layers.
        pools: all windows, then all states, ``[L, slots, ...]`` each, in the order of the layout.
        part: parts of the step's table.
        scratch: number of scratch states.
    """

    def __init__(self, layout: StateLayout, pools: Sequence[Tensor], part: Mapping[str, Tensor], scratch: int) -> None:
        self._part = part
        kinds = len(layout.windows)
        self._windows = list(zip(layout.windows, pools[:kinds], strict=True))
        self._states = list(zip(layout.states, pools[kinds:], strict=True))
        self._window = {key: pools[place] for keys, pools in self._windows for place, key in enumerate(keys)}
        self._state = {key: pools[place] for keys, pools in self._states for place, key in enumerate(keys)}
        # The dummy's rows, behind those of the samples, are in no path.
        self._schedule = Schedule(part["layout"][0, :-1], part["read"], part["write"], scratch)
        self._inputs: dict[Key, Tensor] = {}
        self._scans: dict[Key, Scan] = {}

    def convolve(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
        """See :meth:`~arbordraft.target.attention.Attending.convolve`."""
        self._inputs[key] = inputs
        return tree_convolution(inputs, self._window[key], self._part["history"], weight, bias, activate=activate)

    def scan(self, key: Key, rows: Scan) -> Tensor:
        """See :meth:`~arbordraft.target.attention.Attending.scan`."""
        self._scans[key] = rows
        return rows.run(self._state[key], self._schedule)

    def advance(self, path: Tensor) -> None:
        """Computes the states after accepted paths, ``[S + 1, P]`` rows padded with -1; all layers have run."""
        places = path, self._part["committed"], self._part["ahead"]
        for keys, pools in self._windows:
            advance_windows(pools, [self._inputs[key] for key in keys], *places)
        for keys, pools in self._states:
            advance_states(pools, [self._scans[key] for key in keys], *places)


__all__ = ["StateLayout", "StatePlaces", "StepStates"]
