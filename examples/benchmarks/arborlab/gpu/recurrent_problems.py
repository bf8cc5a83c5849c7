"""Problems for recurrent layers along trees; the truth walks each path in float64.

Shapes: T rows of all trees, H heads, K keys and V values of a head, C channels, W width of a convolution.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbordraft.kernels.recurrent_tree import Paths, Scan, advance_states, advance_windows, gate, tree_convolution
from arbordraft.trees.topology import TreeTopology
from arborlab.gpu.problem import Problem, largest_error, rounding, unequal
from arborlab.gpu.roofline import Stepped

WIDTH = 4  # inputs of a convolution
_HEADS, _KEY_HEADS, _SIZE = 8, 4, 128
_SUMS = 1e-4  # error of sums of products in float32, as a share of the largest


def recurrence(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields gates, convolutions and gated delta rules of all rows, each tree behind a committed state of its own.

    Then windows and states of two layers after accepted paths: those of the trees' last nodes.
    """
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
    accepted = _accepted(paths, device)
    windows = drawn(stepped.samples, WIDTH - 1, channels).to(stepped.dtype)
    yield _convolution(rows, windows, paths, drawn(WIDTH, channels), bias, stepped)
    yield _windows(windows, rows, accepted, stepped)
    size = min(_SIZE, stepped.size)
    heads, key_heads = (_HEADS, _KEY_HEADS) if stepped.size >= _SIZE else (2, 1)
    states = drawn(stepped.samples, heads, size, size)
    query, key = drawn(2, stepped.rows, key_heads, size)
    value = drawn(stepped.rows, heads, size)
    decay, beta = -drawn(stepped.rows, heads).abs(), drawn(stepped.rows, heads).sigmoid()
    yield _delta(states, paths, (query, key, value, decay, beta), stepped)
    yield _states(states, Scan.gated_delta(query, key, value, decay, beta), accepted, stepped)


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


def _accepted(paths: Paths, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the path to each sample's last row, and the states before and after it."""
    samples, ends = len(paths.rows), [sum(paths.rows[: sample + 1]) - 1 for sample in range(len(paths.rows))]
    rows, chains = paths.accepted(ends)
    packed = torch.tensor(rows).split(list(chains.rows))
    path = torch.nn.utils.rnn.pad_sequence(list(packed), batch_first=True, padding_value=-1)
    before = torch.arange(samples)
    return path.to(device), before.to(device), (before + samples).to(device)


def _windows(windows: Tensor, rows: Tensor, accepted: tuple[Tensor, Tensor, Tensor], stepped: Stepped) -> Problem:
    layers = [rows, rows.flip(0)]
    pools = torch.stack([torch.cat([windows, windows]), torch.cat([windows.flip(0), windows])])
    run = partial(advance_windows, pools, layers, *accepted)

    def error() -> float:
        run()
        worst = 0.0
        for path, before, after in zip(*(part.tolist() for part in accepted), strict=True):
            for pool, inputs in zip(pools, layers, strict=True):
                text = torch.cat([pool[before], inputs[[row for row in path if row >= 0]]])
                worst = max(worst, unequal(pool[after], text[len(text) - WIDTH + 1 :]))
        return worst

    note = f"2 layers, paths of {accepted[0].shape[1]} rows of {rows.shape[1]}"
    return stepped.problem("advance_windows", run, error, 0.0, note=note)


def _states(states: Tensor, scan: Scan, accepted: tuple[Tensor, Tensor, Tensor], stepped: Stepped) -> Problem:
    layers = [scan, Scan.joined([scan], lambda parts: parts[0].flip(0))]
    pools = torch.stack([torch.cat([states, states]), torch.cat([states.flip(0), states])])
    run = partial(advance_states, pools, layers, *accepted)

    def error() -> float:
        run()
        worst, shared = 0.0, states.shape[1] // scan.key.shape[1]
        for path, before, after in zip(*(part.tolist() for part in accepted), strict=True):
            for pool, rows in zip(pools, layers, strict=True):
                assert rows.beta is not None
                key = torch.nn.functional.normalize(rows.key.double(), dim=-1).repeat_interleave(shared, 1)
                state = pool[before].double()
                for row in (row for row in path if row >= 0):
                    state = state * rows.log_decay[row].double().exp()[:, None, None]
                    added = rows.value[row] - torch.einsum("hkv,hk->hv", state, key[row])
                    state = state + key[row][:, :, None] * (added * rows.beta[row][:, None])[:, None]
                worst = max(worst, largest_error(pool[after], state))
        return worst

    note = f"gated delta, 2 layers, paths of {accepted[0].shape[1]} rows"
    return stepped.problem("advance_states", run, error, _SUMS, note=note)
