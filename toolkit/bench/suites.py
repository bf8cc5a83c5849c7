"""Decoders to compare, by name, for :func:`~arbordraft.bench.decoding.in_turns`; the first is the reference."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, islice

from arbordraft import builders
from arbordraft.bench.decoding import Decode, theirs
from arbordraft.bench.workload import Workload
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, LanguageModelDrafter, NGramDrafter
from arbordraft.target.model import RaggedModel


def drafter_gain(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload
) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding, lookup alone, and chains, trees and lookup-else-tree of every drafter."""
    decoders: dict[str, SpeculativeDecoder] = {
        "plain": builders.plain(target),
        "lookup alone": builders.ems_sd(target, NGramDrafter(), 8),
    }
    for name, drafter in drafters.items():
        decoders[f"{name}, chain of 4"] = builders.ems_sd(target, drafter, 4)
        decoders[f"{name}, tree of 16"] = builders.cost_aware(target, drafter)
        decoders[f"lookup, else {name}, tree of 16"] = builders.cost_aware(target, drafter, lookup=True)
    return decoders


def policy(target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding and decoders that draft only as far as it pays; none should be slower than plain."""
    decoders = {"plain": builders.plain(target), "lookup": builders.lookup(target)}
    for name, drafter in drafters.items():
        decoders[name] = builders.cost_aware(target, drafter)
        decoders[f"lookup, else {name}"] = builders.cost_aware(target, drafter, lookup=True)
    return decoders


def whole_batches(workload: Workload) -> Workload:
    """Returns a workload of full batches: leaves out an incomplete last batch, or repeats prompts to fill one."""
    prompts, batch = workload.prompts, workload.batch
    count = max(batch, len(prompts)) // batch * batch
    return replace(workload, prompts=tuple(islice(cycle(prompts), count)))


def against_transformers(
    target: RaggedModel, drafters: Mapping[str, Drafter], workload: Workload
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
    ours = policy(target, drafters, workload)
    return decoders | {f"arbordraft, {name}": decoder for name, decoder in ours.items()}
