"""Measures weights of fewer bits: their predictions on real text, their memory, and tokens per second.

Shapes: C chunks of L tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import typer
from torch import Tensor

from arbordraft import builders
from arbordraft.bench.decoding import in_turns
from arbordraft.bench.measure import precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.text import encode, user_turn
from arbordraft.kernels.prepacked_linear import WEIGHTS
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.utils.files import read_text

_CHUNK = 256  # tokens that are read at a time
_TOPICS = ("types", "import", "naming")  # of Python's own help, which every installation has


@dataclass(frozen=True)
class WeightsRow:
    """One kind of weights compared with the model's own.

    Args:
        weights: see :class:`~arbordraft.RaggedModel`; ``own`` for the model's.
        divergence: KL divergence from the predictions of the own weights, in nats per token.
        agreement: share of the positions whose most probable token is equal.
        perplexity: perplexity of the text.
        megabytes: size of the copy that forwards read.
        memory: this size over that of the own weights' copy.
        tokens_per_second: speed of plain greedy decoding, median of the rounds.
        speed_up: speed over that of the own weights, median of the rounds' ratios.
    """

    table: ClassVar[str] = "weights of fewer bits, plain greedy decoding"

    dtype: str
    batch: int
    weights: str
    divergence: float
    agreement: float
    perplexity: float
    megabytes: float
    memory: float
    tokens_per_second: float
    speed_up: float


def compared(
    target: RaggedModel,
    text: str,
    workloads: Sequence[Workload],
    chunks: int = 8,
    on_progress: ProgressCallback = quiet,
) -> Iterator[WeightsRow]:
    """Yields a row for every kind of weights and workload.

    Args:
        target: model with native kernels and its own weights.
        text: text to predict; the first ``chunks`` chunks are read.
        workloads: workloads to measure the speed.
        chunks: most chunks that are read.
        on_progress: receives the current case.

    Raises:
        ValueError: if the kernels are not native, the weights not the model's own, or the text too short.
    """
    if target.backend != "native" or target.weights is not None:
        raise ValueError(f"weights of fewer bits are for native kernels, beside a model's own, not for {target.chosen}")
    tokens = torch.tensor(encode(target.tokenizer, user_turn(text, None), raw=True, name="the text"))
    parts = [part for part in tokens.split(_CHUNK) if len(part) == _CHUNK][:chunks]
    if not parts:
        raise ValueError(f"a text of {len(tokens)} tokens is too short: at least {_CHUNK} are read")
    kinds = {"own": target}
    for name in WEIGHTS:
        kinds[name] = RaggedModel(target.model, target.tokenizer, kernels="native", weights=name)
    told: dict[str, Tensor] = {}
    for done, (name, model) in enumerate(kinds.items()):
        on_progress(f"reading with {name} weights", done, len(kinds))
        told[name] = _read(model, target, parts)
    sizes = {name: model.prepacking.nbytes if model.prepacking else 0 for name, model in kinds.items()}
    for workload in workloads:
        decoders = {name: builders.plain(model) for name, model in kinds.items()}
        for row in in_turns(target, decoders, workload, on_progress):
            divergence, agreement, loss = told[row.decoder].tolist()
            yield WeightsRow(
                dtype=precision(target.model),
                batch=workload.batch,
                weights=row.decoder,
                divergence=divergence,
                agreement=agreement,
                perplexity=float(torch.tensor(loss).exp()),
                megabytes=sizes[row.decoder] / 1e6,
                memory=sizes[row.decoder] / sizes["own"],
                tokens_per_second=row.tokens_per_second,
                speed_up=row.speed_up,
            )


def help_text() -> str:
    """Returns some of Python's own documentation, equal for equal versions of Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[topic] for topic in _TOPICS)


def _read(model: RaggedModel, reference: RaggedModel, parts: Sequence[Tensor]) -> Tensor:
    """Returns the mean divergence from the reference, agreement with it, and loss, over all positions."""
    sums = torch.zeros(3, dtype=torch.float64)
    for tokens in parts:
        expected, found = (_log_probs(each, tokens) for each in (reference, model))
        divergence = (expected.exp() * (expected - found)).sum(dim=-1).mean()
        agreement = (expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()
        loss = -found[:-1].gather(1, tokens[1:, None]).mean()
        sums += torch.stack([divergence.double(), agreement, loss.double()])
    return sums / len(parts)


def _log_probs(model: RaggedModel, tokens: Tensor) -> Tensor:
    """Returns ``[L, V]`` log-probabilities in float32."""
    cache = RaggedKVCache()
    batch = cache.lay_out([cache.open(len(tokens))], [range(len(tokens))])
    return model(tokens, batch, cache).float().log_softmax(dim=-1)


def main(
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to predict; else Python's own help.")
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Most chunks of 256 tokens that are read of it.")] = 8,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 64,
    batches: BatchesOption = "1,8",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure weights of 4 and 8 bits against the model's own: predictions on a text, memory and tokens per second."""
    known = help_text() if text is None else read_text(text)
    sizes = workloads(prompts, limit, batches, new_tokens=new_tokens, repeats=repeats, seed=seed)
    with Report(json, text=text, chunks=chunks) as report:
        target = report.load(model, dtype)
        report.take(compared(target, known, sizes, chunks, report.on_progress), sizes[0])


if __name__ == "__main__":
    run_script(main)
