"""Recurrent layers along draft trees in plain PyTorch: the truth for the other implementations, bit for bit on a CPU.

Shapes: T packed rows, B samples, S committed states, H heads, G key heads, K keys and V values of a
head, C channels, W width of a convolution.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from arbordraft.kernels.recurrent_tree.arithmetic import exp, pairwise_sum, sigmoid, silu, softplus, sqrt
from arbordraft.kernels.recurrent_tree.paths import NOWHERE, PREVIOUS

ACTIVATIONS = {"softplus": softplus, "sigmoid": sigmoid, "silu": silu}


def gate_reference(x: Tensor, bias: Tensor | None, scale: Tensor | None, activation: int) -> Tensor:
    """See :func:`arbordraft.kernels.recurrent_tree.gate`; takes the number of the activation in ``ACTIVATIONS``."""
    x = x.float() if bias is None else x.float() + bias
    y = list(ACTIVATIONS.values())[activation](x)
    return y if scale is None else y * scale


def convolution_reference(
    inputs: Tensor, windows: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """See :func:`arbordraft.kernels.recurrent_tree.tree_convolution`."""
    rows, weight = gather_inputs(inputs, windows, history), weight.float()
    bias = None if bias is None else bias.float()
    total = torch.zeros_like(inputs, dtype=torch.float32) if bias is None else bias.expand(inputs.shape)
    for place, taps in enumerate(weight[:-1]):
        total = total + rows[:, place].float() * taps
    total = total + inputs.float() * weight[-1]
    return (silu(total) if activate else total).to(inputs.dtype)


def gather_inputs(inputs: Tensor, windows: Tensor, history: Tensor) -> Tensor:
    """Returns ``[..., C]`` inputs of packed rows and of committed windows, by indices as in :meth:`Paths.history`."""
    committed = windows.flatten(0, 1)[(-1 - history).clamp(min=0)]  # picked first: pools may hold many windows
    if not len(inputs):
        return committed
    return torch.where((history >= 0).unsqueeze(-1), inputs[history.clamp(min=0)], committed)


def scan_reference(
    states: Tensor,
    first: Tensor,
    read: Tensor,
    write: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
    scale: float,
    epsilon: float,
    count: int,
) -> Tensor:
    """Updates states along paths, as :func:`arbordraft.kernels.recurrent_tree.tree_scan` describes.

    Args:
        states: ``[S, H, K, V]``, changed in place.
        first: see :class:`~arbordraft.kernels.recurrent_tree.Schedule`, as are the next two.
        read: ``[T]``.
        write: ``[T]``.
        query: ``[T, G, K]``.
        key: ``[T, G, K]``.
        value: ``[T, H, V]``.
        log_decay: ``[T, H]``, ``[T, H, K]``, or ``[T, H, V]`` with ``rates``.
        rates: ``[H, K, V]``.
        beta: ``[T, H]``.
        scale: factor of the queries.
        epsilon: added to squared lengths of queries and keys, which get the length 1; 0 leaves them as they are.
        count: number of scratch states of the schedule.
    """
    scratch = states.new_empty(count, *states.shape[1:])
    query, key, value, log_decay = (part.float() for part in (query, key, value, log_decay))
    beta = None if beta is None else beta.float()
    if epsilon:
        query, key = _normalized(query, epsilon), _normalized(key, epsilon)
    query, key = (part.repeat_interleave(value.shape[1] // key.shape[1], dim=1) for part in (query * scale, key))
    out = torch.zeros_like(value)
    begin, reads, writes = first.tolist(), read.tolist(), write.tolist()
    counts = [end - start for start, end in pairwise(begin)]
    current: dict[int, Tensor] = {}  # by sample
    for place in range(max(counts, default=0)):
        samples = [sample for sample, count in enumerate(counts) if place < count]
        rows = [begin[sample] + place for sample in samples]
        before = torch.stack(
            [
                current[sample] if reads[row] == PREVIOUS else _state(states, scratch, reads[row])
                for sample, row in zip(samples, rows, strict=True)
            ]
        )
        k, v = key[rows].unsqueeze(-1), value[rows]
        after = before * _decay(log_decay[rows], rates)
        if beta is not None:
            v = (v - pairwise_sum(after * k, -2)) * beta[rows].unsqueeze(-1)
        after = after + k * v.unsqueeze(-2)
        out[rows] = pairwise_sum(after * query[rows].unsqueeze(-1), -2)
        for sample, row, state in zip(samples, rows, after, strict=True):
            current[sample] = state
            if writes[row] != NOWHERE:
                _state(states, scratch, writes[row]).copy_(state)
    return out


def selective_reference(
    states: Tensor,
    first: Tensor,
    read: Tensor,
    write: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Tensor,
    rates: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    least: float,
    most: float,
    count: int,
) -> Tensor:
    """Runs the rows of Mamba-2 that :class:`arbordraft.kernels.recurrent_tree.Scan` describes, with raw step sizes."""
    places = states, first, read, write
    x, steps = value.float(), _steps(steps, bias, least, most)
    out = scan_reference(*places, query, key, x * steps[..., None], steps * rates, None, None, 1.0, 0.0, count)
    return out if skip is None else out + x * skip.float()[:, None]


def _steps(raw: Tensor, bias: Tensor | None, least: float, most: float) -> Tensor:
    """Returns float32 step sizes."""
    return gate_reference(raw, None if bias is None else bias.float(), None, 0).clamp(least, most)


def advance_windows_reference(
    windows: Tensor, inputs: Tensor, path: Tensor, source: Tensor, destination: Tensor
) -> None:
    """See :func:`arbordraft.kernels.recurrent_tree.advance_windows`; takes the layers' inputs as ``[L, T, C]``."""
    size = windows.shape[2]
    for rows, before, after in zip(path.tolist(), source.tolist(), destination.tolist(), strict=True):
        if after >= 0:
            accepted = inputs[:, [row for row in rows if row >= 0]]
            text = torch.cat([windows[:, before], accepted], dim=1)
            windows[:, after] = text[:, text.shape[1] - size :]


def advance_states_reference(
    scan: Callable[..., Tensor],
    states: Tensor,
    path: Tensor,
    source: Tensor,
    destination: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    least: float,
    most: float,
) -> None:
    """See :func:`arbordraft.kernels.recurrent_tree.advance_states`.

    Args:
        scan: runs :func:`scan_reference` or its equal.
        states: ``[L, S, H, K, V]``, changed in place.
        path: ``[B, P]``.
        source: ``[B]``.
        destination: ``[B]``.
        key: ``[L, T, G, K]``, as are the next ones by layer.
        value: ``[L, T, H, V]``.
        log_decay: as of one layer, behind L.
        rates: ``[L, H, K, V]``, or ``[L, H]`` with raw step sizes in place of decays.
        beta: ``[L, T, H]``.
        bias: ``[L, H]``, added to raw step sizes.
        epsilon: see :func:`scan_reference`.
        least: least step.
        most: greatest step.
    """
    rows, first, read, write = [], [0], [], []
    for each, before, after in zip(path.tolist(), source.tolist(), destination.tolist(), strict=True):
        if after >= 0:
            accepted = [row for row in each if row >= 0]
            rows += accepted
            first.append(len(rows))
            read += [before, *[PREVIOUS] * (len(accepted) - 1)]
            write += [*[NOWHERE] * (len(accepted) - 1), after]
    places = [torch.tensor(part, dtype=torch.int64) for part in (first, read, write)]
    for layer, pool in enumerate(states):
        keys, values, decays = (part[layer, rows].float().contiguous() for part in (key, value, log_decay))
        betas = None if beta is None else beta[layer, rows].float().contiguous()
        factors = None if rates is None else rates[layer]
        if factors is not None and factors.dim() == 1:
            steps = _steps(log_decay[layer, rows], None if bias is None else bias[layer], least, most)
            values, decays, factors = values * steps[..., None], steps * factors, None
        scan(pool, *places, keys, keys, values, decays, factors, betas, 1.0, epsilon, 0)


def _normalized(x: Tensor, epsilon: float) -> Tensor:
    return x * (1.0 / sqrt(pairwise_sum(x * x, -1) + epsilon)).unsqueeze(-1)


def _decay(log_decay: Tensor, rates: Tensor | None) -> Tensor:
    """Returns factors that broadcast to ``[..., H, K, V]``."""
    if rates is not None:
        return exp(log_decay.unsqueeze(-2) * rates)
    factors = exp(log_decay).unsqueeze(-1)
    return factors.unsqueeze(-1) if log_decay.dim() == 2 else factors


def _state(states: Tensor, scratch: Tensor, index: int) -> Tensor:
    return states[index] if index >= 0 else scratch[-2 - index]
