"""arbordraft's decoders against what transformers itself offers for the same models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from arbordraft import builders
from arbordraft.bench.decoding import Decode, DecodeRow, in_turns, ours, theirs
from arbordraft.bench.measure import Tell, quiet
from arbordraft.drafters import Drafter, LanguageModelDrafter
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def against_transformers(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    drafters: Mapping[str, Drafter],
    *,
    batch: int = 1,
    temperature: float = 0.0,
    new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """``generate``, its prompt lookup and its assisted generation, against our decoders on the same prompts.

    Its assisted modes know no batches, so they take the prompts of one one after the other.

    Args:
        target: the target; transformers runs its model as it is.
        tokenizer: its tokenizer.
        prompts: first user turns.
        drafters: by name; a draft model also assists transformers.
        batch: prompts at a time.
        temperature: 0 for greedy.
        new_tokens: longest answer.
        repeats: rounds.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    model = target.model
    decoders: dict[str, Decode] = {
        "transformers generate": theirs(model),
        "transformers prompt lookup": theirs(model, prompt_lookup_num_tokens=10),
    }
    for name, drafter in drafters.items():
        if isinstance(drafter, LanguageModelDrafter):
            decoders[f"transformers assisted by {name}"] = theirs(model, assistant_model=drafter.model.model)
    decoders["arbordraft plain"] = ours(builders.plain(target))
    decoders["arbordraft lookup"] = ours(builders.lookup(target))
    for name, drafter in drafters.items():
        decoders[f"arbordraft, {name}"] = ours(builders.fitted(target, drafter, sampled=temperature > 0))
        if temperature == 0:
            decoders[f"arbordraft, lookup, else {name}"] = ours(builders.fitted(target, drafter, lookup=True))
    yield from in_turns(
        model,
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
