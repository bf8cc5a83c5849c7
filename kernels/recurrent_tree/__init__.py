"""Recurrent layers along draft trees: short convolutions, selective state spaces and gated delta rules.

A node's state follows from its parent's, so one forward computes the rows of all trees of a ragged batch. A commit
runs the accepted rows once more, from the committed state.

Shapes: T packed rows, B samples, S committed states, H heads, G key heads, K keys and V values of a
head, C channels, N states of a channel, W width of a convolution.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.dispatch import NATIVE, SINGLE, Operator
from arbordraft.kernels.recurrent_tree.paths import Paths, Schedule
from arbordraft.kernels.recurrent_tree.reference import (
    ACTIVATIONS,
    advance_states_reference,
    advance_windows_reference,
    convolution_reference,
    gate_reference,
    gather_inputs,
    scan_reference,
    selective_reference,
)

LENGTH_EPSILON = 1e-6  # of normalised queries and keys, as in all models with gated delta rules

_gate = Operator(
    "recurrent_gate(Tensor x, Tensor? bias, Tensor? scale, int activation) -> Tensor",
    gate_reference,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
    triton="arbordraft.kernels.recurrent_tree.triton:launch_gate",
    triton_takes=SINGLE,
    native=True,
    native_takes=NATIVE,
)
_convolution = Operator(
    "tree_convolution(Tensor inputs, Tensor windows, Tensor history, Tensor weight, Tensor? bias, bool activate) "
    "-> Tensor",
    convolution_reference,
    lambda inputs, *_: inputs.new_empty(inputs.shape),
    triton="arbordraft.kernels.recurrent_tree.triton:launch_convolution",
    triton_takes=SINGLE,
    native=True,
    native_takes=NATIVE,
)
_scan = Operator(
    "tree_scan(Tensor(a!) states, Tensor first, Tensor read, Tensor write, Tensor query, "
    "Tensor key, Tensor value, Tensor log_decay, Tensor? rates, Tensor? beta, float scale, float epsilon, int count) "
    "-> Tensor",
    scan_reference,
    lambda states, first, read, write, query, key, value, *_: value.new_empty(value.shape, dtype=torch.float32),
    triton="arbordraft.kernels.recurrent_tree.triton:launch_scan",
    native=True,
)
_selective = Operator(
    "tree_selective(Tensor(a!) states, Tensor first, Tensor read, Tensor write, Tensor query, Tensor key, "
    "Tensor value, Tensor steps, Tensor rates, Tensor? bias, Tensor? skip, float least, float most, int count) "
    "-> Tensor",
    selective_reference,
    lambda states, first, read, write, query, key, value, *_: value.new_empty(value.shape, dtype=torch.float32),
    triton="arbordraft.kernels.recurrent_tree.triton:launch_selective",
)
_advance_windows = Operator(
    "advance_windows(Tensor(a!) windows, Tensor inputs, Tensor path, Tensor source, Tensor destination) -> ()",
    advance_windows_reference,
    lambda *_: None,
    triton="arbordraft.kernels.recurrent_tree.triton:launch_advance_windows",
)
_advance_states = Operator(
    "advance_states(Tensor(a!) states, Tensor path, Tensor source, Tensor destination, Tensor key, Tensor value, "
    "Tensor log_decay, Tensor? rates, Tensor? beta, Tensor? bias, float epsilon, float least, float most) -> ()",
    partial(advance_states_reference, _scan),
    lambda *_: None,
    triton="arbordraft.kernels.recurrent_tree.triton:launch_advance_states",
)


def gate(x: Tensor, activation: str, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Computes ``scale * activation(x + bias)``, with bits that depend on the number and its channel alone.

    Torch's own functions round a number by its place in a tensor. The step sizes of a row would depend on other rows.

    Args:
        x: ``[T, C]``.
        activation: ``"softplus"``, ``"sigmoid"`` or ``"silu"``.
        bias: ``[C]`` float32.
        scale: ``[C]`` float32.

    Returns:
        ``[T, C]`` float32.

    Raises:
        ValueError: if there is no such activation, or a bias or scale is not one float32 per channel.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"there is no activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    for name, tensor in (("bias", bias), ("scale", scale)):
        if tensor is not None:
            _check(name, tensor, (x.shape[-1],), torch.float32)
    bias, scale = (None if part is None else part.contiguous() for part in (bias, scale))
    return _gate(x.contiguous(), bias, scale, list(ACTIVATIONS).index(activation))


def tree_convolution(
    inputs: Tensor,
    windows: Tensor,
    history: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activate: bool = False,
) -> Tensor:
    """Convolves each channel of the inputs along the paths of their rows.

    Args:
        inputs: ``[T, C]`` float32, bfloat16 or float16.
        windows: ``[S, W - 1, C]`` last inputs of the committed text, the oldest first, zeros before its beginning.
        history: ``[T, W - 1]`` int64, from :meth:`Paths.history`.
        weight: ``[W, C]``; the last row weighs a row's own input.
        bias: ``[C]``.
        activate: apply SiLU.

    Returns:
        ``[T, C]``, of the inputs' dtype, computed in float32 and rounded once.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    channels = inputs.shape[1]
    _check("weight", weight, (None, channels))
    _check("windows", windows, (None, len(weight) - 1, channels), inputs.dtype)
    _check("history", history, (len(inputs), len(weight) - 1), torch.int64)
    if bias is not None:
        _check("bias", bias, (channels,))
    windows, history = windows.contiguous(), history.contiguous()
    if not _in_triton(inputs):
        inputs, weight = inputs.contiguous(), weight.float().contiguous()
        bias = None if bias is None else bias.float().contiguous()
    return _convolution(inputs, windows, history, weight, bias, activate)


def commit_windows(windows: Tensor, inputs: Tensor, history: Tensor, states: Tensor) -> None:
    """Replaces the windows of some samples by the last inputs of their accepted paths.

    Args:
        windows: ``[S, W - 1, C]``, changed in place.
        inputs: ``[T, C]`` inputs of the step, of the same dtype.
        history: ``[B, W - 1]`` int64, from :meth:`Paths.windows`.
        states: ``[B]`` int64 window of each sample.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    _check("inputs", inputs, (None, windows.shape[2]), windows.dtype)
    _check("history", history, (len(states), windows.shape[1]), torch.int64)
    windows.index_copy_(0, states, gather_inputs(inputs, windows, history))


def tree_scan(
    states: Tensor,
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    rates: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
) -> Tensor:
    """Runs a recurrence of matrix states along the paths of the rows, and reads each row's state.

    From its parent's state P, and its key k, value v and query q, a row computes for each head:

    - ``S = decay * P``
    - ``u = beta * (v - S^T k)``, without ``beta`` ``u = v``
    - ``S = S + k u^T`` and ``out = S^T q``

    Args:
        states: ``[S, H, K, V]`` float32 committed states. Rows that the schedule lets commit change them in place.
        schedule: states that the rows read and write, on the same device.
        query: ``[T, G, K]``; each key head serves H / G consecutive heads.
        key: ``[T, G, K]``.
        value: ``[T, H, V]``.
        log_decay: logarithm of the decay, at most 0: ``[T, H]`` per head or ``[T, H, K]`` per key. With ``rates``,
            ``[T, H, V]`` step sizes.
        rates: ``[H, K, V]``; the logarithm of the decay is ``log_decay[t, h, v] * rates[h, k, v]``.
        beta: ``[T, H]`` strength of the delta rule's correction.
        scale: factor of the queries.
        epsilon: if positive, queries and keys are divided by the root of their squared length plus ``epsilon``.

    Returns:
        ``[T, H, V]`` float32; zeros for rows behind those of the last sample.

    Raises:
        ValueError: if shapes or dtypes do not fit, or states are not contiguous.
    """
    _, heads, keys, values = states.shape
    rows, key_heads = key.shape[:2]
    _check("states", states, (None, heads, keys, values), torch.float32)
    if heads % key_heads:
        raise ValueError(f"{key_heads} key heads cannot serve {heads} heads: these must be a multiple")
    for name, part in (("query", query), ("key", key)):
        _check(name, part, (rows, key_heads, keys))
    _check("value", value, (rows, heads, values))
    _check("read", schedule.read, (rows,), torch.int64)
    if rates is not None:
        _check("rates", rates, (heads, keys, values), torch.float32)
        _check("log_decay", log_decay, (rows, heads, values))
        rates = rates.contiguous()
    else:
        _check("log_decay", log_decay, (rows, heads) if log_decay.dim() == 2 else (rows, heads, keys))
    if beta is not None:
        _check("beta", beta, (rows, heads))
    if not states.is_contiguous():
        raise ValueError("states are changed in place, so they must be contiguous: allocate them as they are used")
    if not _in_triton(states):
        query, key, value, log_decay = (part.float().contiguous() for part in (query, key, value, log_decay))
        beta = None if beta is None else beta.float().contiguous()
    places = schedule.first, schedule.read, schedule.write
    return _scan(states, *places, query, key, value, log_decay, rates, beta, scale, epsilon, schedule.scratch)


class Scan(NamedTuple):
    """The rows of a recurrence along paths; see :func:`tree_scan`.

    With ``rates`` of one number per head, these are rows of Mamba-2. ``log_decay`` then holds raw step sizes. A step is
    their softplus, the logarithm of the decay is step times rate, and values are multiplied by the step.

    Args:
        query: see :func:`tree_scan`, as for the next four.
        key: ``[T, G, K]``.
        value: ``[T, H, V]``.
        log_decay: ``[T, H]``, ``[T, H, K]`` or ``[T, H, V]``.
        beta: ``[T, H]``.
        rates: ``[H, K, V]``, or ``[H]`` float32 of Mamba-2.
        scale: factor of the queries.
        epsilon: see :func:`tree_scan`.
        bias: ``[H]``, added to raw step sizes.
        skip: ``[H]`` factors of Mamba-2's values, which are added to the output.
        steps: least and greatest step of Mamba-2.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    rates: Tensor | None = None
    scale: float = 1.0
    epsilon: float = 0.0
    bias: Tensor | None = None
    skip: Tensor | None = None
    steps: tuple[float, float] = (0.0, float("inf"))

    @classmethod
    def mamba(cls, inputs: Tensor, steps: Tensor, rates: Tensor, B: Tensor, C: Tensor) -> Self:
        """Returns the rows of Mamba's selective state space, before inputs that skip the state.

        ``state = exp(step * rate) * parent's state + step * B * input``, and the output is ``C . state``. States are
        transposed: transformers keeps the N numbers of a channel together.

        Args:
            inputs: ``[T, C]``.
            steps: ``[T, C]`` positive step sizes, after bias and softplus (see :func:`gate`).
            rates: ``[N, C]`` negative float32, the transpose of the model's A.
            B: ``[T, N]``.
            C: ``[T, N]``.

        Raises:
            ValueError: if shapes do not fit.
        """
        _check("steps", steps, tuple(inputs.shape))
        steps = steps.float()
        value = (inputs.float() * steps)[:, None]
        return cls(C[:, None], B[:, None], value, steps[:, None], rates=rates[None])

    @classmethod
    def mamba2(
        cls,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        bias: Tensor | None = None,
        skip: Tensor | None = None,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Self:
        """Returns the rows of Mamba-2's selective state space; see :meth:`mamba`.

        Args:
            inputs: ``[T, H, V]``.
            steps: ``[T, H]`` raw step sizes.
            rates: ``[H]`` negative float32.
            B: ``[T, G, N]``.
            C: ``[T, G, N]``.
            bias: see :class:`Scan`, as for the next two.
            skip: ``[H]``.
            limits: least and greatest step.

        Raises:
            ValueError: if shapes or dtypes do not fit.
        """
        heads = inputs.shape[1]
        _check("steps", steps, (len(inputs), heads))
        _check("rates", rates, (heads,), torch.float32)
        for name, part in (("bias", bias), ("skip", skip)):
            if part is not None:
                _check(name, part, (heads,))
        return cls(C, B, inputs, steps, rates=rates, bias=bias, skip=skip, steps=limits)

    @classmethod
    def gated_delta(
        cls, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, *, normalize: bool = True
    ) -> Self:
        """Returns the rows of the gated delta rule of Qwen3-Next, or of Kimi Linear.

        Args:
            query: ``[T, G, K]``; divided by the root of K.
            key: ``[T, G, K]``.
            value: ``[T, H, V]``.
            log_decay: ``[T, H]``, or ``[T, H, K]`` as in Kimi Linear; at most 0.
            beta: ``[T, H]``.
            normalize: give queries and keys the length 1 first.
        """
        scale, epsilon = key.shape[-1] ** -0.5, LENGTH_EPSILON if normalize else 0.0
        return cls(query, key, value, log_decay, beta, scale=scale, epsilon=epsilon)

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a state."""
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]

    @property
    def raw(self) -> bool:
        """Whether these are rows of Mamba-2, with raw step sizes."""
        return self.rates is not None and self.rates.dim() == 1

    def run(self, states: Tensor, schedule: Schedule) -> Tensor:
        """Runs :func:`tree_scan` on these rows, and adds inputs that skip the state."""
        if self.raw and _in_triton(states):
            assert self.rates is not None
            _check("states", states, (None, *self.state), torch.float32)
            places, (least, most) = (schedule.first, schedule.read, schedule.write), self.steps
            constants = self.rates, self.bias, self.skip
            return _selective(states, *places, *self[:4], *constants, float(least), float(most), schedule.scratch)
        rows = self.resolved()
        beta, rates, scale, epsilon = rows[4:8]
        out = tree_scan(states, schedule, *rows[:4], beta=beta, rates=rates, scale=scale, epsilon=epsilon)
        return out if self.skip is None else out + self.value.float() * self.skip.float()[:, None]

    def resolved(self) -> Self:
        """Returns these rows with decays instead of raw step sizes, without inputs that skip the state."""
        if not self.raw or self.rates is None:
            return self
        bias = None if self.bias is None else self.bias.float()
        steps = gate(self.log_decay, "softplus", bias).clamp(*self.steps)
        return type(self)(self.query, self.key, self.value.float() * steps[..., None], steps * self.rates)

    @classmethod
    def joined(cls, scans: Sequence[Self], join: Callable[[list[Tensor]], Tensor]) -> Self:
        """Joins the rows of scans of one recurrence, part by part."""
        first, *_ = scans
        beta = None if first.beta is None else join([scan.beta for scan in scans if scan.beta is not None])
        query, key, value, log_decay = (join(list(parts)) for parts in zip(*(scan[:4] for scan in scans), strict=True))
        return first._replace(query=query, key=key, value=value, log_decay=log_decay, beta=beta)


def advance_windows(
    windows: Tensor, inputs: Sequence[Tensor], path: Tensor, source: Tensor, destination: Tensor
) -> None:
    """Writes the windows after accepted paths, in all layers at once; it never asks the host.

    Args:
        windows: ``[L, S, W - 1, C]``, changed in place.
        inputs: for each layer, the ``[T, C]`` inputs of all rows, of the same dtype.
        path: ``[B, P]`` int64 rows of each sample's path, the root first, padded with -1.
        source: ``[B]`` int64 window before the root of each sample.
        destination: ``[B]`` int64 window to write, other than all of these; -1 for none.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    layers, _, _, channels = windows.shape
    stacked = torch.stack(list(inputs))
    _check("inputs", stacked, (layers, None, channels), windows.dtype)
    _advance_windows(windows, stacked, path.contiguous(), source, destination)


def advance_states(states: Tensor, scans: Sequence[Scan], path: Tensor, source: Tensor, destination: Tensor) -> None:
    """Writes the states after accepted paths, in all layers at once; it never asks the host.

    Args:
        states: ``[L, S, H, K, V]`` float32, changed in place.
        scans: for each layer, all rows. Layers differ in tensors alone.
        path: see :func:`advance_windows`.
        source: ``[B]`` int64 state before the root of each sample.
        destination: ``[B]`` int64 state to write, other than all of these; -1 for none.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    layers, _, heads, keys, values = states.shape
    if not _in_triton(states):
        scans = [scan.resolved() for scan in scans]
    _check("states", states, (layers, None, heads, keys, values), torch.float32)
    key, value, log_decay = (torch.stack(list(parts)) for parts in zip(*(scan[1:4] for scan in scans), strict=True))
    _check("key", key, (layers, None, None, keys))
    _check("value", value, (layers, key.shape[1], heads, values))
    rates, beta, bias = (_stacked([getattr(scan, name) for scan in scans]) for name in ("rates", "beta", "bias"))
    epsilon, (least, most) = scans[0].epsilon, scans[0].steps
    rows = key, value, log_decay, rates, beta, bias
    _advance_states(states, path.contiguous(), source, destination, *rows, epsilon, float(least), float(most))


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.stack(given) if given else None


def _in_triton(tensor: Tensor) -> bool:
    """Returns whether Triton runs on a tensor, which converts numbers of any type and distance as it reads them."""
    return not torch.compiler.is_compiling() and choice.triton_chosen(tensor)


def _check(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None) -> None:
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or dtype not in (None, tensor.dtype):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        kind = "" if dtype is None else f" of {dtype}"
        raise ValueError(f"{name} must be [{sizes}]{kind}, got {list(tensor.shape)} of {tensor.dtype}")


__all__ = [
    "ACTIVATIONS",
    "LENGTH_EPSILON",
    "Paths",
    "Scan",
    "Schedule",
    "advance_states",
    "advance_windows",
    "commit_windows",
    "gate",
    "tree_convolution",
    "tree_scan",
]
