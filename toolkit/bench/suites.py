"""What is compared: decoders by name, for :func:`~arbordraft.bench.decoding.in_turns`; the first is the reference."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, islice

from arbordraft import builders
from arbordraft.bench.decoding import Decode, theirs
from arbordraft.bench.padded import PaddedDecoder
from arbordraft.bench.tuning import Tuned, grid
from arbordraft.bench.workload import Workload
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
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
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, LanguageModelDrafter, NGramDrafter
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling


def drafter_gain(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload
) -> dict[str, SpeculativeDecoder]:
    """Plain decoding, lookup alone, and chains, trees and lookup-else-tree of every drafter."""
    decoders: dict[str, SpeculativeDecoder] = {
        "plain": builders.plain(target),
        "lookup alone": builders.ems_sd(target, NGramDrafter(), 8),
    }
    for name, drafter in drafters.items():
        decoders[f"{name}, chain of 4"] = builders.ems_sd(target, drafter, 4)
        decoders[f"{name}, tree of 16"] = builders.fitted(target, drafter)
        decoders[f"lookup, else {name}, tree of 16"] = builders.fitted(target, drafter, lookup=True)
    return decoders


def policy(target: RaggedModel, drafters: Mapping[str, Drafter]) -> dict[str, SpeculativeDecoder]:
    """Plain decoding, and what drafts only as far as it pays: nothing should be slower than plain decoding."""
    decoders = {"plain": builders.plain(target), "lookup": builders.lookup(target)}
    for name, drafter in drafters.items():
        decoders[name] = builders.fitted(target, drafter)
        decoders[f"lookup, else {name}"] = builders.fitted(target, drafter, lookup=True)
    return decoders


def padding(target: RaggedModel, drafter: Drafter, length: int = 7) -> dict[str, SpeculativeDecoder]:
    """EMS-SD's comparison: the same greedy chains in a padded batch, half padded ones and an unpadded one.

    In the paper's LLMA runs the drafter is a lookup.
    """
    parts = (target, drafter, TreeTopology.chain(length), Coupling.matching())
    return {
        "plain": builders.plain(target),
        "vanilla": PaddedDecoder(*parts),
        "unpadded cache only": PaddedDecoder(*parts, pad_cache=False),
        "unpadded input only": PaddedDecoder(*parts, pad_input=False),
        "ems_sd": SpeculativeDecoder(*parts),
    }


def whole_batches(workload: Workload) -> Workload:
    """The same prompts without a last batch of fewer, repeated if they do not fill one."""
    prompts, batch = workload.prompts, workload.batch
    count = max(batch, len(prompts)) // batch * batch
    return replace(workload, prompts=tuple(islice(cycle(prompts), count)))


def product(target: RaggedModel, drafter: Drafter, nodes: int = 16) -> dict[str, SpeculativeDecoder]:
    """Chains and trees, static and of a depth by sample, lossless and not, all of at most ``nodes`` with the root."""
    binary = TreeTopology.sequoia(drafter.acceptance[:2], nodes, 6)
    decoders: dict[str, SpeculativeDecoder] = {
        "plain": builders.plain(target),
        "chain": builders.ems_sd(target, drafter, min(6, nodes - 1)),
        "static tree": SpeculativeDecoder(target, drafter, binary),
        "static tree, depth by sample": SpeculativeDecoder(target, drafter, binary, decider=ConfidenceThreshold(0.4)),
    }
    if drafter.takes_candidates:
        decoders["dynasd fork, lossy"] = builders.dynasd(target, drafter, max(2, (nodes - 1) // 5), 4)
    return decoders


def deciders(depth: int, costs: StepCosts | None = None, learned: LearnedDecider | None = None) -> dict[str, Decider]:
    """Every kind of decider with the settings of its source, for chains of ``depth``.

    Step costs let cost-aware ones take part, a trained one joins as it is.
    """
    known: dict[str, Decider] = {f"fixed {levels}": FixedDepth(levels) for levels in range(1, depth + 1)}
    known |= {
        "heuristic": Heuristic(min(5, depth), depth),
        "accepted average": AcceptedAverage(),
        "confidence 0.4": ConfidenceThreshold(0.4),
        "SVIP": EntropyBound(0.7, 0.15),
        "AdaEDL": AdaEDL(),
        "path survival 0.3": PathSurvival(0.3),
        "bandit of 1, 2 and 4 levels": Bandit([FixedDepth(levels) for levels in (1, 2, 4)], longest=depth),
    }
    if learned is not None:
        known["learned"] = learned
    if costs is not None:
        known["cost-aware"] = CostAware(costs)
        if learned is not None:
            known["cost-aware, learned"] = CostAware(costs, survival=learned)
    return known


def stops(
    target: RaggedModel, drafter: Drafter, deciders: Mapping[str, Decider], workload: Workload, depth: int = 6
) -> dict[str, SpeculativeDecoder]:
    """Plain decoding, and chains of up to ``depth`` drafts that deciders shorten.

    Deciders are scored by tokens per second: acceptance alone any early stop can raise.
    """
    chain = builders.ems_sd(target, drafter, depth)
    return {"plain": builders.plain(target)} | {
        name: SpeculativeDecoder(
            target, drafter, chain.topology, chain.coupling, decider, expected_batch=workload.batch
        )
        for name, decider in deciders.items()
    }


def against_transformers(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload
) -> dict[str, SpeculativeDecoder | Decode]:
    """``generate``, its prompt lookup and its assisted generation, and our decoders.

    transformers runs the target's model as it is, and its assisted modes one prompt at a time; a draft model assists.
    """
    model = target.model
    decoders: dict[str, SpeculativeDecoder | Decode] = {
        "transformers generate": theirs(model),
        "transformers prompt lookup": theirs(model, prompt_lookup_num_tokens=10),
    }
    for name, drafter in drafters.items():
        if isinstance(drafter, LanguageModelDrafter) and isinstance(drafter.model, RaggedModel):
            decoders[f"transformers assisted by {name}"] = theirs(model, assistant_model=drafter.model.model)
    ours = policy(target, drafters)
    return decoders | {f"arbordraft, {name}": decoder for name, decoder in ours.items()}


def against_grid(target: RaggedModel, drafter: Drafter, tuned: Tuned, batch: int) -> dict[str, SpeculativeDecoder]:
    """What tuning chose for a drafter and a batch size, and every other setting of its grid.

    No speed-up should be above 1, on prompts that tuning did not see.
    """
    chosen = tuned.choice(batch).setting
    decoders = {f"chosen: {chosen}": tuned.decoder(target, batch, drafter)}
    for setting in grid(drafter):
        if setting != chosen:
            decoders[str(setting)] = setting.decoder(target, drafter, tuned.costs, batch)
    return decoders
