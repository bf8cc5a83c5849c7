"""The main job: a real model answers a ragged batch of real prompts, faster and with unchanged output.

First a few steps of one answer as trees, what the target accepted marked. Then the same prompts in bfloat16 by several
decoders, each warm: transformers' generate, its prompt lookup (one prompt at a time, all it supports), and ours without
drafts, with lookups, with an EAGLE-3 head that arbordraft trained, and with lookups else the head. Where rows are
computed alike whatever runs beside them, every answer is compared with our plain decoding; a short run in float32 is
compared with generate.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from arbordraft import EagleDrafter, RaggedModel, SpeculativeDecoder, builders
from arbordraft.bench.decoding import answers
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.cli.display import step_tree
from arbordraft.decoding.prompts import MIXED, chat_batch

Inputs = dict[str, Tensor]
Decoded = tuple[list[list[int]], float | None]  # new tokens of every prompt, up to its end, and tau of ours
TRAINED = Path(__file__).parent / "checkpoints" / "smollm2-135m-instruct-eagle"
SHOWN, WARM, ROUNDS = 3, 4, 3  # steps to draw; tokens to decode before the clock starts; timings of ours
CHECKED, CHECKED_TOKENS = 2, 24  # prompts and tokens of the run in float32


@dataclass
class Run:
    """What one decoder made of the batch: new tokens per prompt, cut at their end."""

    name: str
    answers: list[list[int]]
    tau: float | None
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


def theirs(model: PreTrainedModel, inputs: Inputs, new_tokens: int, **options: Any) -> Decoded:
    """transformers' generate on the padded batch, or with options, such as those of prompt lookup, on every prompt."""
    end, texts = model.generation_config.eos_token_id, []
    rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    alone = [{"input_ids": ids[mask == 1][None], "attention_mask": mask[mask == 1][None]} for ids, mask in rows]
    for part in alone if options else [inputs]:
        ids = model.generate(**part, max_new_tokens=new_tokens, do_sample=False, **options)
        texts += ids[:, part["input_ids"].shape[1] :].tolist()
    return [text[: text.index(end) + 1] if end in text else text for text in texts], None


def ours(decoder: SpeculativeDecoder, inputs: Inputs, new_tokens: int) -> Decoded:
    """Answers of one of our decoders to the ragged batch."""
    output: Any = decoder.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    return answers(output, inputs), output.stats.tau


def timed(decoders: dict[str, Callable[[int], Decoded]], new_tokens: int, rounds: int = 1) -> list[Run]:
    """Decodes in short, and then on the clock, in turns: a slow spell of the machine hits all. Medians count."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    results = {name: decode(WARM) for name, decode in decoders.items()}
    for _ in range(rounds):
        for name, decode in decoders.items():
            start = time.perf_counter()
            results[name] = decode(new_tokens)
            seconds[name].append(time.perf_counter() - start)
    return [Run(name, *result, statistics.median(seconds[name])) for name, result in results.items()]


def draw_steps(console: Console, target: RaggedModel, tokenizer: Any, question: str) -> None:
    """Draws the first steps of an answer."""
    drawn = 0

    def show(state: Any, tree: Any, verdict: Any) -> None:
        nonlocal drawn
        if drawn < SHOWN:
            drawn += 1
            console.print(f"\n[bold]step {drawn}[/bold]")
            console.print(step_tree(tree[0], verdict[0], lambda token: tokenizer.decode([token])))

    decoder = builders.expanding(target, EagleDrafter.from_pretrained(TRAINED, target), nodes=8)
    decoder.on_step = show
    console.rule(f"one forward, several tokens: {question}")
    decoder.generate(**chat_batch(tokenizer, [question]), max_new_tokens=3 * SHOWN, do_sample=False)


def compare(model: PreTrainedModel, target: RaggedModel, inputs: Inputs, new_tokens: int) -> list[Run]:
    """All decoders in turn; our plain decoding comes third."""
    head = EagleDrafter.from_pretrained(TRAINED, target)
    decoders = {
        "arbordraft, plain": builders.plain(target),
        "arbordraft, lookups": builders.lookup(target),
        "arbordraft, trained head": builders.eagle(target, head),
        "arbordraft, lookups else head": builders.eagle(target, head, lookup=True),
    }
    references = {
        "transformers, generate": partial(theirs, model, inputs),
        "transformers, prompt lookup, batch 1": partial(theirs, model, inputs, prompt_lookup_num_tokens=4),
    }
    turns = {name: partial(ours, decoder, inputs) for name, decoder in decoders.items()}
    return timed(references, new_tokens) + timed(turns, new_tokens, ROUNDS)


def show_table(console: Console, runs: list[Run]) -> None:
    """The fastest decoder first, the others as they were run."""
    base, plain = runs[0], runs[2]
    best = max(runs, key=lambda run: run.speed)
    table = Table("decoder", "tokens/s", "× generate", "× our plain", "tau", "same as our plain")
    for run in [best, *(run for run in runs if run is not best)]:
        same = sum(answer == expected for answer, expected in zip(run.answers, plain.answers, strict=True))
        table.add_row(
            run.name,
            f"{run.speed:.1f}",
            f"{run.speed / base.speed:.2f}",
            f"{run.speed / plain.speed:.2f}",
            "-" if run.tau is None else f"{run.tau:.2f}",
            f"{same} of {len(run.answers)} answers",
            style="bold" if run is best else None,
        )
    console.print(table)


def same_in_float32(prompts: list[str], new_tokens: int) -> bool:
    """Whether the trained head, drafting trees, gives generate's own tokens in float32."""
    model, tokenizer = load_smollm2(torch.float32)
    inputs = chat_batch(tokenizer, prompts[:CHECKED])
    tokens = min(CHECKED_TOKENS, new_tokens)
    target = RaggedModel(model, tokenizer, kernels="torch")
    decoder = builders.expanding(target, EagleDrafter.from_pretrained(TRAINED, target), lookup=True)
    return ours(decoder, inputs, tokens)[0] == theirs(model, inputs, tokens)[0]


def main() -> int:
    """Runs the comparison; the exit status is 1 if a token differs where equality is promised."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--prompts", type=int, default=len(MIXED), help="use only this many prompts, from the first")
    arguments = options.parse_args()
    prompts, new_tokens = list(MIXED[: arguments.prompts]), arguments.max_new_tokens

    console = Console(highlight=False)
    disable_progress_bar()
    with console.status("loading the model and its kernels"):
        model, tokenizer = load_smollm2(torch.bfloat16)
        target = RaggedModel(model, tokenizer)
    draw_steps(console, target, tokenizer, "What is the capital of France?")

    console.rule(f"{len(prompts)} prompts of different lengths, up to {new_tokens} tokens each, bfloat16")
    console.print(f"kernels: {target.chosen}")
    with console.status("decoding them in six ways"):
        runs = compare(model, target, chat_batch(tokenizer, prompts), new_tokens)
    show_table(console, runs)

    changed = [run.name for run in runs[3:] if run.answers != runs[2].answers]
    if not target.row_invariant:
        console.print("bfloat16: these kernels round by the shape of a batch, so equal tokens are not promised")
        changed = []
    elif not changed:
        console.print("bfloat16: all speculative answers are token for token those of our plain decoding")
    with console.status("checking a short run in float32"):
        if same_in_float32(prompts, new_tokens):
            console.print("float32: a short run gave token for token what transformers' generate gives")
        else:
            changed.append("float32 against generate")
    if changed:
        console.print(f"[red]the output changed: {', '.join(changed)}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
