"""Validates a drafter: computes the expected gain of its drafts along held-out text, and decodes some prompts.

The target's own text is a sample of the text that decoding would emit. The chance that a draft passes can therefore be
computed along it, without the noise of drafting and verifying. Rounds follow each other as in decoding: one begins
where the one before ended. An average over all places of the text would be higher, since decoding comes to places of
bad drafts more often.

Shapes: G drafting steps, M drafts, one for every token of the answers, see :mod:`arbordraft.training.drafts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from arbordraft import Coupling, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.decoding.prompts import left_padded
from arbordraft.training.students import Student

_RANKS = 8  # most siblings in a tree


def chain_accepted(passes: Tensor) -> Tensor:
    """Returns the ``[M, G + 1]`` chances that 0 to G tokens of a chain of G drafts are accepted.

    Args:
        passes: ``[G, M]`` chance that the text's own token passes at that step, given that those before it did. For
            single-draft rejection sampling of text drawn from p it is ``min(1, q(x) / p(x))``, which makes the product
            the exact acceptance. For greedy decoding it is 0 or 1. It must be 0 where the text has ended.
    """
    reach = functional.pad(passes.cumprod(dim=0), (0, 0, 1, 1))
    reach[0] = 1
    return -reach.diff(dim=0).T


def tree_accepted(ranks: Tensor, topology: TreeTopology) -> Tensor:
    """Returns ``[M, G + 1]`` one-hot numbers of accepted tokens, in greedy trees of the most probable tokens.

    Args:
        ranks: ``[G, M]`` int64: how many draft tokens are more probable than the text's own; a large number where
            the text has ended.
        topology: topology of the trees, no deeper than G.
    """
    width = max(len(children) for children in topology.child_list)
    # The extra row is a dead end, which leads only to itself.
    table = torch.full((topology.num_nodes + 1, width + 1), topology.num_nodes)
    for node, children in enumerate(topology.child_list):
        table[node, : len(children)] = torch.tensor(children)
    at = torch.zeros_like(ranks[0])
    length = torch.zeros_like(at)
    for step_ranks in ranks[: topology.max_depth]:
        at = table[at, step_ranks.clamp(max=width)]
        length += at < topology.num_nodes
    return functional.one_hot(length, len(ranks) + 1).float()


def walked_tau(accepted: Tensor, answers: Tensor, tokens: int) -> float:
    """Computes the block efficiency of decoding the first tokens of every answer: tokens per expected round.

    A round that accepts k tokens emits k + 1, and the next round begins after them. Given the text this is exact, since
    the acceptance of a round depends only on where it begins.

    Args:
        accepted: ``[M, G + 1]`` chance that a draft has 0 to G tokens accepted.
        answers: ``[M]`` answer that each draft belongs to; drafts of an answer lie side by side, in order.
        tokens: number of first tokens of every answer; shorter answers count as a whole.
    """
    counts = answers.unique_consecutive(return_counts=True)[1]
    parts = [part[:tokens] for part in accepted.double().split(counts.tolist())]
    counts, rows = counts.clamp(max=tokens), pad_sequence(parts, batch_first=True)
    length, width = rows.shape[1:]
    begins = rows.new_zeros(len(rows), length + width)  # chance that a round begins there
    begins[:, 0] = 1
    for at in range(length):
        begins[:, at + 1 : at + 1 + width] += begins[:, at, None] * rows[:, at]
    inside = torch.arange(length + width) < counts[:, None]
    return float(counts.sum() / begins[inside].sum())


def expectations(drafts: Mapping[str, Tensor], tree: TreeTopology, tokens: int) -> tuple[dict[str, float], list[float]]:
    """Computes the block efficiencies and acceptance that decoding can expect, from drafts along text.

    Args:
        drafts: ``labels``, ``passes``, ``ranks``, ``valid`` and ``answers`` of
            :class:`~arbordraft.training.drafts.Drafts`, and ``temperatures`` ``[M]`` of the text.
        tree: the tree whose block efficiency is computed.
        tokens: number of first tokens of every answer.

    Returns:
        Block efficiencies and acceptance by drafting step, by name. Then how often the next greedy token was the
        drafter's most probable one, its second, and so on; empty if no text is greedy.
    """
    metrics: dict[str, float] = {}
    acceptance: list[float] = []
    for label, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        chosen = drafts["temperatures"] == temperature
        if not chosen.any():
            continue
        labels, passes, ranks, valid = (drafts[name][:, chosen] for name in ("labels", "passes", "ranks", "valid"))
        answers = drafts["answers"][chosen]
        steps = int(valid.any(dim=1).sum())  # fewer than requested if the student drafts no further
        metrics[f"val/tau_{label}_chain"] = walked_tau(chain_accepted(passes), answers, tokens)
        for step in range(steps):
            metrics[f"val/acceptance_{label}_pos_{step + 1}"] = float(labels[step][valid[step]].mean())
        if label == "greedy":
            acceptance = (torch.bincount(ranks[0], minlength=_RANKS)[:_RANKS].double() / len(ranks[0])).tolist()
            if tree.max_depth <= steps:
                metrics["val/tau_greedy_tree"] = walked_tau(tree_accepted(ranks, tree), answers, tokens)
    return metrics, acceptance


def decoded(
    target: RaggedModel, student: Student, prompts: Sequence[list[int]], steps: int, new_tokens: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Decodes prompts greedily with chains of the current drafter; returns figures, and texts for people to read."""
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
