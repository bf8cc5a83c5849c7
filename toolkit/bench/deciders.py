"""Deciders side by side on one drafter, scored by tokens per second: acceptance alone any early stop can raise."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from arbordraft import builders
from arbordraft.bench.decoding import Decode, DecodeRow, in_turns, ours
from arbordraft.bench.measure import Tell, quiet
from arbordraft.costs import StepCosts
from arbordraft.coupling import Coupling
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Backoff,
    Bandit,
    ConfidenceThreshold,
    CostAware,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    PathSurvival,
)
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.laws import IID
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.verifiers import RecursiveRejection, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def choices(depth: int, costs: StepCosts | None = None, learned: LearnedDecider | None = None) -> dict[str, Decider]:
    """Every kind of decider with the settings of its source.

    Args:
        depth: of the topology.
        costs: lets cost-aware ones take part.
        learned: lets a trained one take part.
    """
    found: dict[str, Decider] = {f"fixed {levels}": FixedDepth(levels) for levels in range(1, depth + 1)}
    found |= {
        "heuristic": Heuristic(min(5, depth), depth),
        "accepted average": AcceptedAverage(),
        "confidence 0.4": ConfidenceThreshold(0.4),
        "SVIP": EntropyBound(0.7, 0.15),
        "AdaEDL": AdaEDL(),
        "path survival 0.3": PathSurvival(0.3),
        "backoff": Backoff(),
        "bandit of 1, 2 and 4 levels": Bandit([FixedDepth(levels) for levels in (1, 2, 4)], longest=depth),
    }
    if learned is not None:
        found["learned"] = learned
    if costs is not None:
        found["cost-aware"] = CostAware(costs)
        if learned is not None:
            found["cost-aware, learned"] = CostAware(costs, learned)
    return found


def stops(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafter: Drafter,
    deciders: Mapping[str, Decider],
    *,
    depth: int = 6,
    batch: int = 1,
    temperature: float = 0.0,
    new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Decodes with chains of up to ``depth`` drafts that the deciders shorten; plain decoding is the reference.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns.
        drafter: drafts for all.
        deciders: by name.
        depth: longest chain.
        batch: prompts at a time.
        temperature: 0 for greedy.
        new_tokens: longest answer.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    rejection, matching = Coupling(IID(1), TopDown(RecursiveRejection())), Coupling.matching()
    coupling = rejection if temperature else matching
    decoders: dict[str, Decode] = {"plain": ours(builders.plain(target))}
    for name, decider in deciders.items():
        chain = TreeTopology.chain(depth)
        decoders[name] = ours(SpeculativeDecoder(target, drafter, chain, coupling, decider, expected_batch=batch))
    yield from in_turns(
        target.model,
        tokenizer,
        prompts,
        decoders,
        batch=batch,
        temperature=temperature,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=seed,
        tell=tell,
    )
