"""Extracts and packs MLPs: single ones, and mixtures of experts with their router, experts and shared experts.

Shapes: E experts to choose from, S shared ones, H hidden size, N inner size of an MLP, K experts that a row chooses.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import Experts, Matrix
from arbordraft.kernels.prepacked_linear import ACTIVATIONS, LANES, interleave, prepack
from arbordraft.target.prepacked.probing import (
    TOLERANCE,
    Unrecognised,
    distance,
    hooked,
    noise,
    parts_named,
    plain,
    tried,
    widened,
)
from arbordraft.target.prepacked.weight_collector import Linear, WeightCollector

# Parts of MLPs by their names in transformers' models.
_KINDS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
    (("up_proj",), "down_proj"),
)
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")


class Mlp(NamedTuple):
    """An MLP or a mixture of experts, packed for :class:`~arbordraft.kernels.decoder_layers.LayerWeights`."""

    gate_up: Matrix
    down: Matrix
    activation: str
    inner: int
    gated: bool
    experts: Experts | None = None

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.outputs // (1 if self.experts is None else self.experts.routed + self.experts.shared)


def is_mlp(module: nn.Module) -> bool:
    """Returns whether a module has the parts of an MLP or of a mixture of experts."""
    return _is_mixture(module) or parts_named(module, _KINDS) is not None


def mlp_of(collector: WeightCollector, modules: Sequence[nn.Module]) -> Mlp:
    """Packs an MLP or a mixture of experts that :func:`is_mlp` found, or both if a layer adds their outputs.

    Raises:
        Unrecognised: if the modules compute something else.
    """
    mixtures, others = (list(filter(kind, modules)) for kind in (_is_mixture, lambda one: not _is_mixture(one)))
    if len(mixtures) > 1 or len(others) > 1:
        raise Unrecognised("the layer has several MLPs")
    return mixture(collector, mixtures[0], others) if mixtures else single(collector, others[0])


def single(collector: WeightCollector, mlp: nn.Module) -> Mlp:
    """Packs an MLP, with gates or without."""
    readers, down, activation = _linears(collector, mlp)
    readers[0] = readers[0].times(float(getattr(mlp, "gate_multiplier", 1.0)))
    down = down.times(float(getattr(mlp, "down_multiplier", 1.0)))
    inner = down.weight.shape[1]
    gated = sum(len(linear.weight) for linear in readers) == 2 * inner
    first = collector.matrix(readers, lambda both: interleave(*both.chunk(2))) if gated else collector.matrix(readers)
    return Mlp(first, collector.matrix([down]), activation, inner, gated)


def _linears(collector: WeightCollector, mlp: nn.Module) -> tuple[list[Linear], Linear, str]:
    """Returns the linears of gates and inputs (or inputs alone), the linear of outputs, and the activation."""
    if not (names := parts_named(mlp, _KINDS)):
        raise Unrecognised(f"{type(mlp).__name__} is no MLP")
    readers, down = collector.linears(mlp, *names[0]), collector.linear(mlp, names[1])
    hidden, inner = down.weight.shape
    rows = sum(len(linear.weight) for linear in readers)
    if rows not in (inner, 2 * inner) or inner % LANES or hidden % LANES:
        raise Unrecognised(f"{type(mlp).__name__} is not an MLP of fitting size")
    if hooked(mlp) or mlp._parameters or list(mlp.buffers()):
        raise Unrecognised(f"{type(mlp).__name__} has parts of another kind")
    return readers, down, _activation(mlp)


def _activation(mlp: nn.Module) -> str:
    # LFM2's are called by name only: who asks compares outputs, too.
    function = next((getattr(mlp, key) for key in _ACTIVATION_NAMES if hasattr(mlp, key)), F.silu)
    # Large values, too: some activations differ only in a bound.
    points = torch.cat([torch.linspace(-8, 8, 129), torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])])
    curve = None if function is None else tried(function, points)
    for name, known in ACTIVATIONS.items():
        if curve is not None and torch.allclose(known(points), curve, atol=1e-6):
            return name
    raise Unrecognised(f"the activation of {type(mlp).__name__} is unknown")


def stacked(module: nn.Module) -> bool:
    """Returns whether a module holds experts as transformers stacks them.

    Gates and inputs are ``[E, 2 N, H]``, or inputs alone ``[E, N, H]``, and outputs ``[E, H, N]``.
    """
    first, down = _stacks(module)
    if not (plain(first) and plain(down) and first.ndim == down.ndim == 3):
        return False
    experts, hidden, inner = down.shape
    return first.shape == (experts, (1 + _gated(module)) * inner, hidden)


def _stacks(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Returns the stacked matrices of a module's experts that read hidden states, and those that lead back."""
    first = module._parameters.get("gate_up_proj" if _gated(module) else "up_proj")
    return first, module._parameters.get("down_proj")


def _gated(experts: nn.Module) -> bool:
    return "gate_up_proj" in experts._parameters


def _is_mixture(module: nn.Module) -> bool:
    """Returns whether a child of the module holds experts."""
    return any(map(stacked, module.children()))


def mixture(collector: WeightCollector, block: nn.Module, beside: Sequence[nn.Module] = ()) -> Mlp:
    """Packs a mixture: a router, experts and at most one MLP shared by all rows, with or without its own gate.

    The shared MLP is split by its inner channels into experts of the size of the others. It may stand beside the block.

    Raises:
        Unrecognised: if the block has other parts, or its router or experts compute something else.
    """
    children = dict(block.named_children())
    routed = [child for child in children.values() if stacked(child)]
    inside = [child for child in children.values() if isinstance(getattr(child, "down_proj", None), nn.Module)]
    gates = [name for name, child in children.items() if getattr(child, "out_features", 0) == 1]
    known = (*routed, *inside, *(children[name] for name in gates))
    routers = [child for child in children.values() if child not in known and not isinstance(child, nn.Identity)]
    shared = [*inside, *beside]
    counts = (len(routed), len(routers), len(shared) <= 1, len(gates) <= len(inside))
    if counts != (1, 1, True, True) or hooked(block) or block._parameters:
        raise Unrecognised(f"{type(block).__name__} has parts of another kind")
    router, experts = routers[0], routed[0]
    activation = _activation_of(experts)
    routing = _routing(router, list(block.buffers(recurse=False)))
    gated, gate_up, down = _gated(experts), *([stack.detach()] for stack in _stacks(experts))  # type: ignore[union-attr]
    scores = router.weight.detach()  # type: ignore[operator]
    number, hidden, inner = down[0].shape
    for each in shared:
        more, back = _parted(collector, each, inner, activation, gated)
        gate_up.append(more)
        down.append(back)
    for name in gates:
        if (gate := collector.linear(block, name)).bias is not None:
            raise Unrecognised(f"{name} has a bias")
        scores = torch.cat([scores, gate.weight.detach()])
    fits = scores.shape[1] == hidden and number == len(scores) - len(gates)
    types = {tensor.dtype for tensor in (*gate_up, *down)}
    fits = fits and len(types) == 1 and scores.dtype in (torch.float32, *types)
    if not fits or hidden % LANES or inner % LANES:
        raise Unrecognised(f"{type(block).__name__} has sizes or types that the kernel does not know")
    for module in (router, experts):
        collector.remember(module)
    corrections = routing.corrections
    if corrections is not None:
        collector.sources.append(corrections)
        corrections = corrections.detach().to(torch.float32, copy=True)

    def in_order(rows: Tensor) -> Tensor:
        if not gated:
            return rows
        halves = rows.unflatten(0, (-1, 2 * inner)).chunk(2, dim=1)
        return interleave(*(half.flatten(0, 1) for half in halves))

    # The router keeps its bits: rounding its scores would choose other experts.
    shares = sum(map(len, down)) - number
    choice = Experts(
        Matrix(prepack(scores)),
        number,
        routing.chosen,
        shares,
        routing.normalised,
        bool(gates),
        routing.sigmoid,
        corrections,
        routing.factor,
    )
    first, second = collector.rows(gate_up, in_order), collector.rows(down)
    return Mlp(first, second, activation, inner, gated, choice)


def _parted(
    collector: WeightCollector, mlp: nn.Module, inner: int, activation: str, gated: bool
) -> tuple[Tensor, Tensor]:
    """Splits an MLP into zero-padded ones of this inner size: ``[S, 2 N, H]`` or ``[S, N, H]``, and ``[S, H, N]``."""
    readers, down, own = _linears(collector, mlp)
    rows, back = torch.cat([linear.weight.detach() for linear in readers]), down.weight.detach().T
    parts = 1 + gated
    biased = any(linear.bias is not None for linear in (*readers, down))
    if len(rows) != parts * len(back) or own != activation or biased:
        raise Unrecognised(f"{type(mlp).__name__} has other gates than the experts, biases or another activation")
    stacks = torch.stack([*rows.chunk(parts), back])  # all [M, H]
    count = -(-len(back) // inner)
    *first, back = F.pad(stacks, (0, 0, 0, count * inner - len(back))).unflatten(1, (count, inner))
    return torch.cat(first, dim=1), back.transpose(1, 2)


class _Routing(NamedTuple):
    """Choice of experts: see :class:`~arbordraft.kernels.decoder_layers.Experts`."""

    chosen: int
    normalised: bool
    sigmoid: bool
    corrections: Tensor | None
    factor: float


def _routing(router: nn.Module, given: Sequence[Tensor]) -> _Routing:
    """Returns how a router chooses experts and weighs their outputs, identified on noise.

    Args:
        router: maps hidden states, and the corrections if the block has them, to scores, weights and experts.
        given: the block's own buffers. The only buffer of the block or of the router corrects the choice.
    """
    weight = router._parameters.get("weight")
    own = list(router.buffers())
    corrections = next(iter((*own, *given)), None)
    known = len(list(router.parameters())) == 1 and len(own) + len(given) < 2
    if weight is None or weight.ndim != 2 or not known or (corrections is not None and corrections.ndim != 1):
        raise Unrecognised(f"{type(router).__name__} has parts of another kind")
    wide = widened(router)
    x = noise(16, weight.shape[1])
    x *= torch.tensor([0.3, 1.0, 3.0, 8.0]).repeat(4)[:, None] / (x @ weight.detach().float().T).std()
    scores = x @ weight.detach().float().T
    other = None if corrections is None else 0.2 * noise(len(weight))  # in place of corrections, which may be zero
    for part in wide.modules():
        part._buffers.update(dict.fromkeys(part._buffers, other))  # new ones: float32 buffers are the model's own
    factor = float(getattr(router, "routed_scaling_factor", 1.0))  # the comparison shows whether it is that
    arguments = [] if other is None or own else [other]
    weights, chosen = (tried(lambda x, place=place: wide(x, *arguments)[place], x) for place in (1, 2))
    found = tried(torch.zeros_like(scores).scatter, -1, chosen, weights)
    if found is not None and chosen is not None:
        for sigmoid, normalised in itertools.product((False, True), (True, False)):
            if corrections is not None and not sigmoid:
                continue
            expected = scores.sigmoid() if sigmoid else scores.softmax(dim=-1)
            ranks = expected if other is None else expected + other
            largest = ranks.topk(chosen.shape[-1]).indices
            expected = torch.zeros_like(scores).scatter(-1, largest, expected.gather(-1, largest))
            if normalised:
                expected /= expected.sum(dim=-1, keepdim=True)
            if distance(found, factor * expected) < TOLERANCE:
                return _Routing(chosen.shape[-1], normalised, sigmoid, corrections, factor)
    raise Unrecognised(f"{type(router).__name__} is neither a softmax over scores nor their sigmoids")


def _activation_of(experts: nn.Module) -> str:
    """Returns the activation of experts that are MLPs with or without gates, identified on noise."""
    name = _activation(experts)
    gate_up, down = (stack.detach() for stack in _stacks(experts))  # type: ignore[union-attr]
    if len(list(experts.parameters())) != 2 or list(experts.buffers()) or not gate_up.is_cpu:
        raise Unrecognised(f"{type(experts).__name__} has parts of another kind")
    if gate_up.dtype not in (torch.float32, torch.bfloat16):
        raise Unrecognised(f"{type(experts).__name__} is {gate_up.dtype}")
    # Large values, too: some experts clamp their gates.
    x = (noise(4, down.shape[1]) * torch.tensor([0.1, 1.0, 30.0, 1000.0])[:, None]).to(down.dtype)
    taken = torch.arange(4)[:, None] % len(down)
    found = tried(experts, x, taken, torch.ones(4, 1, dtype=x.dtype))
    # bfloat16 experts round intermediate results.
    tolerance = max(TOLERANCE, 8 * torch.finfo(x.dtype).eps)
    for row, expert in enumerate(taken.flatten().tolist()):
        first, *rest = (gate_up[expert].float() @ x[row].float()).chunk(1 + _gated(experts))
        active = ACTIVATIONS[name](first) * (rest[0] if rest else 1)
        if found is None or not distance(found[row].float(), down[expert].float() @ active) < tolerance:
            raise Unrecognised(f"{type(experts).__name__} compute something else than MLPs")
    return name


__all__ = ["Mlp", "is_mlp", "mixture", "mlp_of", "single", "stacked"]
