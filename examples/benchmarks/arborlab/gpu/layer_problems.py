"""Problems for the parts of decoder layers besides attention; each element has its own rounding bound.

Shapes: T rows, H hidden size, N inner size of an MLP, Hq/Hkv heads, D head size, P pool rows.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbordraft.kernels.fused_layers import (
    ACTIVATIONS,
    add_rms_norm,
    gated_activation,
    gated_activation_reference,
    rms_norm,
    rms_norm_reference,
    rotate_append,
    rotate_append_reference,
)
from arbordraft.kernels.fused_linear import (
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
    project_rotate_append,
    project_rotate_append_reference,
)
from arbordraft.kernels.grouped_linear import (
    grouped_linear,
    grouped_linear_reference,
    interleave,
    restore_panels,
    round_to_panels,
)
from arborlab.gpu.problem import Bands, Problem, largest_error, rounding, share_of, unequal
from arborlab.gpu.roofline import FEW_ROWS, Stepped

EPSILON = 1e-3  # of norms; large, so that it matters
SINGLE = torch.finfo(torch.float32)


def layers(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields norms, gated activations and rotations of all trees' rows, and products of a few rows."""
    yield from norms(stepped, device)
    yield from activations(stepped, device)
    yield rotation(stepped, device)
    yield from products(stepped, device)
    yield from grouped_products(stepped, device)


def norms(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields norms like those of Llama and Gemma, alone and after a sum."""
    x, residual = (_rows(stepped.rows, stepped.hidden, stepped.dtype, device, seed) for seed in (0, 1))
    weight = torch.randn(stepped.hidden, generator=torch.Generator().manual_seed(2)).to(device, stepped.dtype)

    def share(found: Tensor, rows: Tensor, offset: float) -> float:
        # Two results are rounded to the type; sums of squares, a root and products err by some roundings of float32.
        wide = rows.double()
        normed = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + EPSILON).rsqrt()
        truth = normed * (offset + weight.double())
        bound = (2 * rounding(stepped.dtype) + 16 * SINGLE.eps) * truth.abs() + 2 * _least(stepped.dtype)
        if offset:  # the sum of offset and weight is rounded to float32
            bound += SINGLE.eps * normed.abs()
        return share_of(found, truth, bound)

    for name, options in (("", (0.0, False)), ("wide, ", (1.0, True))):
        alone = partial(rms_norm, x, weight, EPSILON, *options)
        norm_call = partial(add_rms_norm, x, residual, weight, EPSILON, *options)

        def error(alone: partial[Tensor] = alone, offset: float = options[0]) -> float:
            return share(alone(), x, offset)

        def summed(norm_call: partial[tuple[Tensor, Tensor]] = norm_call, offset: float = options[0]) -> float:
            total, found = norm_call()
            truth = x.double() + residual.double()
            bound = rounding(stepped.dtype) * truth.abs() + _least(stepped.dtype)
            return max(share_of(total, truth, bound), share(found, total, offset))

        peer = partial(rms_norm_reference, x, weight, EPSILON, *options)
        yield stepped.problem("rms_norm", alone, error, 1.0, note=name, peer=peer)
        yield stepped.problem("add_rms_norm", norm_call, summed, 1.0, note=name)


def activations(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields each activation of gates from very small to very large, times another number."""
    gate = _rows(stepped.rows, stepped.inner, stepped.dtype, device, 3)
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(4)).to(device, stepped.dtype)

    def error(activation: str) -> float:
        wide, other = gate.double(), up.double()
        truth = ACTIVATIONS[activation](wide) * other
        # exp(x) is computed as 2 ** (x / ln 2): rounding the exponent makes a relative error that grows with |x|.
        bound = (2 * rounding(stepped.dtype) + (4 + wide.abs()) * SINGLE.eps) * truth.abs()
        if activation != "silu":  # 1 + erf and 1 + tanh have lost most of their digits next to 0
            bound = bound + 4 * SINGLE.eps * (wide * other).abs()
        # exp overflows before the quotient is 0, and the result may be below the smallest number of the type.
        bound = bound + (wide * other).abs() / SINGLE.max + _least(stepped.dtype) * (1 + other.abs())
        return share_of(gated_activation(gate, up, activation), truth, bound)

    for activation in ACTIVATIONS:
        run = partial(gated_activation, gate, up, activation)
        peer = partial(gated_activation_reference, gate, up, activation)
        check = partial(error, activation)
        yield stepped.problem("gated_activation", run, check, 1.0, note=f"{activation}, ", peer=peer)


def rotation(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of rotating queries and keys and writing keys and values to a pool, with no other change."""
    generator, kind, rows = torch.Generator().manual_seed(5), stepped.dtype, stepped.rows
    shapes = [(rows, heads, stepped.size) for heads in (stepped.heads, stepped.kv_heads, stepped.kv_heads)]
    query, key, value = (torch.randn(shape, generator=generator).to(device, kind) for shape in shapes)
    angles = torch.randn(rows, stepped.size, generator=generator).to(device)
    cosine, sine, bands = angles.cos().to(kind), angles.sin().to(kind), Bands()
    keys, values = (bands.empty(one, torch.Size((2 * rows, *one.shape[1:])), dtype=kind) for one in (key, value))
    slots = torch.randperm(2 * rows, generator=generator)[:rows].to(device)
    run = partial(rotate_append, query, key, value, cosine, sine, keys, values, slots)

    def error() -> float:
        wanted = keys.clone(), values.clone()
        by_torch = rotate_append_reference(query, key, value, cosine, sine, wanted[0], wanted[1], slots)
        found = run()
        if bands.overwritten():
            return math.inf
        if rounding(kind) == torch.finfo(kind).eps / 2:  # bits equal torch's, unless the interpreter truncates
            return max(unequal(*pair) for pair in zip((found, keys, values), (by_torch, *wanted), strict=True))
        exact_heads = [_rotated(heads, cosine, sine) for heads in (query, key)]
        shares = [share_of(one, *exact) for one, exact in zip((found, keys[slots]), exact_heads, strict=True)]
        return max(*shares, unequal(values[slots], value))

    peer = partial(rotate_append_reference, query, key, value, cosine, sine, keys, values, slots)
    return stepped.problem("rotate_append", run, error, 1.0, peer=peer)


def products(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields linears, gated linears, and projections to queries, keys and values with norms and rotations."""
    generator, kind = torch.Generator().manual_seed(6), stepped.dtype
    rows, size, inner = min(stepped.rows, FEW_ROWS), stepped.hidden, stepped.inner

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, kind)

    x, weights = drawn(rows, size), [drawn(inner, size) * size**-0.5 for _ in range(2)]
    wide = [(x.double() @ weight.double().T, _sums(x, weight)) for weight in weights]

    def plain_error() -> float:
        truth, bound = wide[0]
        return share_of(linear(x, weights[0]), truth, bound + rounding(kind) * truth.abs() + _least(kind))

    def gated_error() -> float:
        return share_of(gated_linear(x, weights), *_gated(*wide[0], *wide[1], kind))

    peer = partial(linear_reference, x, weights[0], None)
    yield stepped.problem("linear", partial(linear, x, weights[0]), plain_error, 1.0, peer=peer)
    gated = partial(gated_linear_reference, x, weights, [], "silu")
    yield stepped.problem("gated_linear", partial(gated_linear, x, weights), gated_error, 1.0, peer=gated)

    heads = [count * stepped.size for count in (stepped.heads, stepped.kv_heads, stepped.kv_heads)]
    projections = [drawn(count, size) * size**-0.5 for count in heads]
    head_norms = [1 + drawn(stepped.size) / 4 for _ in range(2)]
    angles = torch.randn(rows, stepped.size, generator=generator).to(device)
    tables, bands = (angles.cos().to(kind), angles.sin().to(kind)), Bands()
    shape = torch.Size((2 * rows, stepped.kv_heads, stepped.size))
    keys, values = (bands.empty(x, shape, dtype=kind) for _ in range(2))
    slots = torch.randperm(2 * rows, generator=generator)[:rows].to(device)
    form = EPSILON, 0.0, False

    def run() -> Tensor:
        return project_rotate_append(x, projections, [], head_norms, *form, *tables, keys, values, slots)

    def by_torch() -> Tensor:
        return project_rotate_append_reference(x, projections, [], head_norms, *form, *tables, keys, values, slots)

    def projected_error() -> float:
        exact = keys.double(), values.double()
        doubled: list[list[Tensor]] = [[tensor.double() for tensor in part] for part in (projections, head_norms)]
        query = project_rotate_append_reference(
            x.double(), doubled[0], [], doubled[1], *form, tables[0].double(), tables[1].double(), *exact, slots
        )
        found = run()
        if bands.overwritten():
            return math.inf
        # Six roundings, each of a number that is at most the largest.
        pairs = [
            (found, query),
            *((pool[slots], truth[slots]) for pool, truth in zip((keys, values), exact, strict=True)),
        ]
        allowed = 6 * rounding(kind) + 4 * size**0.5 * SINGLE.eps
        return max(largest_error(*pair) for pair in pairs) / allowed

    yield stepped.problem("project_rotate_append", run, projected_error, 1.0, peer=by_torch)


def grouped_products(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields a linear over weights of 4 bits with a few rows, and a gated one with the row of a sample's draft."""
    generator, kind = torch.Generator().manual_seed(7), stepped.dtype
    size, inner = stepped.hidden, -(-stepped.inner // 16) * 16
    x = torch.randn(min(stepped.rows, FEW_ROWS), size, generator=generator).to(device, kind)
    weights = [torch.randn(inner, size, generator=generator).to(device) * size**-0.5 for _ in range(2)]
    plain, both = round_to_panels(weights[0]), round_to_panels(interleave(*weights))

    def product(rows: Tensor, panels: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
        restored = restore_panels(panels, "INT4", outputs, size)
        # Kernels may add 16 to each code, which is at most twice the distance of a group's weights.
        groups = torch.nn.functional.pad(restored, (0, -size % 32)).unflatten(1, (-1, 32))
        distance = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, dim=1)[:, :size]
        return rows.double() @ restored.double().T, _sums(rows, restored.abs() + 4 * distance)

    def error() -> float:
        truth, bound = product(x, plain, inner)
        found = grouped_linear(x, plain, outputs=inner)
        return share_of(found, truth, bound + rounding(kind) * truth.abs() + _least(kind))

    def gated_error() -> float:
        truth, bound = product(x[:1], both, 2 * inner)
        parts = [half.unflatten(1, (-1, 2, 16)).unbind(2) for half in (truth, bound)]
        (gate, up), (by_gate, by_up) = ([part.flatten(1) for part in halves] for halves in parts)
        found = grouped_linear(x[:1], both, outputs=2 * inner, activation="silu")
        return share_of(found, *_gated(gate, by_gate, up, by_up, kind))

    run = partial(grouped_linear, x, plain, outputs=inner)
    peer = partial(grouped_linear_reference, x, plain, None, inner, None, "INT4")
    yield stepped.problem("grouped_linear", run, error, 1.0, peer=peer)
    run = partial(grouped_linear, x[:1], both, outputs=2 * inner, activation="silu")
    peer = partial(grouped_linear_reference, x[:1], both, None, 2 * inner, "silu", "INT4")
    yield stepped.problem("gated_grouped_linear", run, gated_error, 1.0, peer=peer)


def _gated(gate: Tensor, by_gate: Tensor, up: Tensor, by_up: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns SiLU of a gate times its input, and bounds of the errors, given those of both products."""
    truth = ACTIVATIONS["silu"](gate) * up
    # SiLU is no steeper than 1.1; both products and the activation are rounded to the type, and then the result.
    by_gate, by_up = (bound + rounding(kind) * exact.abs() for exact, bound in ((gate, by_gate), (up, by_up)))
    bound = (1.1 * by_gate + rounding(kind) * ACTIVATIONS["silu"](gate).abs()) * (up.abs() + by_up)
    return truth, bound + gate.abs() * by_up + (rounding(kind) + (4 + gate.abs()) * SINGLE.eps) * truth.abs() + _least(
        kind
    )


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Returns bounds of the errors of float32 sums: four roundings of the sum of all magnitudes."""
    return 4 * SINGLE.eps * (x.double().abs() @ weight.double().abs().T)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rotated heads in float64, and each number's bound for three roundings."""
    wide = heads.double()
    first, second = wide.chunk(2, dim=-1)
    products = wide * cosine.double()[:, None], torch.cat([-second, first], dim=-1) * sine.double()[:, None]
    large = products[0].abs() + products[1].abs()
    return products[0] + products[1], 2.1 * rounding(heads.dtype) * large + 3 * _least(heads.dtype)


def _rows(count: int, size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Draws rows of very different magnitudes."""
    drawn = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return (drawn * torch.logspace(-2, 2, count)[:, None]).to(device, dtype)


def _least(dtype: torch.dtype) -> float:
    """Returns the distance between the smallest numbers of a type."""
    kind = torch.finfo(dtype)
    return kind.smallest_normal * kind.eps
