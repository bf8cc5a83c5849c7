"""Decoders in MLflow: logged with what is known of them, registered as candidates, promoted if they are better."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.checkpoints.reader import read_config, read_tensors
from arbordraft.deciders import LearnedDecider
from arbordraft.exports.decoder_config import DECIDER, FILE, DecoderConfig
from arbordraft.exports.evaluation import HELD_OUT, Evaluation, evaluate
from arbordraft.exports.mlflow_registry import TRAINING, all_or_nothing, check_names, register, server, training_models
from arbordraft.trees.drawing import tree_picture
from arbordraft.utils.mlflow_server import CANDIDATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arbordraft import SpeculativeDecoder

DRAFTER = "drafter"
_PINNED = ("arbordraft", "mlflow", "numpy", "pandas", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class LoggedDecoder:
    """Where a decoder was logged.

    Args:
        run: id of the run.
        model: id of the logged model.
        uri: to load or serve it.
        version: of the registered model, if it was registered.
        evaluation: what was measured.
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
    tell: Callable[[str], object] = lambda what: None,
) -> LoggedDecoder:
    """Logs a decoder as a pyfunc model that ``mlflow models serve`` answers requests with.

    The model holds a reference to the target, the drafter's and the decider's weights, topology, coupling and costs; it
    comes with signature, pinned requirements and an input example, which MLflow tries on a second copy of the decoder.
    Beside it lie the parity report, a picture of the tree, and the ONNX graphs if there are any. It is registered last:
    whatever fails before leaves no version behind.

    Args:
        decoder: the decoder.
        tokenizer: its target's.
        target: hub name or folder that the target was loaded from; it is loaded from there again.
        drafter: folder or hub name that a trained drafter was loaded from, if it has one; see
            :func:`~arbordraft.exports.mlflow_registry.fetch_drafter`.
        registered_model: name to register it under; by default it is only logged.
        alias: of the registered version.
        onnx: folder with ONNX graphs of its parts.
        training_run: id of the run that the drafter was trained in, on the same server.
        prompts: held-out prompts to measure parity, tau and speed on.
        new_tokens: longest answer to them.
        experiment: its name on the server.
        run_name: name of the run; MLflow invents one by default.
        uri: tracking server; by default ``$MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db``.
        tell: is told what is going on.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if the decoder cannot be described, or names, folders or the training run are not what they should.
        Exception: whatever MLflow raises; then neither version nor model stay, and the run is marked as failed.
    """
    check_names(registered_model, alias)
    graphs = _graphs(onnx)
    config = DecoderConfig.of(decoder, target, None if drafter is None else os.fspath(drafter))
    with server(uri) as (mlflow, client), tempfile.TemporaryDirectory() as scratch:
        inputs = training_models(client, training_run)
        place = client.get_experiment_by_name(experiment)  # a server that is away says so before anything is measured
        tell("measuring parity, tau and speed")
        evaluation = evaluate(decoder, tokenizer, prompts, new_tokens=new_tokens, tell=tell)
        files = _pack(decoder, config, Path(scratch))
        tags = {} if training_run is None else {TRAINING: training_run}
        place_id = place.experiment_id if place else client.create_experiment(experiment)
        with (
            mlflow.start_run(experiment_id=place_id, run_name=run_name, tags=tags, nested=True) as run,
            all_or_nothing(client, place_id, run.info.run_id) as undo,
        ):
            tell("logging the decoder")
            _describe_run(mlflow, config, decoder, evaluation)
            if inputs:
                client.log_inputs(run.info.run_id, models=inputs)
            _log_graphs(mlflow, graphs, tags)
            info = _log_model(mlflow, decoder, files, tags, evaluation)
            number = None
            if registered_model is not None:
                tell(f"registering it as {registered_model}")
                number = register(client, registered_model, alias, info, run.info.run_id, tags, undo)
        return LoggedDecoder(run.info.run_id, info.model_id, info.model_uri, number, evaluation)


def _graphs(onnx: str | os.PathLike[str] | None) -> list[Path]:
    """ONNX graphs in a folder, and the parity reports beside them."""
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
    """Everything that the served model needs, in one folder."""
    folder = scratch / "decoder"
    folder.mkdir()
    if config.trained is not None and Path(config.trained).is_dir():
        read_config(config.trained)
        read_tensors(config.trained)  # nothing damaged is handed on
        names = shutil.ignore_patterns("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth")
        shutil.copytree(config.trained, folder / DRAFTER, ignore=names)
        config = replace(config, trained=DRAFTER)
    deciders = [module for module in decoder.decider.modules() if isinstance(module, LearnedDecider)]
    if len(deciders) > 1:
        raise ValueError("a decoder with several trained deciders cannot be logged")
    for decider in deciders:
        decider.save_pretrained(folder / DECIDER)
    if Path(config.target.name).is_dir():  # wherever it is served from
        config = replace(config, target=replace(config.target, name=str(Path(config.target.name).absolute())))
    config.save(folder / FILE)
    return folder


def _describe_run(mlflow: Any, config: DecoderConfig, decoder: "SpeculativeDecoder", evaluation: Evaluation) -> None:
    """What people look for beside a model: settings, figures, parity report and a picture."""
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
    """Requirements as they are installed; labels of local builds are left out, as no index knows them."""
    return [f"{package}=={version(package).partition('+')[0]}" for package in packages]
