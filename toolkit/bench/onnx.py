"""What a draft step costs in torch and in onnxruntime, and what quantised graphs lose in acceptance."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arbordraft.bench.decoding import Total, ours
from arbordraft.bench.measure import Tell, quiet
from arbordraft.coupling import Coupling
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.prompts import chat_batches, plain_request
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DraftStepRow:
    """What drafting a chain took, with one drafter.

    Args:
        drafter: its name.
        batch: prompts at a time.
        depth: drafted levels per step.
        milliseconds: of a step, all levels and samples: median of the batches and rounds.
        per_level: the same for one level.
        ratio: to the first drafter's step: median of the batches' and rounds' ratios.
        tau: emitted tokens per target forward of a sample, greedily.
        acceptance: by depth, how often the draft was accepted when there was one to accept.
    """

    drafter: str
    batch: int
    depth: int
    milliseconds: float
    per_level: float
    ratio: float
    tau: float
    acceptance: list[float]


def draft_steps(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafters: Mapping[str, tuple[RaggedModel, Drafter]],
    *,
    batch: int,
    depth: int = 4,
    new_tokens: int = 64,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DraftStepRow]:
    """Decodes all prompts greedily with every drafter, batch after batch in turns, and looks at the drafting alone.

    Args:
        tokenizer: the target's.
        prompts: first user turns.
        drafters: by name, each with the target that it was built for; the first one is the reference.
        batch: prompts at a time.
        depth: levels of the chains.
        new_tokens: longest answer.
        repeats: rounds, after one that warms up on the first batch.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    coupling, chain = Coupling.matching(), TreeTopology.chain(depth)
    decoders = {
        name: ours(SpeculativeDecoder(target, drafter, chain, coupling)) for name, (target, drafter) in drafters.items()
    }
    batches = chat_batches(tokenizer, prompts, batch)
    request = plain_request(0.0, new_tokens)
    for decode in decoders.values():
        decode(batches[0], request | {"max_new_tokens": min(new_tokens, 8)}, seed)
    times: dict[str, list[float]] = {name: [] for name in decoders}
    totals = {name: Total() for name in decoders}
    done, rounds = 0, repeats * len(batches) * len(decoders)
    for _ in range(repeats):
        for inputs in batches:
            for name, decode in decoders.items():
                tell(f"batch {batch}, {name}", done, rounds)
                done += 1
                stats: Any = decode(inputs, request, seed)
                totals[name].add(stats)
                times[name].append(1e3 * stats.seconds["draft"] / max(stats.forwards))
    reference = next(iter(times.values()))
    for name, found in times.items():
        total, step = totals[name], statistics.median(found)
        yield DraftStepRow(
            drafter=name,
            batch=batch,
            depth=depth,
            milliseconds=step,
            per_level=step / depth,
            ratio=statistics.median(mine / base for mine, base in zip(found, reference, strict=True)),
            tau=total.emitted / total.forwards,
            acceptance=[total.accepted[level] / total.tried[level] for level in sorted(total.tried)],
        )
