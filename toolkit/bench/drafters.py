"""What a drafter gains over plain decoding: lookups, chains, trees, and lookups with trees behind them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from arbordraft import builders
from arbordraft.bench.decoding import Decode, DecodeRow, in_turns, ours
from arbordraft.bench.measure import Tell, quiet
from arbordraft.coupling import Coupling
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.laws import IID
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.verifiers import RecursiveRejection, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def drafter_gain(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafters: Mapping[str, Drafter],
    *,
    new_tokens: int = 128,
    batch: int = 8,
    temperatures: Sequence[float] = (0.0, 1.0),
    repeats: int = 1,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Decodes all prompts with every decoder; the reference is plain decoding of the same target.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns.
        drafters: by name.
        new_tokens: longest answer.
        batch: prompts at a time.
        temperatures: at which to decode, 0 for greedy.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    for temperature in temperatures:
        found: dict[str, Decode] = {"plain": ours(builders.plain(target))}
        for name, decoder in decoders(target, drafters, sampled=temperature > 0):
            found[name] = ours(decoder)
        yield from in_turns(
            target.model,
            tokenizer,
            prompts,
            found,
            batch=batch,
            temperature=temperature,
            new_tokens=new_tokens,
            repeats=repeats,
            seed=seed,
            tell=tell,
        )


def decoders(
    target: RaggedModel, drafters: Mapping[str, Drafter], *, sampled: bool
) -> Iterator[tuple[str, SpeculativeDecoder]]:
    """The decoders that are compared: lookup alone, and chains, trees and lookup-else-tree of every drafter."""
    chain = TreeTopology.chain(4)
    matching = Coupling.matching()
    yield "lookup alone", SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(8), matching)
    single = Coupling(IID(1), TopDown(RecursiveRejection())) if sampled else matching
    for name, drafter in drafters.items():
        yield f"{name}, chain of 4", SpeculativeDecoder(target, drafter, chain, single)
        yield f"{name}, tree of 16", builders.fitted(target, drafter, sampled=sampled)
        if not sampled:
            yield f"lookup, else {name}, tree of 16", builders.fitted(target, drafter, lookup=True)
