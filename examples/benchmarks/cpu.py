"""Measures the gain of the native kernels over transformers on a CPU.

Ratios are speed-ups: the reference's time over ours.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import torch
import typer
from forward import forward_pair

from arbordraft import builders
from arbordraft.bench.decoding import Decode, in_turns, theirs
from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet, read_texts
from arbordraft.cli.options import (
    BOTH,
    DtypesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.kernels.verify import row_max
from arbordraft.loading import load_target
from arbordraft.target.model import RaggedModel
from arborlab.pairs import paired

_REACH = {1: ">= 3.5", 8: ">= 3.0", 16: ">= 2.3"}


def forward_speed(
    target: RaggedModel, workload: Workload, on_progress: ProgressCallback = quiet
) -> Iterator[Measurement]:
    """Measures forwards with the target's kernels against the model's own, and against reading the weights once."""
    model = target.model
    half = model.dtype == torch.bfloat16
    for new in (1, 8, 16) if half else (8,):
        yield _against_own(target, new, workload, on_progress, _REACH[new] if half else ">= 3.0")
    if not half:
        return
    size = sum(weight.numel() for weight in set(model.parameters())) * 2
    # Reading this buffer once reads as many bytes, with all threads.
    memory = torch.zeros(torch.get_num_threads(), size // 2 // torch.get_num_threads(), dtype=torch.bfloat16)
    case = f"bfloat16, 1 token, against reading {size / 1e6:.0f} MB of weights"
    forward, _ = forward_pair(target, [200], 1)
    row = paired("cpu forward", case, forward, lambda: row_max(memory), workload, on_progress, reach="<= 2.0")
    yield replace(row, detail=f"{size / row.reference / 1e6:.1f} GB/s")


def _against_own(
    target: RaggedModel, new: int, workload: Workload, on_progress: ProgressCallback, reach: str = "", shape: str = ""
) -> Measurement:
    case = f"{precision(target.model)}, {target.backend}, {shape}{new} tokens, context 200"
    pair = forward_pair(target, [200], new)
    return paired("cpu forward", case, *pair, workload, on_progress, reach=reach, speed_up=True)


def other_architectures(workload: Workload, on_progress: ProgressCallback = quiet) -> Iterator[Measurement]:
    """Measures models of two other families with random weights, for which nothing was tuned."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

    shapes = {
        "Qwen3-0.6B": Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        "Gemma-3-1B": Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            sliding_window=512,
        ),
    }
    for name, config in shapes.items():
        on_progress(f"making {name}'s shape", 0, workload.repeats)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        yield _against_own(RaggedModel(model, kernels="auto"), 8, workload, on_progress, ">= 2.0", f"{name}'s shape, ")


def decode_speed(
    target: RaggedModel, workload: Workload, on_progress: ProgressCallback = quiet
) -> Iterator[Measurement]:
    """Measures milliseconds per token of greedy decoding, plain and with lookups where they pay, against ``generate``.

    At batch 1 it decodes the first four prompts one after the other, at larger sizes one full batch.
    """
    decoders: dict[str, SpeculativeDecoder | Decode] = {
        "generate": theirs(target.model),
        "plain": builders.plain(target),
        "n-gram where it pays": builders.lookup(target),
    }
    reach = {1: ">= 5.0", 4: ">= 4.0", 8: ">= 3.5", 16: ">= 2.5"}
    for batch in (size for size in reach if size <= len(workload.prompts)):
        part = replace(workload, prompts=workload.prompts[: max(batch, 4)], batch=batch)
        generate, *rows = in_turns(target, decoders, part, on_progress)
        for row in rows:
            yield Measurement(
                "cpu decode",
                f"{row.dtype}, batch {batch}, {row.decoder}, {workload.new_tokens} new tokens",
                1e3 / row.tokens_per_second,
                1e3 / generate.tokens_per_second,
                row.speed_up,
                "" if row.decoder == "plain" else reach[batch],
                f"{row.tokens_per_second:.0f} against {generate.tokens_per_second:.0f} tokens/s, tau {row.tau:.2f}",
            )


def main(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    others: Annotated[bool, typer.Option(help="Also random models of other families, which need 5 GB.")] = True,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure the native CPU kernels against transformers: forwards, and greedy decoding in bfloat16."""
    workload = Workload(tuple(read_texts(prompts, limit)), new_tokens=new_tokens, repeats=repeats, seed=seed)
    torch.manual_seed(seed)
    with Report(json, model=model, dtype=dtype, others=others) as report:
        for each in dtype:
            target, _ = load_target(model, each)
            report.take(forward_speed(target, workload, report.on_progress), workload)
            if target.model.dtype == torch.bfloat16:
                longer = replace(workload, repeats=max(3, repeats // 2))
                report.take(decode_speed(target, longer, report.on_progress), longer)
        if others:
            report.take(other_architectures(workload, report.on_progress), workload)


if __name__ == "__main__":
    run_script(main)
