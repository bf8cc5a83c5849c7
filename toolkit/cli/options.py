"""Options that several commands have."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbordraft.utils.choices import Dtype, Kernels, Settings, Weights
from arbordraft.utils.files import check_writable

if TYPE_CHECKING:
    from arbordraft.bench.workload import Workload
    from arbordraft.trees.topology import TreeTopology

NONE = "none"  # an axis of a measurement without sizes
SHAPES = "chain:5 | k:4,2,2 | fork:3x4 | parents:-1,0,0,1 | sequoia:0.6,0.2,0.1@16"


def finite(value: float | None) -> float | None:
    """Refuses NaN and infinity, which typer's bounds let through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def output_file(path: Path | None) -> Path | None:
    """Checks early that a file can be written."""
    if path is not None:
        check_writable(path)
    return path


def numbers(text: str, kind: type, least: float = 1) -> list[Any]:
    """Parses comma-separated numbers of at least ``least``; raises ``typer.BadParameter`` for any other text."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"expected comma-separated numbers, got {text!r}") from error
    if wrong := [number for number in values if not (math.isfinite(number) and number >= least)]:
        raise typer.BadParameter(f"expected finite numbers of at least {least}, got {wrong[0]} in {text!r}")
    return values


def whole_numbers(text: str) -> str:
    """Refuses any text but comma-separated whole numbers from 1."""
    numbers(text, int)
    return text


def axis(text: str) -> str:
    """Refuses any text but ``none`` and comma-separated whole numbers from 1."""
    return text if text == NONE else whole_numbers(text)


def _temperatures(text: str) -> str:
    numbers(text, float, 0)
    return text


def _requests(text: str) -> str:
    from arbordraft.bench.workload import REQUESTS

    if text not in ("", "all") and (unknown := [kind for kind in text.split(",") if kind not in REQUESTS]):
        known = ", ".join(REQUESTS)
        raise typer.BadParameter(f"there is no kind of request {unknown[0]!r}: choose among {known}, or write all")
    return text


DRAFTERS = (
    "'auto' (a drafter trained for the model, the model itself after lookups, or lookups: the fastest by estimate), "
    "'ngram' (lookups), 'none', 'self' (the model itself with fewer bits), 'mtp' (the model's own layer for "
    "multi-token prediction), 'early-exit:LAYERS', folder of a trained drafter, hub name of a draft model or a "
    "published head, 'MODULE:CLASS' of your own, or 'models:/NAME@ALIAS' of MLflow."
)

ModelOption = Annotated[
    str,
    typer.Option(help="Hub name, folder or GGUF file of a causal LM; 'smollm2' fetches SmolLM2-135M-Instruct."),
]
DrafterOption = Annotated[str, typer.Option(help=DRAFTERS)]
DraftersOption = Annotated[list[str], typer.Option("--drafter", help=f"{DRAFTERS} May be repeated.")]
CorpusOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--corpus",
        exists=True,
        help="Files or folders that lookups search for next tokens: texts, or a saved pool. Makes answers faster "
        "without changing them. May be repeated.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights.")]
DtypesOption = Annotated[list[Dtype], typer.Option("--dtype", help="Precision of the weights. May be repeated.")]
BOTH = [Dtype.bfloat16, Dtype.float32]
AutoDtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Precision of the weights; by default bfloat16 if this machine is fast at it, else float32."),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if torch sees one.")]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        help="Kernels of the model's layers; 'auto' takes the fastest that work, 'torch' the model's own modules."
    ),
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        help="Bits of the weights. Fewer are faster on a CPU, but make another model, whose law is preserved."
    ),
]
TemperatureOption = Annotated[float, typer.Option(min=0, callback=finite, help="Temperature; 0 decodes greedily.")]
TopPOption = Annotated[
    float | None,
    typer.Option(min=0, max=1, callback=finite, help="Nucleus sampling; by default the model's setting, or 1."),
]
SettingsOption = Annotated[
    Settings,
    typer.Option(
        "--generation-config",
        help="Source of settings that are not given: 'model' for the model's own, 'none' for only its special tokens.",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON lines with 'messages', or 'turns' as in MT-Bench; by default built-in prompts.",
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Number of prompts to use, from the first.")]
# Options of measurements.
NewTokensOption = Annotated[int, typer.Option(min=1, help="New tokens per prompt.")]
BatchesOption = Annotated[
    str,
    typer.Option("--batches", "--batch", callback=whole_numbers, help="Batch sizes, one or several, as in 1,4,8."),
]
TemperaturesOption = Annotated[
    str,
    typer.Option(
        "--temperatures", "--temperature", callback=_temperatures, help="Temperatures, as in 0,1; 0 is greedy."
    ),
]
ClientsOption = Annotated[
    str,
    typer.Option(callback=axis, help="Clients of a server in this process, as in 1,8,32,64; 'none' for no server."),
]
ContextsOption = Annotated[
    str,
    typer.Option(
        callback=axis,
        help="Also measure prompts that unrelated text lengthens to these numbers of tokens, as in 1024,4096; 'none' "
        "for only prompts as they are.",
    ),
]
RequestsOption = Annotated[
    str,
    typer.Option(
        callback=_requests,
        help="Kinds of requests in place of temperatures, as in greedy,min-p,chat; 'all' for every one.",
    ),
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timings per case; medians are reported.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of sampled tokens and random inputs.")]
JsonOption = Annotated[
    Path | None, typer.Option(callback=output_file, help="Write the figures and their provenance to this file.")
]
PngOption = Annotated[
    Path | None, typer.Option(callback=output_file, help="Draw the figures to this PNG file (needs matplotlib).")
]


def workloads(
    prompts: Path | None,
    limit: int | None,
    batches: str,
    temperatures: str = "0",
    requests: str = "",
    *,
    categories: bool = False,
    **settings: Any,
) -> "list[Workload]":
    """Builds a workload for every temperature and batch size, or for every kind of request and batch size.

    Args:
        prompts: file of prompts.
        limit: number of its first prompts that are used, of each category.
        batches: batch sizes; ``none`` for no workload.
        temperatures: temperatures, unless kinds of requests are named.
        requests: kinds of requests, ``all`` for every one.
        categories: whether each category of prompts has workloads of its own.
        settings: other arguments of the workloads.

    Raises:
        typer.BadParameter: if categories are wanted of prompts that have none.
    """
    from arbordraft.bench.workload import REQUESTS, Workload, read_texts
    from arbordraft.decoding.prompts import read_categories

    if batches == NONE:
        return []
    if categories:
        if prompts is None:
            raise typer.BadParameter(
                "the built-in prompts have none: name a file with --prompts", param_hint="--categories"
            )
        return [
            replace(workload, prompts=tuple(texts[:limit]), category=category)
            for category, texts in read_categories(prompts).items()
            for workload in workloads(prompts, 1, batches, temperatures, requests, **settings)
        ]
    texts = tuple(read_texts(prompts, limit))
    if requests:
        kinds = list(REQUESTS) if requests == "all" else requests.split(",")
        return [
            Workload(texts, batch=batch, kind=kind, **settings) for kind in kinds for batch in numbers(batches, int)
        ]
    return [
        Workload(texts, batch=batch, temperature=temperature, **settings)
        for temperature in numbers(temperatures, float, 0)
        for batch in numbers(batches, int)
    ]


def parse_topology(text: str) -> "TreeTopology":
    """Builds a topology from a text like those in ``SHAPES``; raises ``typer.BadParameter`` for any other text."""
    from arbordraft.trees.topology import TreeTopology

    kind, _, values = text.partition(":")
    try:
        match kind:
            case "chain":
                return TreeTopology.chain(int(values))
            case "k":
                return TreeTopology.from_k_config([int(k) for k in values.split(",")])
            case "fork":
                width, depth = values.split("x")
                return TreeTopology.fork(int(width), int(depth))
            case "parents":
                return TreeTopology.from_parents([int(parent) for parent in values.split(",")])
            case "sequoia":
                rates, nodes = values.split("@")
                return TreeTopology.sequoia([float(rate) for rate in rates.split(",")], int(nodes))
    except ValueError as error:
        raise typer.BadParameter(f"tree {text!r}: {error}; write {SHAPES}") from error
    raise typer.BadParameter(f"unknown tree {text!r}; write {SHAPES}")
