"""Logs decoders in MLflow with their evaluation, registers them as candidates, and promotes better ones."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.checkpoints.reader import read_config, read_tensors
from arbordraft.deciders import LearnedDecider
from arbordraft.exports.decoder_config import DECIDER, FILE, DecoderConfig
from arbordraft.exports.evaluation import HELD_OUT, Evaluation, evaluate
from arbordraft.trees.drawing import tree_picture
from arbordraft.utils.mlflow_server import (
    CANDIDATE,
    check_names,
    register,
    server,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from transformers import PreTrainedTokenizerBase

    from arbordraft import SpeculativeDecoder

CHAMPION = "champion"
DRAFTER = "drafter"
METRICS = ("tau", "tokens_per_second")
TRAINING = "arbordraft.training_run"  # tag of runs, models and versions: the run that the drafter was trained in
_PINNED = ("arbordraft", "mlflow", "numpy", "pandas", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class LoggedDecoder:
    """The run and the model of a logged decoder, with its evaluation.

    Args:
        run: id of the run.
        model: id of the logged model.
        uri: address to load or serve the model.
        version: version of the registered model, if it was registered.
        evaluation: the measured figures.
    """

    run: str
    model: str
    uri: str
    version: str | None
    evaluation: Evaluation


def log_decoder(
    decoder: "SpeculativeDecoder",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    target: str,
    drafter: str | os.PathLike[str] | None = None,
    registered_model: str | None = None,
    alias: str = CANDIDATE,
    onnx: str | os.PathLike[str] | None = None,
    training_run: str | None = None,
    prompts: Sequence[str] = HELD_OUT,
    new_tokens: int = 64,
    experiment: str = "arbordraft",
    run_name: str | None = None,
    uri: str | None = None,
    on_progress: Callable[[str], object] = lambda what: None,
) -> LoggedDecoder:
    """Logs a decoder as a pyfunc model that ``mlflow models serve`` can serve.

    The model holds a reference to the target, the drafter's and the decider's weights, topology, coupling and costs. It
    comes with signature, pinned requirements and an input example, which MLflow tries on a second copy of the decoder.
    Beside it lie the parity report, a picture of the tree, and the ONNX graphs if there are any. It is registered last,
    so that an earlier failure leaves no version.

    Args:
        decoder: the decoder.
        tokenizer: the target's tokenizer.
        target: hub name or folder that the target was loaded from; it is loaded from there again.
        drafter: folder or hub name that a trained drafter was loaded from, if it has one; see
            :func:`fetch_drafter`.
        registered_model: name to register it under; by default it is only logged.
        alias: alias of the registered version.
        onnx: folder with ONNX graphs of its parts.
        training_run: id of the run that the drafter was trained in, on the same server.
        prompts: held-out prompts to measure parity, tau and speed on.
        new_tokens: longest answer to these prompts, in tokens.
        experiment: name of the experiment on the server.
        run_name: name of the run; MLflow invents one by default.
        uri: tracking server; by default ``$MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db``.
        on_progress: receives messages on the progress.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if the decoder cannot be described, or a name, a folder or the training run is invalid.
        Exception: errors of MLflow; then neither version nor model stay, and the run is marked as failed.
    """
    check_names(registered_model, alias)
    graphs = _graphs(onnx)
    config = DecoderConfig.of(decoder, target, None if drafter is None else os.fspath(drafter))
    with server(uri) as (mlflow, client), tempfile.TemporaryDirectory() as scratch:
        inputs = _training_models(client, training_run)
        place = client.get_experiment_by_name(experiment)  # raises before anything is measured if the server is away
        on_progress("measuring parity, tau and speed")
        evaluation = evaluate(decoder, tokenizer, prompts, new_tokens=new_tokens, on_progress=on_progress)
        files = _pack(decoder, config, Path(scratch))
        tags = {} if training_run is None else {TRAINING: training_run}
        place_id = place.experiment_id if place else client.create_experiment(experiment)
        with (
            mlflow.start_run(experiment_id=place_id, run_name=run_name, tags=tags, nested=True) as run,
            _all_or_nothing(client, place_id, run.info.run_id),
        ):
            on_progress("logging the decoder")
            _describe_run(mlflow, config, decoder, evaluation)
            if inputs:
                client.log_inputs(run.info.run_id, models=inputs)
            _log_graphs(mlflow, graphs, tags)
            info = _log_model(mlflow, decoder, files, tags, evaluation)
            number = None
            if registered_model is not None:
                on_progress(f"registering it as {registered_model}")
                number = register(client, registered_model, alias, info.model_id, run.info.run_id, tags)
        return LoggedDecoder(run.info.run_id, info.model_id, info.model_uri, number, evaluation)


class Promotion(NamedTuple):
    """Whether a champion was replaced, and why."""

    promoted: bool
    reason: str


def promote_decoder(
    name: str,
    prompts: Sequence[str] = HELD_OUT,
    *,
    by: Sequence[str] = METRICS,
    margin: float = 0.02,
    new_tokens: int = 64,
    uri: str | None = None,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Promotion:
    """Gives the alias ``champion`` to the ``candidate`` if it passes.

    Both decode the prompts here and now, since figures of other machines or other prompts cannot be compared. The
    candidate's answers must equal its target's, token for token. The candidate must also be better than the champion in
    one of the metrics. If speed is one of them, it must be faster than plain decoding, even without a champion.

    Args:
        name: registered model.
        prompts: held-out prompts.
        by: metrics, one of which must be higher: ``tau``, ``tokens_per_second``.
        margin: share by which it must be higher; speeds differ by a few percent between two runs of one decoder.
        new_tokens: longest answer, in tokens.
        uri: tracking server; by default as in :func:`log_decoder`.
        on_progress: receives messages on the progress.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if there is no such metric.
        Exception: errors of MLflow, if the server does not answer or does not know the model.
    """
    if not by or (unknown := set(by) - set(METRICS)):
        raise ValueError(f"decoders are promoted by {' or '.join(METRICS)}, not by {sorted(unknown) if by else 'none'}")
    with server(uri) as (_, client):
        aliases = {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
        candidate, champion = aliases.get(CANDIDATE), aliases.get(CHAMPION)
        if candidate is None:
            return Promotion(False, f"{name} has no version with the alias candidate")
        if candidate == champion:
            return Promotion(False, f"version {champion} is the champion already")

        def measure(version: str) -> Evaluation:
            decoder, tokenizer = load_decoder(client, name, version)
            return evaluate(
                decoder,
                tokenizer,
                prompts,
                new_tokens=new_tokens,
                on_progress=lambda what: on_progress(f"version {version}: {what}"),
            )

        measured = measure(candidate)
        bar = measure(champion) if measured.parity and champion is not None else None
        verdict = judge(candidate, measured, champion, bar, by, margin)
        client.set_model_version_tag(name, candidate, "arbordraft.promotion", verdict.reason)
        client.set_model_version_tag(name, candidate, "arbordraft.evaluation", json.dumps(measured.report()))
        if verdict.promoted:
            client.set_registered_model_alias(name, CHAMPION, candidate)
        return verdict


def judge(
    candidate: str, measured: Evaluation, champion: str | None, bar: Evaluation | None, by: Sequence[str], margin: float
) -> Promotion:
    """Decides whether a candidate becomes champion; ``measured`` is its evaluation, ``bar`` the champion's."""
    if not measured.parity:
        equal = f"{measured.equal} of {measured.prompts} answers are the target's own"
        return Promotion(False, f"version {candidate} fails parity: {equal}, its output law is {measured.exactness}")
    speeds = f"{measured.tokens_per_second:.4g} tokens/s against {measured.plain_tokens_per_second:.4g}"
    slow = measured.tokens_per_second <= measured.plain_tokens_per_second * (1 + margin)
    if slow and "tokens_per_second" in by:
        return Promotion(False, f"version {candidate} is no faster than plain decoding by {margin:.0%}: {speeds}")
    if bar is None:
        description = f"tau {measured.tau:.2f}, {speeds} of plain decoding"
        return Promotion(True, f"version {candidate} is the first champion: {description}")
    shown = [f"{metric} {getattr(measured, metric):.4g} against {getattr(bar, metric):.4g}" for metric in by]
    better = any(getattr(measured, metric) > getattr(bar, metric) * (1 + margin) for metric in by)
    description = f"{', '.join(shown)} of version {champion}"
    verdict = "is champion" if better else f"is no better by {margin:.0%}"
    return Promotion(better, f"version {candidate} {verdict}: {description}")


def load_decoder(client: "MlflowClient", name: str, version: str) -> Any:
    """Loads the decoder of a registered version, and its tokenizer.

    Raises:
        ValueError: if the version holds no decoder, or its target has changed.
    """
    import mlflow

    served = mlflow.pyfunc.load_model(client.get_model_version(name, version).source).unwrap_python_model()
    if not hasattr(served, "decoder"):
        raise ValueError(f"version {version} of {name} is no decoder that arbordraft logged")
    return served.decoder, served.tokenizer


@contextlib.contextmanager
def _all_or_nothing(client: "MlflowClient", experiment: str, run: str) -> Iterator[None]:
    """Deletes the models of a run if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            for model in client.search_logged_models([experiment], f"source_run_id = '{run}'"):
                client.delete_logged_model(model.model_id)
        raise


def _training_models(client: "MlflowClient", run: str | None) -> list[Any]:
    """Returns the models that a training logged, as inputs of another run; raises ValueError for unknown runs."""
    from mlflow import MlflowException
    from mlflow.entities import LoggedModelInput

    if run is None:
        return []
    try:
        outputs = client.get_run(run).outputs
    except MlflowException as error:
        raise ValueError(f"the server knows no training run {run!r} ({error}); name it as MLflow shows it") from error
    return [LoggedModelInput(output.model_id) for output in (outputs.model_outputs if outputs else [])]


def _graphs(onnx: str | os.PathLike[str] | None) -> list[Path]:
    """Lists the ONNX graphs in a folder."""
    if onnx is None:
        return []
    graphs = sorted(Path(onnx).rglob("*.onnx"))
    if not graphs:
        raise ValueError(f"there is no ONNX graph in {onnx}; write some with: arbordraft export onnx")
    try:
        import onnx as library  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX cannot be imported ({error}); run: pip install 'arbordraft[onnx]'") from error
    return graphs


def _pack(decoder: "SpeculativeDecoder", config: DecoderConfig, scratch: Path) -> Path:
    """Collects everything that the served model needs in one folder."""
    folder = scratch / "decoder"
    folder.mkdir()
    if config.trained is not None and Path(config.trained).is_dir():
        read_config(config.trained)
        read_tensors(config.trained)  # raises if the weights are damaged
        names = shutil.ignore_patterns("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth")
        shutil.copytree(config.trained, folder / DRAFTER, ignore=names)
        config = replace(config, trained=DRAFTER)
    deciders = [module for module in decoder.decider.modules() if isinstance(module, LearnedDecider)]
    if len(deciders) > 1:
        raise ValueError("a decoder with several trained deciders cannot be logged")
    for decider in deciders:
        decider.save_pretrained(folder / DECIDER)
    if Path(config.target.name).is_dir():  # found from any working directory
        config = replace(config, target=replace(config.target, name=str(Path(config.target.name).absolute())))
    config.save(folder / FILE)
    return folder


def _describe_run(mlflow: Any, config: DecoderConfig, decoder: "SpeculativeDecoder", evaluation: Evaluation) -> None:
    """Logs settings, figures, the parity report and a picture of the tree."""
    mlflow.log_params(
        {
            "target": config.target.name,
            "target.fingerprint": config.target.fingerprint,
            "dtype": config.target.dtype,
            "drafter": type(decoder.drafter).__name__,
            "law": str(decoder.coupling.law),
            "verifier": " ".join(str(decoder.coupling.verifier).split()),
            "decider": " ".join(str(decoder.decider).split())[:500],
            "nodes": decoder.topology.num_nodes,
            "depth": decoder.topology.max_depth,
            **{f"versions.{package}": version(package) for package in _PINNED},
        }
    )
    mlflow.log_metrics(evaluation.metrics())
    mlflow.log_dict(evaluation.report(), "parity.json")
    with contextlib.suppress(ImportError):  # the picture needs matplotlib, and nothing else does
        mlflow.log_figure(tree_picture(decoder.topology), "tree.png")


def _log_graphs(mlflow: Any, graphs: list[Path], tags: dict[str, str]) -> None:
    for path in graphs:
        import onnx

        name = "onnx-" + re.sub(r"[^\w-]", "-", path.stem)
        mlflow.onnx.log_model(onnx.load(path), name=name, tags=tags, pip_requirements=_pins("onnx", "onnxruntime"))
    for folder in sorted({path.parent for path in graphs}):
        for report in sorted(folder.glob("*parity*.json")):
            mlflow.log_artifact(str(report), "onnx")


def _log_model(mlflow: Any, decoder: Any, files: Path, tags: dict[str, str], evaluation: Evaluation) -> Any:
    from arbordraft.exports import mlflow_model as served

    info = mlflow.pyfunc.log_model(
        name="decoder",
        python_model=str(Path(served.__file__).with_name("mlflow_served.py")),
        artifacts={served.FILES: str(files)},
        signature=served.signature(decoder),
        input_example=served.example(),
        pip_requirements=_pins(*_PINNED),
        tags=tags,
        metadata={"evaluation": json.dumps(evaluation.report())},
    )
    mlflow.log_metrics(evaluation.metrics(), model_id=info.model_id)
    return info


def _pins(*packages: str) -> list[str]:
    """Returns the installed versions as requirements, without labels of local builds, which no index knows."""
    return [f"{package}=={version(package).partition('+')[0]}" for package in packages]
