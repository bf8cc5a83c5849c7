"""Takes mixtures of experts apart: who chooses, what there is to choose, and what every row takes.

Shapes: E experts to choose from, S shared ones, H hidden size, N inner size of an expert, K experts that a row chooses.
"""

import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import Experts, Matrix
from arbordraft.kernels.prepacked_linear import ACTIVATIONS, LANES, interleave, pack, prepack
from arbordraft.target.probing import TOLERANCE, Unrecognised, activation_of, distance, hooked, noise, tried

if TYPE_CHECKING:
    from arbordraft.target.recognition import Parts


class Mixture(NamedTuple):
    """The MLPs of a layer as kernels read them, and how rows choose among them."""

    gate_up: Matrix
    down: Matrix
    activation: str
    experts: Experts


def stacked(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers keeps them: ``[E, 2 N, H]`` and ``[E, H, N]``."""
    gate_up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None or not gate_up.ndim == down.ndim == 3:
        return False
    experts, hidden, inner = down.shape
    return gate_up.shape == (experts, 2 * inner, hidden)


def is_mixture(module: nn.Module) -> bool:
    """Whether a part of the module holds experts."""
    return any(map(stacked, module.children()))


def mixture(parts: "Parts", block: nn.Module) -> Mixture:
    """Router, experts and perhaps an MLP that every row takes, with or without a gate of its own.

    The shared MLP is taken for so many experts of the size of the others: its inner channels are parted among them.

    Raises:
        Unrecognised: if the block has other parts, or its router or experts compute something else.
    """
    children = dict(block.named_children())
    routed = [child for child in children.values() if stacked(child)]
    shared = [child for child in children.values() if isinstance(getattr(child, "down_proj", None), nn.Module)]
    gates = [name for name, child in children.items() if getattr(child, "out_features", 0) == 1]
    routers = [child for child in children.values() if child not in (*routed, *shared, *(children[g] for g in gates))]
    counts = (len(routed), len(routers), len(shared) <= 1, len(gates) <= len(shared))
    if counts != (1, 1, True, True) or hooked(block) or block._parameters or list(block.buffers()):
        raise Unrecognised(f"{type(block).__name__} has parts of another kind")
    router, experts = routers[0], routed[0]
    activation = _activation(experts)
    chosen, normalised = _routing(router)
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()  # type: ignore[operator, union-attr]
    scores = router.weight.detach()  # type: ignore[operator, union-attr]
    number, hidden, inner = down.shape
    for each in shared:
        more, back, also = parts.gated(each)
        if any(linear.bias is not None for linear in (*more, back)) or also != activation:
            raise Unrecognised(f"{type(each).__name__} has biases or another activation")
        count = -(-back.in_features // inner)
        rows = torch.cat([linear.weight.detach() for linear in more]).unflatten(0, (2, -1))
        gate_up = torch.cat([gate_up, _spread(rows, count, inner).transpose(0, 1).flatten(1, 2)])
        down = torch.cat([down, _spread(back.weight.detach().T[None], count, inner)[0].transpose(1, 2)])
    for name in gates:
        if (gate := parts.linear(block, name)).bias is not None:
            raise Unrecognised(f"{name} has a bias")
        scores = torch.cat([scores, gate.weight.detach()])
    fits = scores.shape[1] == hidden and number == len(scores) - len(gates)
    if not fits or hidden % LANES or inner % LANES or len({t.dtype for t in (gate_up, down, scores)}) > 1:
        raise Unrecognised(f"{type(block).__name__} has sizes or types that the kernel does not know")
    for module in (router, experts):
        parts.remember(module)
    return Mixture(
        Matrix(*pack(interleave(*(half.flatten(0, 1) for half in gate_up.chunk(2, dim=1))), parts.weights)),
        Matrix(*pack(down.flatten(0, 1), parts.weights)),
        activation,
        # With fewer bits rows would take other experts.
        Experts(Matrix(prepack(scores)), number, chosen, len(down) - number, normalised, bool(gates)),
    )


def _spread(rows: Tensor, count: int, inner: int) -> Tensor:
    """``[A, M, H]`` to ``[A, S, N, H]``, with zeros behind."""
    return F.pad(rows, (0, 0, 0, count * inner - rows.shape[1])).unflatten(1, (count, inner))


def _routing(router: nn.Module) -> tuple[int, bool]:
    """How many experts a router chooses, and whether their factors add up to 1, read off what it does to noise."""
    weight = router._parameters.get("weight")
    own = [*router.parameters(), *router.buffers()]
    if len(own) != 1 or own[0] is not weight or weight.ndim != 2:
        raise Unrecognised(f"{type(router).__name__} has parts of another kind")
    wide = copy.deepcopy(router).float()
    x = noise(16, weight.shape[1])
    x *= torch.tensor([0.3, 1.0, 3.0, 8.0]).repeat(4)[:, None] / (x @ weight.detach().float().T).std()
    probabilities = (x @ weight.detach().float().T).softmax(dim=-1)
    factors, chosen = (tried(lambda x, place=place: wide(x)[place], x) for place in (1, 2))
    if factors is not None and chosen is not None and factors.shape == chosen.shape and not chosen.is_floating_point():
        found = torch.zeros_like(probabilities).scatter(-1, chosen, factors)
        largest = probabilities.topk(chosen.shape[-1])
        for normalised in (True, False):
            values = largest.values / largest.values.sum(dim=-1, keepdim=True) if normalised else largest.values
            expected = torch.zeros_like(probabilities).scatter(-1, largest.indices, values)
            if distance(found, expected) < TOLERANCE:
                return chosen.shape[-1], normalised
    raise Unrecognised(f"{type(router).__name__} is not a softmax over scores")


def _activation(experts: nn.Module) -> str:
    """The activation of experts that compute ``down(activation(gate) * up)``, as what they do to noise shows."""
    name = activation_of(experts)
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()  # type: ignore[operator, union-attr]
    if len(list(experts.parameters())) != 2 or list(experts.buffers()) or not gate_up.is_cpu:
        raise Unrecognised(f"{type(experts).__name__} has parts of another kind")
    if gate_up.dtype not in (torch.float32, torch.bfloat16):
        raise Unrecognised(f"{type(experts).__name__} is {gate_up.dtype}")
    # Far out too: some clamp their gates.
    x = (noise(4, down.shape[1]) * torch.tensor([0.1, 1.0, 30.0, 1000.0])[:, None]).to(down.dtype)
    taken = torch.arange(4)[:, None] % len(down)
    found = tried(experts, x, taken, torch.ones(4, 1, dtype=x.dtype))
    # In bfloat16 a few numbers are rounded on the way.
    tolerance = max(TOLERANCE, 8 * torch.finfo(x.dtype).eps)
    for row, expert in enumerate(taken.flatten().tolist()):
        gate, up = (gate_up[expert].float() @ x[row].float()).chunk(2)
        expected = down[expert].float() @ (ACTIVATIONS[name](gate) * up)
        if found is None or not distance(found[row].float(), expected) < tolerance:
            raise Unrecognised(f"{type(experts).__name__} are not gated MLPs")
    return name


__all__ = ["Mixture", "is_mixture", "mixture", "stacked"]
