"""What validation of a drafter looks at: what its drafts along held-out text would gain, and a real decode.

The target's own text is a sample of what decoding would emit, so the chance that a draft passes can be read off along
it, without the noise of drafting and verifying.

Shapes: G drafting steps, M drafts, see :mod:`arbordraft.training.drafts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft import Coupling, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.prompts import left_padded
from arbordraft.training.students import Student

_RANKS = 8  # siblings that a tree may have


def chain_tau(passes: Tensor) -> float:
    """Block efficiency of chains of G drafts: accepted tokens and the recovered or bonus one, per target forward.

    Args:
        passes: ``[G, M]`` chance that the text's own token passes at that step, given that those before it did:
            ``min(1, q(x) / p(x))`` for single-draft rejection sampling of text drawn from p, which makes the product
            the exact acceptance; 0 or 1 for greedy decoding. Must be 0 where the text has ended.
    """
    return 1 + float(passes.cumprod(dim=0).sum(dim=0).mean())


def tree_tau(ranks: Tensor, topology: TreeTopology) -> float:
    """Block efficiency of trees whose nodes have the drafter's most probable tokens as children, for greedy decoding.

    Args:
        ranks: ``[G, M]`` int64: how many draft tokens are more probable than the text's own, a large number where
            the text has ended.
        topology: no deeper than G.
    """
    width = max(len(children) for children in topology.child_list)
    # One row more: a dead end, which leads nowhere.
    table = torch.full((topology.num_nodes + 1, width + 1), topology.num_nodes)
    for node, children in enumerate(topology.child_list):
        table[node, : len(children)] = torch.tensor(children)
    at = torch.zeros_like(ranks[0])
    total = torch.ones(len(at))
    for step_ranks in ranks[: topology.max_depth]:
        at = table[at, step_ranks.clamp(max=width)]
        total += at < topology.num_nodes
    return float(total.mean())


def expectations(drafts: Mapping[str, Tensor], tree: TreeTopology) -> tuple[dict[str, float], list[float]]:
    """What decoding can expect of a drafter that drafts like this along text.

    Args:
        drafts: ``labels``, ``passes``, ``ranks`` and ``valid`` of :class:`~arbordraft.training.drafts.Drafts`, and
            ``temperatures`` ``[M]`` of the text.
        tree: the tree whose block efficiency is wanted.

    Returns:
        Block efficiencies and acceptance by drafting step, by name; and how often the next greedy token was the
        drafter's most probable one, its second, and so on: empty if no text is greedy.
    """
    metrics: dict[str, float] = {}
    acceptance: list[float] = []
    for label, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        chosen = drafts["temperatures"] == temperature
        if not chosen.any():
            continue
        labels, passes, ranks, valid = (drafts[name][:, chosen] for name in ("labels", "passes", "ranks", "valid"))
        steps = int(valid.any(dim=1).sum())  # fewer than were asked for if it drafts no further
        metrics[f"val/tau_{label}_chain"] = chain_tau(passes)
        for step in range(steps):
            metrics[f"val/acceptance_{label}_pos_{step + 1}"] = float(labels[step][valid[step]].mean())
        if label == "greedy":
            acceptance = (torch.bincount(ranks[0], minlength=_RANKS)[:_RANKS] / len(ranks[0])).tolist()
            if tree.max_depth <= steps:
                metrics["val/tau_greedy_tree"] = tree_tau(ranks, tree)
    return metrics, acceptance


def decoded(
    target: RaggedModel, student: Student, prompts: Sequence[list[int]], steps: int, new_tokens: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Decodes prompts greedily with chains of the drafter as it is: figures, and the texts for people to read."""
    decoder = SpeculativeDecoder(target, student.drafter(target), TreeTopology.chain(steps), Coupling.matching())
    inputs = left_padded(prompts)
    output: Any = decoder.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    stats, tokenizer = output.stats, target.tokenizer
    assert tokenizer is not None
    answers = output.sequences[:, inputs["input_ids"].shape[1] :]
    samples = {
        "prompt": [tokenizer.decode(prompt) for prompt in prompts],
        "answer": [
            tokenizer.decode(answer[:count]) for answer, count in zip(answers.tolist(), stats.emitted, strict=True)
        ],
    }
    rounds = max(1, max(stats.forwards))
    figures = {
        "val/decode_tau": stats.tau,
        "val/draft_ms": 1e3 * stats.seconds["draft"] / rounds,
        "val/target_ms": 1e3 * stats.seconds["target"] / rounds,
    }
    return figures, samples
