"""``arbordraft export``: writes drafters, deciders and targets in the formats of serving engines."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arbordraft.cli.options import DtypeOption, ModelOption, finite, parse_topology
from arbordraft.utils.choices import Dtype, Kernels, Law, Quantization
from arbordraft.utils.terminal import terminal

if TYPE_CHECKING:
    from arbordraft.exports.folder import Export

app = typer.Typer(no_args_is_help=True, help="Export drafters, deciders and targets for deployment.")
console = terminal()

OutArgument = Annotated[Path, typer.Argument(help="Folder to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")]
OpsetOption = Annotated[int, typer.Option(help="ONNX opset: 20, or 23 with attention as one operator.")]
QuantizeOption = Annotated[
    Quantization, typer.Option(help="Precision of matrices: 8 bits, or blocks of 4 bits with the head in 8.")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        help="Greatest difference of a float32 graph's outputs, as a share of the greatest output.",
    ),
]
LeastOption = Annotated[
    float,
    typer.Option(min=0, max=1, help="Least acceptance of a quantised graph's tokens by the float32 one, on real rows."),
]


@app.command("onnx")
def onnx_graphs(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER_OR_MODEL",
            help="Folder of a trained drafter or decider; folder or hub name of a causal LM ('smollm2' fetches "
            "SmolLM2-135M-Instruct); 'early-exit:LAYERS'; 'verification:TOPS,TAILS'; 'draw', which samples with "
            "shared noise.",
        ),
    ],
    out: OutArgument,
    target: Annotated[
        str | None, typer.Option(help="Model that the drafter drafts for; by default the one that it was trained for.")
    ] = None,
    hidden: Annotated[
        str, typer.Option(help="Hidden states that the graph of a causal LM returns for a drafter, as in 2,15,27.")
    ] = "",
    quantize: QuantizeOption = Quantization.none,
    tolerance: ToleranceOption = 1e-4,
    least_acceptance: LeastOption = 0.8,
    opset: OpsetOption = 20,
    force: ForceOption = False,
) -> None:
    """Write graphs for onnxruntime. Exports drafters, deciders, targets that verify trees, verification, and draws."""
    from arbordraft.exports.onnx import export

    try:
        layers = [int(layer) for layer in hidden.split(",") if layer]
    except ValueError as error:
        raise typer.BadParameter(f"--hidden takes numbers as in 2,15,27, got {hidden!r}") from error
    options = {"opset": opset, "quantization": quantize, "tolerance": tolerance, "least_acceptance": least_acceptance}
    _write(export, source, out, target=target, hidden_layers=layers, force=force, **options)


@app.command("ort-genai")
def ort_genai(
    draft: Annotated[
        str,
        typer.Argument(help="Folder or hub name of a small causal LM, folder of an early exit, 'early-exit:LAYERS'."),
    ],
    out: OutArgument,
    target: Annotated[str, typer.Option(help="Folder or hub name of the target.")] = "smollm2",
    length: Annotated[int, typer.Option(help="Drafted tokens per step, 1 to 16.")] = 4,
    quantize: QuantizeOption = Quantization.none,
    tolerance: ToleranceOption = 1e-4,
    least_acceptance: LeastOption = 0.8,
    opset: OpsetOption = 20,
    force: ForceOption = False,
) -> None:
    """Write a folder for onnxruntime-genai. Holds target, draft model and tokenizer, and decodes chains at batch 1."""
    from arbordraft.exports.onnx import export_ort_genai

    options = {"opset": opset, "quantization": quantize, "tolerance": tolerance, "least_acceptance": least_acceptance}
    _write(export_ort_genai, draft, out, target=target, length=length, force=force, **options)


PromptsOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Held-out prompts: JSON lines with 'messages'.")
]
UriOption = Annotated[str | None, typer.Option(help="Tracking server, by default $MLFLOW_TRACKING_URI or ./mlflow.db.")]


@app.command("sglang", help="Export an EAGLE head or a small causal LM for SGLang.")
@app.command("vllm", help="Export EAGLE or Medusa heads or a small causal LM for vLLM.")
def engine(
    context: typer.Context,
    drafter: Annotated[Path, typer.Argument(help="Folder of a trained drafter, or of a small causal LM.")],
    out: OutArgument,
    layout: Annotated[
        Literal["eagle3", "speculators"],
        typer.Option(help="Layout of EAGLE heads; 'speculators' names its target (vLLM only)."),
    ] = "eagle3",
    target: Annotated[
        str | None, typer.Option(help="Hub name or folder of the target; by default the one named by the drafter.")
    ] = None,
    speculative_tokens: Annotated[int, typer.Option(min=1, help="Length of the chains that the engine drafts.")] = 4,
    dtype: Annotated[Dtype | None, typer.Option(help="Precision of the weights; by default as stored.")] = None,
    force: ForceOption = False,
) -> None:
    """Export a trained drafter in the layout of a serving engine."""
    from arbordraft.exports.engines import export_engine

    export = partial(export_engine, str(context.info_name))
    options = {"layout": layout, "speculative_tokens": speculative_tokens, "dtype": dtype}
    _write(export, drafter, out, target=target, force=force, **options)
    card = (out / "README.md").read_text()  # how to serve it
    console.print(card.replace("THIS_FOLDER", str(out)), soft_wrap=True)  # users copy its commands


@app.command("mlflow")
def mlflow(
    drafter: Annotated[
        str,
        typer.Argument(
            help="'ngram', 'early-exit:LAYERS', folder of a trained drafter, hub name of a draft model, or a version "
            "that a training registered: models:/NAME@candidate."
        ),
    ],
    target: ModelOption = "smollm2",
    tree: Annotated[str, typer.Option(help="Shape of the draft tree, as for 'arbordraft generate'.")] = "chain:4",
    law: Annotated[Law | None, typer.Option(help="Draft law, as for 'arbordraft generate'.")] = None,
    decider: Annotated[Path | None, typer.Option(help="Folder of a trained decider.")] = None,
    tuned: Annotated[
        Path | None, typer.Option(help="File of 'arbordraft tune'; replaces --tree, --law and --decider.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size whose tuned choice is logged.")] = 1,
    name: Annotated[str | None, typer.Option(help="Registered model; by default the decoder is only logged.")] = None,
    alias: Annotated[str, typer.Option(help="Alias of the registered version.")] = "candidate",
    onnx: Annotated[Path | None, typer.Option(help="Folder with ONNX graphs to log with the decoder.")] = None,
    training_run: Annotated[str | None, typer.Option(help="Id of the run that the drafter was trained in.")] = None,
    prompts: PromptsOption = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to held-out prompts, in tokens.")] = 64,
    experiment: Annotated[str, typer.Option(help="Name of the experiment on the server.")] = "arbordraft",
    uri: UriOption = None,
    dtype: DtypeOption = Dtype.float32,
    kernels: Annotated[Kernels, typer.Option(help="Kernels that run the target's layers.")] = Kernels.auto,
) -> None:
    """Log a whole decoder as an MLflow model. --name registers it as a candidate; 'mlflow models serve' serves it."""
    from arbordraft.bench.tuned import Tuned
    from arbordraft.cli.decoders import load_decoder
    from arbordraft.cli.display import progress
    from arbordraft.deciders import LearnedDecider
    from arbordraft.drafter_names import drafter_named
    from arbordraft.exports.mlflow import log_decoder
    from arbordraft.loading import load_target
    from arbordraft.utils.mlflow_server import explained, fetch_drafter

    topology = parse_topology(tree)
    with (
        explained(uri),
        progress(console, transient=True) as on_progress,
        tempfile.TemporaryDirectory() as scratch,
    ):
        if drafter.startswith("models:/"):
            on_progress("fetching the drafter")
            fetched, run = fetch_drafter(drafter, scratch, uri)
            drafter, training_run = str(fetched), training_run or run
        on_progress("loading the target and the drafter")
        model, tokenizer = load_target(target, dtype, kernels)
        if tuned is not None:
            decoder = Tuned.load(tuned).decoder(model, batch, drafter_named(drafter, model))
        else:
            stop = None if decider is None else LearnedDecider.from_pretrained(decider)
            # Without costs: those of this machine mean nothing where the model is served.
            decoder = load_decoder(model, drafter, law=law, topology=topology, decider=stop, costs=None)
        logged = log_decoder(
            decoder,
            tokenizer,
            target=target,
            drafter=drafter,
            registered_model=name,
            alias=alias,
            onnx=onnx,
            training_run=training_run,
            experiment=experiment,
            new_tokens=new_tokens,
            uri=uri,
            on_progress=on_progress,
            prompts=_held_out(prompts),
        )
    for measure, value in logged.evaluation.report().items():
        console.print(f"{measure}: {value}")
    if (found := logged.evaluation).tokens_per_second <= found.plain_tokens_per_second:
        console.print(
            "slower than plain decoding here: 'export promote' would refuse it. Try a smaller --tree, or let "
            "'arbordraft tune' choose and name its file with --tuned",
            soft_wrap=True,
        )
    registered = f", version {logged.version} of {name}, {alias}" if logged.version else ""
    console.print(f"logged {logged.uri} in run {logged.run}{registered}", soft_wrap=True)


@app.command("promote")
def promote(
    name: Annotated[str, typer.Argument(help="Name of the registered model.")],
    prompts: PromptsOption = None,
    by: Annotated[str, typer.Option(help="Metrics; at least one of them must improve.")] = "tau,tokens_per_second",
    margin: Annotated[float, typer.Option(min=0, callback=finite, help="Least improvement, as a share.")] = 0.02,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    uri: UriOption = None,
) -> None:
    """Make the candidate champion if it is better. Its answers must be the target's own; exits with 1 if it fails."""
    from arbordraft.cli.display import progress
    from arbordraft.exports.mlflow import promote_decoder
    from arbordraft.utils.mlflow_server import explained

    with explained(uri), progress(console, transient=True) as on_progress:
        verdict = promote_decoder(
            name,
            by=by.split(","),
            margin=margin,
            new_tokens=new_tokens,
            uri=uri,
            on_progress=on_progress,
            prompts=_held_out(prompts),
        )
    console.print(verdict.reason, soft_wrap=True)
    if not verdict.promoted:
        raise typer.Exit(1)


def _write(export: "Callable[..., Export]", source: str | Path, out: Path, **options: Any) -> None:
    """Exports, then prints the written files and their differences from the original."""
    from rich.table import Column, Table

    from arbordraft.cli.display import progress

    with progress(console, transient=True) as on_progress:
        written = export(source, out, on_progress=on_progress, **options)
    table = Table("file", Column("size", justify="right"), "sha256", title=str(written.folder))
    for file in written.files:
        table.add_row(file.name, f"{file.size / 2**20:.2f} MiB", file.sha256[:16])
    console.print(table)
    for check, value in written.parity.items():
        console.print(f"{check}: {value if isinstance(value, bool) else f'{value:.3g}'}")


def _held_out(path: Path | None) -> Sequence[str]:
    """Reads the prompts of a file; by default returns built-in ones."""
    from arbordraft.decoding.prompts import read_prompts
    from arbordraft.exports.evaluation import HELD_OUT

    return HELD_OUT if path is None else read_prompts(path)
