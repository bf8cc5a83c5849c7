"""Problems for recurrent layers along trees; the truth walks each path in float64.

Shapes: T rows of all trees, H heads, K keys and V values of a head, C channels, W width of a convolution.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbordraft.kernels.recurrent_tree import Paths, Scan, gate, tree_convolution
from arbordraft.trees.topology import TreeTopology
from arborlab.gpu.problem import Problem, largest_error, rounding
from arborlab.gpu.roofline import Stepped

WIDTH = 4  # inputs of a convolution
_HEADS, _KEY_HEADS, _SIZE = 8, 4, 128
_SUMS = 1e-4  # error of sums of products in float32, as a share of the largest


def recurrence(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields gates, convolutions and gated delta rules of all rows, each tree behind a committed state of its own."""
    topology = TreeTopology.from_k_config(stepped.tree)
    nodes = topology.num_nodes
    parents = [
        parent if parent < 0 else parent + sample * nodes
        for sample in range(stepped.samples)
        for parent in topology.parent_list
    ]
    paths = Paths(parents, [nodes] * stepped.samples, list(range(stepped.samples)))
    generator = torch.Generator().manual_seed(0)
    channels = min(stepped.hidden, 1024)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows, bias, scale = drawn(stepped.rows, channels).to(stepped.dtype), drawn(channels), drawn(channels)
    yield _gates(rows, bias, scale, stepped)
    windows = drawn(stepped.samples, WIDTH - 1, channels).to(stepped.dtype)
    yield _convolution(rows, windows, paths, drawn(WIDTH, channels), bias, stepped)
    size = min(_SIZE, stepped.size)
    heads, key_heads = (_HEADS, _KEY_HEADS) if stepped.size >= _SIZE else (2, 1)
    states = drawn(stepped.samples, heads, size, size)
    query, key = drawn(2, stepped.rows, key_heads, size)
    value = drawn(stepped.rows, heads, size)
    decay, beta = -drawn(stepped.rows, heads).abs(), drawn(stepped.rows, heads).sigmoid()
    yield _delta(states, paths, (query, key, value, decay, beta), stepped)


def _gates(rows: Tensor, bias: Tensor, scale: Tensor, stepped: Stepped) -> Problem:
    run = partial(gate, rows, "softplus", bias, scale)

    def error() -> float:
        exact = torch.nn.functional.softplus(rows.double() + bias.double(), threshold=700) * scale.double()
        return largest_error(run(), exact)

    return stepped.problem("recurrent_gate", run, error, _SUMS, note=f"{len(rows)} rows of {rows.shape[1]}")


def _convolution(
    rows: Tensor, windows: Tensor, paths: Paths, weight: Tensor, bias: Tensor, stepped: Stepped
) -> Problem:
    history = paths.history(WIDTH).to(rows.device)
    run = partial(tree_convolution, rows, windows, history, weight, bias)

    def error() -> float:
        inputs = [*windows.double().flatten(0, 1).flip(0), *rows.double()]  # index -1 is the last before the rows
        behind, (*taps, last) = len(inputs) - len(rows), weight.double()
        exact = []
        for row, before in enumerate(history.tolist()):
            parts = [inputs[behind + place] * tap for place, tap in zip(before, taps, strict=True)]
            exact.append(torch.stack([*parts, rows[row].double() * last, bias.double()]).sum(dim=0))
        return largest_error(run(), torch.stack(exact))

    allowed = rounding(stepped.dtype) + _SUMS
    return stepped.problem("tree_convolution", run, error, allowed, note=f"{len(rows)} rows of {rows.shape[1]}")


def _delta(states: Tensor, paths: Paths, inputs: tuple[Tensor, ...], stepped: Stepped) -> Problem:
    schedule = paths.schedule().to(states.device)
    run = partial(Scan.gated_delta(*inputs).run, states, schedule)

    def error() -> float:
        query, key, value, decay, beta = (part.double() for part in inputs)
        shared = states.shape[1] // key.shape[1]
        query, key = (torch.nn.functional.normalize(part, dim=-1).repeat_interleave(shared, 1) for part in (query, key))
        query = query * key.shape[-1] ** -0.5
        own = {-1 - sample: state for sample, state in enumerate(states.double())}
        exact, owner = [], [sample for sample, count in enumerate(paths.rows) for _ in range(count)]
        for row, parent in enumerate(paths.parent):
            state = own[parent if parent >= 0 else -1 - owner[row]] * decay[row].exp()[:, None, None]
            added = (value[row] - torch.einsum("hkv,hk->hv", state, key[row])) * beta[row][:, None]
            own[row] = state + key[row][:, :, None] * added[:, None]
            exact.append(torch.einsum("hkv,hk->hv", own[row], query[row]))
        return largest_error(run(), torch.stack(exact))

    shape = f"{len(paths.parent)} rows, {states.shape[1]} heads of {states.shape[2]} x {states.shape[3]}"
    return stepped.problem("tree_scan", run, error, _SUMS, note=f"gated delta, {shape}")
