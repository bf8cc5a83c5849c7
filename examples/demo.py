"""The main job: a real model answers prompts faster, and every token is checked.

First, the demo draws a few steps of one answer as trees and marks accepted nodes. Then transformers and several
decoders answer one prompt at a time, where drafts pay: one answer repeats its prompt, the other does not. Then they
answer eight prompts at once, where kernels and unpadded batches carry the speed. Every speculative answer is compared
with plain decoding, and a short run in float32 with transformers' ``generate``.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import arbordraft as ad
from arbordraft.bench.decoding import answers
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.cli.display import step_tree
from arbordraft.decoding.prompts import MIXED, REPEATING, VARIED, chat_batch

Inputs = dict[str, Tensor]
Decode = Callable[[Inputs, int], tuple[list[list[int]], float | None]]  # new tokens by prompt; tau, if any was drafted
TRAINED = Path(__file__).parent / "checkpoints" / "smollm2-135m-instruct-eagle"
TEXTS = {"copying": REPEATING[0], "writing": VARIED[0]}  # an answer that repeats its prompt, and new text
DRAFTERS = {
    "arbordraft, plain": "none",
    "arbordraft, lookups": "ngram",
    "arbordraft, trained head": str(TRAINED),
    "arbordraft, itself in 4 bits": "self",
    "arbordraft, load()'s choice": "auto",
}
PLAIN, CHOSEN = "arbordraft, plain", "arbordraft, load()'s choice"
GENERATE, LOOKUP = "transformers, generate", "transformers, lookups"
SHOWN, WARM, ROUNDS = 3, 4, 2  # steps to draw; tokens to decode before the clock starts; rounds of ours
SLOW = 24  # tokens of transformers, enough to measure a speed


@dataclass
class Run:
    """Run of one decoder: new tokens by prompt, tau if anything was drafted, and the speed."""

    answers: list[list[int]]
    tau: float | None
    tokens_per_second: float


def ours(decoder: ad.SpeculativeDecoder, inputs: Inputs, new_tokens: int) -> tuple[list[list[int]], float | None]:
    """Returns answers and tau of one of our decoders for a ragged batch."""
    output: Any = decoder.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    return answers(output, inputs), output.stats.tau if output.stats.drafted else None


def theirs(model: PreTrainedModel, inputs: Inputs, new_tokens: int, **options: Any) -> tuple[list[list[int]], None]:
    """Returns transformers' answers to a padded batch, cut at their end."""
    ids: Any = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **options)
    end, texts = model.generation_config.eos_token_id, ids[:, inputs["input_ids"].shape[1] :].tolist()
    return [text[: text.index(end) + 1] if end in text else text for text in texts], None


def timed(decoders: Mapping[str, Decode], inputs: Inputs, new_tokens: int, rounds: int = 1) -> dict[str, Run]:
    """Decodes in turns, after a short call of each decoder, and keeps the fastest round.

    The first long call may measure the cost of drafts on this machine, which takes seconds.
    """
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    results = {name: decode(inputs, WARM) for name, decode in decoders.items()}
    for _ in range(rounds):
        for name, decode in decoders.items():
            start = time.perf_counter()
            results[name] = decode(inputs, new_tokens)
            speeds[name].append(sum(map(len, results[name][0])) / (time.perf_counter() - start))
    return {name: Run(*results[name], max(speeds[name])) for name in decoders}


def draw_steps(console: Console, decoder: ad.SpeculativeDecoder, question: str) -> None:
    """Draws the first steps of an answer."""
    tokenizer: Any = decoder.target.tokenizer
    drawn = 0

    def show(state: Any, tree: Any, verdict: Any) -> None:
        nonlocal drawn
        if drawn < SHOWN:
            drawn += 1
            console.print(f"\n[bold]step {drawn}[/bold]")
            console.print(step_tree(tree[0], verdict[0], lambda token: tokenizer.decode([token])))

    decoder.on_step = show
    console.rule(f"one forward, several tokens: {question}")
    decoder.generate(**chat_batch(tokenizer, [question]), max_new_tokens=3 * SHOWN, do_sample=False)


def table_of(runs: Mapping[str, Mapping[str, Run]]) -> Table:
    """Builds a table of speeds on several texts; the factor is over ``generate``, the fastest is bold."""
    columns = [Column(heading, justify="right") for text in runs for heading in (text, "x", "tau")]
    table = Table(Column("tokens/s", no_wrap=True), *columns)
    best = {text: max(run.tokens_per_second for run in found.values()) for text, found in runs.items()}
    for name in next(iter(runs.values())):
        cells = []
        for text, found in runs.items():
            run = found[name]
            speed = f"{run.tokens_per_second:.0f}"
            cells.append(f"[bold]{speed}[/bold]" if run.tokens_per_second == best[text] else speed)
            cells.append(f"{run.tokens_per_second / found[GENERATE].tokens_per_second:.1f}")
            cells.append("" if run.tau is None else f"{run.tau:.1f}")
        table.add_row(name, *cells)
    return table


def changed(runs: Mapping[str, Mapping[str, Run]]) -> list[str]:
    """Names the decoders whose answers are not those of plain decoding."""
    return [
        f"{name} on {text}"
        for text, found in runs.items()
        for name, run in found.items()
        if name in DRAFTERS and run.answers != found[PLAIN].answers
    ]


def main() -> int:
    """Runs the comparison; the exit status is 1 if a token differs where equality is promised."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--prompts", type=int, default=len(MIXED), help="number of prompts in the batch")
    arguments = options.parse_args()
    new_tokens, batch = arguments.max_new_tokens, list(MIXED[: arguments.prompts])

    console = Console(highlight=False)
    disable_progress_bar()
    with console.status("loading the model and its kernels"):
        target = ad.load("smollm2", "none").target
        tokenizer: Any = target.tokenizer
        head = ad.builders.eagle2(target, ad.EagleDrafter.from_pretrained(TRAINED, target), nodes=8)
    draw_steps(console, head, "What is the capital of France?")

    console.rule("one prompt at a time")
    with console.status("loading drafters"):
        decoders: dict[str, Decode] = {name: partial(ours, ad.load(target, each)) for name, each in DRAFTERS.items()}
    # In the same precision: where load() takes float32, bfloat16 is emulated and would slow generate, too.
    references: dict[str, Decode] = {
        GENERATE: partial(theirs, target.model),
        LOOKUP: partial(theirs, target.model, prompt_lookup_num_tokens=10),
    }
    single = {}
    for text, prompt in TEXTS.items():
        inputs = chat_batch(tokenizer, [prompt])
        with console.status(f"{text}, in {len(references) + len(decoders)} ways"):
            single[text] = timed(references, inputs, min(SLOW, new_tokens)) | timed(
                decoders, inputs, new_tokens, ROUNDS
            )
    console.print(table_of(single))
    console.print(
        "Copying repeats the prompt, writing does not. "
        f"All in {str(target.model.dtype).removeprefix('torch.')}; our kernels: {target.chosen}. A forward reads all "
        "weights, so several rows take little longer than one, and drafts pay."
    )

    console.rule(f"{len(batch)} prompts at once")
    inputs = chat_batch(tokenizer, batch)
    with console.status("decoding a batch, in 3 ways"):
        two = {name: decoders[name] for name in (PLAIN, CHOSEN)}
        together = timed({GENERATE: references[GENERATE]}, inputs, min(SLOW, new_tokens))
        together |= timed(two, inputs, new_tokens, ROUNDS)
    console.print(table_of({"all at once": together}))
    console.print(
        "Samples of a batch share the reading, so a processor has less room for drafted rows: the policy drafts few. "
        "Kernels and batches without padding carry the speed."
    )

    console.rule("every token checked")
    wrong = changed(single | {"all at once": together})
    if not target.row_invariant:
        console.print("These kernels round by the shape of a batch, so equal tokens are not promised.")
        wrong = []
    elif not wrong:
        console.print("All speculative answers are token for token those of plain decoding.")
    with console.status("checking a short run in float32"):
        float32, _ = load_smollm2(torch.float32)
        exact = ad.load(ad.RaggedModel(float32, tokenizer, kernels="torch"), TRAINED)
        short, tokens = chat_batch(tokenizer, batch[:2]), min(SLOW, new_tokens)
        if ours(exact, short, tokens)[0] == theirs(float32, short, tokens)[0]:
            console.print("float32: a short run gave token for token what transformers' generate gives.")
        else:
            wrong.append("float32 against generate")
    if wrong:
        console.print(f"[red]the output changed: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
