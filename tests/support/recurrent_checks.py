"""Cases of recurrent layers along draft trees, and the bits that every implementation finds for them."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import ACTIVATIONS, Paths, Scan, gate, tree_convolution, tree_scan

TREES = Paths(
    [-1, 0, 0, 1, 1, 2, 2, -1, -1, 8, 9, 8, -1, -1, 13], rows=[7, 1, 4, 0, 3], states=[2, 5, 0, 3, 1]
)  # two samples have several roots, one has no rows
SHAPES = {  # heads, key heads, keys, values, numbers that share a decay, delta rule
    "gated delta": (4, 2, 64, 48, "head", True),
    "gated delta, odd sizes": (3, 3, 7, 5, "head", True),
    "decay per key": (2, 1, 33, 20, "key", True),
    "Mamba-2": (4, 2, 24, 16, "head", False),
    "Mamba": (1, 1, 16, 300, "element", False),
    "RG-LRU": (1, 1, 1, 40, "element", False),
    "decay per key, no delta": (2, 2, 65, 17, "key", False),
}


@dataclass
class Case:
    """Arguments of :func:`tree_scan` for the rows of ``paths``; states of no sample are NaN."""

    paths: Paths
    states: Tensor
    rows: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, schedule=None, states=None):
        """Returns the output; changes ``states``, by default a copy of the case's."""
        states = self.states.clone() if states is None else states
        schedule = self.paths.schedule() if schedule is None else schedule
        return tree_scan(states, schedule, **self.rows, **self.options)

    def on(self, rows, paths):
        """Returns the case with these rows only, on other paths."""
        return replace(self, paths=paths, rows={name: part[rows] for name, part in self.rows.items()})


def scan_case(name, paths=TREES, seed=0):
    heads, key_heads, keys, values, per, delta = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator)

    total = len(paths.parent)
    states = torch.full((max(paths.states) + 2, heads, keys, values), torch.nan)
    states[list(paths.states)] = normal(len(paths.states), heads, keys, values)
    rows = {part: normal(total, key_heads, keys) for part in ("query", "key")}
    rows["value"] = normal(total, heads, values)
    sizes = {"head": (heads,), "key": (heads, keys), "element": (heads, values)}
    rows["log_decay"] = -normal(total, *sizes[per]).abs() * (-1 if per == "element" else 1)
    options = {"scale": keys**-0.5}
    if per == "element":
        options["rates"] = -normal(heads, keys, values).abs()
    if delta:
        rows["beta"] = torch.rand(total, heads, generator=generator)
        options["epsilon"] = 1e-6
    return Case(paths, states, rows, options)


def same(found, expected):
    """Returns whether numbers are equal, NaN included."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def check_scan(name):
    """Compares the chosen implementation with the reference: outputs and committed states."""
    case = scan_case(name)
    results = []
    for path in ("auto", "reference"):
        states = case.states.clone()
        with choice.use(path):
            results.append((case.run(states=states), states))
    assert all(map(same, *results))
    assert not results[0][0].isnan().any()
    assert same(results[0][1], case.states)  # nothing is committed


def numbers():
    """Returns ``[3, 5337]`` float32 numbers of all magnitudes that gates meet, and special ones."""
    some = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    special = torch.tensor([0.0, -0.0, 88.0, 89.0, 200.0, -104.0, -200.0, torch.inf, -torch.inf, torch.nan, 1e-30])
    return torch.cat([some * scale for scale in (1e-3, 1.0, 20.0, 60.0)] + [special]).view(3, -1)


def check_gates():
    x = numbers()
    channels = torch.randn(2, x.shape[1], generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        for activation in ACTIVATIONS:
            for bias, scale in ((None, None), (channels[0], None), (channels[0], channels[1])):
                found = gate(x.to(dtype), activation, bias, scale)
                with choice.use("reference"):
                    assert same(found, gate(x.to(dtype), activation, bias, scale))


def convolution_case(dtype=torch.float32, width=4, channels=37, paths=TREES, seed=0):
    """Returns inputs, windows, history, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(paths.parent), channels, generator=generator).to(dtype)
    windows = torch.full((max(paths.states) + 2, width - 1, channels), torch.nan).to(dtype)
    windows[list(paths.states)] = torch.randn(len(paths.states), width - 1, channels, generator=generator).to(dtype)
    weight, bias = torch.randn(width, channels, generator=generator), torch.randn(channels, generator=generator)
    return inputs, windows, paths.history(width), weight, bias


def check_convolution():
    for dtype in (torch.float32, torch.bfloat16):
        for width, channels in ((4, 37), (3, 64), (1, 5), (4, 1100)):
            *arguments, bias = convolution_case(dtype, width, channels)
            for options in ({}, {"bias": bias}, {"bias": bias, "activate": True}):
                found = tree_convolution(*arguments, **options)
                with choice.use("reference"):
                    assert torch.equal(found, tree_convolution(*arguments, **options))
                assert not found.isnan().any()


def check_recurrent():
    """Checks a build of the C++ kernels, with one thread and with several."""
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for name in SHAPES:
            check_scan(name)
        check_gates()
        check_convolution()
    torch.set_num_threads(threads)


def path_of(row, paths=TREES):
    """Returns the rows from a root to a row."""
    path = [row]
    while (parent := paths.parent[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def sample_of(row, paths=TREES):
    ends = list(itertools.accumulate(paths.rows))
    return next(sample for sample, end in enumerate(ends) if row < end)


ACCEPTED = [[0, 2, 5, -1], [7, -1, -1, -1], [8, 9, 10, -1], [0, -1, -1, -1], [13, 14, -1, -1]]  # rows of TREES
FROM, INTO = [2, 5, 0, 3, 1], [4, 7, 6, -1, 8]  # the fourth sample has no rows


RAW = "Mamba-2"  # the shape of rows with raw step sizes
LIMITS = (0.05, 1.5)  # of their steps


def raw_rows(seed=0):
    """Returns rows of Mamba-2 with raw step sizes."""
    rows, generator = scan_case(RAW, seed=seed).rows, torch.Generator().manual_seed(seed)
    heads = rows["value"].shape[1]
    steps, rates, bias, skip = (
        torch.randn(size, generator=generator) for size in ((len(rows["value"]), heads), *3 * [(heads,)])
    )
    given = rows["value"], steps, -rates.abs(), rows["key"], rows["query"]
    return Scan.mamba2(*given, bias=bias, skip=skip, limits=LIMITS)


def advanced(name, layers=2, raw=False):
    """Returns the states of layers, their scans, and the accepted paths with the states before and after."""
    cases = [scan_case(name, seed=seed) for seed in range(layers)]
    states = torch.stack([torch.cat([case.states, torch.full_like(case.states[:2], torch.nan)]) for case in cases])
    scans = [raw_rows(seed) if raw else Scan(**case.rows, **case.options) for seed, case in enumerate(cases)]
    return states, scans, [torch.tensor(part) for part in (ACCEPTED, FROM, INTO)]


def replayed(states, scans):
    """Returns the states that scans of each accepted path alone leave."""
    states = states.clone()
    for pool, scan in zip(states, scans, strict=True):
        for path, source, destination in zip(ACCEPTED, FROM, INTO, strict=True):
            rows = [row for row in path if row >= 0]
            if destination >= 0:
                schedule = Paths.chains([len(rows)], [source]).schedule(commit=True)
                schedule.write[-1] = destination
                Scan.joined([scan], lambda parts, rows=rows: parts[0][rows]).run(pool, schedule)
    return states


def moved_windows(dtype, width, channels, layers=2):
    """Returns the windows of layers, their inputs, the accepted paths, and the windows after them."""
    cases = [convolution_case(dtype, width, channels, seed=seed) for seed in range(layers)]
    windows = torch.stack([torch.cat([case[1], torch.full_like(case[1][:2], torch.nan)]) for case in cases])
    inputs, after = [case[0] for case in cases], windows.clone()
    for pool, rows in zip(after, inputs, strict=True):
        for path, source, destination in zip(ACCEPTED, FROM, INTO, strict=True):
            if destination >= 0:
                text = [*pool[source], *(rows[row] for row in path if row >= 0)]
                pool[destination] = torch.stack(text[len(text) - width + 1 :]) if width > 1 else pool[destination]
    return windows, inputs, [torch.tensor(part) for part in (ACCEPTED, FROM, INTO)], after
