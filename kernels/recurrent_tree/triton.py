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
    INPUTS, WINDOWS, HISTORY, TAPS, BIASES, OUT, stride_x, between, apart, C: tl.constexpr, W: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves some channels of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total = tl.load(BIASES + c, mask=there, other=0.0).to(tl.float32)
    for place in tl.static_range(W - 1):
        at = tl.load(HISTORY + row * (W - 1) + place)
        if at >= 0:
            x = tl.load(INPUTS + at * stride_x + c, mask=there, other=0.0)
        else:
            x = tl.load(WINDOWS + (-1 - at) * C + c, mask=there, other=0.0)
        taps = tl.load(TAPS + place * between + c * apart, mask=there, other=0.0)
        total += x.to(tl.float32) * taps.to(tl.float32)
    x = tl.load(INPUTS + row * stride_x + c, mask=there, other=0.0)
    taps = tl.load(TAPS + (W - 1) * between + c * apart, mask=there, other=0.0)
    total += x.to(tl.float32) * taps.to(tl.float32)
    if ACTIVATE:
        total = _gated(total, 2)
    tl.store(OUT + row * C + c, total.to(OUT.dtype.element_ty), mask=there)


@triton.jit
def _normal(x, epsilon):
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) + epsilon))


@triton.jit
def _after(
    state, key, added, LOG_DECAY, BETA, head, rates, bias, least, most, k, v, K: tl.constexpr, V: tl.constexpr,
    PER: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Returns the state of a row from its parent's, for one head; pointers are those of the row."""
    if PER == "step":
        step = _gated(tl.load(LOG_DECAY + head).to(tl.float32) + bias, 0)
        # NaN stays NaN.
        step = tl.where(step != step, step, tl.minimum(tl.maximum(step, least), most))
        state *= tl.exp(step * rates)
        added *= step
    elif PER == "head":
        state *= tl.exp(tl.load(LOG_DECAY + head).to(tl.float32))
    elif PER == "key":
        state *= tl.exp(tl.load(LOG_DECAY + head * K + k, mask=k < K, other=0.0).to(tl.float32))[:, None]
    else:
        steps = tl.load(LOG_DECAY + head * V + v, mask=v < V, other=0.0).to(tl.float32)
        state *= tl.exp(steps[None, :] * rates)
    if DELTA:
        added = (added - tl.sum(state * key[:, None], 0)) * tl.load(BETA + head).to(tl.float32)
    return state + key[:, None] * added[None, :]


@triton.jit
def scan_block(
    STATES, SCRATCH, FIRST, READ, WRITE, QUERY, KEY, VALUE, LOG_DECAY, RATES, BETA, STEP_BIAS, SKIP, OUT, scale,
    epsilon, least, most, samples, rows, stride_q, stride_k, stride_v, far_decays, far_betas, H: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PER: tl.constexpr, DELTA: tl.constexpr, BIASED: tl.constexpr,
    SKIPS: tl.constexpr, NORMAL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Runs the rows of one sample for some values of one head per program; PER names the shape of decays.

    Programs behind the last sample write zeros for the rows behind its own.
    """
    sample = tl.program_id(0)
    head = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = (k < K)[:, None] & (v < V)[None, :]
    at = k[:, None] * V + v[None, :]
    rates = 0.0
    if PER == "element":
        rates = tl.load(RATES + head * K * V + at, mask=there, other=0.0)
    elif PER == "step":
        rates = tl.load(RATES + head)
    bias = 0.0
    if BIASED:
        bias = tl.load(STEP_BIAS + head).to(tl.float32)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    first = tl.load(FIRST + sample)
    end = tl.load(FIRST + sample + 1, mask=sample < samples, other=0)
    if sample == samples:
        for row in range(first, rows):
            tl.store(OUT + (row * H + head) * V + v, tl.zeros([BLOCK_V], tl.float32), mask=v < V)
    for row in range(first, end):
        one = row * H + head
        read = tl.load(READ + row)
        if read >= 0:
            state = tl.load(STATES + (read * H + head) * K * V + at, mask=there, other=0.0)
        elif read < -1:
            state = tl.load(SCRATCH + ((-2 - read) * H + head) * K * V + at, mask=there, other=0.0)
        shared = head // (H // G) * K + k
        key = tl.load(KEY + row * stride_k + shared, mask=k < K, other=0.0).to(tl.float32)
        query = tl.load(QUERY + row * stride_q + shared, mask=k < K, other=0.0).to(tl.float32)
        if NORMAL:
            key = _normal(key, epsilon)
            query = _normal(query, epsilon)
        query *= scale
        added = tl.load(VALUE + row * stride_v + head * V + v, mask=v < V, other=0.0).to(tl.float32)
        decays = LOG_DECAY + row * far_decays
        betas = BETA + row * far_betas
        state = _after(state, key, added, decays, betas, head, rates, bias, least, most, k, v, K, V, PER, DELTA)
        out = tl.sum(state * query[:, None], 0)
        if SKIPS:
            out += added * tl.load(SKIP + head).to(tl.float32)
        tl.store(OUT + one * V + v, out, mask=v < V)
        write = tl.load(WRITE + row)
        if write >= 0:
            tl.store(STATES + (write * H + head) * K * V + at, state, mask=there)
        elif write < -1:
            tl.store(SCRATCH + ((-2 - write) * H + head) * K * V + at, state, mask=there)
        tl.debug_barrier()  # other threads of the program may load a state again


@triton.jit
def advance_window(
    WINDOWS, INPUTS, PATH, SOURCE, DESTINATION, slots, rows, longest, C: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes some channels of the window of one sample and layer per program."""
    sample = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    place = tl.arange(0, WIDE)
    path = tl.load(PATH + sample * longest + place, mask=place < longest, other=-1)
    count = tl.sum((path >= 0).to(tl.int32), 0)
    destination = tl.load(DESTINATION + sample)
    before = (layer * slots + tl.load(SOURCE + sample)) * (W - 1)
    after = (layer * slots + destination) * (W - 1)
    if destination >= 0:
        for number in tl.static_range(W - 1):
            at = count - (W - 1) + number
            if at >= 0:
                row = tl.load(PATH + sample * longest + at)
                x = tl.load(INPUTS + (layer * rows + row) * C + c, mask=there, other=0.0)
            else:
                x = tl.load(WINDOWS + (before + (W - 1) + at) * C + c, mask=there, other=0.0)
            tl.store(WINDOWS + (after + number) * C + c, x, mask=there)


@triton.jit
def advance_state(
    STATES, PATH, SOURCE, DESTINATION, KEY, VALUE, LOG_DECAY, RATES, BETA, STEP_BIAS, epsilon, least, most, slots,
    rows, longest, decays, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PER: tl.constexpr,
    DELTA: tl.constexpr, BIASED: tl.constexpr, NORMAL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Runs the accepted rows of one sample for some values of one head of one layer per program."""
    sample = tl.program_id(0)
    layer = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = (k < K)[:, None] & (v < V)[None, :]
    at = k[:, None] * V + v[None, :]
    destination = tl.load(DESTINATION + sample)
    if destination >= 0:
        rates = 0.0
        if PER == "element":
            rates = tl.load(RATES + (layer * H + head) * K * V + at, mask=there, other=0.0)
        elif PER == "step":
            rates = tl.load(RATES + layer * H + head)
        bias = 0.0
        if BIASED:
            bias = tl.load(STEP_BIAS + layer * H + head).to(tl.float32)
        source = (layer * slots + tl.load(SOURCE + sample)) * H + head
        state = tl.load(STATES + source * K * V + at, mask=there, other=0.0)
        for place in range(longest):
            row = tl.load(PATH + sample * longest + place)
            if row >= 0:
                row += layer * rows
                shared = (row * G + head // (H // G)) * K + k
                key = tl.load(KEY + shared, mask=k < K, other=0.0).to(tl.float32)
                if NORMAL:
                    key = _normal(key, epsilon)
                added = tl.load(VALUE + (row * H + head) * V + v, mask=v < V, other=0.0).to(tl.float32)
                behind = LOG_DECAY + row * decays
                beta = BETA + row * H
                state = _after(state, key, added, behind, beta, head, rates, bias, least, most, k, v, K, V, PER, DELTA)
        tl.store(STATES + ((layer * slots + destination) * H + head) * K * V + at, state, mask=there)


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
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    out = inputs.new_empty(inputs.shape)
    if rows:
        convolve_row[(rows, triton.cdiv(channels, BLOCK))](
            inputs, windows, history, weight, weight if bias is None else bias, out, inputs.stride(0), *weight.stride(),
            C=channels, W=len(weight), BIASED=bias is not None, ACTIVATE=activate, BLOCK=BLOCK, **OPTIONS,
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
    places = states, first, read, write
    return _launch(*places, query, key, value, log_decay, rates, beta, None, None, scale, epsilon, 0.0, 0.0, count)


def launch_selective(
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
    """See :class:`arbordraft.kernels.recurrent_tree.Scan`."""
    places = states, first, read, write
    return _launch(*places, query, key, value, steps, rates, None, bias, skip, 1.0, 0.0, least, most, count)


def _launch(
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
    bias: Tensor | None,
    skip: Tensor | None,
    scale: float,
    epsilon: float,
    least: float,
    most: float,
    count: int,
) -> Tensor:
    _, heads, keys, values = states.shape
    out = value.new_empty(value.shape, dtype=torch.float32)
    if not len(value):
        return out
    scratch = states.new_empty((max(1, count), *states.shape[1:]))
    query, key, value, log_decay = map(_rows, (query, key, value, log_decay))
    rates = None if rates is None else _aligned(rates.contiguous())
    beta = log_decay if beta is None else _rows(beta)
    blocks = scan_blocks(keys, values)
    scan_block[(len(first), heads, triton.cdiv(values, blocks["BLOCK_V"]))](
        states, scratch, first, read, write, query, key, value, log_decay, value if rates is None else rates, beta,
        value if bias is None else bias, value if skip is None else skip, out, scale, epsilon, least, most,
        len(first) - 1, len(value), query.stride(0), key.stride(0), value.stride(0), log_decay.stride(0),
        beta.stride(0), H=heads, G=key.shape[1], K=keys, V=values, PER=decay_per(log_decay, rates),
        DELTA=beta is not log_decay, BIASED=bias is not None, SKIPS=skip is not None, NORMAL=epsilon > 0, **blocks,
        **SCAN_OPTIONS,
    )  # fmt: skip
    return out


def launch_advance_windows(windows: Tensor, inputs: Tensor, path: Tensor, source: Tensor, destination: Tensor) -> None:
    """See :func:`arbordraft.kernels.recurrent_tree.advance_windows`."""
    layers, slots, before, channels = windows.shape
    longest = path.shape[1]
    if len(path) and before:
        advance_window[(len(path), layers, triton.cdiv(channels, BLOCK))](
            windows, inputs, path, source, destination, slots, inputs.shape[1], longest, C=channels, W=before + 1,
            WIDE=triton.next_power_of_2(longest), BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip


def launch_advance_states(
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
    """See :func:`arbordraft.kernels.recurrent_tree.advance_states`."""
    layers, slots, heads, keys, values = states.shape
    blocks = scan_blocks(keys, values)
    if len(path):
        advance_state[(len(path), layers * heads, triton.cdiv(values, blocks["BLOCK_V"]))](
            states, path, source, destination, key, value, log_decay, value if rates is None else rates,
            value if beta is None else beta, value if bias is None else bias, epsilon, least, most, slots,
            key.shape[1], path.shape[1], log_decay[0, 0].numel(), H=heads, G=key.shape[2], K=keys, V=values,
            PER=decay_per(log_decay[0], None if rates is None else rates[0]), DELTA=beta is not None,
            BIASED=bias is not None, NORMAL=epsilon > 0, **blocks, **SCAN_OPTIONS,
        )  # fmt: skip


def decay_per(log_decay: Tensor, rates: Tensor | None) -> str:
    """Names the numbers of a state that share a decay: those of a head, also by its step, of a key, or none."""
    if rates is not None:
        return "step" if rates.dim() == 1 else "element"
    return "head" if log_decay.dim() == 2 else "key"


def scan_blocks(keys: int, values: int) -> dict[str, int]:
    """Returns the sizes of the block of a state that one program holds."""
    block_k = max(2, triton.next_power_of_2(keys))
    return {"BLOCK_K": block_k, "BLOCK_V": min(triton.next_power_of_2(values), max(16, NUMBERS // block_k))}


def _rows(tensor: Tensor) -> Tensor:
    """Returns rows whose numbers follow one another, at aligned addresses; rows may be apart."""
    return _aligned(tensor if tensor[0].is_contiguous() else tensor.contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    """Copies tensors at odd addresses, for which Triton would compile a kernel with another order of sums."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
