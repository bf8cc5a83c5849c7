"""Measures decoding steps of models of known shapes with random weights: eager and recorded, by rows, with a head.

Nothing is drafted well by random weights, so what is measured is what steps cost, and not how many tokens they give.
Without a GPU nothing is recorded: that shows whether all of it runs, and says nothing about time on one.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from arbordraft import EagleDrafter, NoDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.bench.report import Report
from arbordraft.cli.options import JsonOption, SeedOption, numbers, whole_numbers
from arbordraft.cli.program import run_script
from arbordraft.heads.eagle import EagleHead

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
DRAFT_VOCABULARY = 32000  # most tokens of a head
PROFILED = 8  # steps


@dataclass(frozen=True)
class StepRow:
    """What a step takes.

    Args:
        steps: ``transformers``, ``eager`` or ``recorded``.
        kernels: of the layers, ``torch`` or ``triton``; see ``RaggedModel``.
        drafts: of every sample, ``none`` or those of an EAGLE head.
        rows: rows of the target's forward, padding included; 0 where they are those of the trees.
        ms: median of a step's milliseconds, from one verdict (or token) to the next.
        launches: kernels that a step runs on the GPU.
        busy_ms: sum of their times.
        first_s: seconds of the first few steps, in which kernels are compiled and graphs recorded.
    """

    model: str
    steps: str
    kernels: str
    drafts: str
    batch: int
    rows: int
    ms: float
    launches: float | None = None
    busy_ms: float | None = None
    first_s: float | None = None

    @property
    def table(self) -> str:
        """Title of its table."""
        return self.model


class _Clock(BaseStreamer):
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measured(
    name: str, device: torch.device, rows: list[int], *, context: int, steps: int, batch: int, profiled: bool
) -> Iterator[StepRow]:
    """The steps of one shape, in bfloat16 on a GPU and in float32 elsewhere."""
    model = _model(name, device)
    ids = torch.randint(10, model.config.vocab_size, (batch, context), device=device)
    request: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def plain(count: int) -> list[float]:
        clock = _Clock()
        generate: Any = model.generate
        generate(ids, max_new_tokens=count, min_new_tokens=count, streamer=clock, **request)
        return clock.times[1:]  # the prompt comes first

    def by(decoder: SpeculativeDecoder) -> Callable[[int], list[float]]:
        def decode(count: int) -> list[float]:
            times: list[float] = []
            decoder.on_step = lambda *_: times.append(time.perf_counter())
            decoder.generate(ids, max_new_tokens=count, **request)
            return times

        return decode

    def row(how: str, kernels: str, drafts: str, padded: int, decode: Callable[[int], list[float]]) -> StepRow:
        begun = time.perf_counter()
        decode(3)
        first = time.perf_counter() - begun
        between = [end - begin for begin, end in pairwise(decode(steps + 2)[1:])]
        launches, busy = _profile(decode) if profiled else (None, None)
        return StepRow(name, how, kernels, drafts, batch, padded, 1e3 * median(between), launches, busy, first)

    if batch == 1:  # it streams one sample
        yield row("transformers", "torch", "none", 1, plain)
    own = RaggedModel(model, kernels="torch", self_test=False)
    target = RaggedModel(model, kernels="triton", self_test=False) if device.type == "cuda" else own
    kernels = target.backend
    layers = model.config.num_hidden_layers
    tokens = range(min(DRAFT_VOCABULARY, model.config.vocab_size))
    head = EagleHead.for_target(model, list(tokens), hidden_layers=sorted({1, layers // 2, layers - 1}))
    head.to(device, model.dtype)
    for each in dict.fromkeys((own, target)):
        yield row("eager", each.backend, "none", batch, by(SpeculativeDecoder(each, NoDrafter(), buckets=None)))
    if kernels != "torch":
        decoder = SpeculativeDecoder(own, NoDrafter(), buckets=(batch,))
        yield row("recorded", "torch", "none", batch, by(decoder))
    for count in rows:
        decoder = SpeculativeDecoder(target, NoDrafter(), buckets=(max(batch, count),))
        yield row("recorded", kernels, "none", max(batch, count), by(decoder))
    for drafts, tree in (("chain of 4", TreeTopology.chain(4)), ("tree of 20", TreeTopology.from_k_config((4, 2, 1)))):
        decoder = SpeculativeDecoder(target, EagleDrafter(head, target), tree, buckets=(batch * tree.num_nodes,))
        yield row("recorded", kernels, drafts, batch * tree.num_nodes, by(decoder))


def _model(name: str, device: torch.device) -> LlamaForCausalLM:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[name], max_position_embeddings=8192))
    finally:
        torch.set_default_dtype(kept)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _profile(decode: Callable[[int], list[float]]) -> tuple[float, float]:
    """Kernels of a step and their milliseconds, without the prompt's."""

    def spent(count: int) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            decode(count)
            torch.cuda.synchronize()
        found: Counter[str] = Counter()
        for event in profiler.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found.update(launches=1, microseconds=event.device_time_total)
        return found

    few, many = spent(2), spent(2 + PROFILED)
    many.subtract(few)
    return many["launches"] / PROFILED, many["microseconds"] / PROFILED / 1e3


def main(
    model: Annotated[list[str], typer.Option(help=f"Shape, {', '.join(SHAPES)}. May be repeated.")] = [  # noqa: B006
        "smollm2-135m",
        "llama-3.1-8b",
    ],
    rows: Annotated[str, typer.Option(callback=whole_numbers, help="Rows of a step, padding included.")] = "1,8,32,128",
    batch: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompts.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps whose median counts.")] = 24,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure steps of models with random weights: eager and recorded, by rows, with a head."""
    if unknown := [name for name in model if name not in SHAPES]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(SHAPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"batch": batch, "context": context, "steps": steps, "seed": seed, "device": device.type}
    with Report(json, model=model, rows=rows, **options) as report:
        for name in model:
            torch.manual_seed(seed)
            counts = numbers(rows, int)
            on_gpu = device.type == "cuda"
            report.take(measured(name, device, counts, context=context, steps=steps, batch=batch, profiled=on_gpu))
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    run_script(main)
