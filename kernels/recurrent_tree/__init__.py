"""Recurrent layers along draft trees: short convolutions, selective state spaces and gated delta rules.

A node's state follows from its parent's, so one forward computes the rows of all trees of a ragged batch. A commit
runs the accepted rows once more, from the committed state.

Shapes: T packed rows, B samples, S committed states, H heads, G key heads, K keys and V values of a
head, C channels, N states of a channel, W width of a convolution.
"""

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import NATIVE, SINGLE, Operator
from arbordraft.kernels.recurrent_tree.paths import Paths, Schedule
from arbordraft.kernels.recurrent_tree.reference import (
    ACTIVATIONS,
    convolution_reference,
    gate_reference,
    gather_inputs,
    scan_reference,
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
    lambda inputs, *_: torch.empty_like(inputs),
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
    lambda states, first, read, write, query, key, value, *_: torch.empty_like(value),
    triton="arbordraft.kernels.recurrent_tree.triton:launch_scan",
    native=True,
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
        weight: ``[W, C]`` float32; the last row weighs a row's own input.
        bias: ``[C]`` float32.
        activate: apply SiLU.

    Returns:
        ``[T, C]``, of the inputs' dtype, computed in float32 and rounded once.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    channels = inputs.shape[1]
    _check("weight", weight, (None, channels), torch.float32)
    _check("windows", windows, (None, len(weight) - 1, channels), inputs.dtype)
    _check("history", history, (len(inputs), len(weight) - 1), torch.int64)
    if bias is not None:
        _check("bias", bias, (channels,), torch.float32)
        bias = bias.contiguous()
    inputs, windows, history, weight = (part.contiguous() for part in (inputs, windows, history, weight))
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
        ``[T, H, V]`` float32.

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
        beta = beta.float().contiguous()
    if not states.is_contiguous():
        raise ValueError("states are changed in place, so they must be contiguous: allocate them as they are used")
    query, key, value, log_decay = (part.float().contiguous() for part in (query, key, value, log_decay))
    places = schedule.first, schedule.read, schedule.write
    return _scan(states, *places, query, key, value, log_decay, rates, beta, scale, epsilon, schedule.scratch)


def tree_selective_update(
    states: Tensor,
    schedule: Schedule,
    inputs: Tensor,
    steps: Tensor,
    rates: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """Runs the selective state space of Mamba or of Mamba-2 along the paths of the rows.

    For each channel, ``state = exp(step * rate) * parent's state + step * B * input`` and ``out = C . state + D *
    input``. States are transposed: transformers keeps the N numbers of a channel together.

    Args:
        states: Mamba ``[S, 1, N, C]``, Mamba-2 ``[S, H, N, V]``, float32; see :func:`tree_scan`.
        schedule: states that the rows read and write.
        inputs: Mamba ``[T, C]``, Mamba-2 ``[T, H, V]``.
        steps: positive step sizes, after bias and softplus (see :func:`gate`): ``[T, C]`` or ``[T, H]``.
        rates: negative numbers: Mamba ``[N, C]``, the transpose of the model's A; Mamba-2 ``[H]``. Float32.
        B: Mamba ``[T, N]``, Mamba-2 ``[T, G, N]``.
        C: as B.
        D: factor of the input that skips the state, ``[C]`` or ``[H]``.

    Returns:
        ``[T, C]`` or ``[T, H, V]`` float32, before any gate.

    Raises:
        ValueError: see :func:`tree_scan`.
    """
    wide, steps = inputs.float(), steps.float()
    if inputs.dim() == 2:
        _check("steps", steps, tuple(inputs.shape))
        query, key, value = C[:, None], B[:, None], (wide * steps)[:, None]
        out = tree_scan(states, schedule, query, key, value, steps[:, None], rates=rates[None])[:, 0]
        return out if D is None else out + wide * D.float()
    _check("steps", steps, tuple(inputs.shape[:2]))
    _check("rates", rates, (inputs.shape[1],), torch.float32)
    out = tree_scan(states, schedule, C, B, wide * steps[..., None], steps * rates)
    return out if D is None else out + wide * D.float()[:, None]


def tree_gated_delta(
    states: Tensor,
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    normalize: bool = True,
) -> Tensor:
    """Runs the gated delta rule of Qwen3-Next, or of Kimi Linear, along the paths of the rows.

    Args:
        states: ``[S, H, K, V]`` float32; see :func:`tree_scan`.
        schedule: states that the rows read and write.
        query: ``[T, G, K]``; divided by the root of K.
        key: ``[T, G, K]``.
        value: ``[T, H, V]``.
        log_decay: ``[T, H]``, or ``[T, H, K]`` as in Kimi Linear; at most 0.
        beta: ``[T, H]``.
        normalize: give queries and keys the length 1 first.

    Returns:
        ``[T, H, V]`` of the value's dtype.

    Raises:
        ValueError: see :func:`tree_scan`.
    """
    scale, epsilon = key.shape[-1] ** -0.5, LENGTH_EPSILON if normalize else 0.0
    places = {"beta": beta, "scale": scale, "epsilon": epsilon}
    return tree_scan(states, schedule, query, key, value, log_decay, **places).to(value.dtype)


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
    "Schedule",
    "commit_windows",
    "gate",
    "tree_convolution",
    "tree_gated_delta",
    "tree_scan",
    "tree_selective_update",
]
