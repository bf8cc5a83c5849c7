"""Decoders to compare, by name, for :func:`~arbordraft.bench.decoding.in_turns`; the first is the reference."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from arbordraft import builders
from arbordraft.bench.decoding import Decode, theirs
from arbordraft.bench.workload import Workload
from arbordraft.deciders import Decider
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter, LanguageModelDrafter, NGramDrafter
from arbordraft.loading import load
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling

_LONGEST_CHAIN = 6  # of those that a trained decider ends


def drafters_of(names: Sequence[str], target: RaggedModel) -> dict[str, Drafter]:
    """Builds drafters; the keys are their names in tables."""
    return {Path(name).name if Path(name).is_dir() else name: drafter_named(name, target) for name in names}


def drafter_gain(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload, decider: Decider | None = None
) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding, lookup alone, and chains, trees and lookup-else-tree of every drafter.

    A trained decider, if given, adds chains of every drafter that it ends early.
    """
    decoders: dict[str, SpeculativeDecoder] = {
        "plain": builders.plain(target),
        "lookup alone": builders.ems_sd(target, NGramDrafter(), 8),
    }
    for name, drafter in drafters.items():
        decoders[f"{name}, chain of 4"] = builders.ems_sd(target, drafter, 4)
        decoders[f"{name}, tree of 16"] = builders.cost_aware(target, drafter)
        decoders[f"lookup, else {name}, tree of 16"] = builders.cost_aware(target, drafter, lookup=True)
    return decoders | _ended_early(target, drafters, decider)


def _ended_early(
    target: RaggedModel, drafters: Mapping[str, Drafter], decider: Decider | None
) -> dict[str, SpeculativeDecoder]:
    if decider is None:
        return {}
    return {
        f"{name}, chain of up to {_LONGEST_CHAIN}": SpeculativeDecoder(
            target, drafter, TreeTopology.chain(_LONGEST_CHAIN), Coupling.shared(), decider
        )
        for name, drafter in drafters.items()
    }


def policy(target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding and decoders that draft only as far as it pays; none should be slower than plain."""
    decoders = {"plain": builders.plain(target), "lookup": builders.lookup(target)}
    for name, drafter in drafters.items():
        decoders[name] = builders.cost_aware(target, drafter)
        decoders[f"lookup, else {name}"] = builders.cost_aware(target, drafter, lookup=True)
    return decoders


def loaded(target: RaggedModel, drafter: str | Drafter) -> SpeculativeDecoder:
    """Builds the decoder of :func:`~arbordraft.load` with measured costs of steps, as servers do at their start."""
    decoder = load(target, drafter)
    decoder.decider.expect(sys.maxsize)  # the number of tokens from which measuring pays
    return decoder


def filled(workloads: Sequence[Workload]) -> list[Workload]:
    """Returns workloads whose batches are no larger than the number of their prompts, each once."""
    return list(dict.fromkeys(replace(one, batch=min(one.batch, len(one.prompts))) for one in workloads))


def whole_batches(workload: Workload, most: int | None = None) -> Workload:
    """Returns a workload of full batches: leaves out an incomplete last batch, or repeats prompts to fill one.

    Args:
        workload: the prompts and their batch size.
        most: prompts to use, from all over the list, of which the second is the first; more if one batch has more. By
            default all.
    """
    prompts, batch = workload.prompts, workload.batch
    count = max(batch, min(len(prompts), most or len(prompts))) // batch * batch
    if count < len(prompts) and most is not None:
        step = len(prompts) / count
        chosen = [prompts[int(1 + number * step) % len(prompts)] for number in range(count)]
    else:
        chosen = list(islice(cycle(prompts), count))
    return replace(workload, prompts=tuple(chosen))


def against_transformers(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload, decider: Decider | None = None
) -> dict[str, SpeculativeDecoder | Decode]:
    """Builds transformers' ``generate``, its prompt lookup and assisted generation, and our decoders.

    transformers runs the target's unchanged model, and its assisted modes run one prompt at a time. The assistants are
    the draft models.
    """
    model = target.model
    decoders: dict[str, SpeculativeDecoder | Decode] = {
        "transformers generate": theirs(model),
        "transformers prompt lookup": theirs(model, prompt_lookup_num_tokens=10),
    }
    for name, drafter in drafters.items():
        if isinstance(drafter, LanguageModelDrafter) and isinstance(drafter.model, RaggedModel):
            decoders[f"transformers assisted by {name}"] = theirs(model, assistant_model=drafter.model.model)
    ours = policy(target, drafters, workload) | _ended_early(target, drafters, decider)
    return decoders | {f"arbordraft, {name}": decoder for name, decoder in ours.items()}
