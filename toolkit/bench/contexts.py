"""Long prompts: questions after unrelated passages, in which nothing is written twice.

The passages are parts of one long text, so that lookups find no more in them than in any text of a person.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from arbordraft.decoding.text import encode, user_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reference_text() -> str:
    """Returns the reference of the language that every Python includes for ``help()``: about 700,000 characters.

    Raises:
        ImportError: if this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError("long prompts need pydoc_data of Python's standard library: install it in full") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def lengthened(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int, seed: int) -> list[str]:
    """Puts unrelated passages before prompts, so that each has about ``length`` tokens, and at most these.

    Prompts that are longer on their own give their places to the others.

    Args:
        tokenizer: counts tokens, with its chat template.
        prompts: first user turns.
        length: tokens of a prompt, chat template included; re-tokenised passages may lack a few.
        seed: seed of the passages, which differ between prompts.

    Returns:
        As many prompts as were given.

    Raises:
        ValueError: if no prompt is short enough, or the text is too short.
    """

    def tokens(prompt: str) -> int:
        return len(encode(tokenizer, user_turn(prompt, None), raw=False))

    drawn, text = random.Random(seed), tokenizer(reference_text(), add_special_tokens=False, verbose=False)["input_ids"]
    rooms = {prompt: room for prompt in prompts if (room := length - tokens(f"\n\n{prompt}")) > 0}
    if not rooms:
        raise ValueError(f"no prompt has fewer than {length} tokens: give a longer context, or shorter prompts")
    if len(text) <= max(rooms.values()):
        raise ValueError(f"the text of passages has {len(text)} tokens: give a context below that, got {length}")
    found = []
    for number in range(len(prompts)):
        prompt = list(rooms)[number % len(rooms)]
        room, start = rooms[prompt], drawn.randrange(len(text) - rooms[prompt])
        longer = f"{tokenizer.decode(text[start : start + room])}\n\n{prompt}"
        while (surplus := tokens(longer) - length) > 0:  # tokens at its edges may be split otherwise than in the text
            room -= surplus
            longer = f"{tokenizer.decode(text[start : start + room])}\n\n{prompt}"
        found.append(longer)
    return found


__all__ = ["lengthened", "reference_text"]
