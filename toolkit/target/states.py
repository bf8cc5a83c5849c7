"""Windows and states of recurrent layers, beside the keys and values of a ragged cache.

The rows of a step read committed states and change none, so a rejected row leaves nothing behind. The inputs of the
rows wait for the commit, which runs the accepted ones again from the committed state. A row's inputs take fewer bytes
than its state would, in nearly all models (see ``kernels/recurrent_tree``).

Shapes: T rows of a forward, U uncommitted rows, S states of a pool, C channels, W width of a convolution.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from arbordraft.kernels.decoder_layers import Kept, NodeMemory, Recurrence, RecurrentRows, replay_layers
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.ragged_tree_attention.batch import WORD_BITS
from arbordraft.kernels.recurrent_tree import Paths, Scan, commit_windows, tree_convolution

Key = tuple[int, int]
"""A convolution or scan of a model: the number of its mixer, and of the call in there; or a layer and ``WHOLE``."""

WHOLE = -1  # in place of a call, where a kernel runs a layer as a whole

_WORD = (1 << WORD_BITS) - 1
_LEAST = 4  # slots are added in multiples of these, so that pools side by side begin at aligned addresses
_KEPT = 2  # older states of a sample
MOST_STATES = 2 + _KEPT  # states of a sample: the committed one, the one computed ahead, and older ones


@dataclass(eq=False)
class _Step:
    """Inputs of one forward's rows: by convolution and by scan, and by layer that a kernel runs as a whole."""

    convolved: dict[Key, Tensor] = field(default_factory=dict)
    scanned: dict[Key, Scan] = field(default_factory=dict)
    layers: dict[Key, tuple[Recurrence, Kept]] = field(default_factory=dict)


@dataclass(eq=False)
class _Sample:
    """States of a sample.

    Args:
        slot: index of its committed windows and states in the pools.
        kept: indices of older ones by number of tokens; at most two, one that is being computed included.
        branch: number of tokens whose state is worth keeping, if any, since other texts begin with them, too.
        rows: its uncommitted rows, as rows of forwards.
        parents: their parents among them; -1 for none.
        sure: number of uncommitted rows that will be accepted, if any; their states are computed ahead. They are the
            first ones, unless a step on the device has accepted them.
        ahead: index of the windows and states after these rows.
        before: index of those one row earlier, if these are to be kept.
        reading: whether these rows are a text that is read, whose end is worth a state.
        behind: number of last committed tokens that its committed state lacks; more than 0 only after its text's end.
    """

    slot: int
    kept: dict[int, int] = field(default_factory=dict)
    branch: int | None = None
    rows: list[tuple[_Step, int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sure: int = 0
    ahead: int | None = None
    before: int | None = None
    reading: bool = False
    behind: int = 0


class _Pools:
    """Pools of one kind, of which those of one shape lie side by side from the first change of their size on.

    Attributes:
        by_key: ``[S, ...]`` each.
        stacks: keys of L pools of one shape, and these pools, ``[L, S, ...]``.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, Tensor] = {}
        self.stacks: list[tuple[tuple[Key, ...], Tensor]] = []

    def get(self, key: Key, like: Tensor, slots: int) -> Tensor:
        """Returns a pool; makes it at first, of the shape of ``like`` behind S."""
        if key not in self.by_key:
            self.by_key[key] = like.new_zeros(slots, *like.shape[1:])
            self.stacks.append(((key,), self.by_key[key][None]))
        return self.by_key[key]

    def resize(self, slots: int) -> None:
        """Lays pools of one shape side by side, with room for this many states."""
        alike: dict[object, list[Key]] = {}
        for key, pool in self.by_key.items():
            alike.setdefault((pool.shape[1:], pool.dtype), []).append(key)
        if len(alike) == len(self.stacks) and all(pools.shape[1] == slots for _, pools in self.stacks):
            return
        self.stacks = []
        for keys in alike.values():
            some = self.by_key[keys[0]]
            pools = some.new_zeros(len(keys), slots, *some.shape[1:])
            for place, key in enumerate(keys):
                pools[place, : len(self.by_key[key])] = self.by_key[key]
                self.by_key[key] = pools[place]
            self.stacks.append((tuple(keys), pools))


class RecurrentStates:
    """Windows of convolutions and states of recurrences, for the samples of a cache.

    A sample has one committed state per layer, and at most two older ones that other samples can copy. They are one
    token before the ends of the first and of the last text that it has read. In place of the first, the one that it was
    copied from or told to :meth:`keep` is there. The sample can be shortened to them.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}
        self._windows, self._states = _Pools(), _Pools()
        self._free: list[int] = []
        self._slots = 0  # of every pool

    @property
    def nbytes(self) -> int:
        """Bytes of all windows and states."""
        return sum(pools.nbytes for pools in self._stacks())

    @property
    def bytes_each(self) -> int:
        """Bytes of one state of all layers, windows included."""
        return sum(pools[:, :1].nbytes for pools in self._stacks())

    def open(self, handle: int) -> None:
        """Adds a sample without tokens."""
        self._samples[handle] = _Sample(self._take())
        self._clear(self._samples[handle].slot)

    def close(self, handle: int) -> None:
        """Removes a sample and frees its states."""
        sample = self._samples.pop(handle)
        self._release(sample.slot, sample.ahead, sample.before, *sample.kept.values())

    def reusable(self, handle: int, length: int, tokens: int) -> int:
        """Returns the greatest number of tokens, at most ``tokens``, after which a sample has a state.

        Args:
            handle: the sample.
            length: number of its committed tokens.
            tokens: bound on the result.
        """
        sample = self._samples[handle]
        return max(known for known in (0, length - sample.behind, *sample.kept) if known <= tokens)

    def share(self, source: int, handle: int, length: int, tokens: int) -> None:
        """Copies the state after ``tokens`` tokens of a sample, which has committed ``length``, to another one.

        The other sample also keeps it as an older state, since further texts may begin with these tokens.
        """
        theirs, ours = self._samples[source], self._samples[handle]
        self._restore(theirs, ours.slot, length, tokens)
        if tokens:
            ours.kept[tokens] = self._take()
            self._restore(theirs, ours.kept[tokens], length, tokens)

    def keep(self, handle: int, tokens: int) -> None:
        """Keeps the state after ``tokens`` tokens of a sample until it leaves.

        That state must be one token before the end of a text that the sample reads later.
        """
        self._samples[handle].branch = tokens

    def shorten(self, handle: int, length: int, tokens: int) -> int:
        """Takes a sample of ``length`` tokens back to its last state within ``tokens``; returns the new length."""
        sample, known = self._samples[handle], self.reusable(handle, length, tokens)
        self._restore(sample, sample.slot, length, known)
        sample.behind = 0
        for later in [number for number in sample.kept if number > known]:
            self._release(sample.kept.pop(later))
        return known

    def lay_out(
        self, handles: Sequence[int], batch: RaggedBatch, reading: Sequence[bool], device: torch.device
    ) -> "StateRows":
        """Plans the rows of a forward.

        Args:
            handles: its samples.
            batch: their rows.
            reading: for each sample, whether its rows are a text that it reads: all of them will be committed.
            device: device of the model.
        """
        step, first = _Step(), 0
        samples = [self._samples[handle] for handle in handles]
        words = None if batch.words is None else batch.words.tolist()
        new: list[list[int]] = []  # places of the new rows among each sample's rows
        given = zip(samples, batch.rows, batch.tree_positions, batch.past, reading, strict=True)
        for sample, rows, region, length, reads in given:
            earlier = len(region) - rows
            self._check_current(sample)
            del sample.rows[earlier:], sample.parents[earlier:]  # of a forward that is repeated
            if len(sample.rows) < earlier:
                raise RuntimeError(f"{earlier} rows were laid out before these, but only {len(sample.rows)} have run")
            for row in range(rows):
                place = earlier + row
                sample.parents.append(place - 1 if words is None else _parent(words[first + row], place))
                sample.rows.append((step, first + row))
            if not earlier:
                # The root of a tree is accepted, unless the step fails: a lone one need not be run twice.
                self._look_ahead(sample, rows if reads or rows == 1 else 0)
                if reads:
                    self._look_behind(sample, length + rows - 1)
            new.append(list(range(earlier, earlier + rows)))
            first += rows
        return StateRows(self, step, samples, new, device, repeatable=not all(reading))

    def commit(self, kept: Mapping[int, Sequence[int]], lengths: Mapping[int, int]) -> None:
        """Commits the states after the accepted rows of each sample, and forgets its other rows.

        Args:
            kept: for every sample, the accepted path as indices of its uncommitted rows.
            lengths: number of committed tokens of each sample before them.

        Raises:
            ValueError: if such rows are no path.
        """
        known = {handle: self._samples[handle] for handle in kept if handle in self._samples}
        for handle, sample in known.items():
            if [sample.parents[place] for place in kept[handle]] != [-1, *kept[handle]][: len(kept[handle])]:
                raise ValueError(f"rows {list(kept[handle])} are no path, so no state follows from them")
        replayed = []
        for handle, sample in known.items():
            if sample.sure and list(kept[handle]) == list(range(sample.sure)):
                self._step_ahead(sample, lengths[handle])
            elif kept[handle]:
                replayed.append((sample.slot, [sample.rows[place] for place in kept[handle]]))
        if replayed:
            self._replay([slot for slot, _ in replayed], [rows for _, rows in replayed])
        for sample in known.values():
            self._look_ahead(sample, 0)
            sample.rows, sample.parents = [], []

    def spare(self, number: int) -> list[int]:
        """Returns free slots for states that need not outlast the next computed one."""
        slots = [self._take() for _ in range(number)]
        self._release(*slots)
        return slots

    def settle(self, samples: int) -> None:
        """Makes room for the states of this many samples, and lays the pools of all layers side by side.

        The pools keep their places until more samples come.
        """
        self._resize(max(self._slots, _rounded(MOST_STATES * samples)))

    @property
    def windows_of_layers(self) -> Sequence[tuple[tuple[Key, ...], Tensor]]:
        """For each shape of windows, the keys of L convolutions, and all their windows, ``[L, S, W - 1, C]``."""
        return self._windows.stacks

    @property
    def states_of_layers(self) -> Sequence[tuple[tuple[Key, ...], Tensor]]:
        """For each shape of states, the keys of L scans, and all their states, ``[L, S, H, K, V]``."""
        return self._states.stacks

    def places(self, handle: int) -> tuple[int, int]:
        """Returns the slot of a sample's committed state, and one for the state that a step on the device computes."""
        sample = self._samples[handle]
        self._check_current(sample)
        if sample.ahead is None or sample.sure:
            self._look_ahead(sample, 0)
            sample.ahead = self._take()
        return sample.slot, sample.ahead

    def computed(self, handle: int, rows: int) -> None:
        """Notes that a step on the device has computed the state after this many rows, which it has accepted."""
        self._samples[handle].sure = rows

    def step_ahead(self, handle: int, rows: int) -> None:
        """Commits the state that a step on the device has computed.

        Args:
            handle: the sample.
            rows: number of rows that are committed. If they are fewer than the device accepted, the text has ended
                among them, and no state after it is there.
        """
        sample = self._samples[handle]
        if rows == sample.sure:
            assert sample.ahead is not None
            sample.slot, sample.ahead = sample.ahead, sample.slot
        else:
            sample.behind = rows
        sample.sure = 0

    def windows(self, key: Key, inputs: Tensor, width: int) -> Tensor:
        """Returns the ``[S, W - 1, C]`` windows of a convolution."""
        return self._windows.get(key, inputs.new_empty(0, width - 1, inputs.shape[1]), self._slots)

    def states(self, key: Key, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Returns the ``[S, *shape]`` float32 states of a scan, on the device of ``like``."""
        return self._states.get(key, like.new_empty(0, *shape, dtype=torch.float32), self._slots)

    def _look_ahead(self, sample: _Sample, rows: int) -> None:
        """Makes room for the state after a sample's first rows, and gives up such room from before."""
        self._release(sample.ahead, sample.before)
        sample.sure, sample.reading, sample.before = rows, False, None
        sample.ahead = self._take() if rows else None

    def _look_behind(self, sample: _Sample, tokens: int) -> None:
        """Makes room for an older state, after ``tokens`` tokens: one before the end of the text that is read."""
        sample.reading = True
        if len(sample.kept) == _KEPT and tokens not in sample.kept:
            self._release(sample.kept.pop(max(number for number in sample.kept if number != sample.branch)))
        sample.before = self._take() if sample.sure > 1 else None

    def _step_ahead(self, sample: _Sample, length: int) -> None:
        """Commits the states after a sample's first rows, which are there already."""
        assert sample.ahead is not None
        older, sample.slot, sample.ahead = sample.slot, sample.ahead, None
        tokens = length + sample.sure - 1
        if sample.before is not None:
            self._release(older)
            older, sample.before = sample.before, None
        if not sample.reading or not tokens or tokens in sample.kept:
            self._release(older)
            return
        sample.kept[tokens] = older

    def _replay(self, slots: Sequence[int], accepted: Sequence[Sequence[tuple[_Step, int]]]) -> None:
        """Runs accepted rows of samples from their committed states, which then are those after the rows."""
        rows = _Gathered([row for rows in accepted for row in rows])
        paths = Paths.chains([len(rows) for rows in accepted], slots)
        ends = [end - 1 for end in accumulate(len(rows) for rows in accepted)]
        (any_step, _), *_ = accepted[0]
        device = next(self._stacks()).device
        places, histories = torch.tensor(slots, device=device), dict[int, Tensor]()

        def history(width: int) -> Tensor:
            if width not in histories:
                histories[width] = paths.windows(ends, width).to(device)
            return histories[width]

        for key in any_step.convolved:
            inputs, pool = rows([step.convolved[key] for step in rows.steps]), self._windows.by_key[key]
            commit_windows(pool, inputs, history(pool.shape[1] + 1), places)
        schedule = paths.schedule(commit=True).to(device)
        for key in any_step.scanned:
            Scan.joined([step.scanned[key] for step in rows.steps], rows).run(self._states.by_key[key], schedule)
        if any_step.layers:
            layers = [layer for layer, _ in any_step.layers.values()]
            pools = [
                (self._windows.by_key[key], self._states.by_key.get(key, self._windows.by_key[key]))
                for key in any_step.layers
            ]
            picked, kept = rows.kept([[step.layers[key][1] for key in any_step.layers] for step in rows.steps])
            replay_layers(layers, pools, kept, picked, schedule, places, history(len(layers[0].taps)))

    def _restore(self, sample: _Sample, slot: int, length: int, tokens: int) -> None:
        """Copies the state of a sample after ``tokens`` tokens to a slot."""
        source = None if not tokens else sample.slot if tokens == length - sample.behind else sample.kept[tokens]
        if source is None:
            self._clear(slot)
        elif source != slot:
            for pools in self._stacks():
                pools[:, slot] = pools[:, source]

    def _clear(self, slot: int) -> None:
        for pools in self._stacks():
            pools[:, slot] = 0

    def _check_current(self, sample: _Sample) -> None:
        if sample.behind:
            raise RuntimeError(f"a text has ended, and the state after its last {sample.behind} tokens is not there")

    def _stacks(self) -> Iterator[Tensor]:
        for pools in (self._windows, self._states):
            yield from (stack for _, stack in pools.stacks)

    def _resize(self, slots: int) -> None:
        self._free = [*reversed(range(self._slots, slots)), *self._free]
        self._slots = slots
        for pools in (self._windows, self._states):
            pools.resize(slots)

    def _take(self) -> int:
        """Returns a free slot; its contents are undefined."""
        if not self._free:
            self._resize(self._slots + _rounded(self._slots // 2))
        return self._free.pop()

    def _release(self, *slots: int | None) -> None:
        self._free += [slot for slot in slots if slot is not None]


class StateRows:
    """The rows of one forward in recurrent layers, behind the uncommitted rows of earlier forwards.

    Earlier rows are run again from the committed state: a drafter that goes level by level keeps no states of nodes.

    Args:
        memory: windows and states.
        step: gets the inputs of these rows.
        samples: samples of the forward.
        new: for each sample, places of its new rows among its uncommitted ones.
        device: device of the model.
        repeatable: keep the inputs, for later rows and for a commit of some rows.
    """

    def __init__(
        self,
        memory: RecurrentStates,
        step: _Step,
        samples: Sequence[_Sample],
        new: Sequence[Sequence[int]],
        device: torch.device,
        *,
        repeatable: bool,
    ) -> None:
        self._memory, self._step, self._device, self._repeatable = memory, step, device, repeatable
        self._samples, self._nodes = samples, _Step()
        counts = [len(sample.rows) for sample in samples]
        firsts = list(accumulate(counts, initial=0))
        parents = [
            parent + first if parent >= 0 else -1
            for sample, first in zip(samples, firsts, strict=False)
            for parent in sample.parents
        ]
        self._paths = Paths(parents, counts, [sample.slot for sample in samples])
        self._rows: _Gathered | None = None
        self._new: Tensor | None = None
        if any(len(places) < len(sample.rows) for places, sample in zip(new, samples, strict=True)):
            self._rows = _Gathered([row for sample in samples for row in sample.rows], device)
            places = [first + place for first, places in zip(firsts, new, strict=False) for place in places]
            self._new = torch.tensor(places, device=device)
        # The first rows of a sample, which are a chain, write no other states.
        ahead = [
            (number, sample)
            for number, (sample, places) in enumerate(zip(samples, new, strict=True))
            if len(places) == len(sample.rows)
        ]
        # By sample, the last row of windows and states that this forward computes ahead, and their slot.
        self._ends: list[dict[int, tuple[int, int]]] = [
            {n: (firsts[n] + one.sure - 1, one.ahead) for n, one in ahead if one.ahead is not None},
            {n: (firsts[n] + one.sure - 2, one.before) for n, one in ahead if one.before is not None},
        ]
        ends = [end for ends in self._ends for end in ends.values()]
        self._slots = torch.tensor([slot for _, slot in ends], dtype=torch.int64, device=device)
        schedule = self._paths.schedule()
        for row, slot in ends:
            schedule.write[row] = slot
        self._schedule = schedule.to(device)
        self._histories: dict[int, tuple[Tensor, Tensor]] = {}
        self._places = torch.arange(sum(counts), device=device) if self._new is None else self._new
        self._gaps: list[tuple[Kept, Kept]] = []  # by layer, inputs of these rows, and of all uncommitted ones

    def convolve(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
        """Convolves ``[T, C]`` inputs along the paths of their rows; see :func:`tree_convolution`."""
        width = len(weight)
        windows = self._memory.windows(key, inputs, width)
        if self._repeatable:
            self._step.convolved[key] = inputs
        rows = inputs if self._rows is None else self._rows([step.convolved[key] for step in self._rows.steps])
        history, ends = self._history(width)
        out = tree_convolution(rows, windows, history, weight, bias, activate=activate)
        if len(self._slots):
            commit_windows(windows, rows, ends, self._slots)
        return out if self._new is None else out[self._new]

    def scan(self, key: Key, rows: Scan) -> Tensor:
        """Runs a recurrence along the paths of the rows; the bits of a row depend on its path alone.

        Args:
            key: the scan.
            rows: these rows.

        Returns:
            ``[T, H, V]`` float32.
        """
        states = self._memory.states(key, rows.state, rows.value)
        if self._repeatable:
            self._step.scanned[key] = rows
        if self._rows is not None:
            rows = Scan.joined([step.scanned[key] for step in self._rows.steps], self._rows)
        out = rows.run(states, self._schedule)
        return out if self._new is None else out[self._new]

    def layers(
        self, recurrences: Mapping[Key, Recurrence], like: Tensor
    ) -> tuple[dict[Key, tuple[Tensor, Tensor]], RecurrentRows]:
        """Lays out the memory of recurrent layers that a kernel runs; :meth:`keep` follows the run.

        Args:
            recurrences: the layers, in order; their convolutions have one width.
            like: has the dtype of the rows.

        Returns:
            Windows and states of every layer, and the rows.
        """
        pools, kept = {}, []
        for key, layer in recurrences.items():
            windows = self._memory.windows(key, like.new_empty(0, layer.channels), len(layer.taps))
            pools[key] = windows, self._memory.states(key, layer.state, like) if layer.scans else windows
            own = layer.memory(len(self._places), like)
            if self._repeatable:
                self._step.layers[key] = layer, own
            if self._rows is not None:  # those of earlier forwards, with gaps for these
                gathered = Kept(*map(self._rows, zip(*(step.layers[key][1] for step in self._rows.steps), strict=True)))
                self._gaps.append((own, gathered))
                own = gathered
            kept.append(own)
        history, ends = self._history(len(layer.taps))
        return pools, RecurrentRows(self._places, self._schedule, history, ends, self._slots, kept)

    def keep(self) -> None:
        """Keeps the inputs that a kernel has left in the memory of :meth:`layers`."""
        for own, gathered in self._gaps:
            for part, rows in zip(own, gathered, strict=True):
                part[:] = rows[self._places]
        self._gaps.clear()

    def nodes(self, recurrences: Mapping[Key, Recurrence], like: Tensor, count: int, width: int) -> NodeMemory:
        """Makes room for trees that a kernel drafts after these rows; :meth:`layers` follows, then :meth:`drafted`.

        Args:
            recurrences: the layers, in order.
            like: has the dtype of the rows.
            count: greatest number of nodes of a tree that are fed.
            width: greatest number of these in a level.
        """
        samples = len(self._samples)
        layers = {key: (layer, layer.memory(samples * count, like)) for key, layer in recurrences.items()}
        self._nodes = _Step(layers=layers)
        scanned = width if any(layer.scans for layer in recurrences.values()) else 0
        slots = torch.tensor(self._memory.spare(samples * scanned), dtype=torch.int64)
        return NodeMemory([kept for _, kept in layers.values()], slots.view(samples, scanned))

    def drafted(self, parents: Sequence[Sequence[int]]) -> None:
        """Records nodes that a kernel has fed as uncommitted rows, once these rows are committed.

        Args:
            parents: for each sample, the parents of its fed nodes among them; -1 for the last committed token.
        """
        ((_, kept), *_) = self._nodes.layers.values()
        count = len(kept.inputs) // len(self._samples)
        for number, (sample, above) in enumerate(zip(self._samples, parents, strict=True)):
            sample.parents = list(above)
            sample.rows = [(self._nodes, number * count + place) for place in range(len(above))]

    def _history(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs before each row, and those of the windows that this forward computes ahead."""
        if width not in self._histories:
            windows = []
            for ends in self._ends:
                last = [ends.get(number, (-1,))[0] for number in range(len(self._paths.rows))]
                windows.append(self._paths.windows(last, width)[list(ends)])
            self._histories[width] = self._paths.history(width).to(self._device), torch.cat(windows).to(self._device)
        return self._histories[width]


class _Gathered:
    """Rows of several forwards, side by side.

    Args:
        rows: the forwards with the numbers of their rows.
        device: device of the rows.

    Attributes:
        steps: the forwards.
    """

    def __init__(self, rows: Sequence[tuple[_Step, int]], device: torch.device | None = None) -> None:
        by_step: dict[_Step, list[int]] = {}
        for place, (step, _) in enumerate(rows):
            by_step.setdefault(step, []).append(place)
        self.steps = list(by_step)
        self._picked = [torch.tensor([rows[place][1] for place in by_step[step]], device=device) for step in self.steps]
        order = torch.tensor([place for places in by_step.values() for place in places])
        self._order = None if len(self.steps) == 1 else order.argsort().to(device or "cpu")

    def kept(self, parts: Sequence[Sequence[Kept]]) -> tuple[Tensor, Sequence[Kept]]:
        """Returns the places of the rows among inputs of layers, and these inputs, given by forward and by layer."""
        if self._order is None:
            return self._picked[0], parts[0]
        gathered = [Kept(*map(self, zip(*each, strict=True))) for each in zip(*parts, strict=True)]
        return torch.arange(len(gathered[0].inputs)), gathered

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the rows of one input, given by forward."""
        found = [part[picked.to(part.device)] for part, picked in zip(parts, self._picked, strict=True)]
        return found[0] if self._order is None else torch.cat(found)[self._order.to(found[0].device)]


def _rounded(slots: int) -> int:
    return -(-max(slots, 1) // _LEAST) * _LEAST


def _parent(words: Sequence[int], place: int) -> int:
    """Returns the last ancestor of a row among the rows that its words make visible; -1 if it has none.

    Nodes follow their ancestors, so the deepest ancestor has the highest place.
    """
    seen = sum((word & _WORD) << WORD_BITS * index for index, word in enumerate(words))
    return (seen & ((1 << place) - 1)).bit_length() - 1


__all__ = ["MOST_STATES", "WHOLE", "Key", "RecurrentStates", "StateRows"]
