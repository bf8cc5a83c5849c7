"""Compares tokens of batched speculative decoding with plain decoding of single prompts, for the same seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from arbordraft import builders
from arbordraft.bench.decoding import answers
from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, EarlyExitDrafter, HybridDrafter, NGramDrafter
from arbordraft.target.equality import Equality
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling


def equal_tokens(
    target: RaggedModel,
    drafters: Mapping[str, Drafter],
    workloads: Sequence[Workload],
    on_progress: ProgressCallback = quiet,
) -> Iterator[Measurement]:
    """Measures how many tokens and answers equal plain decoding of single prompts with the same seeds.

    Args:
        target: the model.
        drafters: drafters by name, measured besides lookups and the model's own first layers.
        workloads: the same prompts and settings in batches of several sizes.
        on_progress: receives the current case.

    Yields:
        A row for each decoder and batch size, plain decoding in batches included. The bound requires all tokens to be
        equal. Decoders that promise only the law, or less, have no bound.
    """
    reference = _tokens(target, builders.plain(target), replace(workloads[0], batch=1), on_progress, "plain decoding")
    lookup = NGramDrafter(longest=8, shortest=1)
    early = EarlyExitDrafter(target, max(1, target.num_layers // 4))
    hybrid = HybridDrafter(NGramDrafter(longest=8, shortest=3), early)
    shapes = {
        "n-gram chain": (lookup, (1,) * 6),
        "n-gram tree": (lookup, (3, 2, 1)),
        "n-gram hybrid": (hybrid, (2, 1)),
    } | {f"{name}, chain of 4": (drafter, (1,) * 4) for name, drafter in drafters.items()}
    decoders = {
        name: SpeculativeDecoder(target, drafter, TreeTopology.from_k_config(shape), Coupling.shared(max(shape)))
        for name, (drafter, shape) in shapes.items()
    }
    decoders = {"plain": builders.plain(target)} | decoders
    for name, drafter in drafters.items():
        decoders[f"{name}, tree of 16"] = builders.cost_aware(target, drafter)
        decoders[f"lookup, else {name}, tree of 16"] = builders.cost_aware(target, drafter, lookup=True)
    for name, decoder in decoders.items():
        promised = decoder.equality_report().equality
        bound = "" if promised in (Equality.law, Equality.lossy) else ">= 1.0"
        for workload in workloads:
            found = _tokens(target, decoder, workload, on_progress, f"{name}, batch {workload.batch}")
            pairs = list(zip(found, reference, strict=True))
            total = sum(len(wanted) for _, wanted in pairs)
            equal = sum(_num_equal(tokens, wanted) for tokens, wanted in pairs)
            same = sum(tokens == wanted for tokens, wanted in pairs)
            yield Measurement(
                "cpu equality",
                f"{precision(target.model)}, {_settings(workload)}, {name}, batch {workload.batch}: "
                "share of plain tokens",
                equal,
                total,
                equal / total,
                bound,
                f"{same} of {len(pairs)} answers equal; {promised}",
            )


def _settings(workload: Workload) -> str:
    if workload.kind:
        return workload.kind
    parts = {"temperature": workload.temperature, "top-p": workload.top_p, "penalty": workload.repetition_penalty}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if name == "temperature" or value != 1)


def _tokens(
    target: RaggedModel, decoder: SpeculativeDecoder, workload: Workload, on_progress: ProgressCallback, what: str
) -> list[list[int]]:
    tokens: list[list[int]] = []
    batches = workload.batches(target)
    for done, inputs in enumerate(batches):
        on_progress(what, done, len(batches))
        seeds = workload.seeds(len(inputs["input_ids"]), len(tokens))
        output = decoder.generate(**inputs, **workload.request(), seeds=seeds, return_dict_in_generate=True)
        tokens += answers(output, inputs)
    return tokens


def _num_equal(tokens: list[int], wanted: list[int]) -> int:
    """Counts the tokens up to the first difference."""
    shorter = min(len(tokens), len(wanted))
    return next((i for i in range(shorter) if tokens[i] != wanted[i]), shorter)
