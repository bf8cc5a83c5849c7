"""Growth of a level in Triton: one program for all trees, whose nodes decide together.

Its lanes are the places for children: sample s, child c. All children of a node repeat the decision about it, and the
child of rank 0 speaks for it in sums over nodes.

Shapes: S samples, N nodes of the topology. At this depth n nodes with children, m children, n' of which have children.
"""

import triton
import triton.language as tl
from torch import Tensor

_COMPARED = 4096  # pairs of a node and a draft that are compared at a time


@triton.jit(do_not_specialize=["depth", "below"])
def grow_trees(
    TOKEN, CHANCE, REACH, BROKEN, LEVELS, CALIBRATION, EXPECTED, COSTS, BUDGET, INNER, PARENT, RANK, FED, TOKENS,
    LOG_PROBS, VOCABULARY, NEXT, depth, below, samples, nodes, inner, children, fed, outputs, known,
    TRIMMED: tl.constexpr, S: tl.constexpr, M: tl.constexpr, F: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """See :func:`arbordraft.kernels.grow_level.grow_level`; sizes in capitals are powers of two."""
    s = tl.arange(0, S)[:, None]
    c = tl.arange(0, M)[None, :]
    there = (s < samples) & (c < children)
    parent = tl.load(PARENT + c, mask=c < children, other=0)
    rank = tl.load(RANK + c, mask=c < children, other=0)
    above = tl.load(INNER + parent)
    at = tl.minimum(depth, known - 1)
    reach = tl.load(REACH + s * nodes + above, mask=there, other=-1.0)
    able = there & (reach >= 0) & (tl.load(LEVELS + s, mask=s < samples, other=0) > depth)
    if depth > 0:  # a node fits if fewer drafts than the budget have a greater reach
        flat = tl.reshape(reach, [S * M])
        greater = tl.zeros([S * M], tl.int64)
        for start in range(0, samples * nodes, DRAFTS):
            other = start + tl.arange(0, DRAFTS)
            is_draft = (other < samples * nodes) & (other % nodes > 0)
            drafted = tl.load(REACH + other, mask=is_draft, other=-1.0)
            greater += tl.sum((drafted[None, :] > flat[:, None]).to(tl.int64), 1)
        able = able & tl.reshape(greater < tl.load(BUDGET), [S, M])
    gain = reach * tl.load(EXPECTED + s * known + at, mask=s < samples, other=0.0) - tl.load(COSTS + 1)
    going = able & (gain >= 0)
    worth = tl.sum(tl.sum(tl.where(going & (rank == 0), gain, 0.0), 1), 0)
    going = going & (worth + 0.0 * gain >= tl.maximum(tl.load(COSTS), 0.0))

    place = (s * inner + parent) * outputs + rank
    drawn = tl.load(LOG_PROBS + place, mask=there & (rank < outputs), other=-float("inf"))
    unsound = tl.sum((going & (rank == 0) & (drawn != drawn)).to(tl.float64), 1)
    first = tl.arange(0, S)
    counted = tl.load(BROKEN + first, mask=first < samples, other=0.0)
    chance = tl.exp(drawn)
    output = tl.load(TOKENS + place, mask=there & (rank < outputs), other=0)
    token = tl.load(VOCABULARY + output, mask=there & (rank < outputs), other=0) if TRIMMED else output
    token = tl.where(chance > 0, token, -1)
    added = going & (token >= 0)
    likely = chance.to(tl.float64)
    share = tl.load(CALIBRATION + s * known + at, mask=s < samples, other=0.0) * likely
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    here = s * nodes + below + c
    tl.debug_barrier()  # all threads have read the reach of the drafts
    tl.store(BROKEN + first, counted + unsound, mask=first < samples)
    tl.store(TOKEN + here, token, mask=added)
    tl.store(CHANCE + here, likely, mask=added)
    tl.store(REACH + here, reach * share, mask=added)
    tl.debug_barrier()  # all tokens are there
    f = tl.arange(0, F)[None, :]
    runs = (s < samples) & (f < fed)
    following = tl.load(TOKEN + s * nodes + tl.load(FED + f, mask=f < fed, other=0), mask=runs, other=0)
    root = tl.load(TOKEN + s * nodes, mask=s < samples, other=0)
    tl.store(NEXT + s * fed + f, tl.where(following < 0, root, following), mask=runs)


def drafts_of(samples: int, children: int) -> int:
    """Returns how many drafts are compared with the nodes at a time; more would not fit into registers."""
    return max(4, min(64, _COMPARED // (samples * children)))


def launch(
    token: Tensor,
    chance: Tensor,
    reach: Tensor,
    broken: Tensor,
    levels: Tensor,
    calibration: Tensor,
    expected: Tensor,
    costs: Tensor,
    budget: Tensor,
    inner: Tensor,
    parent: Tensor,
    rank: Tensor,
    fed: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    vocabulary: Tensor | None,
    depth: int,
    below: int,
) -> Tensor:
    """See :func:`arbordraft.kernels.grow_level.grow_level`."""
    samples, nodes = token.shape
    following = token.new_empty(samples * len(fed))
    lanes = triton.next_power_of_2(samples), max(2, triton.next_power_of_2(len(parent)))
    grow_trees[(1,)](
        token, chance, reach, broken, levels.contiguous(), calibration.contiguous(), expected.contiguous(), costs,
        budget, inner, parent, rank, fed, tokens, log_probs, tokens if vocabulary is None else vocabulary, following,
        depth, below, samples, nodes, len(inner), len(parent), len(fed), tokens.shape[1], calibration.shape[1],
        TRIMMED=vocabulary is not None, S=lanes[0], M=lanes[1], F=triton.next_power_of_2(max(1, len(fed))),
        DRAFTS=drafts_of(*lanes), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return following


__all__ = ["drafts_of", "grow_trees", "launch"]
