"""What validation of a drafter looks at: its rows beside the target's along held-out text, and a real decode.

Shapes: B sequences, S slots, G drafting steps, R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbordraft import Coupling, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.prompts import left_padded
from arbordraft.training.batches import Batch
from arbordraft.training.expected import chain_tau, tree_tau
from arbordraft.training.features import TeacherHead
from arbordraft.training.shards import ANSWER
from arbordraft.training.students import Prediction, Student

_RANKS = 8  # siblings that a tree may have
_ROWS = 256  # rows of logits at a time


class Expectations(NamedTuple):
    """What decoding can expect of a drafter.

    Args:
        metrics: block efficiencies and acceptance by drafting step, by name.
        acceptance: how often the next greedy token was the drafter's most probable one, its second, and so on; empty
            if no held-out text is greedy.
    """

    metrics: dict[str, float]
    acceptance: list[float]


def expectations(seen: Sequence[Mapping[str, Tensor]], tree: TreeTopology) -> Expectations:
    """Sums up what was found along held-out text.

    Args:
        seen: by batch: ``temperature`` ``[B]``, ``begins`` ``[B, S]``; what :func:`along` finds, ``[G, B, S]`` each.
        tree: the tree whose block efficiency is wanted.
    """
    metrics: dict[str, float] = {}
    acceptance: list[float] = []
    for label, keep in (("greedy", 0.0), ("sampled", 1.0)):
        parts = [(part, part["temperature"] == keep) for part in seen]
        parts = [(part, rows) for part, rows in parts if rows.any() and part["begins"][rows].any()]
        if not parts:
            continue
        total = sum(int(part["begins"][rows].sum()) for part, rows in parts)
        factor = "matches" if label == "greedy" else "passes"
        steps = len(parts[0][0]["ranks"])  # fewer than were asked for if it drafts no further

        def mean(value: Any, parts: Any = parts, total: int = total) -> float:
            return sum(value(p, r) * int(p["begins"][r].sum()) for p, r in parts) / total

        metrics[f"val/tau_{label}_chain"] = mean(
            lambda p, r, factor=factor: chain_tau(p[factor][:, r].float(), p["begins"][r])
        )
        for step in range(steps):
            metrics[f"val/acceptance_{label}_pos_{step + 1}"] = mean(
                lambda p, r, step=step, name="matches" if label == "greedy" else "overlap": float(
                    p[name][step][r][p["begins"][r]].float().mean()
                )
            )
        if label == "greedy":
            first = torch.cat([part["ranks"][0, rows][part["begins"][rows]] for part, rows in parts])
            shares = torch.bincount(first, minlength=_RANKS)[:_RANKS] / len(first)
            acceptance = shares.tolist()
        if label == "greedy" and tree.max_depth <= steps:
            metrics["val/tau_greedy_tree"] = mean(lambda p, r: tree_tau(p["ranks"][:, r], p["begins"][r], tree))
    return Expectations(metrics, acceptance)


def along(student: Student, teacher: TeacherHead, batch: Batch, prediction: Prediction) -> dict[str, Tensor]:
    """``[B, S]`` values of one drafting step along the text, 0 where it has ended or never began."""
    ahead = prediction.ahead
    wanted = batch.roles[:, ahead:] == ANSWER
    wanted[:, : prediction.first] = False
    rows = wanted.flatten().nonzero()[:, 0]
    tokens = batch.tokens[:, ahead:].flatten()[rows]
    hidden = prediction.hidden[:, : wanted.shape[1]].flatten(0, 1)[rows]
    final = batch.final[:, ahead - 1 :].flatten(0, 1)[rows]
    values = [torch.empty(0, 4, device=batch.tokens.device)]
    for chunk in range(0, len(rows), _ROWS):
        part = slice(chunk, chunk + _ROWS)
        logits = torch.nn.functional.linear(hidden[part].to(prediction.head.dtype), prediction.head, prediction.bias)
        draft = student.widen(logits.float()).softmax(dim=-1)
        target = teacher(final[part]).float().softmax(dim=-1)
        own = draft.gather(1, tokens[part, None])
        passes = (own / target.gather(1, tokens[part, None])).clamp(max=1)
        rank = (draft > own).sum(dim=1, keepdim=True)
        overlap = torch.minimum(draft, target).sum(dim=1, keepdim=True)
        values.append(torch.cat([(rank == 0) & (own > 0), passes, rank, overlap], dim=1))
    filled = torch.zeros(wanted.numel(), 4, device=batch.tokens.device)
    filled[:, 2] = len(teacher.weight)  # no rank at all
    filled[rows] = torch.cat(values)
    matches, passes, ranks, overlap = filled.unflatten(0, wanted.shape).unbind(-1)
    return {"matches": matches, "passes": passes, "ranks": ranks.long(), "overlap": overlap}


def decoded(
    target: RaggedModel, student: Student, prompts: Sequence[list[int]], steps: int, new_tokens: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Decodes prompts greedily with chains of the drafter as it is: figures, and the texts for people to read."""
    decoder = SpeculativeDecoder(
        target,
        student.drafter(target),
        TreeTopology.chain(steps),
        Coupling.matching(),
    )
    inputs = left_padded(prompts)
    output: Any = decoder.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
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


__all__ = ["Expectations", "along", "decoded", "expectations"]
