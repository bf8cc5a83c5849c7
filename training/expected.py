"""What a drafter would gain on text of the target, computed from both models' rows instead of by decoding.

The target's own text is a sample of what decoding would emit, so the chance that a draft passes can be read off along
it, without the noise of drafting and verifying.

Shapes: G drafting steps, B sequences, S slots. Slot j of step g predicts the (g + 1)-th token of the draft that begins
at slot j - g.
"""

import torch
from torch import Tensor

from arbordraft import TreeTopology


def chain_tau(factors: Tensor, begins: Tensor) -> float:
    """Block efficiency of chains of G drafts: accepted tokens and the recovered or bonus one, per target forward.

    Args:
        factors: ``[G, B, S]`` chance that the text's own token passes at that step, given that those before it did:
            ``min(1, q(x) / p(x))`` for single-draft rejection sampling of text drawn from p, which makes the product
            the exact acceptance; 0 or 1 for greedy decoding. Must be 0 where the text has ended.
        begins: ``[B, S]`` bool, slots at which a draft may begin.
    """
    reached = torch.ones_like(factors[0])
    total = torch.ones_like(factors[0])
    for step, factor in enumerate(factors):
        reached = reached * _earlier(factor, step)
        total = total + reached
    return float(total[begins].mean())


def tree_tau(ranks: Tensor, begins: Tensor, topology: TreeTopology) -> float:
    """Block efficiency of trees whose nodes have the drafter's most probable tokens as children, for greedy decoding.

    Args:
        ranks: ``[G, B, S]`` int64: how many draft tokens are more probable than the text's own, a large number where
            the text has ended.
        begins: ``[B, S]`` bool, slots at which a draft may begin.
        topology: no deeper than G.
    """
    width = max(len(children) for children in topology.child_list)
    # One row more: a dead end, which leads nowhere.
    table = torch.full((topology.num_nodes + 1, width + 1), topology.num_nodes, device=ranks.device)
    for node, children in enumerate(topology.child_list):
        table[node, : len(children)] = torch.tensor(children, device=ranks.device)
    at = torch.zeros_like(ranks[0])
    total = torch.ones(at.shape, device=ranks.device)
    for step in range(topology.max_depth):
        at = table[at, _earlier(ranks[step], step, width).clamp(max=width)]
        total = total + (at < topology.num_nodes)
    return float(total[begins].mean())


def _earlier(x: Tensor, by: int, beyond: float = 0) -> Tensor:
    """Row j holds what slot j + by had."""
    return torch.nn.functional.pad(x[:, by:], (0, by), value=beyond) if by else x


__all__ = ["chain_tau", "tree_tau"]
