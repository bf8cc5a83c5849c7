"""Padded against unpadded batches: the comparison of EMS-SD, and what dynamic trees add to it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from arbordraft import builders
from arbordraft.bench.decoding import Decode, DecodeRow, in_turns, ours
from arbordraft.bench.measure import Tell, quiet
from arbordraft.bench.padded import PaddedDecoder
from arbordraft.coupling import Coupling
from arbordraft.deciders import ConfidenceThreshold
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.laws import IID, Fixed, TopTail
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.verifiers import Lifted, Matching, RecursiveRejection, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCHES = (1, 2, 4, 8, 12, 16, 24)


def padding(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafter: Drafter | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    length: int = 7,
    new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Greedy decoding with the same chains in a padded batch, half padded ones and an unpadded one.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns; every batch size gets the same ones, repeated if they are fewer.
        drafter: by default lookups, as in the paper's LLMA runs.
        batches: batch sizes.
        length: drafted tokens per step.
        new_tokens: longest answer.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    drafter = drafter or NGramDrafter()
    parts = (target, drafter, TreeTopology.chain(length), Coupling.matching())
    decoders: dict[str, Decode] = {
        "plain": ours(builders.plain(target)),
        "vanilla": ours(PaddedDecoder(*parts)),
        "unpadded cache only": ours(PaddedDecoder(*parts, pad_cache=False)),
        "unpadded input only": ours(PaddedDecoder(*parts, pad_input=False)),
        "ems_sd": ours(SpeculativeDecoder(*parts)),
    }
    for batch in batches:
        texts = [prompts[index % len(prompts)] for index in range(max(batch, len(prompts)) // batch * batch)]
        yield from in_turns(
            target.model,
            tokenizer,
            texts,
            decoders,
            batch=batch,
            new_tokens=new_tokens,
            repeats=repeats,
            seed=seed,
            tell=tell,
        )


def shapes(target: RaggedModel, drafter: Drafter, nodes: int, *, sampled: bool) -> dict[str, SpeculativeDecoder]:
    """Chain, static tree and depth by sample with as many nodes at most, root included; and the paper's lossy fork."""
    widest = 2
    binary = TreeTopology.sequoia(drafter.acceptance[:widest], nodes, 6)
    chain = Coupling(IID(1) if sampled else Fixed(1), TopDown(RecursiveRejection() if sampled else Matching()))
    tree = Coupling(TopTail(1, 1), Lifted(RecursiveRejection())) if sampled else Coupling.matching(2)
    found = {
        "chain": SpeculativeDecoder(target, drafter, TreeTopology.chain(min(6, nodes - 1)), chain),
        "static tree": SpeculativeDecoder(target, drafter, binary, tree),
        "static tree, depth by sample": SpeculativeDecoder(target, drafter, binary, tree, ConfidenceThreshold(0.4)),
    }
    if drafter.takes_candidates:
        width = max(2, (nodes - 1) // 5)
        found["dynasd fork, lossy"] = builders.dynasd(target, drafter, width, 4)
    return found


def product(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafter: Drafter,
    *,
    batches: Sequence[int] = (1, 4, 8, 16),
    temperatures: Sequence[float] = (0.0, 1.0),
    nodes: int = 16,
    new_tokens: int = 64,
    repeats: int = 1,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Ragged batches of chains and trees, static and dynamic, lossless and not, at the same number of nodes.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns.
        drafter: drafts for all.
        batches: batch sizes.
        temperatures: 0 for greedy.
        nodes: most nodes of a tree, root included.
        new_tokens: longest answer.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    for temperature in temperatures:
        decoders: dict[str, Decode] = {"plain": ours(builders.plain(target))}
        for name, decoder in shapes(target, drafter, nodes, sampled=temperature > 0).items():
            decoders[name] = ours(decoder)
        for batch in batches:
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
