"""Prompts of chosen lengths, made of text that every Python includes; a seed always gives the same prompts."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from transformers import PreTrainedTokenizerBase

from arbordraft.decoding.prompts import read_prompts

TASKS = (
    "Summarise this passage in a few sentences.",
    "List the most important points of this passage.",
    "Explain this passage to somebody who begins to program.",
    "Write three questions about this passage, and answer them.",
)
QUESTIONS = Path(__file__).resolve().parents[1] / "questions.jsonl"


def prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, seed: int, shortest: int = 50, longest: int = 1000
) -> Iterator[str]:
    """Yields tasks with passages of Python's reference; in every fourth prompt, a question unrelated to its passage.

    Args:
        tokenizer: counts tokens.
        count: number of prompts.
        seed: seed of all choices.
        shortest: fewest tokens, chat template included; lengths are spread evenly by their logarithm.
        longest: most tokens.
    """
    drawn = random.Random(seed)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    reference = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    questions = read_prompts(QUESTIONS)

    def tokens(prompt: str) -> int:
        messages = [{"role": "user", "content": prompt}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    for number in range(count):
        length = round(math.exp(drawn.uniform(math.log(shortest), math.log(longest))))
        task = drawn.choice(questions if number % 4 == 0 else TASKS)
        room = max(1, length - tokens(f"{task}\n\n"))
        start = drawn.randrange(len(reference) - room)
        yield f"{task}\n\n{tokenizer.decode(reference[start : start + room])}"
