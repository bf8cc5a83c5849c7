"""The main job: a real model answers a ragged batch of real prompts, faster and with unchanged output.

Eight prompts of different lengths are decoded greedily in float32, streaming. Then four decoders answer the same
batch: transformers' generate, its prompt lookup (one prompt at a time, all it supports), arbordraft with an n-gram
tree, and arbordraft with an EAGLE-3 drafter that arbordraft trained. Every answer is checked token for token.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from arbordraft import RaggedModel, SpeculativeDecoder
from arbordraft.bench.model import ngram_tree
from arbordraft.builders import eagle
from arbordraft.cli.display import stream_panels
from arbordraft.pretrained import load_smollm2
from arbordraft.prompts import MIXED, chat_batch

Inputs = dict[str, Tensor]
TRAINED = Path(__file__).parent / "checkpoints" / "smollm2-135m-instruct-eagle"


@dataclass
class Run:
    """What one decoder made of the batch: new tokens per prompt, cut at their end."""

    name: str
    answers: list[list[int]]
    seconds: float
    tau: str
    pad_rows: str

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


def plain(model: PreTrainedModel, inputs: Inputs, new_tokens: int) -> Run:
    """transformers' generate on the padded batch; finished and padded rows are computed all the same."""
    start = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    answers = cut(model, inputs, ids)
    pads = int((inputs["attention_mask"] == 0).sum()) + sum(max(map(len, answers)) - len(a) for a in answers)
    return Run("transformers generate", answers, seconds, "1.00", str(pads))


def prompt_lookup(model: PreTrainedModel, inputs: Inputs, new_tokens: int) -> Run:
    """transformers' prompt lookup, which decodes one prompt at a time."""
    answers, start = [], time.perf_counter()
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        alone = {"input_ids": ids[mask == 1][None], "attention_mask": mask[mask == 1][None]}
        found = model.generate(**alone, max_new_tokens=new_tokens, do_sample=False, prompt_lookup_num_tokens=4)
        answers += cut(model, alone, found)
    seconds = time.perf_counter() - start
    return Run("transformers prompt lookup (batch 1)", answers, seconds, "not told", "0")


def speculative(name: str, decoder: SpeculativeDecoder, inputs: Inputs, new_tokens: int) -> Run:
    """One of our decoders on the ragged batch."""
    start = time.perf_counter()
    output = decoder.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    seconds = time.perf_counter() - start
    answers = cut(decoder.target.model, inputs, output.sequences)
    return Run(name, answers, seconds, f"{output.stats.tau:.2f}", str(output.stats.pad_rows))


def cut(model: PreTrainedModel, inputs: Inputs, ids: Tensor) -> list[list[int]]:
    """New tokens of every prompt up to the end of its answer."""
    end = model.generation_config.eos_token_id
    answers = ids[:, inputs["input_ids"].shape[1] :].tolist()
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def main() -> int:
    """Runs the comparison; the exit status is 1 if any token differs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--prompts", type=int, default=len(MIXED), help="use only the first so many prompts")
    arguments = options.parse_args()

    console = Console()
    model, tokenizer = load_smollm2(torch.float32)
    inputs = chat_batch(tokenizer, MIXED[: arguments.prompts])
    new_tokens = arguments.max_new_tokens
    target = RaggedModel(model, tokenizer)
    lookup = ngram_tree(target)

    console.rule("one ragged batch, n-gram tree, streaming")
    with stream_panels(console, tokenizer, MIXED[: arguments.prompts]) as streamers:
        lookup.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamers)

    with console.status("decoding the same batch in four ways"):
        runs = [
            plain(model, inputs, new_tokens),
            prompt_lookup(model, inputs, new_tokens),
            speculative("arbordraft n-gram tree", lookup, inputs, new_tokens),
            speculative("arbordraft trained drafter, tree of 16", eagle(target, TRAINED), inputs, new_tokens),
        ]
    table = Table("decoder", "tokens/s", "against generate", "tau", "pad rows", "same tokens")
    for run in runs:
        same = sum(found == expected for found, expected in zip(run.answers, runs[0].answers, strict=True))
        table.add_row(
            run.name,
            f"{run.speed:.1f}",
            f"{run.speed / runs[0].speed:.2f} x",
            run.tau,
            run.pad_rows,
            f"{same} of {len(run.answers)} answers",
        )
    console.print(table)
    changed = [run.name for run in runs[2:] if run.answers != runs[0].answers]
    if changed:
        console.print(f"[red]the output changed: {', '.join(changed)}")
    return len(changed) > 0


if __name__ == "__main__":
    sys.exit(main())
