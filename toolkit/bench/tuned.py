"""Whether tuning chose well: what it chose against every setting of its grid, on prompts that it did not see."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from arbordraft.bench.decoding import Decode, DecodeRow, in_turns, ours
from arbordraft.bench.measure import Tell, quiet
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel
from arbordraft.tuning import Tuned, grid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def against_grid(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    tuned: Tuned,
    drafter: Drafter,
    *,
    batch: int = 1,
    new_tokens: int = 96,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Decodes with every setting in turns; the reference is the chosen one, so that no speed-up should be above 1.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompts: first user turns.
        tuned: what tuning found, for this drafter.
        drafter: the drafter.
        batch: prompts at a time.
        new_tokens: longest answer.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    sampled = tuned.temperature > 0
    chosen = tuned.choice(batch).setting
    found: dict[str, Decode] = {f"chosen: {chosen}": ours(tuned.decoder(target, batch, drafter))}
    for setting in grid(drafter, sampled=sampled):
        if setting != chosen:
            found[str(setting)] = ours(setting.decoder(target, drafter, tuned.costs, sampled=sampled, batch=batch))
    yield from in_turns(
        target.model,
        tokenizer,
        prompts,
        found,
        batch=batch,
        temperature=tuned.temperature,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=seed,
        tell=tell,
    )
