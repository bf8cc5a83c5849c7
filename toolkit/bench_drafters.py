"""What a trained drafter gains: tokens per target forward and time, decoder by decoder, on the same prompts."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from arbordraft import builders
from arbordraft.bench import Measurement, precision
from arbordraft.coupling import Coupling
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.laws import IID, Fixed
from arbordraft.prompts import chat_batch
from arbordraft.target import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.verifiers import Matching, RecursiveRejection, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Request = dict[str, Any]


def drafter_gain(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafters: dict[str, Drafter],
    *,
    new_tokens: int = 128,
    batch: int = 8,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> Iterator[Measurement]:
    """Decodes all prompts with every decoder; the reference is plain decoding of the same target.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns.
        drafters: by name.
        new_tokens: longest answer.
        batch: samples at a time.
        temperatures: at which to decode, 0 for greedy.
    """
    batches = [chat_batch(tokenizer, prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
    for temperature in temperatures:
        law: Request = {"do_sample": temperature > 0, "max_new_tokens": new_tokens}
        if temperature:
            law |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        plain, plain_seconds, _ = _decode(builders.plain(target), batches, law)
        plain_rate = plain / plain_seconds
        for name, decoder in decoders(target, drafters, sampled=temperature > 0):
            tokens, seconds, detail = _decode(decoder, batches, law)
            case = f"{precision(target.model)}, T={temperature:g}, batch {batch}, {name}"
            per_token, reference = 1e3 * seconds / tokens, 1e3 / plain_rate
            yield Measurement("drafter", case, per_token, reference, reference / per_token, "", detail)


def decoders(
    target: RaggedModel, drafters: dict[str, Drafter], *, sampled: bool
) -> Iterator[tuple[str, SpeculativeDecoder]]:
    """The decoders that are compared: lookup alone, and chains, trees and lookup-else-tree of every drafter."""
    chain = TreeTopology.chain(4)
    matching = Coupling(Fixed(1), TopDown(Matching()))
    yield "lookup alone", SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(8), matching)
    single = Coupling(IID(1), TopDown(RecursiveRejection())) if sampled else matching
    for name, drafter in drafters.items():
        yield f"{name}, chain of 4", SpeculativeDecoder(target, drafter, chain, single)
        yield f"{name}, tree of 16", builders.fitted(target, drafter, sampled=sampled)
        if not sampled:
            yield f"lookup, else {name}, tree of 16", builders.fitted(target, drafter, lookup=True)


def _decode(decoder: SpeculativeDecoder, batches: Sequence[dict[str, Tensor]], law: Request) -> tuple[int, float, str]:
    """Tokens, seconds and what else is worth telling."""
    tokens = forwards = 0
    tried: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    spent: dict[str, float] = {}
    start = time.perf_counter()
    for number, inputs in enumerate(batches):
        seeds = [1000 * number + sample for sample in range(len(inputs["input_ids"]))]
        output: Any = decoder.generate(**inputs, **law, seeds=seeds, return_dict_in_generate=True)
        stats = output.stats
        tokens += sum(stats.emitted)
        forwards += sum(stats.forwards)
        for phase, seconds in stats.seconds.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
        tried += stats.tried
        accepted += stats.accepted
    seconds = time.perf_counter() - start
    rates = " ".join(f"{accepted[depth] / tried[depth]:.2f}" for depth in sorted(tried))
    phases = " ".join(f"{phase} {share / seconds:.0%}" for phase, share in spent.items())
    return tokens, seconds, f"tau {tokens / forwards:.3f}; accepted by depth {rates or '-'}; {phases}"
