"""Decoders in MLflow: logged with what is known of them, registered as candidates, promoted if they are better."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.exports.decoder_config import DECIDER, DecoderConfig, TargetReference, trained_deciders
from arbordraft.exports.evaluation import HELD_OUT, Evaluation, evaluate
from arbordraft.mlflow_server import ALIASES, CANDIDATE, MODEL, NAMES, connect, limits, resolve_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from transformers import PreTrainedTokenizerBase

    from arbordraft import SpeculativeDecoder

TRAINING = "arbordraft.training_run"  # tag of runs, models and versions: the run that the drafter was trained in
DRAFTER = "drafter"
_URI = "MLFLOW_TRACKING_URI"
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
    comes with signature, pinned requirements and an input example. Beside it lie the parity report, a picture of the
    tree, and the ONNX graphs if there are any. It is registered last: whatever fails before leaves no version behind.

    Args:
        decoder: the decoder.
        tokenizer: its target's.
        target: hub name or folder that the target was loaded from; it is loaded from there again.
        drafter: folder or hub name that a trained drafter was loaded from, if it has one; see :func:`fetch_drafter`.
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
    mlflow = import_mlflow()
    _check_names(registered_model, alias)
    graphs = _graphs(onnx)
    server = resolve_uri(uri)
    config = DecoderConfig.of(decoder, target, None if drafter is None else os.fspath(drafter))
    with limits(), at_server(mlflow, server), tempfile.TemporaryDirectory() as scratch:
        client = connect(server)
        inputs = _training_models(client, training_run)
        tell("measuring parity, tau and speed")
        evaluation = evaluate(decoder, tokenizer, prompts, new_tokens=new_tokens, tell=tell)
        files = _pack(decoder, config, Path(scratch))
        tags = {} if training_run is None else {TRAINING: training_run}
        place = client.get_experiment_by_name(experiment)
        place_id = place.experiment_id if place else client.create_experiment(experiment)
        undo: list[Callable[[], object]] = []
        try:
            with mlflow.start_run(experiment_id=place_id, run_name=run_name, tags=tags, nested=True) as run:
                tell("logging the decoder")
                _describe_run(mlflow, client, run.info.run_id, config, decoder, evaluation, inputs)
                _log_graphs(mlflow, client, graphs, tags, undo)
                info = _log_model(mlflow, client, files, tags, evaluation, undo)
                number = None
                if registered_model is not None:
                    tell(f"registering it as {registered_model}")
                    number = _register(client, registered_model, alias, info, run.info.run_id, tags, undo)
        except BaseException:
            for step in reversed(undo):
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    step()
            raise
        return LoggedDecoder(run.info.run_id, info.model_id, info.model_uri, number, evaluation)


def fetch_drafter(version: str, folder: str | os.PathLike[str], uri: str | None = None) -> tuple[Path, str]:
    """The drafter or decider that a training registered.

    Args:
        version: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        folder: where its files are put.
        uri: tracking server; by default as in :func:`log_decoder`.

    Returns:
        Its folder, and the id of the run that it was trained in.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if it names no version.
        Exception: whatever MLflow raises, if the server does not answer or knows no such version.
    """
    mlflow = import_mlflow()
    match = re.fullmatch(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))", version)
    if match is None:
        raise ValueError(f"{version} names no version; write models:/NAME@ALIAS or models:/NAME/VERSION")
    model, alias, number = match.groups()
    server = resolve_uri(uri)
    with limits(), at_server(mlflow, server):
        client = connect(server)
        found = client.get_model_version_by_alias(model, alias) if alias else client.get_model_version(model, number)
        return Path(mlflow.artifacts.download_artifacts(source_of(client, found), dst_path=str(folder))), found.run_id


def source_of(client: "MlflowClient", found: Any) -> str:
    """Where the files of a version lie; of ``models:/`` MLflow would ask the global server instead of ours."""
    logged = found.tags.get(MODEL)
    return str(client.get_logged_model(logged).artifact_location if logged else found.source)


def import_mlflow() -> Any:
    """MLflow, or an ImportError that says how to install it."""
    try:
        import mlflow
    except ImportError as error:
        raise ImportError(f"MLflow cannot be imported ({error}); run: pip install 'arbordraft[mlops]'") from error
    return mlflow


def _check_names(registered_model: str | None, alias: str) -> None:
    if registered_model is not None and not re.fullmatch(NAMES, registered_model):
        raise ValueError(f"registered_model may hold letters, digits, '_', '-', '.', ' ', not {registered_model!r}")
    if not re.fullmatch(ALIASES, alias):
        raise ValueError(f"an alias consists of letters, digits, '_' and '-', and is no version: {alias!r}")


def _graphs(onnx: str | os.PathLike[str] | None) -> list[Path]:
    """ONNX graphs in a folder, and the parity reports beside them."""
    if onnx is None:
        return []
    found = sorted(Path(onnx).rglob("*.onnx"))
    if not found:
        raise ValueError(f"there is no ONNX graph in {onnx}; write some with: arbordraft export onnx")
    try:
        import onnx as library  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX cannot be imported ({error}); run: pip install 'arbordraft[onnx]'") from error
    return found


@contextlib.contextmanager
def at_server(mlflow: Any, uri: str) -> Iterator[None]:
    """MLflow's own functions talk to this server inside the block, and to the user's again behind it."""
    before = os.environ.get(_URI)  # which MLflow keeps in step with what it was told last
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)  # its own getter would make the default a choice
        if before is not None:
            os.environ[_URI] = before


def _training_models(client: "MlflowClient", run: str | None) -> list[str]:
    """Ids of the models that a training logged; raises ValueError if there is no such run."""
    from mlflow import MlflowException

    if run is None:
        return []
    try:
        outputs = client.get_run(run).outputs
    except MlflowException as error:
        raise ValueError(f"the server knows no training run {run!r} ({error}); name it as MLflow shows it") from error
    return [output.model_id for output in (outputs.model_outputs if outputs else [])]


def _pack(decoder: "SpeculativeDecoder", config: DecoderConfig, scratch: Path) -> Path:
    """Everything that the served model needs, in one folder."""
    import dataclasses

    from arbordraft.exports.checkpoints import read_config, read_tensors
    from arbordraft.exports.mlflow_model import CONFIG

    folder = scratch / "decoder"
    folder.mkdir()
    if config.trained is not None and Path(config.trained).is_dir():
        read_config(config.trained)
        read_tensors(config.trained)  # nothing damaged is handed on
        names = shutil.ignore_patterns("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth")
        shutil.copytree(config.trained, folder / DRAFTER, ignore=names)
        config = dataclasses.replace(config, trained=DRAFTER)
    deciders = trained_deciders(decoder)
    if len(deciders) > 1:
        raise ValueError("a decoder with several trained deciders cannot be logged")
    for decider in deciders:
        decider.save_pretrained(folder / DECIDER)
    if Path(config.target.name).is_dir():  # wherever it is served from
        reference = dataclasses.asdict(config.target) | {"name": str(Path(config.target.name).absolute())}
        config = dataclasses.replace(config, target=TargetReference(**reference))
    config.save(folder / CONFIG)
    return folder


def _describe_run(
    mlflow: Any,
    client: "MlflowClient",
    run: str,
    config: DecoderConfig,
    decoder: "SpeculativeDecoder",
    evaluation: Evaluation,
    inputs: list[str],
) -> None:
    """What people look for beside a model: settings, figures, parity report, a picture, and where it comes from."""
    from mlflow.entities import LoggedModelInput

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
    if inputs:
        client.log_inputs(run, models=[LoggedModelInput(model) for model in inputs])
    with contextlib.suppress(RuntimeError):  # the picture needs matplotlib, and nothing else does
        from arbordraft.display import tree_picture

        mlflow.log_figure(tree_picture(decoder.topology), "tree.png")


def _log_graphs(
    mlflow: Any, client: "MlflowClient", graphs: list[Path], tags: dict[str, str], undo: list[Callable[[], object]]
) -> None:
    for path in graphs:
        import onnx

        name = re.sub(r"[^\w-]", "-", path.stem)
        info = mlflow.onnx.log_model(
            onnx.load(path), name=f"onnx-{name}", tags=tags, pip_requirements=_pins("onnx", "onnxruntime")
        )
        undo.append(lambda model=info.model_id: client.delete_logged_model(model))  # type: ignore[misc]
    for folder in sorted({path.parent for path in graphs}):
        for report in sorted(folder.glob("*parity*.json")):
            mlflow.log_artifact(str(report), "onnx")


def _log_model(
    mlflow: Any,
    client: "MlflowClient",
    files: Path,
    tags: dict[str, str],
    evaluation: Evaluation,
    undo: list[Callable[[], object]],
) -> Any:
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    from arbordraft.exports import mlflow_model as served

    kinds = {int: "long", float: "double", bool: "boolean"}
    params = ParamSchema([ParamSpec(name, kinds[type(value)], value) for name, value in served.DEFAULTS.items()])
    outputs = [ColSpec("string", served.TEXT), ColSpec("double", served.TAU), ColSpec("long", served.TOKENS)]
    info = mlflow.pyfunc.log_model(
        name="decoder",
        python_model=str(Path(served.__file__).with_name("mlflow_served.py")),
        artifacts={served.FILES: str(files)},
        signature=ModelSignature(Schema([ColSpec("string", served.PROMPT)]), Schema(outputs), params),
        input_example=(pandas.DataFrame({served.PROMPT: ["Why is the sky blue?"]}), {"max_new_tokens": 16}),
        pip_requirements=_pins(*_PINNED),
        tags=tags,
        metadata={"evaluation": json.dumps(evaluation.report())},
    )
    undo.append(lambda: client.delete_logged_model(info.model_id))
    mlflow.log_metrics(evaluation.metrics(), model_id=info.model_id)
    return info


def _register(
    client: "MlflowClient",
    name: str,
    alias: str,
    info: Any,
    run: str,
    tags: dict[str, str],
    undo: list[Callable[[], object]],
) -> str:
    """A version of the registered model; the alias comes last, so that nobody finds it half finished."""
    from mlflow import MlflowException

    with contextlib.suppress(MlflowException):  # it exists; any other trouble shows in the next line
        client.create_registered_model(name)
        undo.append(lambda: client.delete_registered_model(name))
    client.get_registered_model(name)
    made = client.create_model_version(
        name,
        client.get_logged_model(info.model_id).artifact_location,
        run,
        tags={MODEL: info.model_id, **tags},
        await_creation_for=0,
        model_id=info.model_id,
    )
    undo.append(lambda: client.delete_model_version(name, str(made.version)))
    client.set_registered_model_alias(name, alias, str(made.version))
    return str(made.version)


def _pins(*packages: str) -> list[str]:
    """Requirements as they are installed; labels of local builds are left out, as no index knows them."""
    return [f"{package}=={version(package).partition('+')[0]}" for package in packages]
