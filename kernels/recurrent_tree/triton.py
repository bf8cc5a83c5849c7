"""Recurrent layers along draft trees in Triton: one program per sample, head and block of values walks the rows.

Blocks, warps and the alignment of tensors depend on the model alone. So every row runs the same instructions, and a
node has the bits that plain decoding gives it. Triton orders the sums of a program itself: the last bits differ from
those of a CPU.

Shapes: see reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # gates, or channels of a convolution, of one program
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
NUMBERS = 2048  # numbers of a state that a program holds in registers
SCAN_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ALIGNMENT = 16


@triton.jit
def _gated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:  # ln(1 + e) = e ln(u) / (u - 1) with u = 1 + e rounded
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        rest = tl.where(u == 1.0, 1.0, u - 1.0)
        y = tl.where(x < 0.0, 0.0, x) + tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, rest))
    elif ACTIVATION == 1:
        y = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
    else:
        y = tl.div_rn(x, 1.0 + tl.exp(-x))
    return y


@triton.jit
def gate_block(
    X, BIASES, SCALES, OUT, size, C: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one block of gates per program; a block may span rows."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = e % C
    x = tl.load(X + e, mask=e < size, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(BIASES + channel, mask=e < size, other=0.0)
    y = _gated(x, ACTIVATION)
    if SCALED:
        y *= tl.load(SCALES + channel, mask=e < size, other=0.0)
    tl.store(OUT + e, y, mask=e < size)


@triton.jit
def convolve_row(
    INPUTS, WINDOWS, HISTORY, WEIGHT, BIASES, OUT, C: tl.constexpr, W: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves some channels of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total = tl.load(BIASES + c, mask=there, other=0.0)
    for place in tl.static_range(W - 1):
        at = tl.load(HISTORY + row * (W - 1) + place)
        if at >= 0:
            x = tl.load(INPUTS + at * C + c, mask=there, other=0.0)
        else:
            x = tl.load(WINDOWS + (-1 - at) * C + c, mask=there, other=0.0)
        total += x.to(tl.float32) * tl.load(WEIGHT + place * C + c, mask=there, other=0.0)
    x = tl.load(INPUTS + row * C + c, mask=there, other=0.0)
    total += x.to(tl.float32) * tl.load(WEIGHT + (W - 1) * C + c, mask=there, other=0.0)
    if ACTIVATE:
        total = _gated(total, 2)
    tl.store(OUT + row * C + c, total.to(OUT.dtype.element_ty), mask=there)


@triton.jit
def scan_block(
    STATES, SCRATCH, FIRST, READ, WRITE, QUERY, KEY, VALUE, LOG_DECAY, RATES, BETA, OUT, scale, epsilon,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PER: tl.constexpr, DELTA: tl.constexpr,
    NORMAL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Runs the rows of one sample for some values of one head per program; PER names the shape of decays."""
    sample = tl.program_id(0)
    head = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = (k < K)[:, None] & (v < V)[None, :]
    at = k[:, None] * V + v[None, :]
    if PER == "element":
        rates = tl.load(RATES + head * K * V + at, mask=there, other=0.0)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for row in range(tl.load(FIRST + sample), tl.load(FIRST + sample + 1)):
        one = row * H + head
        read = tl.load(READ + row)
        if read >= 0:
            state = tl.load(STATES + (read * H + head) * K * V + at, mask=there, other=0.0)
        elif read < -1:
            state = tl.load(SCRATCH + ((-2 - read) * H + head) * K * V + at, mask=there, other=0.0)
        shared = (row * G + head // (H // G)) * K + k
        key = tl.load(KEY + shared, mask=k < K, other=0.0)
        query = tl.load(QUERY + shared, mask=k < K, other=0.0)
        if NORMAL:
            key *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(key * key, 0) + epsilon))
            query *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(query * query, 0) + epsilon))
        query *= scale
        added = tl.load(VALUE + one * V + v, mask=v < V, other=0.0)
        if PER == "head":
            state *= tl.exp(tl.load(LOG_DECAY + one))
        elif PER == "key":
            state *= tl.exp(tl.load(LOG_DECAY + one * K + k, mask=k < K, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(LOG_DECAY + one * V + v, mask=v < V, other=0.0)[None, :] * rates)
        if DELTA:
            added = (added - tl.sum(state * key[:, None], 0)) * tl.load(BETA + one)
        state += key[:, None] * added[None, :]
        tl.store(OUT + one * V + v, tl.sum(state * query[:, None], 0), mask=v < V)
        write = tl.load(WRITE + row)
        if write >= 0:
            tl.store(STATES + (write * H + head) * K * V + at, state, mask=there)
        elif write < -1:
            tl.store(SCRATCH + ((-2 - write) * H + head) * K * V + at, state, mask=there)
        tl.debug_barrier()  # other threads of the program may load a state again


def launch_gate(x: Tensor, bias: Tensor | None, scale: Tensor | None, activation: int) -> Tensor:
    """See :func:`arbordraft.kernels.recurrent_tree.gate`."""
    out = x.new_empty(x.shape, dtype=torch.float32)
    if x.numel():
        gate_block[(triton.cdiv(x.numel(), BLOCK),)](
            x, x if bias is None else bias, x if scale is None else scale, out, x.numel(), C=x.shape[-1],
            ACTIVATION=activation, BIASED=bias is not None, SCALED=scale is not None, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip
    return out


def launch_convolution(
    inputs: Tensor, windows: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """See :func:`arbordraft.kernels.recurrent_tree.tree_convolution`."""
    rows, channels = inputs.shape
    out = inputs.new_empty(inputs.shape)
    if rows:
        convolve_row[(rows, triton.cdiv(channels, BLOCK))](
            inputs, windows, history, weight, weight if bias is None else bias, out, C=channels, W=len(weight),
            BIASED=bias is not None, ACTIVATE=activate, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip
    return out


def launch_scan(
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
    """See :func:`arbordraft.kernels.recurrent_tree.tree_scan`."""
    _, heads, keys, values = states.shape
    out = value.new_empty(value.shape)
    if not len(value):
        return out
    scratch = states.new_empty((max(1, count), *states.shape[1:]))
    query, key, value, log_decay = map(_aligned, (query, key, value, log_decay))
    blocks = scan_blocks(keys, values)
    scan_block[(len(first) - 1, heads, triton.cdiv(values, blocks["BLOCK_V"]))](
        states, scratch, first, read, write, query, key, value, log_decay,
        value if rates is None else _aligned(rates), value if beta is None else _aligned(beta), out, scale, epsilon,
        H=heads, G=key.shape[1], K=keys, V=values, PER=decay_per(log_decay, rates), DELTA=beta is not None,
        NORMAL=epsilon > 0, **blocks, **SCAN_OPTIONS,
    )  # fmt: skip
    return out


def decay_per(log_decay: Tensor, rates: Tensor | None) -> str:
    """Names the numbers of a state that share a decay: those of a head, of a key, or none."""
    return "element" if rates is not None else "head" if log_decay.dim() == 2 else "key"


def scan_blocks(keys: int, values: int) -> dict[str, int]:
    """Returns the sizes of the block of a state that one program holds."""
    block_k = max(2, triton.next_power_of_2(keys))
    return {"BLOCK_K": block_k, "BLOCK_V": min(triton.next_power_of_2(values), max(16, NUMBERS // block_k))}


def _aligned(tensor: Tensor) -> Tensor:
    """Copies tensors at odd addresses, for which Triton would compile a kernel with another order of sums."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
